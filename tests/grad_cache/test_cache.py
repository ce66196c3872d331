"""Gradient caching: the gradients of one backward over all chunks, whatever the inputs, encoders, loss and chunks."""

# mypy: no-warn-return-any
# (calls of modules are untyped.)

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import contratile as ct
from contratile.grad_cache.chunks import RowBuffer
from contratile.grad_cache.replay import RandomState
from tests.grad_cache.towers import ROUNDING, Normed, Tower, gap, gradients, ids_of, oracle, padded, twins

N = 23
EXACT = ROUNDING


def scale_leaf(value: float = 2.0) -> Tensor:
    return torch.tensor(value, requires_grad=True)


def assert_exact(
    encoders: tuple[nn.Module, ...],
    loss: Callable[..., Any],
    inputs: tuple[Any, ...],
    chunk_size: int | tuple[int, ...],
    *,
    given: Callable[[], tuple[Any, ...]] | None = None,
    calls: Callable[[list[nn.Module]], Any] = lambda encoders: tuple(encoders),
    context: Callable[[], Any] = nullcontext,
    **options: Any,
) -> tuple[list[nn.Module], list[nn.Module]]:
    """A step against the oracle: loss, gradients, the scale's gradient, and the random state afterwards.

    `given` makes what the step is called with, if that is not `inputs`; `calls` what it is constructed with.
    """
    ours, theirs = twins(*encoders)
    shared = len(encoders) == 1 and len(inputs) > 1
    sizes = (chunk_size,) * len(inputs) if isinstance(chunk_size, int) else chunk_size
    ours_scale, their_scale = scale_leaf(), scale_leaf()
    keyword = {"scale": their_scale.exp()} if loss is clip else {}
    torch.manual_seed(5)
    with context():
        want = oracle(theirs * len(inputs) if shared else theirs, loss, inputs, sizes, **keyword)
    state = torch.get_rng_state()
    keyword = {"scale": ours_scale.exp()} if loss is clip else {}
    cache = ct.GradCache(ours[0] if shared else calls(ours), loss, chunk_size, **options)
    torch.manual_seed(5)
    with context():
        got = cache.step(*(inputs if given is None else given()), **keyword)
    assert torch.equal(torch.get_rng_state(), state)
    assert not got.requires_grad and got.item() == pytest.approx(want.item(), rel=ROUNDING)
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT
    if keyword:
        assert ours_scale.grad is not None and their_scale.grad is not None
        torch.testing.assert_close(ours_scale.grad, their_scale.grad, rtol=1e-5, atol=1e-7)
    return ours, theirs


def clip(image: Tensor, text: Tensor, scale: Tensor | float = 8.0) -> Tensor:
    return ct.clip_loss(image, text, scale)


PAIR = (ids_of(N, 1), ids_of(N, 2))


# --- the same gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [1, 7, N, 100, (4, 9)], ids=str)
@pytest.mark.parametrize("shared", [False, True], ids=["two encoders", "one encoder"])
def test_dropout_and_chunks(shared: bool, chunk_size: int | tuple[int, ...]) -> None:
    encoders = (Tower(1),) if shared else (Tower(1), Tower(2))
    assert_exact(encoders, clip, PAIR, chunk_size)


def test_without_dropout_it_is_full_batch_training() -> None:
    ours, theirs = twins(Tower(1, dropout=0.0), Tower(2, dropout=0.0))
    ct.GradCache(ours, clip, 4).step(*PAIR)
    clip(*(encoder(x) for encoder, x in zip(theirs, PAIR, strict=True))).backward()
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT


def test_dropout_would_be_noticed() -> None:
    """Another random state in the second pass is a difference that the oracle sees."""
    ours, theirs = twins(Tower(1), Tower(2))
    torch.manual_seed(5)
    oracle(theirs, clip, PAIR, (4, 4))
    torch.manual_seed(5)
    cache = ct.GradCache(ours, clip, 4)
    encoded = cache.encode(*PAIR)
    cache.loss_and_grads(encoded)
    for record in encoded.records:
        record.state.states.clear()
    cache.backward(encoded)
    assert gap(gradients(*ours), gradients(*theirs)) > 1e-3


