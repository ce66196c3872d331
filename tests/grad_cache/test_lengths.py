"""Chunks by length: the same gradients as the whole batch in one pass, whatever the padding."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct
from contratile.grad_cache.lengths import ByLength, Pool
from tests.grad_cache.test_cache import clip, count_calls
from tests.grad_cache.towers import Normed, Tower, gap, gradients, padded, twins

N = 23
CLOSE = 1e-6
"""Against the whole batch in one pass, in fp64: the same terms in another order."""


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def exact_tower(seed: int = 1) -> Tower:
    """Without dropout, in fp64."""
    return Tower(seed, dropout=0.0).double()


def left_padded(n: int, seed: int) -> dict[str, Tensor]:
    return {name: x.flip(1) for name, x in padded(n, seed).items()}


def wider(batch: dict[str, Tensor], columns: int) -> dict[str, Tensor]:
    return {name: F.pad(x, (0, columns)) for name, x in batch.items()}


def whole(encoders: list[Any], inputs: tuple[Any, ...]) -> Tensor:
    """The oracle: all rows in one pass, with all padding."""
    value = clip(*(encoder(**x) for encoder, x in zip(encoders, inputs, strict=True)))
    value.backward()
    return value.detach()


def seen_shapes(module: nn.Module) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = []
    hook = lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
    module.register_forward_pre_hook(hook, with_kwargs=True)
    return shapes


INPUTS: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {
    "right": (padded(N, 1), padded(N, 3)),
    "left": (left_padded(N, 1), left_padded(N, 3)),
    "both": (padded(N, 1), left_padded(N, 3)),
    "widths": (padded(N, 1), wider(padded(N, 3), 4)),
    "full": (padded(N, 1) | {"attention_mask": torch.ones(N, 6, dtype=torch.long)}, padded(N, 3)),
    "numbers of rows": (padded(N, 1), padded(N, 3)),
}


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("shared", [False, True], ids=["two encoders", "one encoder"])
@pytest.mark.parametrize(
    "sizes", [{"chunk_size": 4}, {"chunk_tokens": 14}, {"chunk_size": 3, "chunk_tokens": 14}], ids=str
)
def test_gradients_of_the_whole_batch(kind: str, shared: bool, sizes: dict[str, Any]) -> None:
    inputs = INPUTS[kind]
    ours, theirs = twins(*((exact_tower(1),) if shared else (exact_tower(1), exact_tower(2))))
    want = whole(theirs * 2 if shared else theirs, inputs)
    cache = ct.GradCache(ours[0] if shared else ours, clip, **sizes)
    got = cache.step(*inputs)
    assert got.item() == pytest.approx(want.item(), rel=CLOSE)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE
    assert cache.padding.real == sum(int(x["attention_mask"].sum()) for x in inputs)
    assert cache.padding.real <= cache.padding.encoded < cache.padding.given


def test_features_are_in_their_order() -> None:
    encoder, inputs = exact_tower(), (padded(N, 1), wider(padded(N, 3), 2))
    with ct.GradCache(encoder, clip, 4).encode(*inputs) as encoded:
        for got, x in zip(encoded.features, inputs, strict=True):
            torch.testing.assert_close(got.detach(), encoder(**x).detach(), rtol=CLOSE, atol=CLOSE)


def test_one_encoder_sorts_across_columns() -> None:
    """Chunks have rows of both inputs, which saves more than sorting each."""
    encoder = exact_tower()
    cache = ct.GradCache(encoder, clip, 16, lengths=ByLength(check=False))
    shapes = seen_shapes(encoder)
    cache.step(padded(N, 1), wider(padded(N, 3), 4))
    both = cache.padding.encoded
    assert [rows for rows, _ in shapes[:3]] == [14, 16, 16] and shapes[3:] == shapes[2::-1]
    apart = ct.GradCache([exact_tower(1), exact_tower(2)], clip, 16)
    apart.step(padded(N, 1), wider(padded(N, 3), 4))
    assert both < apart.padding.encoded


def test_a_column_that_the_loss_does_not_use() -> None:
    ours, theirs = twins(exact_tower())
    only = lambda a, b: ct.sup_con(a, torch.arange(N) % 4)  # noqa: E731
    only(theirs[0](**padded(N, 1)), None).backward()
    ct.GradCache(ours[0], only, 16).step(padded(N, 1), padded(N, 3))
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE


@pytest.mark.parametrize(
    ("offload", "features"), [("none", False), ("host", False), ("host", True), ("disk", False), ("disk", True)]
)
def test_dropout_is_replayed_and_offload_changes_nothing(offload: Any, features: bool) -> None:
    """Against the same chunks with gradients: the plan's, whose draws are the same."""
    ours, theirs = twins(Tower(1).double())
    inputs = padded(N, 1), wider(padded(N, 3), 4)
    torch.manual_seed(4)
    cache = ct.GradCache(ours[0], clip, 5, offload=offload, offload_features=features)
    cache.step(*inputs)
    torch.manual_seed(4)
    items = ct.GradCache(theirs[0], clip, 5).feed.agenda(inputs).known
    assert items is not None
    torch.manual_seed(4)
    outputs = torch.cat([theirs[0](**item.chunk()) for item in items])
    order = torch.cat([item.piece.rows for item in items])
    rows = torch.empty_like(outputs).index_copy(0, order, outputs)
    clip(*rows.split(N)).backward()
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE


