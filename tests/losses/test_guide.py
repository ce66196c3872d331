"""A guide that drops false negatives: `guide=` of clip_loss and info_nce against the dense definition."""

from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE
from tests.helpers import DTYPES, accumulation, assert_precise, features, labels_of, randn, run
from tests.losses.test_family_ring import compare, part
from tests.ranks import pool

N, M, D, G, E, H = 37, 45, 7, 5, 11, 3
MARGINS: list[dict[str, Any]] = [
    {},
    {"guide_margin": 0.2},
    {"guide_margin": -0.1},
    {"guide_margin": 0.3, "guide_margin_strategy": "relative"},
]


def whole(n: int, d: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Features of small whole numbers: their products are exact, so that ties are ties on every machine."""
    return torch.randint(-2, 3, (n, d), generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [5.0, 100.0])
def test_clip_loss(dtype: torch.dtype, scale: float, margin: dict[str, Any]) -> None:
    """Rows and columns drop pairs by their own positives. At scale 100 tiles need several shifts."""
    image, text = features(N, D, seed=1, dtype=dtype), features(N, D, seed=2, dtype=dtype)
    guide = whole(N, G, 3, dtype), whole(N, G, 4, dtype)
    s = torch.tensor(scale, dtype=accumulation(dtype))

    def oracle(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return reference.clip_loss(a, b, s, guide=(guide[0].to(a.dtype), guide[1].to(a.dtype)), **margin)

    for tile in (8, 64):
        ours = lambda a, b, s, tile=tile: ct.clip_loss(a, b, s, guide=guide, tile=tile, **margin)  # noqa: E731
        assert_precise(ours, oracle, image, text, s, share=1 / N)


@pytest.mark.parametrize("margin", MARGINS, ids=str)
@pytest.mark.parametrize("more", ["plain", "ids", "elsewhere", "key_bias", "none", "dense", "strided", "cached"])
def test_options(more: str, margin: dict[str, Any]) -> None:
    """Extra keys and hard negatives bring guide features of their own."""
    x = [randn(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(((N, D), (M, D), (E, D), (N, H, D)))]
    guide = whole(N, G, 5), whole(M, G, 6)
    options: dict[str, Any] = {"guide": guide, "labels": labels_of(N, M, seed=7), **margin}
    options |= {"extra_guide": whole(E, G, 8), "hard_guide": whole(N * H, G, 9).view(N, H, G)}
    how: dict[str, Any] = {"tile": 8}
    if more == "ids":
        options |= {"ids": (labels_of(N, 9, seed=6), labels_of(M, 9, seed=7)), "extra_ids": labels_of(E, 9, seed=8)}
    elif more == "elsewhere":
        options["in_batch_negatives"] = False
    elif more == "key_bias":
        options["key_bias"] = randn(M, seed=8, dtype=torch.float64)
    elif more == "none":
        options["reduction"] = "none"
    elif more == "dense":
        how = {"backend": "dense"}
    elif more == "strided":
        options["guide"] = guide[0].repeat_interleave(2, 1)[:, ::2], guide[1].t().contiguous().t()
    elif more == "cached":
        how["cache_bytes"] = 1 << 20
    scale = torch.tensor(0.7, dtype=torch.float64)

    def call(loss: Any, **how: Any) -> Any:
        return lambda q, k, e, h, s: loss(q, k, s, extra_keys=e, hard_negatives=h, **options, **how)

    ours, want = run(call(ct.info_nce, **how), *x, scale), run(call(reference.info_nce), *x, scale)
    for a, b in zip([*ours.values, *ours.grads], [*want.values, *want.grads], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_that_are_dropped_may_score_far_above_the_others(dtype: torch.dtype) -> None:
    """At scale 100 the exponential of a false negative overflows at the shift that the pairs that count share."""
    image = features(N, 300, seed=1, dtype=dtype)
    text = image.roll(1, 0)  # the next row's text is this row's image, and its own is any other
    alike = torch.zeros(N, N).index_put((torch.arange(N), (torch.arange(N) + 1) % N), torch.ones(()))
    guide = torch.eye(N).to(dtype), alike.t().contiguous().to(dtype)
    s = torch.tensor(100.0, dtype=accumulation(dtype))

    def oracle(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
        return reference.clip_loss(a, b, s, guide=(guide[0].to(a.dtype), guide[1].to(a.dtype)))

    for cache_bytes in (0, 1 << 20):
        ours = lambda a, b, s, m=cache_bytes: ct.clip_loss(a, b, s, guide=guide, tile=8, cache_bytes=m)  # noqa: E731
        assert_precise(ours, oracle, image, text, s, share=1 / N)


@pytest.mark.parametrize("n", [N, 3])
def test_rows_of_one_set(n: int) -> None:
    """The engine's scores of one set: a tile serves both of its sides, each with its own limits; rows may be empty."""
    z, guide, one = randn(n, D, seed=1, dtype=torch.float64), whole(n, G, 2), torch.ones((), dtype=torch.float64)
    level = whole(n, 1, 3)[:, 0] * 3 - 2

    def ours(z: Tensor) -> Tensor:
        x = Inputs(z, None, one, guide_query=guide, guide_level=level)
        stats = pair_stats(Ring.flat(ALONE, (n,), total=n), x, Spec(cols=False, tile=8))
        assert stats.row.total is not None
        return torch.nn.functional.softplus(stats.nats(stats.row.total))  # finite where nothing counts

    def oracle(z: Tensor) -> Tensor:
        counted = (z @ z.T).masked_fill(guide @ guide.T > level.unsqueeze(1), -torch.inf)
        return torch.cat([counted, torch.zeros(n, 1, dtype=torch.float64)], 1).logsumexp(1)

    got, want = run(ours, z), run(oracle, z)
    torch.testing.assert_close([*got.values, *got.grads], [*want.values, *want.grads])


def test_statistics_count_what_is_dropped() -> None:
    image, text = features(N, D, seed=1), features(N, D, seed=2)
    guide = whole(N, G, 3, torch.float32), whole(N, G, 4, torch.float32)
    _, stats = ct.clip_loss(image, text, 5.0, guide=guide, return_stats=True)
    _, plain = ct.clip_loss(image, text, 5.0, return_stats=True)
    assert stats == plain


def test_compiled() -> None:
    image, text, extra = (features(N, D, seed=seed) for seed in range(3))
    guide = whole(N, G, 3, torch.float32), whole(N, G, 4, torch.float32)
    more: dict[str, Any] = {"guide": guide, "extra_keys": extra, "extra_guide": guide[0]}
    call = torch.compile(lambda x, y: ct.clip_loss(x, y, 5.0, **more), backend="aot_eager", fullgraph=True)
    got, want = run(call, image, text), run(lambda x, y: ct.clip_loss(x, y, 5.0, **more), image, text)
    torch.testing.assert_close([*got.values, *got.grads], [*want.values, *want.grads])


def errors_over_ranks(name: str, sizes: tuple[int, ...], tile: int) -> list[float]:
    n, extras = sum(sizes), tuple(range(1, len(sizes) + 1))
    a, b, e = whole(n, G, 3), whole(n, G, 4), whole(sum(extras), G, 5)
    mine = {"guide": (part(a, sizes), part(b, sizes)), "extra_guide": part(e, extras), "tile": tile}
    split = [(randn(n, D, seed=seed, dtype=torch.float64), sizes) for seed in (1, 2)]
    split.append((randn(sum(extras), D, seed=3, dtype=torch.float64), extras))
    return compare(
        lambda q, k, e, s: getattr(ct, name)(q, k, s, extra_keys=e, guide_margin=0.5, **mine),
        lambda q, k, x, s: getattr(reference, name)(
            q, k, s, extra_keys=x, guide_margin=0.5, guide=(a, b), extra_guide=e
        ),
        [torch.tensor(1.1, dtype=torch.float64)],
        split,
    )


@pytest.mark.parametrize("sizes", [(9,), (8, 9), (5, 0, 17)], ids=str)
@pytest.mark.parametrize("name", ["clip_loss", "info_nce"])
def test_over_ranks(name: str, sizes: tuple[int, ...]) -> None:
    for errors in pool(len(sizes)).run(errors_over_ranks, name, sizes, 4):
        assert max(errors) < 1e-11, errors


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"guide": randn(N, G, seed=1)}, r"guide: expected \(query, key\), got a tensor"),
        ({"guide": (randn(N, G, seed=1), randn(N - 1, G, seed=2))}, r"guide\[1\]: expected 37 rows, got 36"),
        ({"guide": (randn(N, G, seed=1).requires_grad_(), randn(N, G, seed=2))}, "guide.0.: .* a constant"),
        ({"guide_margin": 0.1}, "guide_margin: expected guide= with it"),
        ({"guide_margin_strategy": "relative"}, "guide_margin_strategy: expected guide= with it"),
        ({"guide_margin_strategy": "half"}, "guide_margin_strategy: expected one of 'absolute', 'relative'"),
        ({"extra_guide": randn(N, G, seed=1)}, "extra_guide: expected guide= with it"),
        ({"ok": True, "extra_keys": randn(3, D, seed=1)}, "extra_keys: expected extra_guide= with it"),
        ({"ok": True, "hard_guide": randn(N, 2, G, seed=1)}, "hard_guide: expected hard_negatives= with it"),
        (
            {"ok": True, "extra_keys": randn(3, D, seed=1), "extra_guide": randn(4, G, seed=1)},
            r"extra_guide: expected shape \[3, 5\]",
        ),
        ({"ok": True, "margin": 0.1}, "guide and margin: "),
        ({"ok": True, "label_smoothing": 0.1}, "guide and label_smoothing: "),
        ({"ok": True, "ids": torch.arange(N), "same_id": "positive"}, "guide and same_id='positive': "),
        ({"ok": True, "guide_margin": float("nan")}, "guide_margin: expected a finite number"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_what_is_refused(options: dict[str, Any], told: str) -> None:
    x = randn(N, D, seed=3)
    if options.pop("ok", False):
        options = {"guide": (randn(N, G, seed=1), randn(N, G, seed=2)), **options}
    with pytest.raises((ValueError, TypeError), match=told):
        ct.clip_loss(x, x, **options)
