"""Inputs whose tensors do not have one entry per row: `Rows`, and `split_fn`s for common processors.

    cache = GradCache(model, loss, chunk_size=8, split_fn=image_patches)      # Qwen2-VL
    image_patches(inputs).take(torch.tensor([3, 5]))                          # inputs of two rows, with their patches

A `split_fn` takes the inputs of a side and returns how many rows they have, and how to take some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from contratile.errors import bad_type, bad_value
from contratile.grad_cache.chunks import Nest


@dataclass(frozen=True)
class Rows:
    """The rows of inputs whose tensors do not have one entry per row.

    Examples:
        >>> import torch, contratile as ct
        >>> bags = [torch.ones(3, 2), torch.ones(1, 2)]
        >>> rows = ct.Rows(2, lambda rows: (torch.cat([bags[i] for i in rows]),))
        >>> rows.take(torch.tensor([1]))[0].shape
        torch.Size([1, 2])
    """

    count: int
    """Number of rows."""

    take: Callable[[Tensor], Nest]
    """Returns the encoder's inputs for some rows, given their numbers (int64, on the CPU)."""

    lengths: Tensor | None = None
    """Tokens of each row, if chunks shall have rows of similar length, and for `chunk_tokens`."""


SplitFn = Callable[[Any], Rows]

_GRIDS = {"pixel_values": ("image_grid_thw", "num_images"), "pixel_values_videos": ("video_grid_thw", "num_videos")}


def image_patches(inputs: Mapping[str, Any]) -> Rows:
    """Rows for Qwen2-VL's processor and its relatives: patches of all images in one tensor, with a grid per image.

    Rows may have several images: the tensor `num_images` (`num_videos`) in the inputs says how many each row has; it is
    not passed to the encoder. Without it each row has one. The length of a row is its tokens plus its patches: rows of
    similar length share a chunk. Padding of the texts is not cut.

    Args:
        inputs: `input_ids`, `attention_mask`, `pixel_values` [patches, ...], `image_grid_thw` [images, 3], and the same
            for videos (`pixel_values_videos`, `video_grid_thw`).

    Raises:
        ValueError: A tensor does not have the entries that the grid or the numbers of images ask for.
    """
    count = _text_rows(inputs)
    counts: dict[str, Tensor] = {}
    for pixels, (grid, number) in _GRIDS.items():
        if inputs.get(pixels) is None or inputs.get(grid) is None:
            continue
        images = _images_per_row(inputs, number, count, len(inputs[grid]), grid)
        patches = inputs[grid].long().cpu().prod(1)
        owner = torch.repeat_interleave(torch.arange(count), images)
        counts[grid] = images
        counts[pixels] = torch.zeros(count, dtype=torch.long).index_add_(0, owner, patches)
    hidden = {number for _, number in _GRIDS.values()}
    rows = ragged_rows({name: x for name, x in inputs.items() if name not in hidden}, counts, count)
    return replace(rows, lengths=_tokens(inputs, count) + sum(counts[x] for x in _GRIDS if x in counts))


def several_images(inputs: Mapping[str, Any]) -> Rows:
    """Rows with any number of images: `pixel_values` [images, ...], and `num_images` [rows] says how many each has.

    Other tensors whose names start with `pixel_` or `image_` are split the same way if they have one entry per image.

    Args:
        inputs: Tensors by name. `num_images` is not passed to the encoder.
    """
    if not isinstance(inputs.get("num_images"), Tensor):
        remedy = "Add a tensor with the number of images of each row."
        bad_value("num_images", expected="a tensor [rows]", got=type(inputs.get("num_images")).__name__, remedy=remedy)
    images = inputs["num_images"].long().cpu()
    total = int(images.sum())
    alike = [
        name
        for name, x in inputs.items()
        if isinstance(x, Tensor) and x.dim() and name.startswith(("pixel_", "image_")) and len(x) == total
    ]
    names = {"pixel_values", *alike} & inputs.keys()
    rest = {name: x for name, x in inputs.items() if name != "num_images"}
    return ragged_rows(rest, dict.fromkeys(names, images), len(images))


def packed_sequences(inputs: Mapping[str, Any]) -> Rows:
    """Rows that are packed into one sequence of tokens, as by `DataCollatorWithFlattening` of transformers.

    Args:
        inputs: `input_ids` [1, tokens] and other tensors of that shape; `cu_seq_lens_q` [rows + 1] with the ends of the
            sequences. `cu_seq_lens_*` and `max_length_*` are recomputed for each chunk.
    """
    ends = inputs.get("cu_seq_lens_q")
    if not isinstance(ends, Tensor) or ends.dim() != 1 or len(ends) < 2:
        got = list(ends.shape) if isinstance(ends, Tensor) else type(ends).__name__
        bad_value("cu_seq_lens_q", expected="a tensor [rows + 1]", got=got, remedy="It starts with 0.")
    bounds = ends.long().cpu()
    total, lengths = int(bounds[-1]), bounds[1:] - bounds[:-1]
    if bounds[0] != 0 or (lengths < 1).any():
        remedy = "It holds where sequences end, and 0 before the first."
        bad_value("cu_seq_lens_q", expected="0 and then rising numbers", got=bounds.tolist()[:8], remedy=remedy)
    tokens = [name for name, x in inputs.items() if isinstance(x, Tensor) and x.dim() >= 2 and len(x) == 1]
    for name in tokens:
        if inputs[name].shape[1] != total:
            expected = f"{total} tokens, where cu_seq_lens_q ends"
            bad_value(name, expected=expected, got=inputs[name].shape[1], remedy="Do not pad packed sequences.")
    return Rows(len(lengths), partial(_take_packed, inputs, tokens, bounds, lengths), lengths)