LOSSES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "info_nce": (lambda q, k: ct.InfoNCE(7.0)(q, k), 2),
    "nt_xent": (lambda a, b: ct.NTXent(0.3)(a, b), 2),
    "siglip": (lambda a, b: ct.SigLipLoss()(a, b, 5.0, -3.0), 2),
    "sup_con": (lambda z: ct.SupCon(0.2)(z, torch.arange(N) % 4), 1),
    "of one's own": (lambda a, b: (a - b.roll(1, 0)).square().sum(), 2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    loss, sides = LOSSES[name]
    assert_exact((Tower(1), Tower(2))[:sides], loss, PAIR[:sides], 6)


def test_more_keys_than_queries() -> None:
    inputs = ids_of(N, 1), ids_of(3 * N, 2)
    assert_exact((Tower(1),), lambda q, k: ct.info_nce(q, k, 9.0), inputs, (5, 16))


def test_loss_parameters_and_statistics() -> None:
    """Parameters of the loss get their gradient, added to what is there; what else the loss returns comes detached."""

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, a: Tensor, b: Tensor, shift: Tensor) -> tuple[Tensor, Any]:
            loss, stats = ct.clip_loss(a, b + shift, self.log_scale.exp(), return_stats=True)
            return loss, stats

    (ours, our_loss), (theirs, their_loss) = twins(Tower(1), Learned())
    our_shift, their_shift = torch.zeros(16, requires_grad=True), torch.zeros(16, requires_grad=True)
    torch.manual_seed(3)
    want = oracle([theirs] * 2, lambda a, b: their_loss(a, b, their_shift)[0], PAIR, (5, 5))
    for _ in range(2):
        torch.manual_seed(3)
        got, stats = ct.GradCache(ours, our_loss, 5).step(*PAIR, shift=our_shift)
    assert got.item() == pytest.approx(want.item(), rel=ROUNDING) and not got.requires_grad
    assert isinstance(stats, ct.BatchStats)
    pairs: list[Any] = [(our_shift, their_shift), (our_loss.log_scale, their_loss.log_scale)]
    for mine, other in pairs:
        torch.testing.assert_close(mine.grad, 2 * other.grad, rtol=1e-5, atol=1e-7)


# --- inputs and encoders --------------------------------------------------------------------------------------------


def test_dicts_and_tuples() -> None:
    texts, others = padded(N, 1), padded(N, 3)
    assert_exact((Tower(1), Tower(2)), clip, (texts, tuple(others.values())), 5, lengths="off")


