"""Options as attributes, which users of other packages read and set after construction.

The losses here keep the attributes of their package. Each is checked whenever it is set, by the constructor or later,
so that an unsupported value raises instead of being ignored.
"""

from typing import Any

from torch import nn


class CheckedModule(nn.Module):
    """A module that checks its options whenever they are set."""

    def check_option(self, name: str, value: Any) -> Any:
        """Return the value to store, or raise. Attributes that the constructor sets later do not exist yet."""
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self.check_option(name, value))
