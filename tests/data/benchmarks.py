"""Small data sets in the layout of CLIP_benchmark, and the metrics of one computed apart from the library."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from tests.data.files import encoded, write_tar

Member = tuple[str, bytes]
NAMES = ("red rectangle", "green rectangle", "blue rectangle", "black rectangle", "orange line", "purple rectangle")
TWO = ("red rectangle", "black rectangle")
MANY = ("red", "ellipse", "blue arc", "line")
TEMPLATES = ("a photo of a {c}.", "the {c} of size 2")


COLOURS = ("red", "green", "blue", "black", "orange", "purple")


def picture(number: int) -> bytes:
    """A rectangle in the colour of class i * i % 6, every fourth time in another one, with a little noise."""
    colour = COLOURS[(number * number + (number % 4 == 0)) % 6]
    image = Image.new("RGB", (16, 16), "white")
    image.paste(colour, (2 + number % 3, 2, 14, 13 - number % 5))
    pixels = np.asarray(image).astype(int) + np.random.default_rng(number).integers(-20, 21, (16, 16, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return encoded(image, ("PNG", "WEBP", "JPEG")[number % 3])


def ending(number: int) -> str:
    return ("png", "webp", "jpg")[number % 3]


def npy(vector: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(vector), **options)
    return out.getvalue()


def write_set(
    folder: Path,
    samples: Sequence[tuple[str, bytes]],
    *,
    shards: int = 2,
    classes: Sequence[str] = (),
    templates: Sequence[str] = TEMPLATES,
    kind: str = "",
) -> Path:
    """A data set of (extension of the label, label) pairs; sample i has picture i and is in tar i % shards."""
    (folder / "test").mkdir(parents=True)
    if classes:
        (folder / "classnames.txt").write_text("\n".join(classes) + "\n")
        (folder / "zeroshot_classification_templates.txt").write_text("\n".join(templates) + "\n")
    if kind:
        (folder / "dataset_type.txt").write_text(kind + "\n")
    (folder / "test" / "nshards.txt").write_text(f"{shards}\n")
    for shard in range(shards):
        members: list[Member] = []
        for number in range(shard, len(samples), shards):
            label, data = samples[number]
            members += [(f"s{number:07d}.{ending(number)}", picture(number)), (f"s{number:07d}.{label}", data)]
        write_tar(folder / "test" / f"{shard}.tar", members)
    return folder


def classification(folder: Path, classes: Sequence[str], *, samples: int = 31, shards: int = 2) -> Path:
    """Sample i is of class i * i % C."""
    labels = [("cls", f"{i * i % len(classes)}\n".encode()) for i in range(samples)]
    return write_set(folder, labels, shards=shards, classes=classes)


def multilabel(folder: Path, classes: Sequence[str], *, samples: int = 23, shards: int = 2) -> Path:
    """Sample i has the classes c for which (i + c) * (c + 1) % 4 is 0."""
    labels = [("npy", npy(hot(i, len(classes)))) for i in range(samples)]
    return write_set(folder, labels, shards=shards, classes=classes, kind="multilabel")


def hot(number: int, classes: int) -> list[int]:
    return [int((number + c) * (c + 1) % 4 == 0) for c in range(classes)]


def captions(number: int) -> list[str]:
    """1 to 3 captions of sample i."""
    words = ("red", "green", "blue", "black", "orange")
    shapes = ("ellipse", "rectangle", "line", "arc")
    return [f"{words[(number + j) % 5]} {shapes[number % 4]} of size {number} {j}" for j in range(1 + number % 3)]


def retrieval(folder: Path, *, samples: int = 19, shards: int = 2) -> Path:
    labels = [("txt", "\n".join(captions(i)).encode()) for i in range(samples)]
    return write_set(folder, labels, shards=shards, kind="retrieval")


def benchmark(folder: Path) -> Path:
    """Four data sets, one of them a level deeper."""
    classification(folder / "wds_colours", NAMES)
    classification(folder / "vtab" / "wds_two", TWO, samples=13, shards=3)
    multilabel(folder / "wds_many", MANY)
    retrieval(folder / "wds_pairs")
    return folder


# --- the same metrics, in numpy -------------------------------------------------------------------------------------


def class_weights(tower: Any, classes: Sequence[str], templates: Sequence[str] = TEMPLATES) -> "np.ndarray[Any, Any]":
    """Normalise each prompt's feature, average, normalise again."""
    rows = []
    for name in classes:
        features = np.stack([encode(tower, [x.replace("{c}", name)])[0] for x in templates])
        mean = (features / np.linalg.norm(features, axis=1, keepdims=True)).mean(0)
        rows.append(mean / np.linalg.norm(mean))
    return np.stack(rows)


def encode(tower: Any, raw: Sequence[Any]) -> "np.ndarray[Any, Any]":
    import torch

    with torch.no_grad():
        found: Tensor = tower(tower.prepare(list(raw)))
    return np.asarray(found.double().numpy())


def images(tower: Any, numbers: Sequence[int]) -> "np.ndarray[Any, Any]":
    opened = [Image.open(io.BytesIO(picture(number))).convert("RGB") for number in numbers]
    return np.concatenate([encode(tower, [image]) for image in opened])


def expected_classification(towers: Any, classes: Sequence[str], samples: Sequence[int]) -> dict[str, float]:
    scores = images(towers.left, samples) @ class_weights(towers.right, classes).T
    targets = np.array([i * i % len(classes) for i in samples])
    order = (-scores).argsort(1)
    recalls = [float((order[targets == c, 0] == c).mean()) for c in sorted(set(targets))]
    found = {"acc1": float((order[:, 0] == targets).mean()), "mean_per_class_recall": float(np.mean(recalls))}
    if len(classes) >= 5:
        found["acc5"] = float((order[:, :5] == targets[:, None]).any(1).mean())
    return found


def expected_multilabel(towers: Any, classes: Sequence[str], samples: Sequence[int]) -> dict[str, float]:
    scores = images(towers.left, samples) @ class_weights(towers.right, classes).T
    truth = np.array([hot(i, len(classes)) for i in samples], dtype=bool)
    precisions = []
    for c in range(len(classes)):
        ranked = truth[(-scores[:, c]).argsort(), c]
        at = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
        precisions.append(float(at[ranked].sum() / max(1, ranked.sum())))
    return {"mean_average_precision": float(np.mean(precisions))}


def expected_retrieval(towers: Any, samples: Sequence[int]) -> dict[str, float]:
    owners = np.array([row for row, i in enumerate(samples) for _ in captions(i)])
    texts = np.concatenate([encode(towers.right, [text]) for i in samples for text in captions(i)])
    scores = texts @ images(towers.left, samples).T
    found = {}
    for k in (1, 5, 10):
        best = (-scores).argsort(1)[:, :k]
        found[f"image_retrieval_recall@{k}"] = float((best == owners[:, None]).any(1).mean())
        nearest = (-scores.T).argsort(1)[:, :k]
        hits = [bool((owners[row] == image).any()) for image, row in enumerate(nearest)]
        found[f"text_retrieval_recall@{k}"] = float(np.mean(hits))
    return found
