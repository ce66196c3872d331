"""sentence-transformers' ranking losses, without their score matrices. Change an import:

    from contratile.integrations.sentence_transformers import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(model, scale=20.0, gather_across_devices=True)
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

`CachedMultipleNegativesRankingLoss` is the same for batches of any size. Values and gradients are those of the
package's losses. An option that has no counterpart here is refused by its name, never ignored, whether it is given to
the constructor or set as an attribute later. `margin`, `tile` and `cache_bytes` are additions, with the meaning they
have in `contratile.info_nce`. Losses of 16-bit embeddings are fp32, as in the package; under autocast they stay fp32,
where the package's are of 16 bits. The package itself is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.errors import bad_type, bad_value, check_choice, check_count, check_pairs
from contratile.grad_cache import GradCache
from contratile.grad_cache.chunks import cut
from contratile.grad_cache.offload import Offload
from contratile.integrations.attributes import CheckedModule
from contratile.losses.functional import clip_loss, info_nce

Direction = Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"]
Similarity = Callable[[Tensor, Tensor], Tensor]
_DIRECTIONS = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
_SIMILARITIES = {"cos_sim": True, "pytorch_cos_sim": True, "dot_score": False}
"""Whether the embeddings are normalised before their products."""

_HARDNESS = ("in_batch_negatives", "hard_negatives", "all_negatives")
_OTHERWISE = "or keep sentence-transformers' own loss for it."
_FLAT = {
    "cu_seq_lens_q": f"Load the model without input flattening, {_OTHERWISE}",
    "offsets": "A StaticEmbedding has no activations worth a cache: use MultipleNegativesRankingLoss.",
}


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """The package's function of that name, for where the package is not loaded."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).mT


class MultipleNegativesRankingLoss(CheckedModule):
    """Each query's positive against all documents of the batch, and of all devices if they are gathered. Replaces

        docs = torch.cat(columns[1:])                        # positives, then columns of hard negatives
        scores = scale * cos_sim(columns[0], docs)
        return F.cross_entropy(scores, torch.arange(len(scores)))

    With `directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction"` the mean of this and of the
    positives against all queries. `similarity_fct` is the package's cos_sim (as is None) or dot_score, a
    `functools.partial` of these without arguments, or `model.similarity` of a model that has chosen one of the two.
    Every option is also an attribute, and may be changed between calls.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__()
        if not scale > 0:
            bad_value("scale", expected="a positive number", got=scale, remedy="It is 1 / temperature.")
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.gather_across_devices = gather_across_devices
        self.directions = directions
        self.partition_mode = partition_mode
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self.margin = margin
        self.tile = tile
        self.cache_bytes = cache_bytes

        _check_partition(self.directions, partition_mode)

    def check_option(self, name: str, value: Any) -> Any:
        """What cannot be honoured is refused here. The two options of directions are compared at the call: they are set
        one after the other."""
        if name == "similarity_fct":
            value = _cos_sim() if value is None else value
            _is_cosine(value)
        elif name == "directions":
            value = _checked_directions(value)
        elif name == "partition_mode":
            check_choice(name, value, ("joint", "per_direction"))
        elif name in ("hardness_mode", "hardness_strength"):
            now = {"hardness_mode": None, "hardness_strength": 0.0, **self.__dict__, name: value}
            _check_hardness(now["hardness_mode"], now["hardness_strength"])
        return value

    @property
    def symmetric(self) -> bool:
        return "doc_to_query" in self.directions

    @property
    def temperature(self) -> float:
        return 1.0 / self.scale

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The trainer's call; labels are not used, as a query's positive is the document of its own row."""
        return self.compute_loss_from_embeddings(_embed(self.model, list(sentence_features)), labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """The loss of columns of embeddings, each [N, D]: queries, positives, then any number of hard negatives."""
        if len(embeddings) < 2:
            remedy = "The dataset needs an anchor and a positive, and may have columns of negatives after them."
            bad_value("sentence_features", expected="two columns or more", got=len(embeddings), remedy=remedy)
        _check_partition(self.directions, self.partition_mode)
        if self.symmetric:
            check_pairs("anchors and positives", *embeddings[:2])
        # As in the package, at least fp32: the length of a 16-bit embedding may not fit into 16 bits.
        dtype = reduce(torch.promote_types, (x.dtype for x in embeddings), torch.float32)
        embeddings = [x.to(dtype) for x in embeddings]
        if _is_cosine(self.similarity_fct):  # asked at each call: a model may choose another in between
            embeddings = [F.normalize(x, dim=-1) for x in embeddings]
        query, positive, *negatives = embeddings
        loss = clip_loss if self.symmetric else info_nce
        return loss(
            query,
            positive,
            self.scale,
            extra_keys=torch.cat(negatives) if negatives else None,
            margin=self.margin,
            group="auto" if self.gather_across_devices else None,
            tile=self.tile,
            cache_bytes=self.cache_bytes,
        )

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card lists."""
        return {
            "scale": self.scale,
            "similarity_fct": _similarity_name(self.similarity_fct),
            "gather_across_devices": self.gather_across_devices,
            "directions": self.directions,
            "partition_mode": self.partition_mode,
            "hardness_mode": self.hardness_mode,
            "hardness_strength": self.hardness_strength,
            "margin": self.margin,
        }

    @property
    def citation(self) -> str:
        return _JINA if self.symmetric else _CPC


class MultipleNegativesSymmetricRankingLoss(MultipleNegativesRankingLoss):
    """Both directions, averaged: the short name for `directions` and `partition_mode` of the class above."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        gather_across_devices: bool = False,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
            margin=margin,
            tile=tile,
            cache_bytes=cache_bytes,
        )


