"""`NTXentLoss` and `SupConLoss` of pytorch-metric-learning in linear memory. Change an import:

    from contratile.integrations.pytorch_metric_learning import NTXentLoss, SupConLoss
    loss = NTXentLoss(temperature=0.07)(embeddings, labels)              # or (..., ref_emb=, ref_labels=)

Distances are cosines (the default: embeddings are normalised here) and dot products, reducers the default, the mean and
the sum. `indices_tuple` of miners restricts the pairs, and the losses work inside the package's `SelfSupervisedLoss`,
`CrossBatchMemory` and `DistributedLossWrapper`. Other distances, reducers and regularizers raise an error, in the
constructor or when they are set later. Labels are compared for equality: integers, floats or bools. Losses of 16-bit
embeddings are fp32, where the package returns 16 bits.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.engine.autograd import pair_stats
from contratile.engine.spec import Inputs, Spec
from contratile.errors import bad_value, check_features, check_temperature, check_transform, check_vector
from contratile.integrations.attributes import CheckedModule
from contratile.integrations.listed_pairs import Listed, nt_xent_of_listed, sup_con_of_listed
from contratile.losses.terms import as_tensor, class_losses
from contratile.ring.ring import Ring
from contratile.ring.team import ALONE


class AnchorsAndReferences(NamedTuple):
    """Normalised anchors and what they are compared with: themselves (None) or a set of references."""

    query: Tensor  # [N, D]
    key: Tensor | None  # [M, D]
    query_labels: Tensor  # [N]
    key_labels: Tensor  # [M]

    @property
    def ring(self) -> Ring:
        return Ring.flat(ALONE, (len(self.key_labels),), total=len(self.query))


class _LabelLoss(CheckedModule):
    """The constructor and the call that both losses share.

    Where pytorch-metric-learning is installed, instances are also instances of its `BaseMetricLossFunction`, because
    `DistributedLossWrapper` takes no others. The base class's code is not used.
    """

    def __new__(cls, *arguments: Any, **options: Any) -> "_LabelLoss":
        return super().__new__(_known_to_package(cls))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.importable or type(self),), self.__dict__

    importable: type["_LabelLoss"] | None = None
    """The class that pickle finds by its name, if this one was made from it."""

    default_reducer: str
    reducers = "MeanReducer", "SumReducer"
    """Supported reducers besides the default."""

    def __init__(
        self,
        temperature: Tensor | float,
        *,
        distance: Any = None,
        reducer: Any = None,
        embedding_regularizer: None = None,
        embedding_reg_weight: float = 1,  # has no effect without a regularizer
        collect_stats: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self.temperature = temperature
        self.distance = distance
        self.reducer = reducer
        self.embedding_regularizer = embedding_regularizer
        self.embedding_reg_weight = embedding_reg_weight
        self.collect_stats = bool(collect_stats)

    def check_option(self, name: str, value: Any) -> Any:
        if name == "temperature":
            check_temperature(value)
        elif name == "distance":
            products = _is(value, "CosineSimilarity") or _is(value, "DotProductSimilarity")
            known = value is None or (products and value.p == 2 and value.power == 1)
            accepted = "CosineSimilarity(), or DotProductSimilarity()" + " with p=2 and power=1" * products
            self._refuse(name, value, accepted, known=known)
        elif name == "reducer":
            reducers = dict.fromkeys((self.default_reducer, *self.reducers))
            known = value is None or any(_is(value, reducer) for reducer in reducers)
            self._refuse(name, value, " or ".join(f"{reducer}()" for reducer in reducers), known=known)
        elif name == "embedding_regularizer":
            self._refuse(name, value, "None", known=value is None)
        elif name == "collect_stats":
            self._refuse(name, value, "False", known=not value)
        return value

    @staticmethod
    def _refuse(name: str, value: object, default: str, *, known: bool) -> None:
        if not known:
            remedy = f"Drop {name}=, or use the loss of pytorch_metric_learning for it."
            bad_value(name, expected=f"the default, {default}", got=repr(value), remedy=remedy)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: Any = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
    ) -> Tensor:
        """Compute the loss.

        Args:
            embeddings: Anchors [N, D]; normalised here.
            labels: Labels [N]. Embeddings with equal labels are positives of each other.
            indices_tuple: What a miner returns, triplets or pairs: only these pairs count. None: all.
            ref_emb: References [M, D] to compare the anchors with; None: the anchors themselves.
            ref_labels: Labels [M] of the references.

        Returns:
            A scalar; 0 if there are no negatives.
        """
        if indices_tuple is not None:
            return self._mined(embeddings, ref_emb, indices_tuple)
        if labels is None or (ref_emb is None) != (ref_labels is None):
            missing = "labels" if labels is None else "ref_emb" if ref_emb is None else "ref_labels"
            bad_value(missing, expected="a tensor", got="None", remedy="Labels determine which pairs are positive.")
        x = self._sets(embeddings, labels, ref_emb, ref_labels)
        if bool((x.query_labels == x.key_labels[0]).all() and (x.key_labels == x.key_labels[0]).all()):
            return embeddings.sum() * 0  # no negatives
        return self._loss(x)

    def _sets(
        self, embeddings: Tensor, labels: Tensor, ref_emb: Tensor | None, ref_labels: Tensor | None
    ) -> AnchorsAndReferences:
        check_transform(type(self).__name__, "auto", (embeddings, ref_emb))
        check_features({"embeddings": embeddings}, empty=False)
        query = self._measured(embeddings)
        mine = _vector("labels", labels, embeddings)
        if ref_emb is None or ref_labels is None or (ref_emb is embeddings and ref_labels is labels):
            classes, _ = _classes(mine, mine)
            return AnchorsAndReferences(query, None, classes, classes)
        if ref_labels is labels:
            remedy = "pytorch_metric_learning would skip the pairs (i, i): pass ref_labels.clone() to count them."
            bad_value("ref_labels", expected="another tensor than labels", got="the same", remedy=remedy)
        check_features({"embeddings": embeddings, "ref_emb": ref_emb}, empty=False)
        classes, ref_classes = _classes(mine, _vector("ref_labels", ref_labels, ref_emb))
        return AnchorsAndReferences(query, self._measured(ref_emb), classes, ref_classes)

    def _measured(self, embeddings: Tensor) -> Tensor:
        """Embeddings whose products are the similarities."""
        normalised = self.distance is None or self.distance.normalize_embeddings
        return F.normalize(embeddings, dim=1) if normalised else embeddings

    def _mined(self, embeddings: Tensor, ref_emb: Tensor | None, indices_tuple: Any) -> Tensor:
        check_transform(type(self).__name__, "auto", (embeddings, ref_emb))
        ref_emb = embeddings if ref_emb is None else ref_emb
        check_features({"embeddings": embeddings, "ref_emb": ref_emb}, empty=False)
        pairs = Listed.of(indices_tuple, embeddings.device)
        if not (len(pairs.a) and len(pairs.a2)):
            return embeddings.sum() * 0
        query, key = self._measured(embeddings), self._measured(ref_emb)
        return self._loss_of_listed(query, key, 1 / as_tensor(self.temperature, query), pairs)

    @property
    def _reduction(self) -> str:
        return self.default_reducer if self.reducer is None else type(self.reducer).__name__

    def _loss(self, x: AnchorsAndReferences) -> Tensor:
        raise NotImplementedError

    def _loss_of_listed(self, query: Tensor, key: Tensor, scale: Tensor, pairs: Listed) -> Tensor:
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


@cache
def _known_to_package(cls: type[_LabelLoss]) -> type[_LabelLoss]:
    """The class as a subclass of the package's base class, if there is one."""
    if "importable" in vars(cls):
        return cls
    try:
        from pytorch_metric_learning.losses import BaseMetricLossFunction
    except ImportError:
        return cls
    members = {"importable": cls, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls, BaseMetricLossFunction), members)


