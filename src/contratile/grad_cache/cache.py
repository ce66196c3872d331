"""Gradient caching: train encoders on huge batches in the memory of one chunk.

    cache = GradCache((image_encoder, text_encoder), ct.ClipLoss(), chunk_size=64)
    loss = cache.step(images, texts, logit_scale=log_scale.exp())       # fills .grad, also that of log_scale
    optimizer.step()

The method is that of Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from contratile.errors import bad_value, check_choice
from contratile.grad_cache.chunks import Encoder, Nest, tensors_of
from contratile.grad_cache.encoded import ChunkRecord, Encoded, OutputGrads
from contratile.grad_cache.feed import ChunkSize, Feed, Item
from contratile.grad_cache.keep import Keeper, KeepGraphs, Shelf, empty_cache, is_out_of_memory, out_of_memory
from contratile.grad_cache.lengths import ByLength
from contratile.grad_cache.loss import LossCall
from contratile.grad_cache.offload import OFFLOADS, Offload, make_store
from contratile.grad_cache.plan import Padding
from contratile.grad_cache.progress import Progress, RichBar, silent
from contratile.grad_cache.replay import Autocast, RandomState, copy_buffers, devices_of, restore_buffers
from contratile.grad_cache.rows import SplitFn
from contratile.grad_cache.wrappers import reduced_once, unsynchronised
from contratile.ring.team import Group, Team


class GradCache:
    """Trains encoders with a loss over batches whose activations do not fit into memory.

    `cache.step(*inputs, **loss_keywords)` replaces

        features = [
            torch.cat([encoder(chunk) for chunk in x.split(chunk_size)])
            for encoder, x in zip(encoders, inputs)
        ]
        loss(*features, **loss_keywords).backward()

    with the same value and gradients, dropout included. It needs the memory of one chunk and of the features, and costs
    a second forward pass. A step has three phases, which are also methods for custom loops:

    1. `encode`: compute the features of all chunks without gradients.
    2. `loss_and_grads`: compute the loss of all features, and the gradients of the features.
    3. `backward`: encode each chunk again, with gradients, and backpropagate the gradients of its features.

    Encoders may be wrapped in DDP or FSDP: gradients are synchronised once per step. Under autocast, use the cache
    inside the context; with GradScaler or accelerate call `cache(...)` instead of `cache.step(...)`.

    Args:
        encoders: One module for all inputs, or a sequence with one per input: modules, methods of modules
            (`model.encode_text`), or `functools.partial` of them. Each returns features [rows, D], or a tuple or dict
            of tensors with as many rows as its input.
        loss: Called as `loss(*features, **loss_keywords)`. Returns a scalar, or a tuple that starts with it.
        chunk_size: Rows to encode at a time: one number, one per input, or "auto", which finds the largest chunk that
            fits by trial in the first step.
        chunk_tokens: Tokens to encode at a time, padding included, for inputs with integer tensors [rows, columns];
            with a number as `chunk_size` at most so many rows as well.
        lengths: "auto" sorts the rows of mappings with an attention mask by length and cuts off their padding, if the
            features stay the same; see `ByLength`, which also chooses what is cut. "off" keeps the order of the rows.
        split_fn: For inputs whose tensors do not have one entry per row: called with the inputs, it returns `Rows`. One
            for all inputs, or one for each (None for plain rows). Ready ones are in `contratile.grad_cache.rows`.
        keep_graphs: Chunks, the last ones, whose graphs are kept in the first pass, so that they need no second: a
            number, or "auto" for as many as fit into memory with a chunk. Gradients are bitwise the same.
        offload: Where chunks are kept until the second forward pass: "none" leaves them where they are, "host" moves
            them to host memory (pinned for CUDA), "disk" to a temporary file. Offloaded chunks are brought to the
            encoder's device when they are needed.
        offload_features: Also offload features and their gradients while they are not needed.
        directory: Folder of the temporary file; None: the system's.
        features: Selects the features from an encoder's output, for example `lambda output: output.pooler_output`.
        memory_limit: Bytes that a chunk and the graphs that are kept may take with "auto"; None: half of the available
            memory on a CPU, what is free on an accelerator. (For `chunk_size="auto"` it counts on the CPU only.)
        progress: Called as `progress(phase, rows_done, rows_total)`, or "bar" for a progress bar (needs rich).
        group: Ranks over which the gradients of loss keywords and loss parameters are averaged, as DDP averages those
            of the encoders: "auto" (all ranks), None (this process alone) or a process group.

    Raises:
        ValueError: An option has an invalid value.
        TypeError: An encoder is not a module, a method of one, or a `functools.partial` of these.

    Examples:
        >>> import torch, contratile as ct
        >>> image_encoder, text_encoder = torch.nn.Linear(8, 4), torch.nn.Linear(6, 4)
        >>> cache = ct.GradCache((image_encoder, text_encoder), ct.ClipLoss(), chunk_size=16)
        >>> loss = cache.step(torch.randn(100, 8), torch.randn(100, 6), logit_scale=10.0)
        >>> loss.shape, image_encoder.weight.grad.shape
        (torch.Size([]), torch.Size([4, 8]))
    """

    def __init__(
        self,
        encoders: Encoder | Sequence[Encoder],
        loss: Callable[..., Any],
        chunk_size: ChunkSize = "auto",
        *,
        chunk_tokens: int | None = None,
        lengths: Literal["auto", "off"] | ByLength = "auto",
        split_fn: SplitFn | Sequence[SplitFn | None] | None = None,
        keep_graphs: KeepGraphs = 0,
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
        self.feed = Feed(
            encoders,
            chunk_size,
            chunk_tokens=chunk_tokens,
            lengths=lengths,
            split_fn=split_fn,
            select=features,
            memory_limit=memory_limit,
            group=group,
        )
        self.loss, self.group = loss, group
        self.offload, self.offload_features, self.directory = offload, offload_features, directory
        self.progress: Progress = RichBar() if progress == "bar" else progress or silent
        self.keeper = Keeper(keep_graphs, memory_limit)
        self.kept_chunks = 0
        """Chunks of the last step whose graphs were kept."""
        self._graphs = False
        self.padding = Padding()
        """Tokens of the last step: real, encoded, and as given."""

    def step(self, *inputs: Nest, **loss_keywords: Any) -> Any:
        """Compute the loss and add its gradients to `.grad`.

        Args:
            *inputs: One per encoder: a tensor, a tuple (the encoder's positional arguments), a mapping (its keyword
                arguments), or an iterator that yields chunks of these. A single iterator can serve several encoders if
                it yields tuples with a chunk for each.
            **loss_keywords: Passed to the loss. Tensors that require a gradient, such as a learned scale, get it.

        Returns:
            What the loss returned, detached. Under `torch.no_grad()` nothing but the loss is computed.

        Raises:
            ValueError: The inputs do not fit the encoders, an input requires a gradient, or nothing is trainable.
        """
        with self.encode(*inputs) as encoded:
            loss = self.loss_and_grads(encoded, **loss_keywords)
            if torch.is_grad_enabled():
                self.backward(encoded)
        return loss

    def __call__(self, *inputs: Nest, **loss_keywords: Any) -> Any:
        """Like `step`, but return a loss whose `backward()` runs the third phase.

        For GradScaler, accelerate and trainers, which call `backward()` themselves:
        `scaler.scale(cache(images, texts)).backward()`. `backward()` may be called once.
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
        """Phase 1: compute the features of all chunks without gradients.

        Keeps the chunks and the random state before each of them, until the result is used by `backward` or closed.

        Args:
            *inputs: As for `step`.

        Returns:
            An `Encoded`. Its `features` are leaves: one entry per encoder, with all rows.
        """
        agenda = self.feed.agenda(inputs)
        sides = agenda.sides
        devices = devices_of(x for side in sides for x in side.owner.parameters())
        store = make_store(self.offload, self.directory)
        encoded = Encoded(sides, store, Autocast(devices), offload_features=self.offload_features)
        state: RandomState | None = None
        try:
            shelf = self.keeper.shelf(agenda)
            for index, item in enumerate(agenda.items):
                side, chunk = item.side, item.chunk()
                here = store.bring(chunk, side.device)
                state = RandomState.now(devices | devices_of(tensors_of(here)), state)
                output, kept = self._encode_once(item, here, state, shelf, keep=shelf.wants(index, item))
                side.add(output, item.rows, encoded.feature_store)
                if side.trainable:
                    slot = store.put(chunk, side.device)
                    record = ChunkRecord(side, item.rows, len(item.piece.rows), slot, state)
                    encoded.records.append(record)
                    if kept:
                        record.kept = tensors_of(output)
                        shelf.add(record, item)
                del output
                self._show_padding(agenda.padding)
                self.progress("encode", sum(side.rows for side in sides), encoded.total)
            if torch.is_grad_enabled() and not any(side.trainable for side in sides):
                remedy = "Frozen encoders need no cache: encode under torch.no_grad() and call the loss."
                bad_value("encoders", expected="a trainable parameter behind some features", got="none", remedy=remedy)
        except BaseException:
            encoded.close()
            raise
        finally:
            self._end_progress()
        self.kept_chunks = len(shelf.kept)
        torch.clear_autocast_cache()  # weights cast under no_grad must not be reused in the second pass
        encoded.buffers = copy_buffers(side.owner for side in sides)
        return encoded

    def loss_and_grads(self, encoded: Encoded, /, **loss_keywords: Any) -> Any:
        """Phase 2: compute the loss and the gradients of features, loss keywords and loss parameters.

        Args:
            encoded: Result of `encode`.
            **loss_keywords: As for `step`.

        Returns:
            What the loss returned, detached.
        """
        self.progress("loss", 0, 1)
        pending = LossCall(self.loss, encoded, loss_keywords)
        if torch.is_grad_enabled():
            pending.differentiate(Team.of(self.group))
        self.progress("loss", 1, 1)
        self._end_progress()
        return pending.answer_with(pending.value)

    def backward(self, encoded: Encoded, gradient: Tensor | float | None = None) -> None:
        """Phase 3: encode each chunk again, with gradients, and backpropagate the gradients of its features.

        DDP and FSDP synchronise gradients in the last backward pass of each wrapper. Random state and buffers are
        restored afterwards, even if an encoder raises; `.grad` then holds the gradients of the chunks done so far.

        Args:
            encoded: Result of `encode`, whose features have gradients; it is closed afterwards.
            gradient: Factor for all gradients, for example a loss scale.
        """
        with encoded:
            work = encoded.work()
            last = {id(wrapper): index for index, (record, _) in enumerate(work) for wrapper in record.side.wrappers}
            total, done = sum(record.count for record, _ in work), 0
            now = RandomState.now({device for record, _ in work for device in record.state.states})
            for index, (record, _) in enumerate(work):
                if any(last[id(wrapper)] == index for wrapper in record.side.wrappers):
                    record.kept = None  # its forward pass has to prepare the synchronisation
            try:
                with reduced_once(wrapper for record, _ in work for wrapper in record.side.wrappers):
                    for index, (record, chunk, gradients) in enumerate(encoded.fetch(work)):
                        if gradient is not None:
                            gradients = [None if g is None else g * gradient for g in gradients]
                        with unsynchronised(w for w in record.side.wrappers if last[id(w)] != index):
                            self._second_pass(record, chunk, gradients, encoded.autocast)
                        done += record.count
                        self.progress("backward", done, total)
            except (RuntimeError, MemoryError) as error:
                if is_out_of_memory(error):
                    self.keeper.back_off()
                raise
            finally:
                now.restore()
                restore_buffers(encoded.buffers)
                self._end_progress()

    # --- one chunk ----------------------------------------------------------------------------------------------------

    def _encode_once(
        self, item: Item, chunk: Nest, state: RandomState, shelf: Shelf, *, keep: bool
    ) -> tuple[Nest, bool]:
        """Output of a chunk, and whether it has a graph to keep. If memory runs out, all kept graphs are released."""
        with out_of_memory(tolerated=keep or bool(shelf.kept)) as attempt:
            return self._first_pass(item, chunk, keep=keep), keep
        assert attempt.failed
        shelf.release()
        shelf.room = 0.0
        self.keeper.back_off()
        empty_cache(item.side.device)
        state.restore()
        return self._first_pass(item, chunk, keep=False), False

    def _first_pass(self, item: Item, chunk: Nest, *, keep: bool) -> Nest:
        """Features of a chunk. The first chunk of a side is encoded with gradients, to see if they need any."""
        side, rows = item.side, len(item.piece.rows)
        if any(x.requires_grad for x in tensors_of(chunk)):
            remedy = "Make what is learned a parameter of an encoder, or detach the input."
            bad_value("inputs", expected="tensors without requires_grad", got="one with it", remedy=remedy)
        look = keep or (side.trainable is None and torch.is_grad_enabled())
        if look and not self._graphs:
            torch.clear_autocast_cache()  # weights cast under no_grad have no graph
        self._graphs = look
        with torch.set_grad_enabled(look), unsynchronised(side.wrappers if look else ()):
            output = side.encode(chunk)
        tensors = tensors_of(output)
        if not tensors or any(x.dim() == 0 or len(x) != rows for x in tensors):
            got = [list(x.shape) for x in tensors] or type(output).__name__
            remedy = "Select what the loss needs with features=, for example lambda output: output.pooler_output."
            bad_value("encoder", expected=f"features with {rows} rows, like its input", got=got, remedy=remedy)
        if side.trainable is None:
            side.trainable = any(x.requires_grad for x in tensors)
        return output

    def _second_pass(self, record: ChunkRecord, chunk: Nest, gradients: OutputGrads, autocast: Autocast) -> None:
        with torch.enable_grad():
            if record.kept is None:
                record.state.restore()
                with autocast.replayed():
                    output = tensors_of(record.side.encode(chunk))
            else:
                output, record.kept = record.kept, None
            pairs = [(x, g) for x, g in zip(output, gradients, strict=True) if g is not None and x.requires_grad]
            with autocast.off():
                torch.autograd.backward([x for x, _ in pairs], [g for _, g in pairs])

    def _show_padding(self, padding: Padding) -> None:
        self.padding = padding
        if isinstance(self.progress, RichBar):
            self.progress.note = str(padding) if padding.real else ""

    def _end_progress(self) -> None:
        if isinstance(self.progress, RichBar):
            self.progress.close()
