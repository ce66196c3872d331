"""Huge batches through real encoders in the memory of one chunk: gradient caching.

    cache = GradCache((image_encoder, text_encoder), ct.ClipLoss(), chunk_size=64)
    loss = cache.step(images, texts, logit_scale=log_scale.exp())       # fills .grad, log_scale's too
    optimiser.step()

A step has three phases: encode all chunks without gradient; the loss of all features, and its gradients; encode each
chunk again, with gradient, and push the gradient of its features through. For loops of one's own they are `encode`,
`loss_and_grads` and `backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contratile.errors import bad_value, check_choice
from contratile.grad_cache.chunks import Encoder, Nest, rows_of, tensors_of
from contratile.grad_cache.encoded import Encoded, Gradients, Record, Side
from contratile.grad_cache.feed import ChunkSize, Feed
from contratile.grad_cache.loss import LossCall
from contratile.grad_cache.offload import OFFLOADS, Offload, make_shelf
from contratile.grad_cache.progress import Progress, RichBar, silent
from contratile.grad_cache.replay import Autocast, RandomState, copy_buffers, devices_of, put_back
from contratile.grad_cache.wrappers import unsynchronised
from contratile.ring.team import Group, Team


class GradCache:
    """Encoders and a loss, for batches whose activations do not fit into memory. A step replaces

        features = [torch.cat([encoder(chunk) for chunk in x.split(chunk_size)]) for encoder, x in ...]
        loss(*features, **loss_keywords).backward()

    with the same value and the same gradients, dropout included, at the price of a second forward pass.

    Args:
        encoders: One module that serves all inputs, or one for each: modules, methods of modules (`model.encode_text`),
            or `functools.partial` of them. Each returns features [rows, D], or a tuple or dict of tensors with as many
            rows as its input.
        loss: Called as `loss(*features, **loss_keywords)`; returns a scalar, or a tuple that begins with it.
        chunk_size: Rows at a time: one number, one for each input, or "auto": the largest that fits, found by trying.
        offload: Where chunks wait for the second pass. "none": where they are. "host": in host memory, pinned for CUDA.
            "disk": in a temporary file. From the last two they come to their encoder's device when they are needed.
        offload_features: Features and their gradients wait there as well while they are not needed.
        directory: Of the temporary file; by default that of the system.
        features: What to take of an encoder's output, for example `lambda output: output.pooler_output`.
        memory_limit: Bytes that a chunk may take if "auto" tries it on the CPU; by default half of what is available.
        progress: Called as `progress(phase, rows_done, rows_in_all)`, or "bar" for one drawn by rich.
        group: The ranks over which gradients of loss keywords and loss parameters are averaged, as DDP does with those
            of encoders.
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Any],
        chunk_size: ChunkSize = "auto",
        *,
        offload: Offload = "none",
        offload_features: bool = False,
        directory: str | Path | None = None,
        features: Callable[[Any], Any] | None = None,
        memory_limit: int | None = None,
        progress: Progress | Literal["bar"] | None = None,
        group: Group = "auto",
    ) -> None:
        check_choice("offload", offload, OFFLOADS)
        if offload_features and offload == "none":
            bad_value("offload_features", expected="offload='host' or 'disk' with it", got="'none'", remedy="Pass one.")
        self.feed = Feed(encoders, chunk_size, select=features, memory_limit=memory_limit, group=group)
        self.loss, self.group = loss, group
        self.offload, self.offload_features, self.directory = offload, offload_features, directory
        self.progress: Progress = RichBar() if progress == "bar" else progress or silent

    def step(self, *inputs: Nest, **loss_keywords: Any) -> Any:
        """All three phases. Returns the loss, detached, and adds to `.grad`; without grad mode, the loss alone.

        An input is a tensor, a tuple (the encoder's arguments), a mapping (its keywords), or an iterator of chunks of
        such. One iterator for several encoders yields tuples with a chunk for each.
        """
        with self.encode(*inputs) as encoded:
            loss = self.loss_and_grads(encoded, **loss_keywords)
            if torch.is_grad_enabled():
                self.backward(encoded)
        return loss

    def __call__(self, *inputs: Nest, **loss_keywords: Any) -> Any:
        """The loss as a tensor whose `backward()` does the rest, for those who call it themselves.

        GradScaler, accelerate and trainers do: `scaler.scale(cache(images, texts)).backward()`.
        """
        encoded = self.encode(*inputs)
        if not torch.is_grad_enabled():
            with encoded:
                return self.loss_and_grads(encoded, **loss_keywords)
        pending = LossCall(self.loss, encoded, loss_keywords)
        value = pending.value.requires_grad_()

        def finish(gradient: Tensor) -> None:
            with encoded:
                pending.differentiate(Team.of(self.group), gradient)
                self.backward(encoded)

        value.register_hook(finish)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return pending.answer_with(value)

    # --- the three phases ---------------------------------------------------------------------------------------------

    def encode(self, *inputs: Nest) -> Encoded:
        """Phase 1: features of all chunks, without gradient. Chunks are kept, and the random state before each."""
        sides = self.feed.sides(inputs)
        devices = devices_of(x for side in sides for x in side.owner.parameters())
        shelf = make_shelf(self.offload, self.directory)
        encoded = Encoded(sides, shelf, Autocast(devices), offload_features=self.offload_features)
        state: RandomState | None = None
        try:
            for side, chunk in self.feed.chunks(sides, inputs):
                here = shelf.bring(chunk, side.device)
                state = RandomState.now(devices | devices_of(tensors_of(here)), state)
                rows = side.add(self._first_pass(side, here), encoded.feature_shelf)
                if side.trainable:
                    encoded.records.append(Record(side, rows, shelf.put(chunk, side.device), state))
                self.progress("encode", sum(side.rows for side in sides), encoded.total)
            if torch.is_grad_enabled() and not any(side.trainable for side in sides):
                remedy = "Features that nothing is learned from need no cache: encode under no_grad and call the loss."
                bad_value("encoders", expected="a trainable parameter behind some features", got="none", remedy=remedy)
        except BaseException:
            encoded.close()
            raise
        finally:
            self._end_progress()
        torch.clear_autocast_cache()  # weights that were cast without gradient must not serve the second pass
        encoded.buffers = copy_buffers(side.owner for side in sides)
        return encoded

    def loss_and_grads(self, encoded: Encoded, /, **loss_keywords: Any) -> Any:
        """Phase 2: the loss of all features, detached; gradients of features, loss keywords and loss parameters."""
        self.progress("loss", 0, 1)
        pending = LossCall(self.loss, encoded, loss_keywords)
        if torch.is_grad_enabled():
            pending.differentiate(Team.of(self.group))
        self.progress("loss", 1, 1)
        self._end_progress()
        return pending.answer_with(pending.value)

    def backward(self, encoded: Encoded, gradient: Tensor | float | None = None) -> None:
        """Phase 3: encode each chunk again, with gradient, and push the gradient of its features through.

        `gradient` is a factor for all of them. Wrappers synchronise in the last backward pass of each. Random state and
        buffers are afterwards as they were before; if an encoder raises, too, and `.grad` has what was done so far.
        """
        with encoded:
            work = encoded.work()
            last = {id(wrapper): index for index, (record, _) in enumerate(work) for wrapper in record.side.wrappers}
            total, done = sum(record.rows.stop - record.rows.start for record, _ in work), 0
            now = RandomState.now({device for record, _ in work for device in record.state.states})
            try:
                for index, (record, chunk, gradients) in enumerate(encoded.fetch(work)):
                    if gradient is not None:
                        gradients = [None if g is None else g * gradient for g in gradients]
                    record.state.restore()
                    with unsynchronised(w for w in record.side.wrappers if last[id(w)] != index):
                        self._second_pass(record.side, chunk, gradients, encoded.autocast)
                    done += record.rows.stop - record.rows.start
                    self.progress("backward", done, total)
            finally:
                now.restore()
                put_back(encoded.buffers)
                self._end_progress()

    # --- a chunk in the first and in the third ------------------------------------------------------------------------

    def _first_pass(self, side: Side, chunk: Nest) -> Nest:
        """Features of a chunk. The first of a side is encoded with gradient, to see if there is anything to learn."""
        if any(x.requires_grad for x in tensors_of(chunk)):
            remedy = "Make what is learned a parameter of an encoder, or detach the input."
            bad_value("inputs", expected="tensors that want no gradient", got="one that does", remedy=remedy)
        look = side.trainable is None and torch.is_grad_enabled()
        with torch.set_grad_enabled(look), unsynchronised(side.wrappers if look else ()):
            output = side.encode(chunk)
        tensors, rows = tensors_of(output), rows_of(chunk, "chunk")
        if not tensors or any(x.dim() == 0 or len(x) != rows for x in tensors):
            got = [list(x.shape) for x in tensors] or type(output).__name__
            remedy = "Choose what the loss needs with features=, for example lambda output: output.pooler_output."
            bad_value("encoder", expected=f"features with {rows} rows, as its input", got=got, remedy=remedy)
        if side.trainable is None:
            side.trainable = any(x.requires_grad for x in tensors)
        return output

    def _second_pass(self, side: Side, chunk: Nest, gradients: Gradients, autocast: Autocast) -> None:
        with torch.enable_grad():
            with autocast.replayed():
                output = tensors_of(side.encode(chunk))
            pairs = [(x, g) for x, g in zip(output, gradients, strict=True) if g is not None and x.requires_grad]
            with autocast.off():
                torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])

    def _end_progress(self) -> None:
        if isinstance(self.progress, RichBar):
            self.progress.close()
