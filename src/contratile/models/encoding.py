"""Features of a whole data source, and which of its samples share an image or a text.

found = encode(towers, source, chunk=256)          # SourceFeatures: both sides of every sample, on the CPU
groups = matches(found)                            # distinct images, distinct texts, and the pairs between them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from contratile.data.augment import AugmentConfig
from contratile.data.loader import BROKEN_LIMIT, Loader
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.models.towers import LockedTowerHead, Tower, Towers


class SourceFeatures(NamedTuple):
    """Features of a source in its own order, with the texts and names that belong to them."""

    left: Tensor  # [N, D] on the CPU
    right: Tensor  # [N, D] on the CPU
    places: Tensor  # [N]: index in the source; -1 in a stream
    keys: list[str]
    """One key per sample."""

    texts: list[str]
    """The right side of each sample, as text."""

    names: list[str]
    """Name of each left side; equal names mean the same picture or text."""

    broken: int = 0
    """Samples that were left out because they could not be read."""

    views: bool = False
    """Whether the right sides are views of the left ones, so that every row has its own."""


@torch.no_grad()
def encode(
    towers: Towers,
    source: Indexed | Stream,
    *,
    chunk: int,
    limit: int = 0,
    broken_limit: float = BROKEN_LIMIT,
    workers: int = 0,
    notify: Callable[[int], object] = lambda done: None,
    kept: Mapping[str, Tensor] = MappingProxyType({}),
    augment: AugmentConfig | None = None,
) -> SourceFeatures:
    """Encode both sides of a data source in evaluation mode.

    Args:
        towers: The pair of encoders, for example from `load_run`.
        source: The pairs, from `open_source`.
        chunk: Pairs that go through the encoders at a time.
        limit: Encode only the first `limit` pairs; 0 means all.
        broken_limit: How many samples may be unreadable before this raises: below 1 a share, else a number.
        workers: Processes that read and prepare samples; 0: this process does.
        notify: Called with the number of pairs done after every chunk.
        augment: With two views, the right side is a random view of each image, always the same one; the left side is
            the image as it is.
        kept: Outputs of locked backbones for the whole source, by side ("left", "right"): they are not computed again.

    Returns:
        The features, float32 on the CPU. Unreadable samples are left out and counted.

    Raises:
        ValueError: No sample could be read, or more than `broken_limit` could not.

    Examples:
        >>> towers, config, _ = load_run(Path("runs/icons"))                     # doctest: +SKIP
        >>> held_out = encode(towers, open_source(config.data, "test"), chunk=256)    # doctest: +SKIP
    """
    prepare = towers.left.prepare, towers.right.prepare
    device = towers.log_scale.device
    left: list[Tensor] = []
    right: list[Tensor] = []
    index, keys, texts, names = [], [], [], []
    broken: Counter[str] = Counter()
    options: dict[str, Any] = {"chunk": chunk, "limit": limit, "broken_limit": broken_limit, "broken": broken}
    options |= {"augment": augment, "workers": workers}
    with evaluating(towers):
        for part in Loader.ordered(source, prepare, **options):
            for side, features in (("left", left), ("right", right)):
                tower = getattr(towers, side)
                outputs = kept[side][part.index] if side in kept else None
                if outputs is None or bool(outputs[:, :1].isnan().any()):  # NaN: unreadable when they were computed
                    found = tower(to_device(getattr(part, side), device))
                else:
                    found = LockedTowerHead(tower)(to_device(outputs, device))
                features.append(found.float().cpu())
            index.append(part.index)
            keys += part.keys
            texts += part.texts
            names += part.names
            notify(len(keys))
    if not keys:
        remedy = f"All {broken.total():,} of {source.name} are broken: {', '.join(broken)}."
        bad_value("data", expected="samples to evaluate on", got="none", remedy=remedy)
    views = augment is not None and augment.views == 2
    sides = torch.cat(left), torch.cat(right)
    return SourceFeatures(*sides, torch.cat(index), keys, texts, names, broken.total(), views)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which a module is in evaluation mode."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


class LeftFeatures(NamedTuple):
    """Features of the left sides of a source in its own order, with their texts."""

    left: Tensor  # [N, D] on the CPU
    texts: list[str]
    broken: Counter[str]
    """Samples that were left out, by reason."""


@torch.no_grad()
def encode_left(
    towers: Towers,
    source: Indexed | Stream,
    *,
    chunk: int,
    broken_limit: float = BROKEN_LIMIT,
    workers: int = 0,
    notify: Callable[[int], object] = lambda done: None,
) -> LeftFeatures:
    """Encode only the left side of a data source in evaluation mode; texts stay texts. The arguments are `encode`'s."""
    device = towers.log_scale.device
    left = [torch.empty(0, towers.left.width)]
    texts: list[str] = []
    broken: Counter[str] = Counter()
    options: dict[str, Any] = {"chunk": chunk, "broken_limit": broken_limit, "broken": broken, "workers": workers}
    with evaluating(towers):
        for part in Loader.ordered(source, (towers.left.prepare, list), **options):
            left.append(towers.left(to_device(part.left, device)).float().cpu())
            texts += part.texts
            notify(len(texts))
    return LeftFeatures(torch.cat(left), texts, broken)