# --- iterators ------------------------------------------------------------------------------------------------------


def pieces(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
    """Chunks that were padded on their own, as loaders make them."""
    found = []
    for at in range(0, len(batch["input_ids"]), size):
        part = {name: x[at : at + size] for name, x in batch.items()}
        width = int(part["attention_mask"].sum(1).max())
        found.append({name: x[:, :width] for name, x in part.items()})
    return found


@pytest.mark.parametrize("window", [1, 2, 16])
@pytest.mark.parametrize("together", [False, True])
def test_iterators_are_sorted_within_a_window(window: int, together: bool) -> None:
    inputs = padded(N, 1), padded(N, 3)
    ours, theirs = twins(exact_tower(1), exact_tower(2))
    whole(theirs, inputs)
    given: Any = [iter(pieces(x, 5)) for x in inputs]
    if together:
        given = [zip(*given, strict=True)]
    cache = ct.GradCache(ours, clip, 5, lengths=ByLength(window=window))
    cache.step(*given)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE
    if window == 16:
        whole_batch = ct.GradCache(ours, clip, 5)
        whole_batch.step(*inputs)
        assert cache.padding.encoded == whole_batch.padding.encoded


def test_iterators_are_read_one_window_ahead() -> None:
    read = 0

    def chunks() -> Iterator[dict[str, Tensor]]:
        nonlocal read
        for x in pieces(padded(N, 1), 5):
            read += 1
            yield x

    seen: list[int] = []
    encoder = Tower(1)
    encoder.register_forward_pre_hook(lambda *_: seen.append(read))
    ct.GradCache(
        encoder, lambda z: ct.sup_con(z, torch.arange(N) % 4), 5, lengths=ByLength(window=2, check=False)
    ).step(chunks())
    assert seen[:5] == [2, 2, 4, 4, 5]


# --- what is cut ----------------------------------------------------------------------------------------------------


class Strict(Tower):
    """Looks at everything that it is given."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **more: Any) -> Tensor:
        if "boxes" in more:
            assert more["boxes"].shape == (*input_ids.shape, 4)
        for name in ("position_ids", "token_type_ids"):
            assert name not in more or more[name].shape == input_ids.shape
        assert "prices" not in more or more["prices"].shape == (len(input_ids), 6)
        assert "codes" not in more or more["codes"].shape == (len(input_ids), 2)
        return super().forward(input_ids, attention_mask)


def strict_batch(seed: int) -> dict[str, Any]:
    batch: dict[str, Any] = padded(N, seed)
    same = torch.zeros(N, 6, dtype=torch.long)
    return {**batch, "position_ids": same, "token_type_ids": same, "codes": same[:, :2], "prices": same.double()}


def test_integers_as_wide_as_the_mask_are_cut() -> None:
    cache = ct.GradCache(Strict(1), clip, 5)
    cache.step(strict_batch(1), strict_batch(2))
    assert cache.padding.encoded < cache.padding.given


def test_tensors_to_cut_can_be_given() -> None:
    rule = ByLength(cut=("input_ids", "boxes"))
    batches = [{**padded(N, seed), "boxes": torch.zeros(N, 6, 4)} for seed in (1, 2)]
    cache = ct.GradCache(Strict(1), clip, 5, lengths=rule)
    cache.step(*batches)
    assert cache.padding.encoded < cache.padding.given
    missing = r"cut of input: expected a tensor 'boxes' \[rows, 6, ...\], got none. There are input_ids, attention_mask"
    with pytest.raises(ValueError, match=missing):
        cache.step(padded(N, 1), padded(N, 2))


class Summed(nn.Module):
    """Takes lengths instead of a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8).double()

    def forward(self, ids: Tensor, size: Tensor) -> Tensor:
        there = torch.arange(ids.shape[1]) < size.unsqueeze(1)
        return F.normalize((self.words(ids) * there.unsqueeze(2)).sum(1), dim=1)


