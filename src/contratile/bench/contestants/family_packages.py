"""How other packages compute the losses of the family, and the problems that all contestants get.

    problem = labelled_problem(1024, 256, scale=10.0)
    value = metric_learning_sup_con()(*problem.args)     # imports the package; ImportError if it is not installed

Temperatures are 1 / scale. Packages that fix the scale in a constructor give no gradient for it.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from contratile.bench.contestants.loss import LossFunction, LossProblem, LossStep, with_backward

CLASS = 8
"""Examples per class in a labelled problem."""
BIAS = -10.0
"""The initial bias of SigLIP."""


def labelled_problem(
    n: int,
    d: int,
    *,
    scale: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> LossProblem:
    """Make N unit features, those of a class slightly more alike than others, their labels, and a scale."""
    random = torch.Generator().manual_seed(n + d + seed)
    labels = torch.arange(n) % max(1, n // CLASS)
    centres = F.normalize(torch.randn(n, d, generator=random), dim=1)[labels]
    z = torch.randn(n, d, generator=random).mul_(2 / d**0.5).add_(centres)
    z = F.normalize(z, dim=1, out=z).to(device, dtype).requires_grad_()
    return LossProblem((z, labels.to(device), torch.tensor(scale, device=device, requires_grad=True)))


def biased(n: int, d: int, **how: Any) -> LossProblem:
    """Make pairs, a scale and a bias; keywords are those of `LossProblem.make`."""
    pairs = LossProblem.make(n, d, **how)
    return LossProblem((*pairs.args, torch.tensor(BIAS, device=pairs.args[0].device, requires_grad=True)))


def normalised(loss: LossFunction) -> LossFunction:
    """Return the loss of normalised features."""
    return lambda *args: loss(*(F.normalize(x, dim=1) if x.ndim == 2 else x for x in args))


def cooled(loss: LossFunction) -> LossFunction:
    """Turn a loss that takes a temperature into one that takes a scale."""
    return lambda a, b, scale, **keywords: loss(a, b, 1 / scale, **keywords)


def fixed_scale(make: Callable[[float], Any]) -> LossStep:
    """Return the step of a module whose scale is fixed when it is made."""
    module = cache(make)
    return with_backward(lambda *args: module(args[-1].item())(*args[:-1]))


def lightly_nt_xent() -> LossStep:
    from lightly.loss import NTXentLoss

    return fixed_scale(lambda scale: NTXentLoss(temperature=1 / scale))


def metric_learning_sup_con() -> LossStep:
    from pytorch_metric_learning.losses import SupConLoss

    return fixed_scale(lambda scale: SupConLoss(temperature=1 / scale))


def open_clip_siglip() -> LossStep:
    from open_clip.loss import SigLipLoss

    return with_backward(SigLipLoss())


def siglip_kernel() -> LossStep:
    from siglip_kernel import fused_siglip_loss

    return with_backward(lambda image, text, scale, bias: fused_siglip_loss(image, text, scale.log(), bias))


def multiple_negatives() -> LossStep:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    model: Any = torch.nn.Sequential(torch.nn.Identity())  # embeddings are given: no model is run
    both: Any = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}

    def make(scale: float) -> LossFunction:
        loss = MultipleNegativesRankingLoss(model, scale=scale, **both)
        # What its forward does with the embeddings of two columns; labels are ignored.
        return lambda query, doc: loss.compute_loss_from_embeddings([query, doc], torch.empty(0))

    return fixed_scale(make)


def info_nce_pytorch() -> LossStep:
    from info_nce import InfoNCE

    return fixed_scale(lambda scale: InfoNCE(temperature=1 / scale))


def unpaired(loss: LossFunction) -> LossFunction:
    """`info_nce` with keys of its own for negatives, and none from the batch."""
    return lambda query, key, others, scale, **how: loss(
        query, key, scale, extra_keys=others, in_batch_negatives=False, **how
    )
