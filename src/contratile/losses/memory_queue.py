"""A queue of keys from earlier batches, the same on every rank: MoCo's queue, or a cross-batch memory.

    queue = MemoryQueue(65536, 256)
    loss = info_nce(query, key, scale, extra_keys=queue.keys())
    queue.enqueue(key)

The queued keys are negatives in addition to the other keys of the batch (MoCo's own loss uses the queue alone). Every
rank holds the whole queue, so one rank's state dict serves any number of ranks. `keys()` returns this rank's share, so
that the ring compares each key once.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from contratile.errors import bad_value, check_count, check_features, check_vector
from contratile.ring.team import Facts, Group, Team


class MemoryQueue(nn.Module):
    """A first-in, first-out queue of keys for `extra_keys=`.

    Args:
        size: Number of keys to keep.
        dim: Features per key.
        with_ids: Also keep an id per key, for `extra_ids=`.
        group: The ranks that share the queue, as for the losses.
        dtype: Dtype of the stored keys.
        device: Device of the buffers.

    Examples:
        >>> import torch, contratile as ct
        >>> queue = ct.MemoryQueue(4096, 16)
        >>> query, key = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss = ct.info_nce(query, key, 0.5, extra_keys=queue.keys())
        >>> queue.enqueue(key)
        >>> len(queue)
        8
    """

    buffer: Tensor
    ids_buffer: Tensor
    seen: Tensor

    def __init__(
        self,
        size: int,
        dim: int,
        *,
        with_ids: bool = False,
        group: Group = "auto",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_count("size", size, least=1)
        check_count("dim", dim, least=1)
        self.size, self.with_ids, self.group = size, with_ids, group
        self.register_buffer("buffer", torch.zeros(size, dim, dtype=dtype, device=device))
        self.register_buffer("ids_buffer", torch.zeros(size if with_ids else 0, dtype=torch.long, device=device))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long, device=device))  # keys written so far

    def __len__(self) -> int:
        return min(int(self.seen), self.size)

    def keys(self) -> Tensor:
        """This rank's share of the keys, for `extra_keys=`; empty at first."""
        return self._share(self.buffer)

    def ids(self) -> Tensor:
        """The ids of `keys()`, for `extra_ids=`."""
        if not self.with_ids:
            bad_value(
                "ids",
                expected="a queue made with with_ids=True",
                got="one without",
                remedy="Create it with with_ids=True.",
            )
        return self._share(self.ids_buffer)

    def _share(self, stored: Tensor) -> Tensor:
        team = Team.of(self.group)
        # A copy: the backward pass of a loss on these keys may come after they were overwritten.
        return stored[: len(self)][team.rank :: team.size].clone()

    @torch.no_grad()
    def enqueue(self, keys: Tensor, ids: Tensor | None = None) -> None:
        """Append the keys of all ranks in rank order, replacing the oldest. Collective: every rank calls it."""
        team = Team.of(self.group)
        try:
            self._check(keys, ids)
        except Exception as error:  # so that the other ranks do not hang
            team.refuse(error)
            raise
        rows = [keys.detach().to(self.buffer.dtype), *([] if ids is None else [ids.long()])]
        rows = [x[-self.size :] for x in gather_rows(team, "MemoryQueue.enqueue", *rows)]
        place = (torch.arange(len(rows[0]), device=keys.device) + self.seen) % self.size
        for stored, new in zip((self.buffer, self.ids_buffer), rows, strict=False):
            stored[place] = new
        self.seen += len(place)

    def _check(self, keys: Tensor, ids: Tensor | None) -> None:
        check_features({"keys": keys}, empty=True)
        check_features({"buffer": self.buffer, "keys": keys.to(self.buffer.dtype)}, empty=True)
        if (ids is not None) != self.with_ids:
            expected = "ids with the keys" if self.with_ids else "no ids"
            remedy = "A queue takes ids if and only if it was made with with_ids=True."
            bad_value("ids", expected=expected, got="none" if ids is None else "some", remedy=remedy)
        if ids is not None:
            check_vector("ids", ids, length=len(keys), device=keys.device)

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.buffer.shape[1]}, filled={len(self)}"


def gather_rows(team: Team, call: str, *tensors: Tensor) -> list[Tensor]:
    """The rows of all ranks in rank order, for several tensors at once; ranks may have different numbers of rows."""
    if team.size == 1:
        return list(tensors)
    features = tensors[0]
    facts = team.handshake(
        Facts(
            queries=len(features),
            keys=len(features),
            features=features.shape[1],
            dtype=str(features.dtype).removeprefix("torch."),
            device=features.device.type,
            call=call,
            gradient="none",
        )
    )
    return [_gathered(team, x, [fact.keys for fact in facts]) for x in tensors]


def _gathered(team: Team, x: Tensor, sizes: list[int]) -> Tensor:
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=team.group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
