"""Keywords that a loss does not have: the error says which one was meant, and signatures stay what they were."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import contratile as ct
from contratile.keywords import known_keywords
from tests.helpers import features

X, Y = features(6, 4, seed=1), features(6, 4, seed=2)
Z = torch.arange(6) // 2
ct_: Any = ct  # calls that type checkers refuse, too


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ct_.clip_loss(X, Y, temperature=0.07), "clip_loss has scale=, the inverse: pass scale=1 / 0.07."),
        (lambda: ct_.info_nce(X, Y, tau=torch.ones(())), "info_nce has scale=, the inverse: pass scale=1 / tau."),
        (lambda: ct_.clip_loss(X, Y, logit_scale=3.0), "clip_loss calls it scale=."),
        (lambda: ct_.pair_lse(X, Y, logit_scale=3.0), "pair_lse calls it scale=."),
        (lambda: ct_.siglip_loss(X, Y, 3.0, logit_bias=1.0), "siglip_loss calls it bias=."),
        (lambda: ct_.nt_xent(X, Y, scale=20), "nt_xent has temperature=, the inverse: pass temperature=1 / 20."),
        (lambda: ct_.sup_con(X, Z, logit_scale=20), "sup_con has temperature=, the inverse"),
        (lambda: ct_.sup_con(X, Z, base_temperature=1), "Multiply the loss by temperature / base_temperature"),
        (lambda: ct_.sup_con(X, targets=Z), "sup_con calls it labels=."),
        (lambda: ct_.clip_loss(image_features=X, text_features=Y), "clip_loss calls it image=."),
        (lambda: ct_.info_nce(X, positive_key=Y), "info_nce calls it key=."),
        (lambda: ct_.info_nce(X, Y, negative_keys=Y), "info_nce calls it extra_keys=."),
        (lambda: ct_.clip_loss(X, Y, normalize=True), "pass torch.nn.functional.normalize(x, dim=1)"),
        (lambda: ct_.clip_loss(X, Y, label_smothing=0.1), "Did you mean label_smoothing=?"),
        (lambda: ct_.clip_loss(X, Y, in_batch_negatives=False), "info_nce has it, with labels=None"),
        (lambda: ct_.clip_loss(X, Y, colour=1), "Drop it."),
        (lambda: ct_.ClipLoss(temperature=0.07), "The call of the module has logit_scale=, the inverse"),
        (lambda: ct_.ClipLoss(scale=3.0), "The call of the module calls it logit_scale=."),
        (lambda: ct_.ClipLoss(logit_scale=3.0), "The call of the module has it: pass logit_scale= there."),
        (lambda: ct_.ClipLoss(world_size=2), "contratile.integrations.open_clip"),
        (lambda: ct_.InfoNCE(temperature=0.07), "InfoNCE has scale=, the inverse: pass scale=1 / 0.07."),
        (lambda: ct_.NTXent(scale=3.0), "NTXent has temperature=, the inverse: pass temperature=1 / 3.0."),
        (lambda: ct_.SupCon(base_temperature=1), "Multiply the loss by temperature / base_temperature"),
        (lambda: ct_.SigLipLoss(bias=1.0), "The call of the module calls it logit_bias=."),
        (lambda: ct_.ClipLoss()(X, Y, scale=3.0), "ClipLoss.forward calls it logit_scale=."),
        (lambda: ct_.ClipLoss()(X, Y, temperature=0.1), "ClipLoss.forward has logit_scale=, the inverse"),
        (lambda: ct_.InfoNCE()(X, Y, logit_scale=3.0), "InfoNCE.forward calls it scale=."),
        (lambda: ct_.NTXent()(X, Y, scale=3.0), "NTXent.forward has temperature=, the inverse"),
        (lambda: ct_.SupCon()(X, Z, scale=3.0), "SupCon.forward has temperature=, the inverse"),
        (lambda: ct_.SigLipLoss()(X, Y, 3.0, bias=1.0), "SigLipLoss.forward calls it logit_bias=."),
    ],
)
def test_the_error_names_the_keyword(call: Callable[[], object], told: str) -> None:
    with pytest.raises(TypeError, match=f"expected keywords among .*, got .*{re.escape(told)}"):
        call()


def test_names_of_other_packages() -> None:
    for name, meant in (("NTXentLoss", "NTXent"), ("SupConLoss", "SupCon"), ("infonce", "info_nce")):
        with pytest.raises(AttributeError, match=rf"module 'contratile' has no attribute '{name}'.*{meant}"):
            getattr(ct, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        ct_.colour  # noqa: B018


def test_options_of_a_module_may_be_given_to_its_call() -> None:
    """What is given to the call wins."""
    module = ct.ClipLoss(tile=4, reduction="mean")
    assert module(X, Y, 3.0, reduction="none", weights=torch.ones(6)).shape == (6,)


@pytest.mark.parametrize("name", ["clip_loss", "info_nce", "nt_xent", "sup_con", "siglip_loss", "pair_lse"])
def test_functions_stay_what_they_are(name: str) -> None:
    function = getattr(ct, name)
    parameters = inspect.signature(function).parameters
    assert "backend" in parameters and not any(x.kind is x.VAR_KEYWORD for x in parameters.values())
    assert function.__name__ == name and function.__module__.startswith("contratile.losses.") and function.__doc__
    assert pickle.loads(pickle.dumps(function)) is function


def test_other_errors_are_left_alone() -> None:
    @known_keywords
    def half(x: float, *, by: float = 2.0) -> float:
        return x / by

    assert half(3.0, by=3.0) == half(x=1.0, by=1.0) == 1.0
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        half()  # type: ignore[call-arg]
