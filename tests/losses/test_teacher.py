"""Distillation: `teacher=` of clip_loss and info_nce against the dense definition, alone and over ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import contratile as ct
from contratile import reference
from contratile.engine.autograd import pair_stats
from contratile.engine.beside import ROWS, centres
from contratile.engine.spec import Inputs, Spec
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import DTYPES, accumulation, assert_precise, features, labels_of, randn, run
from tests.losses.test_family_ring import compare, part
from tests.ranks import pool

N, M, D, T = 37, 45, 7, 11


def near(x: Tensor, seed: int) -> Tensor:
    """Rows close to those of x."""
    return F.normalize(x.double() + 0.01 * randn(*x.shape, seed=seed, dtype=torch.float64)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [5.0, 100.0])
@pytest.mark.parametrize("converged", [False, True])
def test_clip_loss(dtype: torch.dtype, scale: float, converged: bool) -> None:
    """Near convergence teacher and student agree, and their difference must not drown in rounding."""
    image = features(N, D, seed=1, dtype=dtype)
    text = near(image, 2) if converged else features(N, D, seed=2, dtype=dtype)
    teacher = features(N, T, seed=3, dtype=dtype), features(N, T, seed=4, dtype=dtype), 10.0
    if converged:
        teacher = image, near(image, 5), scale
    s = torch.tensor(scale, dtype=accumulation(dtype))

    def oracle(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        same = teacher[0].to(a.dtype), teacher[1].to(a.dtype), teacher[2]
        return reference.clip_loss(a, b, s, teacher=same, teacher_weight=0.7, teacher_temperature=1.5)

    for tile in (8, 64):
        how: dict[str, Any] = {"teacher_weight": 0.7, "teacher_temperature": 1.5, "tile": tile}
        ours = lambda a, b, s, how=how: ct.clip_loss(a, b, s, teacher=teacher, **how)  # noqa: E731
        assert_precise(ours, oracle, image, text, s, share=2 / N)


def both(query: Tensor, key: Tensor, teacher: tuple[Tensor, Tensor, float], tile: int) -> tuple[Any, Any]:
    """Of fp32, and of the dense definition in fp64."""
    exact = teacher[0].double(), teacher[1].double(), teacher[2]
    return (
        run(lambda q, k: ct.clip_loss(q, k, 5.0, teacher=teacher, tile=tile), query, key),
        run(lambda q, k: reference.clip_loss(q, k, 5.0, teacher=exact), query, key, dtype=torch.float64),
    )


def test_tiles_whose_scores_by_the_teacher_are_far_apart() -> None:
    """Each has another shift, at which the sums of the tiles before do not count."""
    n, tile = 12, 4
    query, key = features(n, D, seed=1), features(n, D, seed=2)
    level = 100.0 * torch.tensor([0, 1, -1]).repeat_interleave(tile).unsqueeze(1)
    got, want = both(query, key, (torch.ones(n, 1), level + randn(n, 1, seed=3), 1.0), tile)
    for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
        assert (x - y).abs().max() < 3e-5 * y.abs().max()


def test_large_scores_of_a_teacher() -> None:
    """Log-sum-exps around 2**17 are rounded to 1 / 64: without a correction its softmax would not add up to 1."""
    query, key = features(N, D, seed=1), features(N, D, seed=2)
    small = torch.randint(-3, 4, (2, N, 2), generator=torch.Generator().manual_seed(3)) / 4
    large = torch.full((N, 1), 512.0), torch.full((N, 1), 256.0)
    teacher = torch.cat([large[0], small[0]], 1), torch.cat([large[1], small[1]], 1), math.log(2)  # exact in base 2
    got, want = both(query, key, teacher, 8)
    for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
        assert (x - y).abs().max() < 1e-5 * y.abs().max()


def test_more_rows_than_a_chunk_of_positives() -> None:
    n = ROWS + 5
    query, key = features(n, 3, seed=1), features(n, 3, seed=2)
    found = centres(Inputs(query, key, torch.ones(()), labels=torch.arange(n), teacher_query=query), torch.ones(()))
    assert found is not None and torch.allclose(found, (query * key).sum(1), atol=1e-6)
    got, want = both(query, key, (features(n, 2, seed=3), features(n, 2, seed=4), 3.0), 256)
    for x, y in zip(got.values + got.grads, want.values + want.grads, strict=True):
        assert (x - y).abs().max() < 1e-4 * y.abs().max()


@pytest.mark.parametrize("more", ["plain", "ids", "weights", "key_bias", "none", "dense", "strided", "cached"])
def test_options(more: str) -> None:
    query, key = features(N, D, seed=1, dtype=torch.float64), features(M, D, seed=2, dtype=torch.float64)
    teacher = randn(N, T, seed=3, dtype=torch.float64), randn(M, T, seed=4, dtype=torch.float64), 0.7
    options: dict[str, Any] = {"teacher": teacher, "labels": labels_of(N, M, seed=5)}
    how: dict[str, Any] = {"tile": 8}
    if more == "ids":
        options["ids"] = labels_of(N, 9, seed=6), labels_of(M, 9, seed=7)
    elif more == "weights":
        options["weights"] = torch.linspace(0, 2, N, dtype=torch.float64)
    elif more == "key_bias":
        options["key_bias"] = randn(M, seed=8, dtype=torch.float64)
    elif more == "none":
        options["reduction"] = "none"
    elif more == "dense":
        how = {"backend": "dense"}
    elif more == "strided":
        options["teacher"] = teacher[0].repeat_interleave(2, 1)[:, ::2], teacher[1].t().contiguous().t(), 0.7
    elif more == "cached":
        how["cache_bytes"] = 1 << 20
    scale = torch.tensor(3.0, dtype=torch.float64)
    ours = run(lambda q, k, s: ct.info_nce(q, k, s, **options, **how), query, key, scale)
    want = run(lambda q, k, s: reference.info_nce(q, k, s, **options), query, key, scale)
    for a, b in zip([*ours.values, *ours.grads], [*want.values, *want.grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("spread", [1.0, 1e4])
def test_teachers_that_need_exact_tiles(spread: float) -> None:
    """Scores of the teacher so far apart that rows and columns of a tile share no shift."""
    sizes = torch.logspace(0, 1, N, spread, dtype=torch.float64).unsqueeze(1)
    teacher = features(N, T, seed=3).double() * sizes, features(N, T, seed=4).double() * sizes, 1.0
    image, text = features(N, D, seed=1), features(N, D, seed=2)
    as_float = teacher[0].float(), teacher[1].float(), 1.0
    got = run(lambda a, b: ct.clip_loss(a, b, 5.0, teacher=as_float, tile=8), image, text)
    same = as_float[0].double(), as_float[1].double(), 1.0
    want = run(lambda a, b: reference.clip_loss(a, b, 5.0, teacher=same), image.double(), text.double())
    noise = torch.finfo(torch.float32).eps * (1 + float((same[0] @ same[1].T).abs().max()))  # of the teacher's scores
    for a, b in zip([*got.values, *got.grads], [*want.values, *want.grads], strict=True):
        torch.testing.assert_close(a.double(), b, rtol=0, atol=min(1.0, 64 * noise))


def test_terms() -> None:
    """The terms are those of open_clip, their sum is the loss, and a teacher's terms come with statistics."""
    image, text, a, b = (features(N, D, seed=seed, dtype=torch.float64) for seed in range(4))
    loss, terms = ct.clip_loss(image, text, 5.0, teacher=(a, b, 9.0), teacher_weight=0.5, return_terms=True)
    student, teacher = 5 * image @ text.T, 9 * a @ b.T
    want = -(teacher.softmax(1) * student.log_softmax(1)).sum(1) - (teacher.softmax(0) * student.log_softmax(0)).sum(0)
    torch.testing.assert_close(terms.distill, 0.25 * want.mean())
    torch.testing.assert_close(terms.contrastive, ct.clip_loss(image, text, 5.0))
    assert loss == terms.contrastive + terms.distill
    same = ct.clip_loss(image, text, 5.0, teacher=(a, b, 9.0), return_terms=True, return_stats=True)
    assert [type(x).__name__ for x in same[1:]] == ["LossTerms", "BatchStats"]
    found = ct.ClipLoss(return_terms=True)(image, text, 5.0, output_dict=True, teacher=(a, b, 9.0))
    assert list(found) == ["contrastive_loss", "distill_loss"]


