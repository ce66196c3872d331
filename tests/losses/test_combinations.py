"""Options of the losses together: equal to the dense definition or refused by name, on one process, over ranks, with
statistics, compiled and in chunks."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import contratile as ct
from tests.losses.combinations import (
    LOSSES,
    NEEDS,
    OPTIONS,
    OWNERS,
    Combination,
    Found,
    allowed,
    differences,
    draw,
    of_ours,
    of_reference,
)
from tests.ranks import pool

KEYWORDS = {
    "ids": "ids",
    "positive": "same_id",
    "extra": "extra_keys",
    "hard": "hard_negatives",
    "elsewhere": "in_batch_negatives",
    "share": "share_hard_negatives",
    "smoothing": "label_smoothing",
    "matryoshka": "matryoshka_dims",
    "hardness": "hardness_",
    "both": "directions",
    "apart": "directions",
    "same_type": "directions",
    "more_keys": "equally many rows",
}
"""What an error calls an option, if not by its own name."""


def with_needs(options: tuple[str, ...]) -> frozenset[str]:
    """With what they mean something beside."""
    found = set(options)
    while missing := [NEEDS[name] for name in sorted(found & NEEDS.keys()) if not NEEDS[name] & found]:
        found.add(min(missing[0]))
    if {"extra_ids", "hard_ids"} & found and not {"ids", "pair_of_ids"} & found:
        found.add("pair_of_ids")
    return frozenset(found)


def make_sense(options: frozenset[str]) -> bool:
    """Whether they are more than two values of one option, and `ids` are as many as they have to be."""
    alternatives = {"none", "sum"}, {"ids", "pair_of_ids"}, {"both", "apart"}, {"ids", "labels"}, {"ids", "more_keys"}
    return not any(pair <= options for pair in alternatives)


def check(loss: str, options: frozenset[str], names: tuple[str, ...], seed: int) -> None:
    case = draw(loss, seed, options=options)
    if allowed(loss, options):
        found = differences(case, of_ours(case, group=None), of_reference(case))
        assert not found, f"{found} {case}"
        return
    with pytest.raises(ValueError) as error:
        of_ours(case, group=None)
    for name in names:
        assert KEYWORDS.get(name, name) in str(error.value), (str(error.value), str(case))


@pytest.mark.parametrize("loss", LOSSES)
def test_every_pair_of_options_is_right_or_refused_by_name(loss: str) -> None:
    seen = 0
    for seed, names in enumerate(combinations(OPTIONS[loss], 2)):
        options = with_needs(names)
        if make_sense(options):
            alone = all(allowed(loss, with_needs((name,))) for name in names)
            check(loss, options, names if alone and options == set(names) else (), seed)
            seen += 1
    assert seen > 10


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["clip_loss", "info_nce"])
def test_every_three_options_are_right_or_refused(loss: str) -> None:
    for seed, names in enumerate(combinations(OPTIONS[loss], 3)):
        options = with_needs(names)
        if make_sense(options):
            check(loss, options, (), seed)


@pytest.mark.parametrize("loss", LOSSES)
def test_random_combinations(loss: str) -> None:
    for seed in range(1000, 1150):
        case = draw(loss, seed)
        want = of_reference(case)
        for backend in ("torch", "dense"):
            found = differences(case, of_ours(case, group=None, backend=backend), want)
            assert not found, f"{found} {backend} {case}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", LOSSES)
def test_many_random_combinations(loss: str) -> None:
    for seed in range(4000):
        case = draw(loss, seed)
        found = differences(case, of_ours(case, group=None), of_reference(case))
        assert not found, f"{found} {case}"


# --- over ranks ---------------------------------------------------------------------------------------------------


def on_ranks(loss: str, seeds: range, world: int) -> list[str]:
    told = []
    for seed in seeds:
        case, rank = draw(loss, seed, world), dist.get_rank()
        got, want = of_ours(case, rank), of_reference(case)
        value = want.value
        if case.constants["reduction"] == "none":
            value = case.split(value, "query", rank)
        else:
            got = got._replace(value=summed(got.value) / (world if case.constants["reduction"] == "mean" else 1))
        grads = {name: x if name in OWNERS else summed(x) for name, x in got.grads.items()}
        mine = {name: case.part(name, x, rank) for name, x in want.grads.items()}
        found = differences(case, Found(got.value, grads, ()), Found(value, mine, ()))
        if found:
            told.append(f"rank {rank}: {found} {case}")
    return told


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("loss", LOSSES)
def test_random_combinations_over_ranks(loss: str, world: int) -> None:
    """Rows are dealt unevenly, and some ranks have none."""
    for told in pool(world).run(on_ranks, loss, range(2000, 2040), world):
        assert not told, "\n".join(told[:3])


STATS = frozenset({"matryoshka", "none", "sum"})
"""Refused beside statistics, or without effect on them."""

CLEAR = "unit", "whole", "near", "norms"
"""Kinds of features of which no two products differ by rounding alone: that could rank them either way."""


def statistics_on_ranks(loss: str, seeds: range, world: int) -> list[tuple[str, list[float], list[float]]]:
    """Of all ranks, and of the whole batch on one process."""
    told = []
    for seed in seeds:
        case = with_statistics(draw(loss, seed, world, without(loss, seed), CLEAR))
        whole = alone(case)
        got, want = (found.more[-1] for found in (of_ours(case, dist.get_rank()), of_ours(whole, group=None)))
        ours, theirs = ([float(x) for x in stats if x is not None] for stats in (got, want))
        told.append((str(case), ours, theirs))
    return told


def without(loss: str, seed: int) -> frozenset[str]:
    """Options that statistics go with."""
    for number in range(seed, seed + 100_000, 1000):
        options = draw(loss, number).options - STATS
        if allowed(loss, options) and not {"hardness", "hard_ids", "share"} <= options:
            return options
    raise AssertionError("no such options")


def with_statistics(case: Combination) -> Combination:
    case.constants["return_stats"] = True
    return case


def alone(case: Combination) -> Combination:
    """The same batch on one process."""
    sizes: dict[str, tuple[int, ...]] = {name: (sum(x),) for name, x in case.sizes.items()}
    constants = dict(case.constants)
    if "labels" in constants or sizes["query"] != sizes["key"]:
        constants["labels"] = case.all_labels()
    return Combination(case.loss, sizes, case.leaves, constants, case.how, case.name)


@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_of_combinations_over_ranks(loss: str) -> None:
    for told in pool(2).run(statistics_on_ranks, loss, range(3000, 3030), 2):
        for case, got, want in told:
            assert got == pytest.approx(want, rel=1e-9, nan_ok=True), case


@pytest.mark.parametrize("loss", LOSSES)
def test_statistics_of_combinations_are_those_of_the_dense_backend(loss: str) -> None:
    """And they do not change the loss."""
    for seed in range(5000, 5060):
        case = draw(loss, seed, options=without(loss, seed), kinds=CLEAR)
        plain = of_ours(case, group=None)
        got = of_ours(with_statistics(case), group=None)
        want = of_ours(case, group=None, backend="dense")
        for x, y in zip(got.more[-1], want.more[-1], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12, equal_nan=True, msg=str(case))
        assert not differences(case, got, plain), str(case)


# --- compiled, and in chunks --------------------------------------------------------------------------------------


def check_compiled(loss: str, seed: int) -> None:
    case = draw(loss, seed)
    torch._dynamo.reset()
    names, constants = [*case.leaves], {**case.constants, **case.how, "group": None}

    def call(*leaves: Tensor) -> Tensor:
        value: Tensor = getattr(ct, loss)(**dict(zip(names, leaves, strict=True)), **constants)
        return value

    leaves = [x.detach().requires_grad_() for x in case.leaves.values()]
    want = of_reference(case)
    value = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    given = torch.linspace(-1, 2, len(value), dtype=value.dtype) if value.dim() else torch.ones_like(value)
    grads = torch.autograd.grad(value, leaves, given, allow_unused=True)
    found = {
        name: torch.zeros_like(x) if grad is None else grad for name, x, grad in zip(names, leaves, grads, strict=True)
    }
    told = differences(case, Found(value.detach(), found, ()), want)
    assert not told, f"{told} {case}"


@pytest.mark.parametrize("loss", LOSSES)
def test_compiled(loss: str) -> None:
    for seed in (1, 2, 4):
        check_compiled(loss, seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("loss", LOSSES)
def test_many_compiled(loss: str) -> None:
    for seed in range(6000, 6040):
        check_compiled(loss, seed)


FEATURES = "query", "key", "image", "text", "hard_negatives"
"""What encoders give; the other tensors of a batch go to the loss."""


@pytest.mark.parametrize("loss", LOSSES)
def test_in_chunks(loss: str) -> None:
    """`GradCache` gives the gradients of the whole batch, whatever options the loss has."""
    for seed in range(7000, 7025):
        case = draw(loss, seed)
        case.constants["reduction"] = "mean"
        given = {name: x for name, x in case.leaves.items() if name in FEATURES}
        d = next(iter(given.values())).shape[-1]
        torch.manual_seed(seed)
        encoder = nn.Linear(d, d, bias=False, dtype=torch.float64)
        shapes = {name: x.shape for name, x in given.items()}
        others = {name: x for name, x in case.leaves.items() if name not in given}

        def whole(*rows: Tensor, names: tuple[str, ...] = (*given,), more: Any = others, case: Any = case) -> Tensor:
            sides = {name: x.view(shapes[name]) for name, x in zip(names, rows, strict=True)}  # noqa: B023
            value: Tensor = getattr(ct, case.loss)(**sides, **more, **case.constants, **case.how, group=None)
            return value

        inputs = [x.flatten(0, -2).contiguous() for x in given.values()]
        want = torch.autograd.grad(whole(*(encoder(x) for x in inputs)), encoder.weight)[0]
        cache = ct.GradCache([encoder] * len(inputs), whole, chunk_size=4)
        cache.step(*inputs)
        assert encoder.weight.grad is not None
        # Late in training gradients cancel, and what is left are the roundings of scores.
        clear = torch.allclose(encoder.weight.grad, want, rtol=1e-8, atol=1e-8 * float(want.abs().max()) + 1e-9)
        assert clear, f"{encoder.weight.grad} {want} {case}"
