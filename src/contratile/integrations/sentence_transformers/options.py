"""Options of the ranking losses: which similarities, directions and weightings are supported, as sentence-transformers
names them. The package itself is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from contratile.errors import bad_type

Similarity = Callable[[Tensor, Tensor], Tensor]
_SIMILARITIES = {"cos_sim": True, "pytorch_cos_sim": True, "dot_score": False}
"""Whether embeddings are normalised, by name of the similarity."""

OTHERWISE = "or use the loss of sentence-transformers for it."


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosine similarities [N, M]; stands in for the package's function of that name if it is not loaded."""
    return F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).mT


def default_similarity() -> Similarity:
    """The package's `cos_sim` if it is loaded, else the one above."""
    package = sys.modules.get("sentence_transformers.util")
    function: Similarity = getattr(package, "cos_sim", cos_sim)
    return function


def _unwrapped(function: Any) -> Any:
    """The function inside a `functools.partial` without arguments."""
    while isinstance(function, partial) and not function.args and not function.keywords:
        function = function.func
    return function


def similarity_name(function: Any) -> str:
    """The name of a similarity in the package's model card."""
    function = _unwrapped(function)
    owner: Any = getattr(function, "__self__", None)
    name = getattr(function, "__name__", type(function).__name__)
    if name == "similarity" and hasattr(owner, "similarity_fn_name"):  # model.similarity: the one that the model uses
        chosen = str(getattr(owner.similarity_fn_name, "value", owner.similarity_fn_name))
        return {"cosine": "cos_sim", "dot": "dot_score"}.get(chosen, chosen)
    return str(name)


def is_cosine(function: Any) -> bool:
    """Whether a similarity is the cosine (True) or the dot product (False); a TypeError for others.

    Functions are recognised by name and module, because the package may not be loaded.
    """
    function, name = _unwrapped(function), similarity_name(function)
    home = getattr(function, "__module__", None) or ""
    if name in _SIMILARITIES and (home.split(".")[0] == "sentence_transformers" or function is cos_sim):
        return _SIMILARITIES[name]
    got = f"{home}.{name}" if hasattr(function, "__name__") else repr(function)
    remedy = f"Scores must be products of embeddings: pass one of the two, {OTHERWISE}"
    bad_type("similarity_fct", expected="sentence_transformers.util's cos_sim or dot_score", got=got, remedy=remedy)


def embed_columns(model: nn.Module, columns: list[dict[str, Tensor]]) -> list[Tensor]:
    """Compute the embeddings of each column.

    Uses the package's own function if it has one. That encodes candidate columns in one forward pass, which is faster
    and draws other dropout masks.
    """
    package = sys.modules.get("sentence_transformers.base.losses.merged_forward")
    if package is not None and hasattr(package, "embed_columns"):
        together: list[Tensor] = package.embed_columns(model, columns)
        return together
    return [model(features)["sentence_embedding"] for features in columns]