def test_compiled() -> None:
    image, text, a, b = (features(N, D, seed=seed) for seed in range(4))
    call = torch.compile(lambda x, y: ct.clip_loss(x, y, 5.0, teacher=(a, b, 9.0)), backend="aot_eager", fullgraph=True)
    got, want = run(call, image, text), run(lambda x, y: ct.clip_loss(x, y, 5.0, teacher=(a, b, 9.0)), image, text)
    for x, y in zip([*got.values, *got.grads], [*want.values, *want.grads], strict=True):
        torch.testing.assert_close(x, y)


def errors_over_ranks(name: str, sizes: tuple[int, ...], tile: int) -> list[float]:
    """The teacher's features travel with the keys."""
    n = sum(sizes)
    a, b = randn(n, T, seed=3, dtype=torch.float64), randn(n, T, seed=4, dtype=torch.float64)
    ids = labels_of(n, 5, seed=5)
    mine = {"teacher": (part(a, sizes), part(b, sizes), 0.7), "ids": part(ids, sizes), "tile": tile}
    split = [(randn(n, D, seed=seed, dtype=torch.float64), sizes) for seed in (1, 2)]
    return compare(
        lambda q, k, s: getattr(ct, name)(q, k, s, **mine),
        lambda q, k, s: getattr(reference, name)(q, k, s, teacher=(a, b, 0.7), ids=ids),
        [torch.tensor(1.1, dtype=torch.float64)],
        split,
    )