def _unpickled(cls: type[_LabelLoss]) -> _LabelLoss:
    """A loss without its attributes, which pickle sets."""
    return cls.__new__(cls)


def _is(x: object, name: str) -> bool:
    """Whether this is an instance of the package's class of that name. The package may not be installed."""
    return type(x).__name__ == name and type(x).__module__.split(".")[0] == "pytorch_metric_learning"


def _vector(name: str, labels: Tensor, embeddings: Tensor) -> Tensor:
    """Check labels [N]: integers, floats or bools on any device, as in the package."""
    if not isinstance(labels, Tensor) or not (labels.is_floating_point() or labels.dtype == torch.bool):
        labels = labels.to(embeddings.device) if isinstance(labels, Tensor) else labels
        check_vector(name, labels, length=len(embeddings), device=embeddings.device)
        return labels
    labels = labels.to(embeddings.device)
    shape = torch.empty_like(labels, dtype=torch.long)
    check_vector(name, shape, length=len(embeddings), device=embeddings.device)
    if labels.is_floating_point() and bool(labels.isnan().any()):
        remedy = "NaN is not equal to itself: give each embedding without a label a label of its own."
        bad_value(name, expected="labels that can be compared", got="NaN among them", remedy=remedy)
    return labels


def _classes(labels: Tensor, ref_labels: Tensor) -> tuple[Tensor, Tensor]:
    """Integers that are equal where `labels == ref_labels`, with PyTorch's promotion of mixed dtypes."""
    if not (labels.is_floating_point() or ref_labels.is_floating_point()):
        return labels.long(), ref_labels.long()
    dtype = torch.promote_types(labels.dtype, ref_labels.dtype)
    both = torch.cat([labels.to(dtype), ref_labels.to(dtype)])
    if dtype != torch.float64:
        both = both.float()  # exact, and supported by torch.unique on every device
    numbers = torch.unique(both + 0.0, return_inverse=True)[1]  # -0.0 equals 0.0
    return numbers[: len(labels)], numbers[len(labels) :]


