"""Contestants of the symmetric loss, each called the way its package intends.

    step = CLIP.contestants["open_clip"].load()          # imports the package; ImportError if it is not installed
    problem = CLIP.problem(1024, 256, scale=14.3)
    value = step(*problem.args)                          # forward and backward; gradients are in .grad

Features are [N, D] leaves and the scale is a 0-d leaf. A step fills in the gradients of all of them (packages with a
fixed scale: of the features).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from contratile import clip_loss, reference
from contratile.bench.contestants import Contestant
from contratile.bench.harness import PRODUCTS
from contratile.bench.harness import quiet as quiet

MINI_BATCH = 1024
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of features that `--dtype` takes."""
LossFunction = Callable[..., Tensor]
"""Maps a problem's arguments to a differentiable value."""
LossStep = Callable[..., Tensor]
"""Runs forward and backward on a problem's arguments and leaves the gradients in them."""


@dataclass(frozen=True, kw_only=True)
class LossContestant(Contestant):
    """An implementation of a loss in one process. `matrices` and `linear` were measured; they only predict memory."""

    load: Callable[[], LossStep]
    matrices: float = 0.0
    """How many N x N fp32 matrices are alive at the same time."""

    linear: int = 0
    """How many floats per row are alive besides."""

    dtype: torch.dtype | None = None
    """The dtype of its features, if it is always the same."""

    needs_cuda: bool = False
    oracle: LossFunction | None = None
    """What it computes in terms of `contratile.reference`, if that differs from the loss of its case."""

    def predicted_bytes(self, n: int, d: int) -> float:
        return 4 * (self.matrices * n * n + (self.linear + 4 * d) * n)


@dataclass(frozen=True)
class LossProblem:
    """The arguments of a loss: features [N, D] and whatever else it takes."""

    args: tuple[Tensor, ...]

    @classmethod
    def make(
        cls,
        n: int,
        d: int,
        *,
        scale: float,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ) -> "LossProblem":
        """Make N pairs of unit features, the two of a pair slightly more alike than others, and a scale."""
        random = torch.Generator().manual_seed(n + d + seed)
        image = F.normalize(torch.randn(n, d, generator=random), dim=1)
        text = torch.randn(n, d, generator=random).mul_(2 / d**0.5).add_(image)
        text = F.normalize(text, dim=1, out=text)
        image, text = (x.to(device, dtype).requires_grad_() for x in (image, text))
        return cls((image, text, torch.tensor(scale, device=device, requires_grad=True)))

    @property
    def leaves(self) -> list[Tensor]:
        """The arguments that need a gradient."""
        return [x for x in self.args if x.requires_grad]

    @property
    def features(self) -> list[Tensor]:
        return [x for x in self.leaves if x.ndim == 2]

    def clear(self) -> None:
        """Drop all gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def double(self) -> "LossProblem":
        """Return the same numbers in fp64."""
        numbers = (x.detach().double() if x.is_floating_point() else x for x in self.args)
        return LossProblem(
            tuple(x.requires_grad_(own.requires_grad) for x, own in zip(numbers, self.args, strict=True))
        )

    def bind(self, step: LossStep) -> Callable[[], Tensor]:
        """Return the step on this problem; gradients are dropped before each call, as an optimizer would."""

        def call() -> Tensor:
            self.clear()
            return step(*self.args)

        return call


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss and the contestants that compute it."""

    name: str
    contestants: dict[str, LossContestant]
    oracle: LossFunction
    """The same loss from `contratile.reference`."""

    problem: Callable[..., LossProblem] = LossProblem.make
    """Called with n, d and keywords scale, dtype, device."""

    views: int = 1
    """The score matrix has `views` * N rows and columns."""

    products: int = PRODUCTS
    """Products of that size in a step that keeps no scores: half as many if the scores are symmetric."""

    beside_products: int = 0
    """Products of another model's features, likewise."""

    beside_width: float = 1.0
    """Features of the other model for each of these."""

    def beside_d(self, d: int) -> int:
        """Number of features of the other model; 0 if there is none."""
        return int(self.beside_width * d) if self.beside_products else 0


def with_backward(loss: LossFunction) -> LossStep:
    """Return the step of a loss: forward and backward."""

    def step(*args: Tensor) -> Tensor:
        value = loss(*args)
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return value.detach()

    return step


def _dense() -> LossStep:
    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        logits = scale * image @ text.T
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    return with_backward(loss)


def _contratile() -> LossStep:
    return with_backward(lambda image, text, scale: clip_loss(image, text, scale, group=None))


def _contratile_cached() -> LossStep:
    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        return clip_loss(image, text, scale, group=None, cache_bytes=4 * len(image) * len(text))

    return with_backward(loss)


def _open_clip() -> LossStep:
    from open_clip.loss import ClipLoss

    return with_backward(ClipLoss())


