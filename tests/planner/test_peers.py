"""The counted tensors of other packages' losses against the tensors that their code really holds, on gloo ranks."""

import math
import weakref
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from contratile.planner.peers import Peer, held_at_peak, held_table, peer_loss_bytes
from tests.ranks import pool

D = 128
CASES = [("clip", 1, torch.float32), ("clip", 2, torch.float32), ("open_clip", 2, torch.float32)]
CASES += [("inf_cl", world, torch.float32) for world in (1, 2, 3)]
CASES += [("clip", 2, torch.bfloat16), ("open_clip", 2, torch.bfloat16), ("inf_cl", 2, torch.bfloat16)]


def needs(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


class Alive(TorchDispatchMode):
    """Counts the bytes of all tensors that are created inside the block and not yet freed."""

    def __init__(self, known: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.seen = {x.untyped_storage()._cdata for x in known}
        self.bytes: int = 0
        self.peak: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.bytes)
        return result

    def _freed(self, storage: int, size: int) -> None:
        self.seen.discard(storage)
        self.bytes -= size


def _loss(name: str) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    if name == "inf_cl":
        from inf_cl import flash, ring

        module: Any = ring if world > 1 else flash
        # The kernels need a GPU; what they allocate is this.
        module._flash_prob_forward = lambda q, k: torch.ones(len(q))
        module._flash_prob_backward = lambda q, k, lse, dlse: (
            torch.zeros_like(q, dtype=torch.float32),
            torch.zeros_like(k, dtype=torch.float32),
        )
        one: Any = ring.cal_inf_loss if world > 1 else flash.cal_flash_loss
        head = {"head_dim": D}
        return lambda q, k, scale: (one(q, k, scale=scale, **head) + one(k, q, scale=scale, **head)).mean() / 2
    ours = {"local_loss": True, "gather_with_grad": True} if name == "open_clip" else {}
    return _open_clip_loss().ClipLoss(**ours, rank=rank, world_size=world)


@cache
def _open_clip_loss() -> Any:
    """The module open_clip.loss without its package, whose import takes many seconds in each rank."""
    package = find_spec("open_clip")
    assert package is not None and package.submodule_search_locations
    found = spec_from_file_location("open_clip_loss", Path(package.submodule_search_locations[0]) / "loss.py")
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


def held(name: str, n: int, dtype: torch.dtype) -> int:
    """The peak of a step with n pairs on each rank, beyond the features."""
    loss = _loss(name)
    image, text = (F.normalize(torch.randn(n, D), dim=1).to(dtype).requires_grad_() for _ in range(2))
    scale = torch.tensor(5.0, requires_grad=True)
    alive = Alive((image, text, scale))
    with alive:
        loss(image, text, scale).backward()
    return alive.peak


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "world", "dtype"), [*CASES, pytest.param("inf_cl", 4, torch.float32, marks=pytest.mark.slow)]
)
def test_formulas_are_what_the_code_holds(name: Peer, world: int, dtype: torch.dtype) -> None:
    needs("inf_cl" if name == "inf_cl" else "open_clip")
    n = 192
    for measured in pool(world).run(held, name, n, dtype):
        counted = peer_loss_bytes(name, batch=n * world, ranks=world, width=D, itemsize=dtype.itemsize)
        # Vectors of length n and N are not counted: labels, log-sum-exps and their gradients. Gloo may still hold
        # blocks that it has sent.
        late = 2 * n * D * dtype.itemsize if world > 1 else 0
        assert 0 <= measured - counted <= 100 * n * world + late


@pytest.mark.peers
def test_small_batches_hold_gradients_of_the_product() -> None:
    needs("open_clip")
    for measured in pool(2).run(held, "clip", 16, torch.float32):
        counted = peer_loss_bytes("clip", batch=32, ranks=2, width=D, itemsize=4)
        assert counted == 4 * (5 * 32 * D + 32 * 32)
        assert 0 <= measured - counted <= 2 * 16 * D * 4 + 3200  # blocks that gloo has not yet let go


@pytest.mark.parametrize(
    ("name", "batch", "ranks", "paper"),
    [("clip", 64, 8, 66.11), ("open_clip", 128, 8, 33.64), ("open_clip", 256, 32, 34.35), ("inf_cl", 256, 8, 1.45)],
)
def test_the_paper_is_met(name: Peer, batch: int, ranks: int, paper: float) -> None:
    found = peer_loss_bytes(name, batch=batch << 10, ranks=ranks, width=768, itemsize=4)
    assert math.isclose(found / 2**20 / 1000, paper, rel_tol=0.15)


def test_uneven_ranks_count_the_largest() -> None:
    (_, _), (_, scaled), *_ = held_at_peak("open_clip", batch=10001, ranks=8, width=768, itemsize=4)
    assert scaled == 2 * 1251 * 768 * 4


def test_table_shows_every_tensor() -> None:
    table = held_table("inf_cl", batch=32768, ranks=8, width=768, itemsize=4)
    numbers = [int(line.split("|")[2]) for line in table.splitlines()[2:]]
    assert sum(numbers) == 14
    assert "fp32 copies" in held_table("inf_cl", batch=32768, ranks=8, width=768, itemsize=2)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="name: expected one of 'clip', 'open_clip', 'inf_cl'"):
        peer_loss_bytes("disco", batch=1, ranks=1, width=1, itemsize=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ranks: expected at least 1, got 0"):
        peer_loss_bytes("clip", batch=1, ranks=0, width=1, itemsize=4)
