"""What a pair of towers is worth: features of a source, retrieval metrics, the nearest images of a text.

found = encode(towers, source, chunk=256)
retrieval(found)                       # R@k, ranks, both directions
zero_shot(towers, found, names, templates)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from contratile.data.loader import BROKEN_LIMIT, Loader
from contratile.data.sample import Indexed, Stream
from contratile.errors import bad_value
from contratile.metrics import retrieval_metrics, zero_shot_metrics
from contratile.train.towers import Tower, Towers

TEMPLATES = ("{}", "a photo of a {}.", "a picture of {}.")
KS = (1, 5, 10)


class Encoded(NamedTuple):
    """The features of a source, in its order, and the texts and names beside them."""

    left: Tensor  # [N, D] on the CPU
    right: Tensor
    places: Tensor  # [N] in the source; -1 in a stream
    keys: list[str]
    texts: list[str]
    broken: int = 0
    """Samples that are not among them because they could not be used."""


@torch.no_grad()
def encode(
    towers: Towers,
    source: Indexed | Stream,
    *,
    chunk: int,
    limit: int = 0,
    broken_limit: float = BROKEN_LIMIT,
    notify: Callable[[int], object] = lambda done: None,
) -> Encoded:
    """Both sides of every sample, or of the first `limit`, in evaluation mode.

    Broken samples are left out and counted, up to `broken_limit` of them, by the rule of training.
    """
    prepare = towers.left.prepare, towers.right.prepare
    was_training = towers.training
    towers.eval()
    device = towers.log_scale.device
    left, right, index, keys, texts = [], [], [], [], []
    broken: Counter[str] = Counter()
    options: dict[str, Any] = {"chunk": chunk, "limit": limit, "broken_limit": broken_limit, "broken": broken}
    try:
        for part in Loader.ordered(source, prepare, **options):
            left.append(towers.left(to_device(part.left, device)).float().cpu())
            right.append(towers.right(to_device(part.right, device)).float().cpu())
            index.append(part.index)
            keys += part.keys
            texts += part.texts
            notify(len(keys))
    finally:
        towers.train(was_training)
    if not keys:
        remedy = f"All {broken.total():,} of {source.name} are broken: {', '.join(broken)}."
        bad_value("data", expected="samples to evaluate on", got="none", remedy=remedy)
    return Encoded(torch.cat(left), torch.cat(right), torch.cat(index), keys, texts, broken.total())


def retrieval(found: Encoded, ks: Sequence[int] = KS) -> dict[str, float]:
    """How texts find their own sample and the other way round."""
    return retrieval_metrics(found.left, found.right, ks)


def chance(n: int, ks: Sequence[int] = KS) -> dict[str, float]:
    """What guessing would reach among n."""
    return {f"{way}_R@{k}": min(1.0, k / n) for way in ("image_to_text", "text_to_image") for k in ks}


@torch.no_grad()
def class_features(tower: Tower, names: Sequence[str], templates: Sequence[str] = TEMPLATES) -> Tensor:
    """One feature per class: the mean over prompts, of unit length."""
    for template in templates:
        if "{}" not in template:
            remedy = 'Write it like "a photo of a {}."'
            bad_value("template", expected="a prompt with {} for the name", got=repr(template), remedy=remedy)
    device = next(tower.parameters()).device
    features = []
    for name in names:
        prompts = tower(to_device(tower.prepare([template.replace("{}", name) for template in templates]), device))
        features.append(torch.nn.functional.normalize(prompts.float().mean(0), dim=0))
    return torch.stack(features).cpu()


class Labelled(NamedTuple):
    """The samples of a source that belong to given classes."""

    rows: Tensor  # [n] of the features
    targets: Tensor  # [n]: their classes


def labelled(texts: Sequence[str], names: Sequence[str]) -> Labelled:
    """Samples whose text is the name of a class, in whatever case; all others belong to none."""
    place = {name.casefold(): index for index, name in enumerate(names)}
    found = [(row, place[text.casefold()]) for row, text in enumerate(texts) if text.casefold() in place]
    if not found:
        shown = ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
        remedy = f"A sample's class is its text; the first one here is {texts[0]!r}."
        bad_value("classes", expected="names that are texts of the data", got=shown, remedy=remedy)
    rows, targets = torch.tensor(found).unbind(1)
    return Labelled(rows, targets)


def zero_shot(
    towers: Towers, found: Encoded, names: Sequence[str], templates: Sequence[str] = TEMPLATES
) -> dict[str, float]:
    """Classification by the nearest class name; a sample's class is its text, and others are left out."""
    rows, targets = labelled(found.texts, names)
    return zero_shot_metrics(found.left[rows], class_features(towers.right, names, templates), targets)


def best_device() -> torch.device:
    """An accelerator if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device("cpu")


def to_device(inputs: Any, device: torch.device) -> Any:
    """Tensors in a dict, a tuple, or by themselves."""
    if isinstance(inputs, Tensor):
        return inputs.to(device, non_blocking=True)
    if isinstance(inputs, dict):
        return {name: to_device(x, device) for name, x in inputs.items()}
    if isinstance(inputs, tuple | list):
        return type(inputs)(to_device(x, device) for x in inputs)
    return inputs


# --- the gallery of a run: what `contratile search` looks in -------------------------------------------------------

GALLERY = "gallery"


class Gallery(NamedTuple):
    """The held-out left side of a run."""

    left: Tensor  # [N, D]
    places: Tensor  # [N]
    keys: list[str]
    texts: list[str]
    step: int
    """Of the weights that made the features."""


def save_gallery(found: Encoded, folder: Path, step: int) -> None:
    """Features in 16 bit, with names and texts."""
    from safetensors.torch import save_file

    partial = folder / f"{GALLERY}.partial"
    save_file({"left": found.left.half().contiguous(), "places": found.places.contiguous()}, partial)
    partial.replace(folder / f"{GALLERY}.safetensors")
    partial.write_text(json.dumps({"step": step, "keys": found.keys, "texts": found.texts}), encoding="utf-8")
    partial.replace(folder / f"{GALLERY}.json")


def load_gallery(folder: Path) -> Gallery:
    from safetensors.torch import load_file

    path = folder / f"{GALLERY}.safetensors"
    if not path.exists():
        remedy = "Finish a run of `contratile train` there first."
        bad_value("run", expected=f"a folder with {path.name}", got=folder, remedy=remedy)
    names = json.loads((folder / f"{GALLERY}.json").read_text(encoding="utf-8"))
    tensors = load_file(path)
    return Gallery(tensors["left"].float(), tensors["places"], names["keys"], names["texts"], names["step"])