class CachedMultipleNegativesRankingLoss(MultipleNegativesRankingLoss):
    """The same loss for batches of any size: `contratile.GradCache` over mini-batches of texts.

    Its forward does the first two phases, its backward the third, so the trainer's call is that of any loss.
    Mini-batches are those of the package, without the padding that only longer texts of other mini-batches need.
    `offload` is an addition: "host" or "disk" for what the model is called with.
    """

    uses_gradient_cache = True
    """Asked for by the package's MatryoshkaLoss, which then wraps `calculate_loss`."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: tuple[Direction, ...] = ("query_to_doc",),
        partition_mode: Literal["joint", "per_direction"] = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
        offload: Offload = "none",
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            gather_across_devices,
            directions,
            partition_mode,
            hardness_mode,
            hardness_strength,
            margin=margin,
            tile=tile,
            cache_bytes=cache_bytes,
        )
        check_count("mini_batch_size", mini_batch_size, least=1)
        if mini_batch_num_tokens is not None:
            check_count("mini_batch_num_tokens", mini_batch_num_tokens, least=1)
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar
        self.offload = offload

    @property
    def loss(self) -> MultipleNegativesRankingLoss:
        """The package keeps the options on a loss inside of this one; here they are its own."""
        return self

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The trainer's call. Gradients of embeddings are found here; those of the model come with `backward()`."""
        cache = GradCache(
            _Embedding(self.model),
            self.compute_loss_from_embeddings,
            chunk_size=sys.maxsize,  # they come as mini-batches
            offload=self.offload,
            progress="bar" if self.show_progress_bar else None,
        )
        encoded = cache.encode(*(self._mini_batches(features) for features in sentence_features))
        columns = [[x] for x in encoded.features]
        if not torch.is_grad_enabled():
            with encoded:
                return self.calculate_loss(columns, labels)
        loss = self.calculate_loss(columns, labels, with_backward=True).requires_grad_()
        loss.register_hook(partial(cache.backward, encoded))  # type: ignore[no-untyped-call]  # likewise
        return loss

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of columns of embeddings that come in parts, and its gradients if asked for, as in the package."""
        loss = self.compute_loss_from_embeddings([torch.cat(x) if len(x) > 1 else x[0] for x in reps], labels)
        if not with_backward:
            return loss
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        return loss.detach()

    def _mini_batches(self, features: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """As the package cuts them, so that with dropout the draws are the same; plain slices if it is not there."""
        for name, remedy in _FLAT.items():
            if name in features:
                got = f"flattened ones with {name}"
                bad_value("sentence_features", expected="padded inputs", got=got, remedy=remedy)
        package = sys.modules.get("sentence_transformers.base.losses.gradcache")
        if package is not None and hasattr(package, "_minibatch_ranges") and hasattr(package, "_create_minibatch"):
            ranges = package._minibatch_ranges(features, self.mini_batch_size, self.mini_batch_num_tokens)
            return (package._create_minibatch(features, begin, end) for begin, end in ranges)
        if self.mini_batch_num_tokens is not None:
            tokens, remedy = self.mini_batch_num_tokens, "Install sentence-transformers 6, or pass mini_batch_size=."
            bad_value("mini_batch_num_tokens", expected="None without the package's own cut", got=tokens, remedy=remedy)
        return cut(features, self.mini_batch_size, "sentence_features")

    def get_config_dict(self) -> dict[str, Any]:
        """What the model card lists."""
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return {**super().get_config_dict(), **sizes}

    @property
    def citation(self) -> str:
        return _GRAD_CACHE


class CachedMultipleNegativesSymmetricRankingLoss(CachedMultipleNegativesRankingLoss):
    """Both directions, averaged: the short name for `directions` and `partition_mode` of the class above."""

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Similarity | None = None,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        show_progress_bar: bool = False,
        *,
        margin: float | None = None,
        tile: int | None = None,
        cache_bytes: int = 0,
        offload: Offload = "none",
    ) -> None:
        super().__init__(
            model,
            scale,
            similarity_fct,
            mini_batch_size,
            mini_batch_num_tokens,
            gather_across_devices=gather_across_devices,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
            show_progress_bar=show_progress_bar,
            margin=margin,
            tile=tile,
            cache_bytes=cache_bytes,
            offload=offload,
        )


class _Embedding(nn.Module):
    """A sentence-transformers model as an encoder: keywords in, embeddings out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **features: Any) -> Tensor:
        embedding: Tensor = self.model(features)["sentence_embedding"]
        return embedding


