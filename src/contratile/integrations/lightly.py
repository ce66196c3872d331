"""lightly's `NTXentLoss` in linear memory. Change an import:

from contratile.integrations.lightly import NTXentLoss       # was: from lightly.loss import NTXentLoss
loss = NTXentLoss(temperature=0.5, gather_distributed=True)(out0, out1)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.errors import bad_value, check_features, check_pairs
from contratile.integrations.attributes import CheckedModule
from contratile.losses.functional import nt_xent, pair_lse
from contratile.losses.memory_queue import gather_rows
from contratile.ring.team import Team


class NTXentLoss(CheckedModule):
    """Replaces `lightly.loss.NTXentLoss`: SimCLR's loss of two views, or MoCo's with a memory bank.

    The constructor, the call and the values are lightly's, without the score matrix. Views are normalised here, as in
    lightly. With a memory bank, its keys are the only negatives. The loss is fp32 (fp64 for fp64 views), also for
    16-bit views, where lightly returns 16 bits.

    Relations: `contratile.nt_xent` is the same loss for features that are already normalised; `contratile.MemoryQueue`
    with `contratile.info_nce` is MoCo's loss with more options.

    Args:
        temperature: Divides the cosines; at least 1e-8.
        memory_bank_size: 0 for no bank, or (number of keys, features).
        gather_distributed: Use the views of all ranks as negatives; with a bank, add the keys of all ranks to it.

    Raises:
        ValueError: An option is invalid, or `cross_entropy` was replaced by something else.

    Examples:
        >>> import torch
        >>> out0, out1 = torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)
        >>> NTXentLoss(temperature=0.1)(out0, out1).backward()
        >>> out0.grad.shape
        torch.Size([16, 8])
    """

    def __init__(
        self, temperature: float = 0.5, memory_bank_size: int | Sequence[int] = 0, gather_distributed: bool = False
    ) -> None:
        super().__init__()
        self.temperature, self.gather_distributed = temperature, gather_distributed
        self.cross_entropy = nn.CrossEntropyLoss()
        self.eps = 1e-8
        size = (memory_bank_size,) if isinstance(memory_bank_size, int) else tuple(memory_bank_size)
        self.memory_bank = None if size[:1] == (0,) else _Bank(size)

    def check_option(self, name: str, value: Any) -> Any:
        if name == "temperature" and not value >= 1e-8:
            bad_value("temperature", expected="at least 1e-8", got=value, remedy="SimCLR uses 0.1 to 0.5.")
        if name == "cross_entropy":
            _check_cross_entropy(value)
        return value

    def forward(self, out0: Tensor, out1: Tensor) -> Tensor:
        """Compute the loss of two views [N, D] of the same examples."""
        _check_cross_entropy(self.cross_entropy)  # its options may have been changed
        team = Team.of("auto" if self.gather_distributed else None)
        out0, out1 = F.normalize(out0, dim=1), F.normalize(out1, dim=1)
        if self.memory_bank is None:
            return nt_xent(out0, out1, self.temperature, group=team.group)
        check_pairs("out0 and out1", out0, out1)
        bank = self.memory_bank.bank.to(out0, copy=True)
        check_features({"out0": out0, "out1": out1, "memory bank": bank}, empty=False)
        if out0.requires_grad:
            self.memory_bank.enqueue(*gather_rows(team, "NTXentLoss", out1.detach()))
        negatives, _ = pair_lse(out0, bank, 1 / self.temperature, cols=False, group=None)
        positive = (out0 * out1).sum(1).to(negatives.dtype) / self.temperature
        return F.softplus(negatives - positive).mean()


def _check_cross_entropy(module: Any) -> None:
    """Raise a ValueError unless it is the plain mean cross entropy, which is what the loss computes."""
    plain = nn.CrossEntropyLoss()
    options = {name: getattr(module, name, None) for name in ("reduction", "label_smoothing", "ignore_index", "weight")}
    if type(module) is not nn.CrossEntropyLoss or any(
        x is not None if name == "weight" else x != getattr(plain, name) for name, x in options.items()
    ):
        got = f"{type(module).__name__} with {options}"
        remedy = "contratile.info_nce has reduction=, label_smoothing= and weights=. Or use lightly's own loss."
        bad_value("cross_entropy", expected="a plain nn.CrossEntropyLoss()", got=got, remedy=remedy)


class _Bank(nn.Module):
    """lightly's memory bank: initially random unit vectors. Keys that do not fit before its end are dropped."""

    bank: Tensor

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        if len(size) != 2 or min(size) < 1:
            remedy = "Pass 0 for no memory bank."
            bad_value("memory_bank_size", expected="(number of keys, features)", got=tuple(size), remedy=remedy)
        self.register_buffer("bank", F.normalize(torch.randn(*size), dim=1), persistent=False)
        self.place = 0

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        kept = keys[: len(self.bank) - self.place]
        self.bank[self.place : self.place + len(kept)] = kept.to(self.bank)
        self.place = (self.place + len(kept)) % len(self.bank)
