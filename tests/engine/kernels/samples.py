"""The launches of typical calls on any GPU, to compile ahead of time: host code runs on tensors without memory."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch

from contratile.engine import passes
from contratile.engine.backends import registry, triton_tiles
from contratile.engine.backends.triton_configs import Arch
from contratile.engine.backends.triton_launch import Device, Launch
from contratile.engine.spec import Inputs, Spec, Wanted
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.engine.kernels.ahead_of_time import recorded

META = torch.device("meta")

CALLS: dict[str, Spec] = {
    "clip": Spec(),
    "training": Spec(ranks=True, sums="differ", col_sums=False),
    "one set": Spec(cols=False, exclude_self=True),
    "ids": Spec(),
    "softplus": Spec("softplus", cols=False),
    "sup_con": Spec(cols=False, exclude_self=True, sums="equal"),
    "smoothing": Spec(sums="all"),
    "margin": Spec(margin=0.1),
    "views, statistics": Spec(cols=False, exclude_self=True, ranks=True, sums="all"),
    "softplus, statistics": Spec("softplus", ranks=True, sums="all", col_sums=False),
    "metrics": Spec(ranks=True, ties=True),
    "cache": Spec(cache_bytes=32 << 20),
    "positives": Spec(ranks=True, same_id="positive", sums="same"),
    "biases": Spec(ranks=True, sums="all", col_sums=False),
    "softplus, positives": Spec("softplus", cols=False, same_id="positive"),
    "hardness": Spec(hardness=9.0),
    "hardness, statistics": Spec(hardness=9.0, cols=False, ranks=True, sums="differ"),
}
"""What the losses ask for, by name."""

RULES = tuple(CALLS)
ONE_SET = ("one set", "sup_con", "views, statistics")
IDS = ("training", "ids", "positives", "softplus, positives", "hardness, statistics")


@contextmanager
def pretended(device: Device) -> Iterator[None]:
    """Host code takes tensors without memory for those of a GPU."""
    with ExitStack() as scopes:
        for where, name, value in (
            (registry, "choose", lambda x, spec: triton_tiles),
            (triton_tiles, "adds_in_fp32", lambda device, dtype: False),
            (triton_tiles, "on_device", lambda device: nullcontext()),
            (Device, "of", lambda given: device),
        ):
            scopes.enter_context(patch.object(where, name, value))
        yield


def inputs_of(name: str, n: int, d: int, dtype: torch.dtype) -> Inputs:
    """What a call is given."""
    q, k = (torch.empty(n, d, dtype=dtype, device=META) for _ in range(2))
    labels, ids = (torch.empty(n, dtype=torch.int64, device=META) for _ in range(2))
    softplus = CALLS[name].reduce == "softplus"
    return Inputs(
        query=q,
        key=None if name in ONE_SET else k,
        scale=torch.empty((), device=META),
        bias=torch.empty((), device=META) if softplus else None,
        key_bias=torch.empty(n, device=META) if name == "biases" else None,
        labels=None if name == "sup_con" else labels,
        query_ids=ids if name in IDS else None,
        key_ids=ids if name in IDS else None,
        query_classes=ids if name == "sup_con" else None,
        key_classes=ids if name == "sup_con" else None,
    )


def run_step(name: str, n: int, d: int, dtype: torch.dtype, precision: str | None = None) -> list[torch.Tensor]:
    """Forward and backward, with gradients of everything that has one; the gradients."""
    spec = CALLS[name]._replace(precision=precision)
    x = inputs_of(name, n, d, dtype)
    ring = Ring.flat(ALONE, (n,), total=n)
    results = passes.forward(ring, x, spec)
    wanted = Wanted(True, x.key is not None, True, x.bias is not None, x.key_bias is not None)
    given = results
    if spec.ranks or name == "metrics":  # statistics have no gradient
        given = results._replace(row=results.row._replace(sums=None), col=results.col._replace(sums=None))
    return [grad for grad in passes.backward(ring, x, spec, results, given, wanted) if grad is not None]


def sample_launches(
    arch: Arch, d: int, dtype: torch.dtype, precision: str = "ieee", rule: str = "clip", n: int = 4096
) -> list[Launch]:
    """The different launches of a call on an architecture, in order."""
    with pretended(Device(arch, 108)), recorded() as launches:
        run_step(rule, n, d, dtype, precision)
    found: dict[str, Launch] = {}
    for launch in launches:
        found.setdefault(name_of_launch(launch), launch)
    return list(found.values())


def name_of_launch(launch: Launch) -> str:
    """The kernel, and which of its launches it is."""
    arguments, words = launch.arguments, [str(launch.kernel.__name__)]
    if arguments.get("CAREFUL"):
        words.append("careful")
        if words[0] == "forward_tiles" and arguments["row_total"] is None and arguments["col_total"] is None:
            words.append("statistics")
    if words[0] == "merge_parts" and arguments["level"] is None:
        words.append("sums")
    return ", ".join(words)


def fast(launches: list[Launch]) -> list[Launch]:
    """Those that most tiles pass through."""
    return [x for x in launches if x.arguments.get("CAREFUL") is False]


__all__ = ["CALLS", "RULES", "fast", "inputs_of", "name_of_launch", "pretended", "run_step", "sample_launches"]