def _checked_directions(directions: Any) -> tuple[str, ...]:
    """One direction, or two: all others mix scores of several matrices in one softmax."""
    if isinstance(directions, str) or not directions:
        remedy = "Pass a tuple, for example ('query_to_doc',)."
        bad_value("directions", expected="a tuple of names", got=repr(directions), remedy=remedy)
    for direction in directions:
        check_choice("directions", direction, _DIRECTIONS)
    if "query_to_doc" not in directions:
        remedy = "It is the one that holds the positives: add it."
        bad_value("directions", expected="'query_to_doc' among them", got=directions, remedy=remedy)
    for direction in ("query_to_query", "doc_to_doc"):
        if direction in directions:
            remedy = f"Drop {direction!r}, {_OTHERWISE}"
            bad_value("directions", expected="'query_to_doc' or both ways", got=directions, remedy=remedy)
    return tuple(directions)


def _check_partition(directions: tuple[str, ...], partition_mode: str) -> None:
    if "doc_to_query" in directions and partition_mode == "joint":
        remedy = f"Pass partition_mode='per_direction', drop 'doc_to_query', {_OTHERWISE}"
        bad_value("partition_mode", expected="'per_direction' for two directions", got="'joint'", remedy=remedy)


def _check_hardness(hardness_mode: str | None, hardness_strength: float) -> None:
    """As in the package, a mode without strength and a strength without mode change nothing."""
    if hardness_mode is not None:
        check_choice("hardness_mode", hardness_mode, _HARDNESS)
    if not hardness_strength >= 0:
        remedy = "It multiplies the similarity of negatives; 0 is no weighting."
        bad_value("hardness_strength", expected="a number from 0 up", got=hardness_strength, remedy=remedy)
    if hardness_mode is not None and hardness_strength > 0:
        got, remedy = f"{hardness_mode!r} of strength {hardness_strength}", f"Drop one of them, {_OTHERWISE}"
        bad_value("hardness_mode and hardness_strength", expected="at most one of them", got=got, remedy=remedy)