def inf_cl_ring() -> LossStep:
    """Both directions of the paper's ring. On one rank nothing is sent: gloo does not let a rank send to itself."""
    import inf_cl.ring
    import torch.distributed as dist

    class Alone(inf_cl.ring.RingComm):  # type: ignore[misc]  # the package is not annotated
        def send_recv(self, to_send: Tensor, recv_tensor: Tensor | None = None) -> Tensor:
            return to_send

        def commit(self) -> None: ...

        def wait(self) -> None: ...

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]  # documented, not in __all__
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    if dist.get_world_size() == 1:
        inf_cl.ring.RingComm = Alone

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        d = image.shape[1]
        head = 256 if d % 256 == 0 else d  # features are viewed as heads of this width
        rows = inf_cl.ring.cal_ring_loss(image, text, scale=scale, head_dim=head)
        cols = inf_cl.ring.cal_ring_loss(text, image, scale=scale, head_dim=head)
        result: Tensor = (rows + cols) / 2
        return result

    return with_backward(loss)


def _inf_cl() -> LossStep:
    """The paper's kernels on one rank. The scale stays outside: its own scaling needs a process group."""
    from inf_cl import cal_flash_loss

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        d = image.shape[1]
        head = 256 if d % 256 == 0 else d
        rows = cal_flash_loss(scale * image, text, head_dim=head)
        cols = cal_flash_loss(scale * text, image, head_dim=head)
        result: Tensor = (rows + cols).mean() / 2
        return result

    return with_backward(loss)


def sentence_transformers_cached() -> LossStep:
    """The loss stage of the cached loss: mini-batches of rows, each with its own backward, gradients in place."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from sentence_transformers.util import dot_score

    model: Any = torch.nn.Sequential(torch.nn.Identity())  # embeddings are given: no model is run

    @cache
    def module(scale: float) -> Any:
        return CachedMultipleNegativesRankingLoss(
            model,
            scale=scale,
            similarity_fct=dot_score,
            mini_batch_size=MINI_BATCH,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
        )

    def chunks(x: Tensor) -> list[Tensor]:
        """Split embeddings into mini-batches as the package does; their gradients are views of x.grad."""
        x.grad = torch.zeros_like(x)
        parts = []
        for part, grad in zip(torch.split(x.detach(), MINI_BATCH), torch.split(x.grad, MINI_BATCH), strict=True):
            part.requires_grad_().grad = grad
            parts.append(part)
        return parts

    def step(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        value: Tensor = module(scale.item()).calculate_loss([chunks(image), chunks(text)], with_backward=True)
        return value

    return step


def _cut_ce() -> LossStep:
    from cut_cross_entropy import linear_cross_entropy

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        labels = torch.arange(len(image), device=image.device)
        impl = "cce" if image.is_cuda else "torch_compile"
        rows = linear_cross_entropy(scale * image, text, labels, impl=impl)
        cols = linear_cross_entropy(scale * text, image, labels, impl=impl)
        result: Tensor = (rows + cols) / 2
        return result

    return with_backward(loss)


def _keops() -> LossStep:
    import pykeops
    from pykeops.torch import LazyTensor

    pykeops.set_verbose(False)

    def loss(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
        query = scale * image
        scores = (LazyTensor(query[:, None, :]) * LazyTensor(text[None, :, :])).sum(-1)
        lse = scores.logsumexp(dim=1).view(-1) + scores.logsumexp(dim=0).view(-1)
        result: Tensor = (lse / 2 - (query * text).sum(1)).mean()
        return result

    return with_backward(loss)


_ALL = (
    LossContestant(name="contratile", load=_contratile, about="clip_loss: 4 products, no scores kept", linear=16),
    LossContestant(
        name="contratile_cached",
        load=_contratile_cached,
        about="clip_loss with cache_bytes for all tiles: 3 products",
        matrices=1.0,
    ),
    LossContestant(
        name="contratile_bf16",
        load=_contratile,
        about="clip_loss on bfloat16 features",
        dtype=torch.bfloat16,
    ),
    LossContestant(name="dense", load=_dense, about="one logits matrix, two cross entropies: 3 products", matrices=4.0),
    LossContestant(
        name="open_clip",
        load=_open_clip,
        about="ClipLoss(): two logits matrices, 6 products",
        matrices=4.1,
        package="open_clip_torch",
    ),
    LossContestant(
        name="inf_cl_ring",
        load=inf_cl_ring,
        about="cal_ring_loss per direction, PyTorch path of the paper's package on one rank: 8 products",
        matrices=3.9,
        package="inf-cl",
    ),
    LossContestant(
        name="inf_cl",
        load=_inf_cl,
        about="cal_flash_loss per direction, kernels of the paper's package: 10 products",
        linear=16,
        package="inf-cl",
        needs_cuda=True,
    ),
    LossContestant(
        name="sentence_transformers",
        load=sentence_transformers_cached,
        about=f"CachedMultipleNegativesRankingLoss, both directions, mini-batch {MINI_BATCH}, fixed scale: 6 products",
        linear=11 * MINI_BATCH,
        package="sentence-transformers",
    ),
    LossContestant(
        name="cut_ce",
        load=_cut_ce,
        about="linear_cross_entropy per direction, its kernels on CUDA, else impl=torch_compile: 6 products",
        matrices=2.2,
        package="cut-cross-entropy",
    ),
    LossContestant(
        name="keops",
        load=_keops,
        about="LazyTensor log-sum-exps, compiled per D on first use",
        package="pykeops",
    ),
)

LOSS_CONTESTANTS = {contestant.name: contestant for contestant in _ALL}
CLIP = Case(name="clip", contestants=LOSS_CONTESTANTS, oracle=reference.clip_loss)