@torch.no_grad()
def encode_texts(tower: Tower, texts: Sequence[str], chunk: int) -> Tensor:
    """Encode texts in evaluation mode, `chunk` at a time: features [n, D], float32 on the CPU."""
    device = next(tower.parameters()).device
    found = [torch.empty(0, tower.width)]
    with evaluating(tower):
        for start in range(0, len(texts), chunk):
            inputs = tower.prepare(list(texts[start : start + chunk]))
            found.append(tower(to_device(inputs, device)).float().cpu())
    return torch.cat(found)


class Matches(NamedTuple):
    """Distinct left sides and texts of a source, and which belong together."""

    left: Tensor  # [U]: first row of each distinct left side
    right: Tensor  # [V]: first row of each distinct text
    pairs: Tensor  # [P, 2]: positions in `left` and `right`

    def repeat(self, rows: int) -> bool:
        """Whether an image or a text occurs in more than one of the rows."""
        return not len(self.left) == len(self.right) == rows


def matches(found: SourceFeatures) -> Matches:
    """Group the rows of a source by equal left names and by equal texts; views belong to their own row."""
    if found.views:
        rows = torch.arange(len(found.keys))
        return Matches(rows, rows, torch.stack([rows, rows], 1))
    left: dict[str, tuple[int, int]] = {}  # name -> (position, first row)
    right: dict[str, tuple[int, int]] = {}
    pairs: dict[tuple[int, int], None] = {}
    for row, (name, text) in enumerate(zip(found.names, found.texts, strict=True)):
        left.setdefault(name, (len(left), row))
        right.setdefault(text, (len(right), row))
        pairs[left[name][0], right[text][0]] = None
    first = [torch.tensor([row for _, row in side.values()]) for side in (left, right)]
    return Matches(first[0], first[1], torch.tensor(list(pairs)))


def best_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def usable_device(given: str | torch.device) -> torch.device:
    """The device of that name.

    Raises:
        ValueError: There is no such device on this machine.
    """
    try:
        device = torch.device(given)
        if device.type == "meta":
            raise RuntimeError("it holds no values")
        torch.empty(1, device=device)
        return device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        others = [f"{found.type}:{place}" for place in range(torch.accelerator.device_count())] if found else []
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".")
        expected = f"a device of this machine ({', '.join(['cpu', *others])})"
        bad_value("device", expected=expected, got=f"{given!r} ({reason})", remedy="Leave it out for the fastest one.")


def to_device(inputs: Any, device: torch.device) -> Any:
    """Move a tensor, or all tensors in a dict, tuple or list, to a device."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, dict):
        return {name: to_device(x, device) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(to_device(x, device) for x in inputs)
    return inputs