def _cos_sim() -> Similarity:
    """The package's own function if it is loaded."""
    package = sys.modules.get("sentence_transformers.util")
    function: Similarity = getattr(package, "cos_sim", cos_sim)
    return function


def _unwrapped(function: Any) -> Any:
    """What a `functools.partial` without arguments of its own stands for."""
    while isinstance(function, partial) and not function.args and not function.keywords:
        function = function.func
    return function


def _similarity_name(function: Any) -> str:
    """The name that the package's model card has for it."""
    function = _unwrapped(function)
    owner: Any = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    if name == "similarity" and hasattr(owner, "similarity_fn_name"):  # the model's own, whichever it has chosen
        chosen = str(getattr(owner.similarity_fn_name, "value", owner.similarity_fn_name))
        return {"cosine": "cos_sim", "dot": "dot_score"}.get(chosen, chosen)
    return str(name)


def _is_cosine(function: Any) -> bool:
    """Cosines or products. Functions are known by name and home, as the package may not be there to compare."""
    function, name = _unwrapped(function), _similarity_name(function)
    home = getattr(function, "__module__", None) or ""
    if name in _SIMILARITIES and (home.split(".")[0] == "sentence_transformers" or function is cos_sim):
        return _SIMILARITIES[name]
    got = f"{home}.{name}" if hasattr(function, "__name__") else repr(function)
    remedy = f"Scores here are products of embeddings: pass one of the two, {_OTHERWISE}"
    bad_type("similarity_fct", expected="sentence_transformers.util's cos_sim or dot_score", got=got, remedy=remedy)


def _embed(model: nn.Module, columns: list[dict[str, Tensor]]) -> list[Tensor]:
    """One embedding per column. The package, where it can, runs candidate columns in one forward pass: faster, and with
    dropout another draw, so its own function is used if it is there."""
    package = sys.modules.get("sentence_transformers.base.losses.merged_forward")
    if package is not None and hasattr(package, "embed_columns"):
        together: list[Tensor] = package.embed_columns(model, columns)
        return together
    return [model(features)["sentence_embedding"] for features in columns]


_CPC = """
@misc{oord2019representationlearningcontrastivepredictive,
      title={Representation Learning with Contrastive Predictive Coding},
      author={Aaron van den Oord and Yazhe Li and Oriol Vinyals},
      year={2019},
      eprint={1807.03748},
      archivePrefix={arXiv},
      primaryClass={cs.LG},
      url={https://arxiv.org/abs/1807.03748},
}
"""

_JINA = """
@misc{günther2024jinaembeddings28192token,
      title={Jina Embeddings 2: 8192-Token General-Purpose Text Embeddings for Long Documents},
      author={Michael Günther and Jackmin Ong and Isabelle Mohr and others},
      year={2024},
      eprint={2310.19923},
      archivePrefix={arXiv},
      primaryClass={cs.CL},
      url={https://arxiv.org/abs/2310.19923},
}
"""

_GRAD_CACHE = """
@misc{gao2021scaling,
      title={Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},
      author={Luyu Gao and Yunyi Zhang and Jiawei Han and Jamie Callan},
      year={2021},
      eprint={2101.06983},
      archivePrefix={arXiv},
      primaryClass={cs.LG},
}
"""