def test_what_is_no_row_goes_with_every_chunk() -> None:
    class Options(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower(1)

        def forward(self, input_ids: Tensor, factor: Tensor, name: str) -> Tensor:
            assert name == "text" and factor.dim() == 0
            return self.tower(input_ids) * factor

    inputs = [{"input_ids": x, "factor": torch.tensor(2.0), "name": "text"} for x in PAIR]
    assert_exact((Options(),), clip, tuple(inputs), 5)


@pytest.mark.parametrize("offload", ["none", "host", "disk"])
def test_iterators(offload: str) -> None:
    """One for each side; what they yield is cut further if it is larger than a chunk."""
    given = lambda: (iter(PAIR[0].split(5)), (x for x in PAIR[1].split(5)))  # noqa: E731
    assert_exact((Tower(1), Tower(2)), clip, PAIR, 5, given=given, offload=offload)
    blocks = lambda: tuple(iter(x.split(10)) for x in PAIR)  # noqa: E731
    assert_exact((Tower(1), Tower(2)), clip, PAIR, 5, given=blocks, offload=offload)


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_one_iterator_of_pairs(offload: str) -> None:
    """Chunks of both sides alternate, so with dropout the oracle's do as well."""
    ours, theirs = twins(Tower(1), Tower(2))
    torch.manual_seed(2)
    chunks = list(zip(*(x.split(5) for x in PAIR), strict=True))
    features = [[encoder(x) for encoder, x in zip(theirs, pair, strict=True)] for pair in chunks]
    clip(*map(torch.cat, zip(*features, strict=True))).backward()
    torch.manual_seed(2)
    ct.GradCache(ours, clip, 5, offload=offload).step(iter(chunks))  # type: ignore[arg-type]
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT


def test_iterators_are_read_once_and_one_chunk_at_a_time() -> None:
    alive = 0

    def chunks() -> Iterator[Tensor]:
        nonlocal alive
        for x in PAIR[0].split(5):
            alive += 1
            yield x.clone()

    seen: list[int] = []

    class Watched(Tower):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            seen.append(alive)
            return super().forward(input_ids)

    ct.GradCache(Watched(1), lambda z: ct.sup_con(z, torch.arange(N) % 4), 5).step(chunks())
    assert seen == [1, 2, 3, 4, 5] + [5] * 5


def test_methods_and_partials_are_encoders() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = Tower(1), Tower(2)

        def encode_image(self, x: Tensor) -> Tensor:
            return self.image(x)

        def forward(self, x: Tensor, *, kind: str) -> Tensor:
            return getattr(self, kind)(x)

    ours, theirs = twins(Both())
    torch.manual_seed(5)
    oracle([theirs[0].image, theirs[0].text], clip, PAIR, (6, 6))  # type: ignore[list-item]
    torch.manual_seed(5)
    ct.GradCache((ours[0].encode_image, partial(ours[0], kind="text")), clip, 6).step(*PAIR)  # type: ignore[arg-type]
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT


class Several(nn.Module):
    """An encoder that returns more than the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.spare = Tower(1), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        features = self.tower(input_ids)
        return {"features": features, "unused": self.spare(features), "length": (input_ids > 0).sum(1)}


def test_unused_outputs() -> None:
    ours, theirs = twins(Several())
    lengths = []

    def loss(a: dict[str, Tensor], b: dict[str, Tensor]) -> Tensor:
        lengths.append(a["length"])
        return clip(a["features"], b["features"])

    torch.manual_seed(5)
    oracle([lambda x: theirs[0](x)["features"]] * 2, clip, PAIR, (6, 6))
    torch.manual_seed(5)
    ct.GradCache(ours[0], loss, 6).step(*PAIR)
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT
    assert torch.equal(lengths[0], (PAIR[0] > 0).sum(1)) and ours[0].spare.weight.grad is None  # type: ignore[union-attr]
    selected = twins(Several())[0]
    torch.manual_seed(5)
    ct.GradCache(selected[0], clip, 6, features=lambda output: output["features"]).step(*PAIR)
    assert gap(gradients(*selected), gradients(*ours)) == 0


def test_a_side_that_the_loss_does_not_use() -> None:
    encoders = Tower(1), Tower(2)
    counts = [count_calls(encoder) for encoder in encoders]
    ct.GradCache(encoders, lambda a, b: ct.sup_con(a, torch.arange(N) % 4), 6).step(*PAIR)
    assert [len(count) for count in counts] == [8, 4]
    assert all(p.grad is None for p in encoders[1].parameters())


def count_calls(module: nn.Module) -> list[bool]:
    """Grows by one with every forward pass: whether it was in grad mode."""
    calls: list[bool] = []
    module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


def test_frozen_tower_is_encoded_once() -> None:
    encoders = Tower(1), Tower(2)
    encoders[0].requires_grad_(False)
    ours, _ = assert_exact(encoders, clip, PAIR, 6)
    counts = [count_calls(encoder) for encoder in ours]
    ct.GradCache(ours, clip, 6).step(*PAIR)
    assert [len(count) for count in counts] == [4, 8]
    assert all(p.grad is None for p in ours[0].parameters())


def test_frozen_part_of_one_model() -> None:
    """Which features are learned is seen by looking, not from the parameters of the whole model."""

    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = Tower(1).requires_grad_(False), Tower(2)

        def encode_image(self, x: Tensor) -> Tensor:
            return self.image(x)

        def encode_text(self, x: Tensor) -> Tensor:
            return self.text(x)

    model = Locked()
    calls = count_calls(model.image)
    ct.GradCache((model.encode_image, model.encode_text), clip, 6).step(*PAIR)
    assert len(calls) == 4 and model.text.out.weight.grad is not None


# --- state ----------------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_updated_once() -> None:
    ours, theirs = assert_exact((Normed(1), Normed(2)), clip, PAIR, 6)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.norm.num_batches_tracked == other.norm.num_batches_tracked == 4  # type: ignore[union-attr]
        for name in ("running_mean", "running_var"):
            assert torch.equal(getattr(mine.norm, name), getattr(other.norm, name))


def test_modules_in_eval_mode_are_untouched() -> None:
    encoders = Normed(1).eval(), Normed(2)
    encoders[1].norm.eval()
    ours, _ = assert_exact(encoders, clip, PAIR, 6)
    assert not any(module.training for module in ours[0].modules())
    assert ours[1].training and not ours[1].norm.training  # type: ignore[union-attr]
    for module in ours:
        assert module.norm.num_batches_tracked == 0  # type: ignore[union-attr]


def test_autocast() -> None:
    autocast = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    kinds = []

    def loss(a: Tensor, b: Tensor) -> Tensor:
        kinds.append(a.dtype)
        return clip(a, b)

    class Projected(Tower):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return self.out(super().forward(input_ids))

    ours, theirs = twins(Projected(1), Projected(2))
    torch.manual_seed(5)
    with autocast():
        features = [torch.cat([e(x) for x in given.split(6)]) for e, given in zip(theirs, PAIR, strict=True)]
        value = loss(*features)
    value.backward()
    torch.manual_seed(5)
    with autocast():
        ct.GradCache(ours, loss, 6).step(*PAIR)
    assert kinds == [torch.bfloat16] * 2
    # 16-bit sums over chunks are rounded in another order.
    assert gap(gradients(*ours), gradients(*theirs)) <= 2e-2


def test_autocast_is_replayed_outside_its_context() -> None:
    kinds: list[torch.dtype] = []
    encoder = Tower(1)
    encoder.out.register_forward_hook(lambda module, args, output: kinds.append(output.dtype))
    cache = ct.GradCache(encoder, clip, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        encoded = cache.encode(*PAIR)
    with torch.autocast("cpu", dtype=torch.float16):
        cache.loss_and_grads(encoded)
        cache.backward(encoded)
    assert kinds == [torch.bfloat16] * 8


def test_random_state_of_accelerators_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        """The module of an accelerator, as far as random states go."""

        state = torch.zeros(1)

        def get_rng_state(self, device: torch.device) -> Tensor:
            assert device == torch.device("cuda", 1)
            return self.state.clone()

        def set_rng_state(self, state: Tensor, device: torch.device) -> None:
            self.state = state

    module = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    devices = [torch.device("cpu"), torch.device("cuda", 1)]
    first = RandomState.now(devices)
    assert RandomState.now(devices, first) is first
    module.state = torch.ones(1)
    torch.rand(1)
    second = RandomState.now(devices, first)
    assert second is not first
    first.restore()
    assert module.state == 0 and torch.equal(torch.get_rng_state(), first.states[torch.device("cpu")])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # said without grad mode
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    class Checkpointed(Tower):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            x = self.words(input_ids)
            x = checkpoint(self.layer, x, use_reentrant=reentrant)
            return F.normalize(self.out(x.mean(1)), dim=1)

    assert_exact((Checkpointed(1), Checkpointed(2)), clip, PAIR, 6)


def test_accumulation_and_clipping() -> None:
    ours, theirs = twins(Tower(1), Tower(2))
    batches = [(ids_of(9, seed), ids_of(9, seed + 1)) for seed in (1, 5)]
    cache = ct.GradCache(ours, clip, 4)
    torch.manual_seed(5)
    for batch in batches:
        oracle(theirs, clip, batch, (4, 4))
    torch.manual_seed(5)
    for batch in batches:
        cache.step(*batch)
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT
    norms = [nn.utils.clip_grad_norm_([p for m in x for p in m.parameters()], 0.01) for x in (ours, theirs)]
    torch.testing.assert_close(*norms)


# --- a loop of one's own --------------------------------------------------------------------------------------------


def test_three_calls() -> None:
    """Also with a loss that the cache does not know."""
    ours, theirs = twins(Tower(1), Tower(2))
    torch.manual_seed(5)
    want = oracle(theirs, clip, PAIR, (6, 6))
    torch.manual_seed(5)
    cache = ct.GradCache(ours, clip, 6)
    encoded = cache.encode(*PAIR)
    value = clip(*encoded.features)
    value.backward()
    cache.backward(encoded)
    assert value.item() == pytest.approx(want.item(), rel=ROUNDING)
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT
    with pytest.raises(ValueError, match="encoded: expected features that are still there"):
        cache.backward(encoded)


def test_loss_with_a_backward_of_its_own() -> None:
    """What trainers do: scale the loss, call backward. The scale's gradient comes then, too."""
    ours, theirs = twins(Tower(1), Tower(2))
    our_scale, their_scale = scale_leaf(), scale_leaf()
    torch.manual_seed(5)
    oracle(theirs, lambda a, b: clip(a, b, their_scale.exp()) / 4, PAIR, (6, 6))
    torch.manual_seed(5)
    loss = ct.GradCache(ours, clip, 6)(*PAIR, scale=our_scale.exp())
    assert loss.requires_grad and our_scale.grad is None
    (loss / 4).backward()
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT
    torch.testing.assert_close(our_scale.grad, their_scale.grad, rtol=1e-5, atol=1e-7)


def test_grad_scaler() -> None:
    ours, theirs = twins(Tower(1), Tower(2))
    torch.manual_seed(5)
    oracle(theirs, clip, PAIR, (6, 6))
    optimiser = torch.optim.SGD([p for module in ours for p in module.parameters()], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    torch.manual_seed(5)
    scaler.scale(ct.GradCache(ours, clip, 6)(*PAIR)).backward()
    assert gap(gradients(*ours), [None if g is None else 1024 * g for g in gradients(*theirs)]) <= EXACT
    scaler.unscale_(optimiser)
    assert gap(gradients(*ours), gradients(*theirs)) <= EXACT


def test_without_grad_mode_the_loss_alone() -> None:
    encoder = Tower(1).eval()
    calls = count_calls(encoder)
    want = clip(encoder(PAIR[0]), encoder(PAIR[1])).item()
    calls.clear()
    cache = ct.GradCache(encoder, clip, 6, offload="disk")
    with torch.no_grad():
        assert cache.step(*PAIR).item() == pytest.approx(want, rel=ROUNDING)
        assert cache(*PAIR).item() == pytest.approx(want, rel=ROUNDING)
    assert calls == [False] * 16 and all(p.grad is None for p in encoder.parameters())


def test_progress() -> None:
    told: list[tuple[Any, ...]] = []
    cache = ct.GradCache(Tower(1), clip, 12, progress=lambda *words: told.append(words))
    cache.step(*PAIR)
    rows = [12, 23, 35, 46]
    assert told == [
        *(("encode", n, 46) for n in rows),
        ("loss", 0, 1),
        ("loss", 1, 1),
        *(("backward", n, 46) for n in (11, 23, 34, 46)),
    ]
    told.clear()
    cache.step(iter(PAIR[0].split(12)), iter(PAIR[1].split(12)))
    assert told[:4] == [("encode", n, None) for n in rows]


def test_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    ct.GradCache(Tower(1), clip, 12, progress="bar").step(*PAIR)
    said = capsys.readouterr().out
    assert all(phase in said for phase in ("encode", "loss", "backward")) and "46/46" in said


# --- what goes wrong ------------------------------------------------------------------------------------------------


class Fragile(Normed):
    """Fails in the forward pass of a given number."""

    def __init__(self, fails_at: int) -> None:
        super().__init__(1)
        self.fails_at, self.count = fails_at, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        self.count += 1
        if self.count == self.fails_at:
            raise OSError("the encoder fails")
        return super().forward(input_ids)


@pytest.mark.parametrize("offload", ["none", "disk"])
@pytest.mark.parametrize("fails_at", [3, 10], ids=["first pass", "second pass"])
def test_encoder_that_raises(fails_at: int, offload: Any) -> None:
    """As documented: training flags and buffers are those of the first pass; in the second pass the random state is
    put back and the gradients of the chunks before are there."""
    encoder, reference = Fragile(fails_at), Normed(1)
    encoder.norm.eval()
    reference.norm.eval()
    torch.manual_seed(5)
    with torch.no_grad():
        for x in itertools.islice((x for side in PAIR for x in side.split(6)), fails_at - 1):
            reference(x)
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(OSError, match="the encoder fails"):
        ct.GradCache(encoder, clip, 6, offload=offload).step(*PAIR)
    assert encoder.training and not encoder.norm.training and encoder.norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)
    assert (encoder.tower.out.weight.grad is not None) == (fails_at == 10)


def test_buffers_are_put_back_after_an_exception() -> None:
    encoder, reference = Fragile(10), Normed(1)
    torch.manual_seed(5)
    with torch.no_grad():
        for x in (x for side in PAIR for x in side.split(6)):
            reference(x)
    torch.manual_seed(5)
    with pytest.raises(OSError, match="the encoder fails"):
        ct.GradCache(encoder, clip, 6).step(*PAIR)
    assert encoder.norm.num_batches_tracked == 8
    assert torch.equal(encoder.norm.running_mean, reference.norm.running_mean)  # type: ignore[arg-type]


def test_loss_that_raises_leaves_its_parameters_alone() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.scale.grad = torch.tensor(7.0)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            value = clip(a, b, self.scale)
            value.register_hook(self.fail)
            return value

        def fail(self, _: Tensor) -> None:
            raise OSError("the loss fails")

    loss = Bad()
    with pytest.raises(OSError, match="the loss fails"):
        ct.GradCache(Tower(1), loss, 6).step(*PAIR)
    assert loss.scale.grad == 7.0


SPOILT = {**padded(N, 1), "input_ids": ids_of(22, 1)}
WANTING = torch.ones(4, 3, requires_grad=True)
TWO = {"encoders": (Tower(1), Tower(2))}
WRONG: list[tuple[type[Exception], str, dict[str, Any], tuple[Any, ...]]] = [
    (ValueError, "input 1: expected tensors of one batch length, got 22 and 23", {}, (PAIR[0], SPOILT)),
    (ValueError, "image and text: expected equally many rows, got 23 and 22", {}, (PAIR[0], ids_of(22, 2))),
    (ValueError, "input 0: expected at least one chunk, got an empty iterator", {}, (iter(()), PAIR[1])),
    (ValueError, "input: expected at least one chunk, got an empty iterator", TWO, (iter(()),)),
    (ValueError, "input 0: expected at least one row, got 0", {}, (PAIR[0][:0], PAIR[1])),
    (ValueError, "inputs: expected one for each of 2 encoders, got 1", TWO, (PAIR[0],)),
    (ValueError, "inputs: expected tensors without requires_grad", {"encoders": nn.Linear(3, 3)}, (WANTING, WANTING)),
    (TypeError, "input 0: expected a tensor, a tuple.* got list. For a list x pass tuple", {}, ([PAIR[0]], PAIR[1])),
    (TypeError, "input: expected tuples of 2.* got Tensor", TWO, (iter(PAIR),)),
    (TypeError, "input 0: expected tensors with a row per example, got dict", {}, ({"a": 1}, PAIR[1])),
    (ValueError, "encoders: expected a trainable", {"encoders": Tower().requires_grad_(False)}, PAIR),
    (TypeError, "encoders: expected a module, a method", {"encoders": lambda x: x}, PAIR),
    (ValueError, "chunk_size: expected at least 1, got 0", {"chunk_size": 0}, PAIR),
    (ValueError, "chunk_size: expected one of 'auto'", {"chunk_size": "largest"}, PAIR),
    (ValueError, "chunk_size: expected one for each of 2 inputs, got 3", {"chunk_size": (1, 2, 3)}, PAIR),
    (ValueError, "offload: expected one of 'none', 'host', 'disk'", {"offload": "cloud"}, PAIR),
    (ValueError, "offload_features: expected offload=", {"offload_features": True}, PAIR),
    (ValueError, "directory: expected offload='disk' with it, got 'host'", {"directory": ".", "offload": "host"}, PAIR),
    (ValueError, "memory_limit: expected chunk_size='auto' or keep_graphs", {"memory_limit": 1 << 30}, PAIR),
    (ValueError, r"loss: expected a scalar, got \[23\]", {"loss": ct.ClipLoss(reduction="none")}, PAIR),
    (ValueError, r"encoder: expected features with 4 rows.*got \[\[\]\]. Select", {"features": Tensor.sum}, PAIR),
]


@pytest.mark.parametrize(("kind", "text", "options", "inputs"), WRONG, ids=[wrong[1][:45] for wrong in WRONG])
def test_errors(kind: type[Exception], text: str, options: dict[str, Any], inputs: tuple[Any, ...]) -> None:
    with pytest.raises(kind, match=text):
        ct.GradCache(**{"encoders": Tower(1), "loss": clip, "chunk_size": 4, **options}).step(*inputs)


def test_rows_grow() -> None:
    parts = [torch.randn(n, 3) for n in (2, 1, 7, 4)]
    for total in (14, None):
        rows = RowBuffer(total)
        for part in parts:
            rows.place(slice(rows.count, rows.count + len(part)), part)
        assert torch.equal(rows.gathered(), torch.cat(parts))
        scattered = RowBuffer(total)
        order = torch.randperm(14)
        for at in range(0, 14, 4):
            scattered.place(order[at : at + 4], torch.cat(parts)[order[at : at + 4]])
        assert torch.equal(scattered.gathered(), torch.cat(parts))
