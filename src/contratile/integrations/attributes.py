"""Options as attributes: other packages' users read them, and set them after the loss was made.

A loss here keeps its package's attributes. Each is checked when it is set, by the constructor or later, so that one
that cannot be honoured is refused and never ignored.
"""

from typing import Any

from torch import nn


class CheckedModule(nn.Module):
    """A module that looks at its options whenever they are set."""

    def check_option(self, name: str, value: Any) -> Any:
        """The value to store, or an error. Other attributes may not be there yet: the constructor sets them in turn."""
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, self.check_option(name, value))
