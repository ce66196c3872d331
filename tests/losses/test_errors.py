"""Bad input: the type of the error, and a text that says what was expected, what came and what to do."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

import contratile as ct
from tests.helpers import features

X = features(6, 4, seed=1)
Y = features(6, 4, seed=2)
BOTH: list[Any] = [ct.clip_loss, ct.info_nce]
ALL: list[Any] = [ct.clip_loss, ct.info_nce, ct.pair_lse]


def fails(call: Callable[[], object], kind: type[Exception], *, expected: str, got: str, remedy: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    text = str(caught.value)
    assert f"expected {expected}" in text and f"got {got}" in text and remedy in text, text


@pytest.mark.parametrize("loss", ALL)
def test_features(loss: Any) -> None:
    fails(lambda: loss(X, Y[:, :3]), ValueError, expected="one number of features", got="4 and 3", remedy="Project")
    fails(lambda: loss(X[0], Y), ValueError, expected="shape [N, D]", got="[4]", remedy="pool")
    fails(lambda: loss(X, Y[None]), ValueError, expected="shape [N, D]", got="[1, 6, 4]", remedy="pool")
    fails(lambda: loss(X.long(), Y.long()), TypeError, expected="dtype float32", got="torch.int64", remedy=".float()")
    fails(lambda: loss(X, Y > 0), TypeError, expected="dtype float32", got="torch.bool", remedy=".float()")
    fails(
        lambda: loss(X, Y.to(torch.complex64)),
        TypeError,
        expected="dtype float32",
        got="torch.complex64",
        remedy="text.abs()" if loss is ct.clip_loss else "key.abs()",
    )
    fails(
        lambda: loss(X, Y.half()), TypeError, expected="one dtype", got="torch.float32 and torch.float16", remedy=".to("
    )
    fails(lambda: loss(X, Y.to("meta")), TypeError, expected="one device", got="cpu and meta", remedy=".device)")
    fails(lambda: loss(None, Y), TypeError, expected="a tensor", got="NoneType", remedy="Pass")
    fails(lambda: loss(X.tolist(), Y), TypeError, expected="a tensor", got="list", remedy="Pass")
    fails(lambda: loss(X, Y.numpy()), TypeError, expected="a tensor", got="ndarray", remedy="Pass")
    fails(lambda: loss(X[:0], Y[:0]), ValueError, expected="at least one row", got="[0, 4]", remedy="drop_last")
    fails(lambda: loss(X, Y[:0]), ValueError, expected="at least one row", got="[0, 4]", remedy="drop_last")
    fails(
        lambda: loss(X[:, :0], Y[:, :0]),
        ValueError,
        expected="at least one row and one feature",
        got="[6, 0]",
        remedy="",
    )


@pytest.mark.parametrize("loss", BOTH)
def test_no_key(loss: Any) -> None:
    fails(lambda: loss(X, None), TypeError, expected="a tensor", got="NoneType", remedy="Pass")


def test_names_are_those_of_the_call() -> None:
    with pytest.raises(ValueError, match=r"^image and text: "):
        ct.clip_loss(X, Y[:, :3])
    with pytest.raises(ValueError, match=r"^query and key: "):
        ct.info_nce(X, Y[:, :3])
    with pytest.raises(TypeError, match=r"^text: "):
        ct.clip_loss(X, Y.long())


def test_numbers_of_rows() -> None:
    fails(lambda: ct.clip_loss(X, Y[:5]), ValueError, expected="equally many rows", got="6 and 5", remedy="info_nce")
    fails(lambda: ct.info_nce(X, Y[:5]), ValueError, expected="at least 6 rows", got="5", remedy="labels=")


@pytest.mark.parametrize("backend", ["auto", "torch", "dense"])
@pytest.mark.parametrize(("low", "high"), [(-1, 5), (0, 6), (-100, 2), (3, 1 << 40)])
def test_labels_out_of_range(low: int, high: int, backend: Any) -> None:
    labels = torch.tensor([low, 1, 2, 3, 4, high])
    expected, got = "indices from 0 to 5", f"{min(low, 1)} to {max(high, 4)}"
    call = lambda: ct.info_nce(X, Y, labels=labels, backend=backend)  # noqa: E731
    fails(call, ValueError, expected=expected, got=got, remedy="key[labels[i]]")


def test_labels() -> None:
    good = torch.arange(6)

    def call(labels: Any) -> Callable[[], object]:
        return lambda: ct.info_nce(X, Y, labels=labels)

    fails(call(good.float()), TypeError, expected="an integer tensor", got="torch.float32", remedy="labels.long()")
    fails(call(good > 2), TypeError, expected="an integer tensor", got="torch.bool", remedy="labels.long()")
    fails(call(good.tolist()), TypeError, expected="an integer tensor", got="list", remedy="torch.as_tensor(labels)")
    fails(call(good[:5]), ValueError, expected="shape [6]", got="[5]", remedy="Reshape")
    fails(call(good[:, None]), ValueError, expected="shape [6]", got="[6, 1]", remedy="Reshape")
    fails(call(good.to("meta")), TypeError, expected="device cpu", got="meta", remedy=".to('cpu')")


def test_ids_and_labels_that_are_strings() -> None:
    """The remedy is code that runs, and gives equal strings equal numbers."""
    names: Any = ["cat", "dog", "cat", "bird", "dog", "cow"]
    what = "an integer tensor, or a pair of them"

    def call(ids: Any) -> Callable[[], object]:
        return lambda: ct.clip_loss(X, Y, ids=ids)

    for some in (names, names[:2]):
        got = f"list of str, {len(some)} entries"
        fails(call(some), TypeError, expected=what, got=got, remedy="Give equal strings equal numbers")
    fails(lambda: ct.sup_con(X, names), TypeError, expected="an integer tensor", got="list of str", remedy="hashlib")
    with pytest.raises(TypeError) as caught:
        ct.info_nce(X, Y, ids=names)
    code = str(caught.value).partition("every rank: ")[2].removesuffix(".")
    ids = eval(code, {"torch": torch, "hashlib": hashlib, "strings": names})
    assert ids[0] == ids[2] != ids[1] and torch.isfinite(ct.clip_loss(X, Y, ids=ids))
    numbers: Any = list(range(6))
    fails(call(numbers), TypeError, expected=what, got="list of int", remedy="torch.as_tensor(ids)")
    good = torch.arange(6)
    remedy = "Pass (query_ids, key_ids), both of them tensors"
    fails(call((good,) * 3), TypeError, expected=what, got="tuple of Tensor, 3 entries", remedy=remedy)
    fails(call((good, numbers)), TypeError, expected=what, got="tuple, 2 entries", remedy=remedy)


def test_metrics_speak_of_what_they_were_given() -> None:
    call = lambda: ct.zero_shot_metrics(X, Y[:3], torch.arange(6))  # noqa: E731
    fails(call, ValueError, expected="indices from 0 to 2", got="0 to 5", remedy="classes[targets[i]]")
    with pytest.raises(ValueError, match=r"^targets: "):
        call()
    call = lambda: ct.retrieval_metrics(X[:3], Y, image_of_text=torch.arange(6))  # noqa: E731
    fails(call, ValueError, expected="indices from 0 to 2", got="0 to 5", remedy="image[image_of_text[i]]")


@pytest.mark.parametrize("loss", ALL)
def test_options(loss: Any) -> None:
    def call(**keywords: Any) -> Callable[[], object]:
        return lambda: loss(X, Y, **keywords)

    for tile in (0, -1):
        fails(call(tile=tile), ValueError, expected="at least 1", got=str(tile), remedy="default")
    for bad, kind in ((1.5, "float"), (True, "bool"), ("16", "str")):
        fails(call(tile=bad), TypeError, expected="an int", got=kind, remedy="whole number")
        fails(call(cache_bytes=bad), TypeError, expected="an int", got=kind, remedy="whole number")
    fails(call(cache_bytes=-1), ValueError, expected="at least 0", got="-1", remedy="default")
    backends = "one of 'auto', 'torch', 'triton', 'dense'"
    fails(call(backend="cuda"), ValueError, expected=backends, got="'cuda'", remedy="spelling")
    fails(call(backend=None), ValueError, expected="one of", got="None", remedy="spelling")
    fails(
        call(group="world"), ValueError, expected='"auto", None or a process group', got="'world'", remedy="Pass None"
    )


@pytest.mark.parametrize("loss", BOTH)
def test_reduction(loss: Any) -> None:
    for bad in ("average", None, True):
        call = lambda bad=bad: loss(X, Y, reduction=bad)  # noqa: E731
        fails(call, ValueError, expected="one of 'mean', 'sum', 'none'", got=repr(bad), remedy="spelling")


@pytest.mark.parametrize("loss", ALL)
def test_scale(loss: Any) -> None:
    def call(scale: Any) -> Callable[[], object]:
        return lambda: loss(X, Y, scale)

    what = "a float or a 0-d float tensor"
    fails(call(torch.ones(2)), ValueError, expected=what, got="torch.float32 of shape [2]", remedy="share one scale")
    fails(
        call(torch.ones(6, 1)), ValueError, expected=what, got="torch.float32 of shape [6, 1]", remedy="share one scale"
    )
    fails(call(torch.tensor(2)), ValueError, expected=what, got="torch.int64 of shape []", remedy="share one scale")
    fails(call("2"), TypeError, expected=what, got="str", remedy="Pass a number")
    fails(call(None), TypeError, expected=what, got="NoneType", remedy="Pass a number")
    fails(call(True), TypeError, expected=what, got="bool", remedy="Pass a number")


def test_errors_come_before_any_gradient() -> None:
    """A refused call leaves no trace: the next one works."""
    x = X.clone().requires_grad_()
    with pytest.raises(ValueError, match="labels"):
        ct.info_nce(x, Y, labels=torch.full((6,), 9))
    ct.info_nce(x, Y).backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()
