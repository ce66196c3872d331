"""lightly's `NTXentLoss`: the same constructor, call and values, in linear memory.

from contratile.integrations.lightly import NTXentLoss       # was: from lightly.loss import NTXentLoss
loss = NTXentLoss(temperature=0.5, gather_distributed=True)(out0, out1)

Losses of 16-bit views are fp32; lightly's are of 16 bits.
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
    """SimCLR's loss of two views; with a memory bank, MoCo's: the bank's keys are the only negatives.

    Views are normalised here, as lightly does. Negatives are this rank's own unless `gather_distributed`; with a bank
    that means the keys of all ranks enter everybody's bank. The loss is fp32 (fp64 for fp64 views), also for 16-bit
    views, where lightly's is of 16 bits.
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
        _check_cross_entropy(self.cross_entropy)  # its own options may have been set
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
    """lightly's is the plain mean, which is what is computed here without it."""
    plain = nn.CrossEntropyLoss()
    options = {name: getattr(module, name, None) for name in ("reduction", "label_smoothing", "ignore_index", "weight")}
    if type(module) is not nn.CrossEntropyLoss or any(
        x is not None if name == "weight" else x != getattr(plain, name) for name, x in options.items()
    ):
        got = f"{type(module).__name__} with {options}"
        remedy = "contratile.info_nce has reduction=, label_smoothing= and weights=; or keep lightly's own loss."
        bad_value("cross_entropy", expected="nn.CrossEntropyLoss() as it is", got=got, remedy=remedy)


class _Bank(nn.Module):
    """lightly's bank: random unit vectors at first; keys that do not fit before its end are dropped."""

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