def test_lengths_that_are_given() -> None:
    batches = [{"ids": x["input_ids"], "size": x["attention_mask"].sum(1)} for x in (padded(N, 1), padded(N, 3))]
    ours, theirs = twins(Summed())
    clip(*(theirs[0](**x) for x in batches)).backward()
    cache = ct.GradCache(ours[0], clip, 5, lengths=ByLength(mask="size"))
    cache.step(*batches)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE and cache.padding.encoded < cache.padding.given


def test_rows_without_any_token() -> None:
    batch = padded(N, 1)
    batch["attention_mask"][3] = 0
    pool = Pool([batch], ByLength())
    assert pool.lengths[3] == 1 and pool.take(torch.tensor([3]), 1)["input_ids"].shape == (1, 1)


def test_padding_of_chunks_from_several_batches_is_that_of_the_tokenizer() -> None:
    """Left padded rows of another width get the token that pads the others, as encoders may look for it."""
    narrow, wide = left_padded(5, 1), left_padded(5, 3)
    narrow = {name: x[:, 2:] for name, x in narrow.items()}
    wide["input_ids"][wide["attention_mask"] == 0] = 49
    narrow["input_ids"][narrow["attention_mask"] == 0] = 49
    chunk = Pool([narrow, wide], ByLength()).take(torch.arange(10), 6)
    assert (chunk["input_ids"][chunk["attention_mask"] == 0] == 49).all()
    assert chunk["attention_mask"].sum() == narrow["attention_mask"].sum() + wide["attention_mask"].sum()


# --- encoders that need their padding -------------------------------------------------------------------------------


class Careless(Tower):
    """Ignores its mask."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


class Positions(Tower):
    """Counts positions from the left, padding included."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward((input_ids + torch.arange(input_ids.shape[1])) % 50, attention_mask)


class Tokenwise(Tower):
    """Returns a vector for each token."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return F.normalize(self.words(input_ids), dim=2)


class Fixed(Tower):
    """Takes texts of one length only."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids + torch.zeros(6, dtype=torch.long), attention_mask)


@pytest.mark.parametrize(
    ("encoder", "make", "text"),
    [
        (Careless(1, dropout=0.0), padded, "they differ by"),
        (Positions(1, dropout=0.0), left_padded, "they differ by"),
        (Tokenwise(1), padded, "their shapes are"),
        (Fixed(1), padded, "it raised RuntimeError"),
    ],
    ids=["no mask", "positions", "tokens", "fixed"],
)
def test_encoders_that_need_padding(encoder: Any, make: Callable[..., Any], text: str) -> None:
    """A warning once, and chunks as they come."""
    loss = lambda a, b: (a.flatten(1)[:, :16] * b.flatten(1)[:, :16]).sum()  # noqa: E731
    cache = ct.GradCache(encoder, loss, 5)
    with pytest.warns(UserWarning, match=f"features of input 0 are not the same without padding .{text}"):
        cache.step(make(N, 1), make(N, 3))
    assert cache.padding.real == 0
    cache.step(make(N, 1), make(N, 3))
    calls = count_calls(encoder)
    ct.GradCache(encoder, loss, 5, lengths="off").step(make(N, 1), make(N, 3))
    assert len(calls) == 20


def test_positions_are_no_problem_of_right_padding() -> None:
    cache = ct.GradCache(Positions(1), clip, 5)
    cache.step(padded(N, 1), padded(N, 3))
    assert cache.padding.encoded < cache.padding.given


def test_the_comparison_leaves_no_trace() -> None:
    encoder = Tower(1)
    encoder.layer.eval()
    calls = count_calls(encoder)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    cache = ct.GradCache(encoder, clip, 5)
    cache.feed.agenda((padded(N, 1), padded(N, 3)))
    assert torch.equal(torch.get_rng_state(), state) and calls == [False, False]
    assert encoder.training and not encoder.layer.training
    cache.feed.agenda((padded(N, 1), padded(N, 3)))
    assert len(calls) == 2, "only in the first step"


