"""Retrieval and zero-shot metrics from tiles: never an N x M matrix of scores.

    retrieval_metrics(image, text)                     # R@1, R@5, R@10, mean and median rank, both directions
    zero_shot_metrics(image, classes, targets)         # top-1, top-5 accuracy
    nearest(query, gallery, 10)                        # scores and indices of the best keys of each query

The rank of a positive is 1 + the number of other keys that score strictly higher: of equal scores the positive counts
as the first. Features are compared by their products: pass normalised ones where cosines are meant. Everything runs
on this process alone, without gradients.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from contratile.backends import Backend
from contratile.errors import bad_value, check_count, check_features, check_labels, check_vector
from contratile.lse import Engine, pair_stats
from contratile.ring import Ring
from contratile.task import Inputs, Task
from contratile.team import ALONE


def retrieval_metrics(
    image: Tensor,
    text: Tensor,
    ks: Sequence[int] = (1, 5, 10),
    *,
    image_of_text: Tensor | None = None,
    backend: Backend = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """How well texts find their images and images their texts, under the names that open_clip uses. Replaces

        scores = image @ text.T
        found = {"image_to_text": scores, "text_to_image": scores.T}
        ranks = {name: (x > x.diagonal()[:, None]).sum(1) + 1 for name, x in found.items()}
        return {f"{name}_R@{k}": (x <= k).float().mean() for name, x in ranks.items() for k in ks}

    Text i describes image i or, if `image_of_text` (one index per text) is given, that image: an image is found by the
    best of its texts, and images without any are only there to be confused with.
    """
    check_features({"image": image, "text": text}, empty=False)
    if image_of_text is None:
        if len(image) != len(text):
            remedy = "Pass image_of_text=, the index of each text's image."
            bad_value(
                "image and text", expected="equally many rows", got=f"{len(image)} and {len(text)}", remedy=remedy
            )
        image_of_text = torch.arange(len(text), device=text.device)
    check_vector("image_of_text", image_of_text, length=len(text), device=text.device)
    check_labels(image_of_text, len(image))
    text_ranks, image_ranks = _ranks(text, image, image_of_text, cols=True, backend=backend, tile=tile)
    described = torch.bincount(image_of_text, minlength=len(image)).cpu() > 0
    metrics = {}
    for name, ranks in (("image_to_text", image_ranks[described]), ("text_to_image", text_ranks)):
        metrics[f"{name}_mean_rank"] = ranks.mean().item()
        metrics[f"{name}_median_rank"] = _median(ranks)
        metrics |= {f"{name}_R@{k}": _share(ranks, k) for k in ks}
    return metrics


def zero_shot_metrics(
    image: Tensor,
    classes: Tensor,
    targets: Tensor,
    ks: Sequence[int] = (1, 5),
    *,
    backend: Backend = "auto",
    tile: int | None = None,
) -> dict[str, float]:
    """Share of the images [N, D] whose class is among the k best of the class features [C, D]; `targets` are [N]."""
    check_features({"image": image, "classes": classes}, empty=False)
    check_vector("targets", targets, length=len(image), device=image.device)
    check_labels(targets, len(classes))
    ranks, _ = _ranks(image, classes, targets, cols=False, backend=backend, tile=tile)
    return {f"zero_shot_top{k}": _share(ranks, k) for k in ks}


@torch.no_grad()
def nearest(query: Tensor, gallery: Tensor, k: int, *, tile: int = 16384) -> tuple[Tensor, Tensor]:
    """The k best scores of each query, falling, and where in the gallery they are: two [N, k], k at most its size."""
    check_features({"query": query, "gallery": gallery}, empty=False)
    check_count("k", k, least=1)
    k = min(k, len(gallery))
    scores = query.new_empty(len(query), 0)
    index = torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    for start in range(0, len(gallery), tile):
        new = query @ gallery[start : start + tile].t()
        places = torch.arange(start, start + new.shape[1], device=query.device).expand_as(new)
        scores, best = torch.cat([scores, new], 1).topk(min(k, scores.shape[1] + new.shape[1]), dim=1)
        index = torch.cat([index, places], 1).gather(1, best)
    return scores, index


@torch.no_grad()
def _ranks(
    query: Tensor, key: Tensor, labels: Tensor, *, cols: bool, backend: Backend, tile: int | None
) -> tuple[Tensor, Tensor]:
    """The ranks of the queries' positives among the keys, and of the keys' best positives among the queries."""
    engine = Engine(Ring.flat(ALONE, (len(key),), total=len(query)), backend, tile)
    x = Inputs(
        query.detach(), key.detach(), torch.ones((), dtype=query.dtype, device=query.device), labels=labels.long()
    )
    results, _ = pair_stats(x, Task(cols=cols, ranks=True), engine)
    row, col = results["row_higher"] + 1, results["col_higher"] + 1 if cols else results["row_higher"][:0]
    return row.cpu().double(), col.cpu().double()  # not every device has fp64


def _share(ranks: Tensor, k: int) -> float:
    return (ranks <= k).double().mean().item()


def _median(ranks: Tensor) -> float:
    """The lower half-way rank, as open_clip rounds it."""
    return ranks.quantile(0.5).floor().item() if len(ranks) < 1 << 24 else ranks.median().item()