class NTXentLoss(_LabelLoss):
    """Replaces `pytorch_metric_learning.losses.NTXentLoss`.

    The mean over all positive pairs (a, p) of

        -log(exp(s_ap) / (exp(s_ap) + sum of exp(s_an) over the negatives n of a)),    s = cosine / temperature

    so the denominator of a pair does not contain the anchor's other positives. Memory is linear in the batch, whatever
    the size of the classes: log-sum-exps of negatives are computed in tiles, and positive pairs in chunks.

    Relations: `contratile.nt_xent` is SimCLR's loss of two views. `SupConLoss` keeps the other positives in the
    denominator.

    Args:
        temperature: A number, or a tensor if it is learned.
        **options: `distance` (cosines or dot products), `reducer` (the default, mean or sum); `collect_stats` and
            `embedding_regularizer` only as the package's defaults.

    Raises:
        ValueError: An option is not supported.

    Examples:
        >>> import torch
        >>> embeddings = torch.randn(12, 8, requires_grad=True)
        >>> NTXentLoss()(embeddings, torch.arange(12) % 4).backward()
    """

    default_reducer = "MeanReducer"

    def __init__(self, temperature: Tensor | float = 0.07, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _loss(self, x: AnchorsAndReferences) -> Tensor:
        scale = 1 / as_tensor(self.temperature, x.query)
        inputs = Inputs(x.query, x.key, scale, query_ids=x.query_labels, key_ids=x.key_labels)
        stats = pair_stats(x.ring, inputs, Spec(cols=False))
        assert stats.row.total is not None
        pairs = Positives.of(x.query_labels, x.key_labels, same_set=x.key is None)
        key = x.query if x.key is None else x.key
        total: Tensor = _PairLosses.apply(x.query, key, stats.nats(stats.row.total), scale, pairs)  # type: ignore[no-untyped-call]
        return total if self._reduction == "SumReducer" else total / max(pairs.number, 1)

    def _loss_of_listed(self, query: Tensor, key: Tensor, scale: Tensor, pairs: Listed) -> Tensor:
        losses = nt_xent_of_listed(query, key, scale, pairs)
        return losses.sum() if self._reduction == "SumReducer" else losses.mean()


class SupConLoss(_LabelLoss):
    """Replaces `pytorch_metric_learning.losses.SupConLoss`: the supervised contrastive loss.

    Anchors without a positive do not count in the mean.

    Relations: `contratile.sup_con` is the same loss for features that are already normalised, with more options.

    Args:
        temperature: A number, or a tensor if it is learned.
        **options: `distance` (cosines or dot products), `reducer` (the default, mean or sum); `collect_stats` and
            `embedding_regularizer` only as the package's defaults.

    Raises:
        ValueError: An option is not supported.

    Examples:
        >>> import torch
        >>> embeddings = torch.randn(12, 8, requires_grad=True)
        >>> SupConLoss()(embeddings, torch.arange(12) % 4).backward()
    """

    default_reducer = "AvgNonZeroReducer"

    def __init__(self, temperature: Tensor | float = 0.1, **options: Any) -> None:
        super().__init__(temperature, **options)

    def _loss(self, x: AnchorsAndReferences) -> Tensor:
        scale = 1 / as_tensor(self.temperature, x.query)
        inputs = Inputs(x.query, x.key, scale, query_classes=x.query_labels, key_classes=x.key_labels)
        losses, count = class_losses(inputs, Spec(exclude_self=x.key is None), x.ring)
        return self._reduced(losses, count)

    def _loss_of_listed(self, query: Tensor, key: Tensor, scale: Tensor, pairs: Listed) -> Tensor:
        return self._reduced(*sup_con_of_listed(query, key, scale, pairs))

    def _reduced(self, losses: Tensor, count: Tensor) -> Tensor:
        """Reduce the losses; `count` is the number of positives of each anchor."""
        if self._reduction == "SumReducer":
            return losses.sum()
        return losses.mean() if self._reduction == "MeanReducer" else losses.sum() / (count > 0).sum().clamp(min=1)


class Positives(NamedTuple):
    """All pairs with equal labels, numbered anchor by anchor, without storing a list of them."""

    order: Tensor  # [M] keys sorted by label
    first: Tensor  # [N] where an anchor's positives start in that order
    ends: Tensor  # [N] number of pairs up to and including an anchor's
    same_set: bool
    number: int
    """Number of pairs, without those of an anchor with itself."""

    @classmethod
    def of(cls, query_labels: Tensor, key_labels: Tensor, *, same_set: bool) -> "Positives":
        ordered, order = key_labels.sort(stable=True)
        first, last = (torch.searchsorted(ordered, query_labels, right=right) for right in (False, True))
        ends = (last - first).cumsum(0)
        return cls(order, first, ends, same_set, int(ends[-1]) - same_set * len(query_labels))

    def chunks(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield anchors and keys of up to `size` pairs at a time."""
        all_pairs = self.number + self.same_set * len(self.first)
        for start in range(0, all_pairs, size):
            number = torch.arange(start, min(start + size, all_pairs), device=self.ends.device)
            anchor = torch.searchsorted(self.ends, number, right=True)
            before = torch.where(anchor > 0, self.ends[anchor - 1], 0)
            key = self.order[self.first[anchor] + number - before]
            yield (anchor[anchor != key], key[anchor != key]) if self.same_set else (anchor, key)


class _PairLosses(torch.autograd.Function):
    """Sum over positive pairs of softplus(log-sum-exp of the anchor's negatives - scale * <anchor, positive>)."""

    CHUNK = 1 << 19
    """Number of feature values in a chunk of pairs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, negatives: Tensor, scale: Tensor, pairs: Positives) -> Tensor:
        ctx.save_for_backward(query, key, negatives, scale)
        ctx.pairs = pairs
        total = negatives.new_zeros(())
        for a, p in pairs.chunks(max(1, _PairLosses.CHUNK // query.shape[1])):
            score = (query[a].to(total.dtype) * key[p].to(total.dtype)).sum(1) * scale
            total += F.softplus(negatives[a] - score).sum()
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, negatives, scale = ctx.saved_tensors
        acc = negatives.dtype
        dquery, dkey = (torch.zeros_like(x, dtype=acc) for x in (query, key))
        dnegatives, dscale = torch.zeros_like(negatives), torch.zeros_like(scale)
        for a, p in ctx.pairs.chunks(max(1, _PairLosses.CHUNK // query.shape[1])):
            left, right = query[a].to(acc), key[p].to(acc)
            similar = (left * right).sum(1)
            slope = grad * torch.sigmoid(negatives[a] - similar * scale)
            dnegatives.index_add_(0, a, slope)
            dscale -= torch.dot(slope, similar)
            slope = (-scale * slope).unsqueeze(1)
            dquery.index_add_(0, a, slope * right)
            dkey.index_add_(0, p, slope * left)
        return dquery.to(query.dtype), dkey.to(key.dtype), dnegatives, dscale, None