def test_batch_statistics_are_not_those_of_one_length() -> None:
    class Masked(Normed):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return super().forward(input_ids)

    cache = ct.GradCache(Masked(1), clip, 5)
    cache.step(padded(N, 1), padded(N, 3))
    assert cache.padding.real == 0


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_compiled_encoders_see_few_lengths() -> None:
    """Powers of two from 8 on; lengths of one's own."""

    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 8)
            self._orig_mod = None  # what torch.compile adds

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return F.normalize((self.words(input_ids) * attention_mask.unsqueeze(2)).sum(1), dim=1)

    lengths = torch.arange(1, 101).unsqueeze(1)
    batch = {
        "input_ids": torch.randint(50, (100, 100)),
        "attention_mask": (torch.arange(100) < lengths).long(),
    }
    for rule, want in (("auto", {16, 32, 64, 100}), (ByLength(buckets=(50,)), {50, *range(60, 101, 10)})):
        encoder = Long()
        shapes = seen_shapes(encoder)
        ct.GradCache(encoder, lambda z: ct.sup_con(z, torch.arange(100) % 4), 10, lengths=rule).step(batch)  # type: ignore[arg-type]
        assert {width for rows, width in shapes if rows == 10} == want
        assert {rows for rows, _ in shapes} == {10, 8}, "8 are compared; other sizes would be compiled too"


def test_a_budget_of_tokens_without_lengths() -> None:
    """Rows of a chunk times their columns; inputs without tokens have chunks of rows."""

    class Either(Tower):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return input_ids @ self.out.weight if input_ids.is_floating_point() else super().forward(input_ids)

    encoder = Either(1)
    sizes: list[int] = []
    encoder.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    ct.GradCache(encoder, clip, 7, chunk_tokens=20).step(padded(N, 1)["input_ids"], torch.randn(N, 16))
    assert set(sizes) == {3, 2, 7}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("chunk_tokens: expected at least 1, got 0", {"chunk_tokens": 0}),
    ("lengths: expected one of 'auto', 'off'", {"lengths": "on"}),
]


@pytest.mark.parametrize(("text", "options"), WRONG, ids=[text[:30] for text, _ in WRONG])
def test_errors(text: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=text):
        ct.GradCache(Tower(1), clip, 5, **options)
    with pytest.raises(ValueError, match="buckets: expected ascending lengths"):
        ByLength(buckets=(8, 8))
    with pytest.raises(ValueError, match="window: expected at least 1, got 0"):
        ByLength(window=0)
    with pytest.raises(TypeError, match=r"buckets: expected 'auto' or a tuple of lengths, got 64"):
        ByLength(buckets=64)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cut: expected a tuple of names, got str. Write cut=.'input_ids',."):
        ByLength(cut="input_ids")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="overhead: expected at least 0, got -1"):
        ByLength(overhead=-1)


def test_masks_that_are_none() -> None:
    """A mask that was named must be there, and say what a mask or lengths can say."""
    batch = padded(N, 1)
    sizes = batch["attention_mask"].sum(1)
    wrong: list[tuple[str, dict[str, Tensor]]] = [
        ("expected one with 'size', got input_ids, attention_mask", {}),
        ("input 'size': expected a mask .* or integer lengths .*, got .23. of torch.float64", {"size": sizes.double()}),
        ("lengths: expected numbers of at least 0, got -6", {"size": -sizes}),
    ]
    for text, more in wrong:
        with pytest.raises(ValueError, match=text):
            ct.GradCache(Tower(1), clip, 5, lengths=ByLength(mask="size")).step(batch | more, batch | more)
    empty = {name: x[:, :0] for name, x in batch.items()}
    with pytest.raises(ValueError, match="expected tensors with at least one column, got 0"):
        ct.GradCache(Tower(1), clip, 5).step(empty, empty)


def test_rows_whose_features_are_not_finite_tell_nothing() -> None:
    """Rows without tokens are NaN with and without padding: no reason to keep the padding of the other rows."""
    batch = padded(N, 1)
    batch["attention_mask"][:3] = 0
    cache = ct.GradCache(Tower(1, dropout=0.0), clip, 5)
    assert not cache.step(batch, batch).isfinite() and cache.padding.encoded < cache.padding.given
    batch["attention_mask"][:] = 0
    cache = ct.GradCache(Tower(1, dropout=0.0), clip, 5)
    cache.step(batch, batch)
    assert not cache.feed.sorting.agreed, "there was nothing to compare"


def test_the_progress_bar_shows_what_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    ct.GradCache(Tower(1), clip, 12, progress="bar").step(padded(N, 1), padded(N, 3))
    assert "tokens per real token" in " ".join(capsys.readouterr().out.split())


def test_tensors_keep_their_order() -> None:
    """Without a mask there is nothing to sort by."""
    encoder = Tower(1, dropout=0.0)
    given = [x["input_ids"] for x in (padded(N, 1), padded(N, 3))]
    starts: list[Tensor] = []
    encoder.register_forward_pre_hook(lambda _, args: starts.append(args[0][0]))
    ct.GradCache(encoder, clip, 5).step(*given)
    want = [x[0] for x in itertools.chain(*(x.split(5) for x in given))]
    assert all(map(torch.equal, starts, want + want[::-1]))