@pytest.mark.parametrize("sizes", [(9,), (8, 9), (5, 0, 17)], ids=str)
@pytest.mark.parametrize("name", ["clip_loss", "info_nce"])
def test_over_ranks(name: str, sizes: tuple[int, ...]) -> None:
    for errors in pool(len(sizes)).run(errors_over_ranks, name, sizes, 4):
        assert max(errors) < 1e-11, errors


def teachers_of_two_widths() -> str:
    x, wide = randn(4, D, seed=1), randn(4, T + dist.get_rank(), seed=2)
    with pytest.raises(ValueError, match="expected the same on every rank") as error:
        ct.clip_loss(x, x, teacher=(wide, wide, 1.0))
    return str(error.value)


def test_teachers_that_differ_between_ranks_are_told() -> None:
    first, second = pool(2).run(teachers_of_two_widths)
    assert first == second and f"x {T}" in first


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"teacher": (randn(N, T, seed=1),)}, r"teacher: expected \(query, key, scale\), got 1 values"),
        ({"teacher": (randn(N, T, seed=1), randn(N - 1, T, seed=2), 1.0)}, r"teacher\[1\]: expected 37 rows, got 36"),
        ({"teacher": (randn(N, T, seed=1), randn(N, D, seed=2), 1.0)}, "one number of features"),
        ({"teacher": (randn(N, T, seed=1).requires_grad_(), randn(N, T, seed=2), 1.0)}, "teacher.0.: .* a constant"),
        (
            {"teacher": (randn(N, T, seed=1), randn(N, T, seed=2), torch.ones(()).requires_grad_())},
            "teacher.2.: .*const",
        ),
        ({"teacher": (randn(N, T, seed=1).double(), randn(N, T, seed=2).double(), 1.0)}, "teacher.0.: .*float64"),
        ({"teacher_weight": 2.0}, "teacher_weight: expected teacher= with it"),
        ({"return_terms": True}, "return_terms: expected teacher= with it"),
        ({"ok": True, "teacher_temperature": 0.0}, "teacher_temperature: expected a positive number"),
        ({"ok": True, "extra_keys": randn(3, D, seed=1)}, "teacher and extra_keys: expected one of them"),
        ({"ok": True, "hard_negatives": randn(N, 2, D, seed=1)}, "teacher and hard_negatives: "),
        ({"ok": True, "margin": 0.1}, "teacher and margin: "),
        ({"ok": True, "label_smoothing": 0.1}, "teacher and label_smoothing: "),
        ({"ok": True, "ids": torch.arange(N), "same_id": "positive"}, "teacher and same_id='positive': "),
        ({"ok": True, "guide": (randn(N, T, seed=1), randn(N, T, seed=2))}, "teacher and guide: "),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    x = randn(N, D, seed=3)
    if options.pop("ok", False):
        options = {"teacher": (randn(N, T, seed=1), randn(N, T, seed=2), 1.0), **options}
    with pytest.raises((ValueError, TypeError), match=told):
        ct.clip_loss(x, x, **options)


def test_kernels_refuse_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from contratile.engine.backends import registry

    monkeypatch.setattr(registry, "unavailable", lambda device: None)
    x, more = randn(4, D, seed=1), randn(4, T, seed=2)
    with pytest.raises(ValueError, match="what kernels cover, got a teacher"):
        ct.clip_loss(x, x, teacher=(more, more, 1.0), backend="triton")
    with pytest.raises(ValueError, match="what kernels cover, got a guide"):
        ct.clip_loss(x, x, guide=(more, more), backend="triton")


def test_engine_gives_the_mean_score_under_the_teacher() -> None:
    q, k, a, b = (features(N, D, seed=seed, dtype=torch.float64) for seed in range(4))
    one = torch.ones((), dtype=torch.float64)
    x = Inputs(q, k, 2 * one, labels=torch.arange(N), teacher_query=a, teacher_key=b, teacher_scale=3 * one)
    stats = pair_stats(Ring.flat(ALONE, (N,), total=N), x, Spec(paired=True, tile=8))
    assert stats.row.cross is not None and stats.pos is not None
    scores = 2 * q @ k.T
    want = ((3 * a @ b.T).softmax(1) * scores).sum(1) - scores.diagonal()
    torch.testing.assert_close(stats.nats(stats.row.cross), want)