def _take_packed(inputs: Mapping[str, Any], tokens: list[str], bounds: Tensor, lengths: Tensor, rows: Tensor) -> Nest:
    index = torch.cat([torch.arange(int(bounds[row]), int(bounds[row + 1])) for row in rows.tolist()])
    mine = torch.cat([torch.zeros(1, dtype=torch.long), lengths[rows].cumsum(0)])
    chunk: dict[str, Any] = {}
    for name, x in inputs.items():
        if name in tokens:
            chunk[name] = x.index_select(1, index.to(x.device))
        elif name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            chunk[name] = mine.to(x.device, x.dtype)
        elif name in ("max_length_q", "max_length_k"):
            longest = int(lengths[rows].max())
            chunk[name] = torch.full_like(x, longest) if isinstance(x, Tensor) else longest
        else:
            chunk[name] = x
    if "seq_idx" in chunk:
        numbers = torch.repeat_interleave(torch.arange(len(rows)), lengths[rows]).view(1, -1)
        chunk["seq_idx"] = numbers.to(chunk["seq_idx"].device, chunk["seq_idx"].dtype)
    return chunk


def processed(processor: Callable[..., Any], **keywords: Any) -> SplitFn:
    """Make a `split_fn` for lists that a processor of transformers turns into tensors, chunk by chunk.

    Args:
        processor: Called as `processor(**lists, **keywords)`, or `processor(list, **keywords)`.
        **keywords: For example `return_tensors="pt", padding=True`, which are the default.

    Returns:
        A function for `split_fn`. Its inputs are a list of images or texts, or a mapping of lists by the processor's
        argument names: `{"images": [...], "text": [...]}`.
    """
    how = {"return_tensors": "pt", **keywords}

    def split(inputs: Any) -> Rows:
        lists = inputs if isinstance(inputs, Mapping) else {"inputs": inputs}
        for name, x in lists.items():
            if isinstance(x, str) or not isinstance(x, Sequence):
                remedy = "Pass lists of images or texts, one per row."
                bad_type(f"inputs {name!r}", expected="a list", got=type(x).__name__, remedy=remedy)
        counts = {name: len(x) for name, x in lists.items()}
        if len(set(counts.values())) != 1:
            got = ", ".join(f"{name} {count}" for name, count in counts.items())
            bad_value("inputs", expected="lists of one length", got=got, remedy="Each needs one entry per row.")

        def take(rows: Tensor) -> Nest:
            mine = {name: [x[row] for row in rows.tolist()] for name, x in lists.items()}
            made = processor(**mine, **how) if isinstance(inputs, Mapping) else processor(mine["inputs"], **how)
            return dict(made) if isinstance(made, Mapping) else made

        return Rows(next(iter(counts.values())), take)

    return split


def ragged_rows(inputs: Mapping[str, Any], counts: Mapping[str, Tensor], count: int) -> Rows:
    """Rows of tensors with several entries for each row.

    Args:
        inputs: Tensors and other values by name.
        counts: By tensor name: how many entries each row has [rows]. Other tensors have one entry per row.
        count: Number of rows.

    Raises:
        ValueError: A tensor does not have as many entries; the message names it.
    """
    for name, x in inputs.items():
        if not isinstance(x, Tensor) or x.dim() == 0:
            continue
        wanted = int(counts[name].sum()) if name in counts else count
        if len(x) != wanted:
            why = "as its grid and numbers per row say" if name in counts else "one for each row"
            remedy = "If a row has several of them, pass a split_fn that says how many."
            bad_value(name, expected=f"{wanted} entries, {why}", got=len(x), remedy=remedy)
    ends = {name: x.cumsum(0) for name, x in counts.items()}

    def take(rows: Tensor) -> Nest:
        chunk: dict[str, Any] = {}
        for name, x in inputs.items():
            if not isinstance(x, Tensor) or x.dim() == 0:
                chunk[name] = x
                continue
            index = rows
            if name in counts:
                spans = [(int(ends[name][row] - counts[name][row]), int(ends[name][row])) for row in rows.tolist()]
                index = torch.cat([torch.arange(start, stop) for start, stop in spans])
            chunk[name] = x.index_select(0, index.to(x.device))
        return chunk

    return Rows(count, take)


def _tokens(inputs: Mapping[str, Any], count: int) -> Tensor:
    """Tokens of each row, by the mask if there is one."""
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return (mask != 0).sum(1).cpu()
    text = inputs.get("input_ids", inputs.get("inputs_embeds"))
    return torch.full((count,), text.shape[1] if isinstance(text, Tensor) and text.dim() > 1 else 1)


def _text_rows(inputs: Mapping[str, Any]) -> int:
    for name in ("input_ids", "attention_mask", "inputs_embeds"):
        if isinstance(inputs.get(name), Tensor):
            return len(inputs[name])
    remedy = "The number of rows is that of the texts."
    bad_value("inputs", expected="input_ids, attention_mask or inputs_embeds", got=", ".join(inputs), remedy=remedy)


def _images_per_row(inputs: Mapping[str, Any], number: str, rows: int, images: int, grid: str) -> Tensor:
    given = inputs.get(number)
    if given is None:
        if images != rows:
            remedy = f"Add a tensor {number!r} [rows] to the inputs that says how many each row has."
            bad_value(grid, expected=f"{rows} entries, one for each row", got=images, remedy=remedy)
        return torch.ones(rows, dtype=torch.long)
    found: Tensor = given.long().cpu()
    if len(found) != rows or int(found.sum()) != images:
        remedy = f"Its entries are the numbers of images of the rows; {grid} has {images}."
        bad_value(number, expected=f"{rows} entries that add up to {images}", got=found.tolist(), remedy=remedy)
    return found
