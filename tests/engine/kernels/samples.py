"""Typical launches of the kernels, for compiling them ahead of time."""

import torch

from contratile.engine.backends.block import Given, Scores, SideGrad
from contratile.engine.backends.triton_configs import Arch
from contratile.engine.backends.triton_tiles import Chunks, Device, KernelCall, Launch, forward_launches
from contratile.engine.plan import plan_tiles
from contratile.engine.rule import PairRule
from contratile.engine.spec import Spec
from contratile.engine.stats import SideParts

RULES = ("clip", "one set", "ids", "softplus")


def sample_launches(
    arch: Arch, d: int, dtype: torch.dtype, precision: str = "ieee", rule: str = "clip", n: int = 4096
) -> list[Launch]:
    """The launches of a typical call on an architecture, each kernel once, on meta tensors."""
    meta = torch.device("meta")
    q, k = (torch.empty(n, d, dtype=dtype, device=meta) for _ in range(2))
    one_set, softplus = rule == "one set", rule == "softplus"
    labels, ids, vector = (torch.empty(n, dtype=x, device=meta) for x in (torch.int64, torch.int64, torch.float32))
    scalar = torch.empty((), device=meta)
    pairs = PairRule(
        labels=labels,
        exclude_self=one_set,
        query_ids=ids if rule == "ids" else None,
        key_ids=ids if rule == "ids" else None,
    )
    plan = plan_tiles(n, n, d, symmetric=one_set)
    scores = Scores(
        q, None if one_set else k, scalar, scalar if softplus else None, pairs, plan, None, None, vector[:0]
    )
    spec = Spec("softplus" if softplus else "lse", cols=not one_set and not softplus, precision=precision)
    call = KernelCall(scores, spec, Device(arch, 108))
    statistics = SideParts(total=vector) if softplus else SideParts(vector, vector)
    side = SideGrad(None if softplus else vector, vector, None)
    given = Given(side, side if spec.cols else None, vector, None if softplus else vector)
    found = list(forward_launches(call, statistics, statistics if spec.cols else SideParts(), vector))
    found.append(Chunks(call, given, write=True, add_up=True).launch(slice(0, n), slice(0, n)))
    return list({launch.kernel.__name__: launch for launch in reversed(found)}.values())[::-1]
