"""What a loss costs: matrix products counted exactly, and every tensor it allocates on the way."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import contratile as ct
from contratile.engine import compiled
from contratile.engine.plan import plan_tiles
from contratile.engine.rule import PairRule
from tests.helpers import features, labels_of, pair_stats

N, M, D, TILE = 48, 80, 24, 16


class Meter(TorchDispatchMode):
    """Counts products and remembers the bytes of every storage that an operator makes.

    A dispatch mode does not look into custom operators by itself: their Python is run under the mode instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.made: dict[int, tuple[int, str]] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for name, op in (
            ("contratile::pair_statistics", compiled.pair_statistics),
            ("contratile::pair_gradients", compiled.pair_gradients),
        ):
            if func._schema.name == name:
                with self:
                    return op._init_fn(*args, **kwargs)
        taken = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            a, b = args[-2:]
            self.flops += 2 * a.shape[0] * a.shape[1] * b.shape[1]
        for x in tree_leaves(result):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in taken:
                self._alive.append(x)
                self.made[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes(), str(func)
        return result

    def largest(self) -> int:
        return max(size for size, _ in self.made.values())


def leaves(
    q_grad: bool, k_grad: bool, s_grad: bool, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    query = features(N, D, seed=1, dtype=dtype).requires_grad_(q_grad)
    key = features(M, D, seed=2, dtype=dtype).requires_grad_(k_grad)
    return query, key, torch.tensor(10.0, requires_grad=s_grad)


def measure(loss: Callable[..., Tensor], *inputs: Tensor) -> Meter:
    """One forward and, if an input wants it, one backward pass. (`.backward()` would copy what the meter holds.)"""
    meter = Meter()
    with meter:
        value = loss(*inputs)
        if value.requires_grad:
            torch.autograd.grad(value, [x for x in inputs if x.requires_grad])
    return meter


@pytest.mark.parametrize(
    ("q_grad", "k_grad", "s_grad", "products"),
    [
        (True, True, True, 4),
        (True, True, False, 4),
        (True, False, False, 3),
        (True, False, True, 3),
        (False, True, False, 3),
        (False, True, True, 3),
        (False, False, True, 2),
        (False, False, False, 1),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_matrix_products(q_grad: bool, k_grad: bool, s_grad: bool, products: int, cached: bool) -> None:
    query, key, scale = leaves(q_grad, k_grad, s_grad)
    cache_bytes = N * M * 4 if cached else 0
    labels = labels_of(N, M, seed=3)
    saved = int(cached and products > 1)
    options: dict[str, Any] = {"tile": TILE, "cache_bytes": cache_bytes}
    meter = measure(lambda q, k, s: ct.info_nce(q, k, s, labels=labels, **options), query, key, scale)
    assert meter.flops == (products - saved) * 2 * N * M * D
    meter = measure(lambda q, k, s: ct.clip_loss(q, k[:N], s, **options), query, key, scale)
    assert meter.flops == (products - saved) * 2 * N * N * D


def test_a_cache_of_two_thirds_saves_two_thirds_of_a_product() -> None:
    query, key, scale = leaves(True, True, True)
    two_thirds = N * M * 4 * 2 // 3
    meter = measure(lambda q, k, s: ct.info_nce(q, k, s, tile=TILE, cache_bytes=two_thirds), query, key, scale)
    assert meter.flops == (4 * N - 2 * N // 3) * 2 * M * D


@pytest.mark.parametrize(("n", "products"), [(512, 3), (513, 4)])
def test_scores_of_a_mebibyte_are_always_kept(n: int, products: int) -> None:
    """At small sizes a product costs more than the memory; larger scores are computed again unless asked for."""
    image, text = (features(n, D, seed=seed).requires_grad_() for seed in (1, 2))
    meter = measure(lambda a, b: ct.clip_loss(a, b, 5.0), image, text)
    assert meter.flops == products * 2 * n * n * D


def test_one_set_computes_the_upper_triangle_only() -> None:
    query, _, scale = leaves(True, False, True)
    meter = measure(lambda q, s: ct.pair_lse(q, None, s, tile=TILE)[0].sum(), query, scale)
    assert meter.flops == symmetric_flops(N)


def symmetric_flops(n: int) -> int:
    """Scores twice, by whole tiles of the upper triangle; gradients without waste, as on the diagonal one product of a
    tile stands for two of half of it."""
    triangle = sum(tile.shape[0] * tile.shape[1] for tile in plan_tiles(n, n, D, tile=TILE, symmetric=True).tiles())
    assert triangle == n * (n + TILE) // 2
    return 2 * D * (2 * triangle + n * n)


def test_products_of_the_family() -> None:
    query, key, scale = leaves(True, True, True)
    key = key[:N].detach().requires_grad_()
    meter = measure(lambda a, b, t: ct.nt_xent(a, b, t, tile=TILE), query, key, scale)
    assert meter.flops == symmetric_flops(2 * N)
    meter = measure(lambda z, t: ct.sup_con(z, torch.arange(N) // 2, t, tile=TILE), query, scale)
    assert meter.flops == symmetric_flops(N)
    meter = measure(lambda a, b, s: ct.siglip_loss(a, b, s, -1.0, tile=TILE), query, key, scale)
    assert meter.flops == 4 * 2 * N * N * D


G, T, E = 20, 36, 32
FOUR: Any = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
HARDER: dict[str, Any] = {"hardness_mode": "all_negatives", "hardness_strength": 5.0}
OBJECTIVES: dict[str, tuple[str, dict[str, Any], int]] = {
    "matryoshka": ("clip_loss", {"matryoshka_dims": (5, 16, D)}, 4 * D),
    "matryoshka, info_nce": ("info_nce", {"matryoshka_dims": (16, D, 1)}, 4 * D),
    "matryoshka of a part": ("clip_loss", {"matryoshka_dims": (5, 16)}, 4 * 16),
    "matryoshka, siglip": ("siglip_loss", {"bias": -5.0, "matryoshka_dims": (5, 16, D)}, 4 * D),
    "teacher": ("clip_loss", {"teacher": (features(N, T, seed=5), features(N, T, seed=6), 9.0)}, 4 * D + 2 * T),
    "several positives": ("clip_loss", {"ids": torch.arange(N) // 3, "same_id": "positive"}, 4 * D),
    "key_bias": ("info_nce", {"key_bias": torch.linspace(-1, 1, N)}, 4 * D),
    "hardness": ("info_nce", HARDER, 4 * D),
}
"""The loss, its options, and the features that are multiplied for each pair in forward and backward pass together."""


@pytest.mark.parametrize("name", OBJECTIVES)
def test_products_of_the_objectives(name: str) -> None:
    query, key, scale = leaves(True, True, True)
    key = key[:N].detach().requires_grad_()
    loss, options, width = OBJECTIVES[name]
    meter = measure(lambda q, k, s: getattr(ct, loss)(q, k, s, **options, tile=TILE), query, key, scale)
    assert meter.flops == 2 * N * N * width


def test_products_of_a_guide() -> None:
    """Those of the positives are computed before, by the tiles that hold one."""
    query, key, scale = leaves(True, True, True)
    key, guide = key[:N].detach().requires_grad_(), (features(N, G, seed=5), features(N, G, seed=6))
    meter = measure(lambda q, k, s: ct.clip_loss(q, k, s, guide=guide, tile=TILE), query, key, scale)
    assert meter.flops == 2 * N * N * (4 * D + 2 * G) + 2 * N * TILE * G


def test_products_of_four_directions() -> None:
    """Queries with queries and documents with documents are half of a square each."""
    query, key, scale = leaves(True, True, True)
    key, hard = key[:N].detach().requires_grad_(), features(N, D, seed=7).view(N, 1, D).requires_grad_()
    pairs = 4 * 2 * N * N * D + 2 * symmetric_flops(N)
    options: dict[str, Any] = {"directions": FOUR, "tile": TILE}
    meter = measure(lambda q, k, s: ct.info_nce(q, k, s, **options), query, key, scale)
    assert meter.flops == pairs
    options |= {"share_hard_negatives": True}
    meter = measure(lambda q, k, s, h: ct.info_nce(q, k, s, hard_negatives=h, **options), query, key, scale, hard)
    assert meter.flops == pairs + 8 * 2 * N * N * D


def test_negatives_from_elsewhere_alone_cost_no_product_of_the_batch() -> None:
    query, key, scale = leaves(True, True, True)
    key, extra = key[:N].detach().requires_grad_(), features(E, D, seed=7).requires_grad_()
    options: dict[str, Any] = {"in_batch_negatives": False, "tile": TILE}
    meter = measure(lambda q, k, s, e: ct.info_nce(q, k, s, extra_keys=e, **options), query, key, scale, extra)
    assert meter.flops == 4 * 2 * N * E * D
    key, extra = key.detach(), extra.detach()  # MoCo's queue and its slow encoder
    meter = measure(lambda q, k, s, e: ct.info_nce(q, k, s, extra_keys=e, **options), query, key, scale, extra)
    assert meter.flops == 3 * 2 * N * E * D


def test_an_option_that_is_not_used_costs_nothing() -> None:
    """Options at their defaults lead to the very same operators."""
    query, key, scale = leaves(True, True, True)
    key = key[:N].detach().requires_grad_()
    plain = measure(lambda q, k, s: ct.clip_loss(q, k, s, tile=TILE), query, key, scale)
    off: dict[str, Any] = {"ids": None, "margin": None, "label_smoothing": 0.0, "weights": None, "return_stats": False}
    same = measure(lambda q, k, s: ct.clip_loss(q, k, s, tile=TILE, **off), query, key, scale)
    assert sorted(made for made in plain.made.values()) == sorted(made for made in same.made.values())
    asked = measure(lambda q, k, s: ct.clip_loss(q, k, s, tile=TILE, return_stats=True)[0], query, key, scale)
    assert len(asked.made) > len(plain.made)


FAMILY = (
    *("nt_xent", "sup_con", "siglip", "options", "several positives", "directions", "hardness", "elsewhere"),
    *("matryoshka", "teacher", "guide"),
)


@pytest.mark.parametrize("loss", FAMILY)
def test_no_large_tensor_is_made_by_the_family(loss: str) -> None:
    """Nothing grows with N x N; per row there are gradients, the views of nt_xent, and vectors."""
    n, d, tile = 512, 8, 32
    image, text = (features(n, d, seed=seed).requires_grad_() for seed in (1, 2))
    ids, hard = torch.arange(n) // 3, features(2 * n, d, seed=3).view(n, 2, d)
    guide = features(n, 5, seed=4), features(n, 5, seed=5)
    shared: dict[str, Any] = {"hard_negatives": hard, "share_hard_negatives": True}
    run: dict[str, Callable[..., Tensor]] = {
        "nt_xent": lambda a, b: ct.nt_xent(a, b, 0.5, tile=tile),
        "sup_con": lambda a, b: ct.sup_con(a, ids, 0.5, tile=tile) + 0 * b[0, 0],
        "siglip": lambda a, b: ct.siglip_loss(a, b, 5.0, -5.0, tile=tile),
        "options": lambda a, b: ct.clip_loss(
            a, b, 5.0, ids=ids, hard_negatives=hard, extra_keys=hard[:, 0], margin=0.1, return_stats=True, tile=tile
        )[0],
        "several positives": lambda a, b: ct.clip_loss(a, b, 5.0, ids=ids, same_id="positive", tile=tile),
        "directions": lambda a, b: ct.info_nce(a, b, 5.0, directions=FOUR, **shared, tile=tile),
        "hardness": lambda a, b: ct.info_nce(a, b, 5.0, **shared, **HARDER, key_bias=a.detach()[:, 0], tile=tile),
        "elsewhere": lambda a, b: ct.info_nce(a, b, 5.0, extra_keys=hard[:, 0], in_batch_negatives=False, tile=tile),
        "matryoshka": lambda a, b: ct.clip_loss(a, b, 5.0, matryoshka_dims=(2, 5, d), tile=tile),
        "teacher": lambda a, b: ct.clip_loss(a, b, 5.0, teacher=(*guide, 3.0), tile=tile),
        "guide": lambda a, b: ct.clip_loss(a, b, 5.0, guide=guide, guide_margin=0.1, tile=tile),
    }
    assert set(run) == set(FAMILY)
    assert measure(run[loss], image, text).largest() <= 2 * n * d * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("needs", [(True, True, True), (False, False, True), (True, False, False)])
def test_no_large_tensor_is_made(dtype: torch.dtype, needs: tuple[bool, bool, bool]) -> None:
    """Beyond the gradients nothing is larger than a tile, a block of features or a vector over the rows."""
    n, d, tile = 256, 64, 16
    image, text = (features(n, d, seed=seed, dtype=dtype) for seed in (1, 2))
    inputs = [image.requires_grad_(needs[0]), text.requires_grad_(needs[1]), torch.tensor(9.0, requires_grad=needs[2])]
    meter = measure(lambda q, k, s: ct.clip_loss(q, k, s, tile=tile), *inputs)
    full = sorted((size for size, _ in meter.made.values() if size > tile * d * 4 and size > n * 8), reverse=True)
    copies = 2 if dtype == torch.bfloat16 else 1  # a 16-bit key gradient is rounded from its fp32 accumulator
    expected = [n * d * dtype.itemsize] * needs[0]
    if needs[1]:
        expected += [n * d * 4] + [n * d * dtype.itemsize] * (copies - 1)
    assert full == sorted(expected, reverse=True), [made for made in meter.made.values() if made[0] in full]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_large_tensor_is_made_of_one_set(dtype: torch.dtype) -> None:
    n, d, tile = 256, 64, 16
    query = features(n, d, seed=1, dtype=dtype).requires_grad_()
    rule = PairRule(exclude_self=True, labels=(torch.arange(n) + 7) % n)
    meter = measure(lambda q: pair_stats(q, None, 3.0, rule, tile=tile).row_lse.sum(), query)
    full = [size for size, _ in meter.made.values() if size > tile * d * 4 and size > n * 8]
    assert sorted(full) == [n * d * 2, n * d * 4][1 if dtype == torch.float32 else 0 :]


def test_meter_sees_dense_scores() -> None:
    """The dense backend makes what the tests above would have noticed."""
    query, key, scale = leaves(True, True, True)
    meter = measure(lambda q, k, s: ct.info_nce(q, k, s, backend="dense"), query, key, scale)
    assert meter.flops == 3 * 2 * N * M * D and meter.largest() >= N * M * 4


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
def test_no_cache_without_gradients(grad_mode: Any) -> None:
    inputs = leaves(True, True, True)

    def loss(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        return ct.info_nce(q, k, s, tile=TILE, cache_bytes=1 << 20)

    with grad_mode():
        assert measure(loss, *inputs).largest() < N * M * 4
    assert measure(loss, *(x.detach() for x in inputs)).largest() < N * M * 4
    assert measure(loss, *inputs).largest() == N * M * 4
