"""What the losses cannot take part in says so: transforms, tracing, forward mode, tensors that are no plain ones."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

import contratile as ct
from contratile import reference
from contratile.integrations import pytorch_metric_learning as pml
from tests.helpers import features, randn

# PyTorch's own forward mode and exporter use what it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")

Q, K = (features(6, 4, seed=seed, dtype=torch.float64) for seed in (1, 2))
LABELS = torch.arange(6) // 2
HARD = randn(6, 2, 4, seed=3, dtype=torch.float64)
Loss = Callable[..., Tensor]
LOSSES: dict[str, Loss] = {
    "clip_loss": lambda q, k, **how: ct.clip_loss(q, k, torch.tensor(5.0), **how),
    "info_nce": lambda q, k, **how: ct.info_nce(q, k, 5.0, labels=LABELS, **how),
    "nt_xent": lambda q, k, **how: ct.nt_xent(q, k, **how),
    "sup_con": lambda q, k, **how: ct.sup_con(q, LABELS, **how),
    "siglip_loss": lambda q, k, **how: ct.siglip_loss(q, k, 5.0, -1.0, **how),
    "pair_lse": lambda q, k, **how: ct.pair_lse(q, k, 5.0, **how)[0].sum(),
    "everything": lambda q, k, **how: ct.info_nce(
        q, k, torch.tensor(5.0), ids=LABELS, hard_negatives=HARD, extra_keys=2 * K, margin=0.1,
        weights=torch.ones(6), return_stats=True, **how,
    )[0],
}  # fmt: skip


def dual(loss: Loss) -> Tensor:
    with forward_ad.dual_level():
        tangent: Tensor = forward_ad.unpack_dual(loss(forward_ad.make_dual(Q, torch.ones_like(Q)), K)).tangent
        return tangent


TRANSFORMS: dict[str, Callable[[Loss], Any]] = {
    "grad": lambda loss: torch.func.grad(loss)(Q, K),
    "vjp": lambda loss: torch.func.vjp(loss, Q, K)[1](torch.ones((), dtype=torch.float64)),
    "jvp": lambda loss: torch.func.jvp(loss, (Q, K), (K, Q)),
    "jacrev": lambda loss: torch.func.jacrev(loss)(Q, K),
    "vmap": lambda loss: torch.vmap(loss)(torch.stack([Q, K]), torch.stack([K, Q])),
    "dual tensors": dual,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_transforms_are_refused(name: str, transform: str) -> None:
    what = "dual tensors" if transform == "dual tensors" else "a call inside torch.func or torch.vmap"
    call = "info_nce" if name == "everything" else name
    with pytest.raises(RuntimeError, match=rf"{call}: expected .* autograd, got {what}.*Pass backend='dense'"):
        TRANSFORMS[transform](LOSSES[name])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_dense_backend_takes_part(name: str, transform: str) -> None:
    """The remedy works."""

    def loss(q: Tensor, k: Tensor) -> Tensor:
        return LOSSES[name](q, k, backend="dense")

    got = TRANSFORMS[transform](loss)
    leaf = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(LOSSES[name](leaf, K), leaf)
    if transform in ("grad", "jacrev"):
        torch.testing.assert_close(got, grad)
    elif transform == "vjp":
        torch.testing.assert_close(got[0], grad)
    elif transform == "dual tensors":
        torch.testing.assert_close(got, grad.sum().to(got.dtype))
    elif transform == "vmap":
        torch.testing.assert_close(got, torch.stack([LOSSES[name](Q, K), LOSSES[name](K, Q)]))
    else:
        torch.testing.assert_close(got[0], LOSSES[name](Q, K))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_truncated_hard_negatives_take_part(dtype: torch.dtype) -> None:
    """Their gradients, which almost cancel, are added up in fp32 here too."""
    hard = (Q.unsqueeze(1) * (1 + 0.02 * HARD)).to(dtype)

    def loss(h: Tensor, of: Any = ct, kind: torch.dtype = dtype, **how: Any) -> Tensor:
        value: Tensor = of.clip_loss(Q.to(kind), K.to(kind), 5.0, hard_negatives=h, matryoshka_dims=(2, 3, 4), **how)
        return value

    got = torch.func.grad(loss)(hard, backend="dense")
    true = torch.func.grad(loss)(hard.double(), of=reference, kind=torch.float64)
    assert got.dtype == dtype
    assert (got - true).abs().max() <= torch.finfo(dtype).eps * (true.abs().max() + 4)


FAR: dict[str, Any] = {"extra_keys": -K, "hard_negatives": -Q.unsqueeze(1)}


@pytest.mark.parametrize(
    "options",
    [FAR, {**FAR, "margin": 1.9}, {**FAR, "hard_mask": torch.zeros(6, 1, dtype=torch.bool)}, {"matryoshka_dims": (2,)}],
    ids=["far away", "margin", "mask", "prefix"],
)
def test_second_derivatives_of_the_dense_backend(options: dict[str, Any]) -> None:
    """Negatives so far below the positives that exponentials of the distance overflow, or none at all."""

    def twice(of: Any, **how: Any) -> Tensor:
        leaf = Q.clone().requires_grad_()
        loss = of.clip_loss(leaf, Q, 600.0, **options, **how)
        (grad,) = torch.autograd.grad(loss, leaf, create_graph=True)
        (second,) = torch.autograd.grad((grad * K).sum(), leaf)
        return second

    torch.testing.assert_close(twice(ct, backend="dense"), twice(reference), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("backend", ["torch", "dense"])
def test_sigmoids_of_large_scores(backend: Any) -> None:
    """No softplus is cut off, which fp64 would see."""
    got, want = (of.siglip_loss(Q, -Q, 25.0, 0.0, **how) for of, how in ((ct, {"backend": backend}), (reference, {})))
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("backend", ["auto", "dense"])
def test_traces_are_refused(backend: Any) -> None:
    with pytest.raises(RuntimeError, match=r"clip_loss: expected .*, got a call inside torch.jit.trace.*torch.compile"):
        torch.jit.trace(lambda q, k: ct.clip_loss(q, k, 5.0, backend=backend), (Q, K))


def test_export_works() -> None:
    """The other remedy."""

    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return ct.clip_loss(q, k, 5.0)

    torch.testing.assert_close(torch.export.export(Model(), (Q, K)).module()(K, Q), ct.clip_loss(K, Q, 5.0))


def test_features_that_are_not_transformed() -> None:
    """Forward mode elsewhere does not matter; a functional call is no transform."""
    with forward_ad.dual_level():
        assert torch.isfinite(ct.clip_loss(Q, K, 5.0))
    module = torch.nn.Linear(4, 4, dtype=torch.float64)
    weights = {name: x.detach().clone().requires_grad_() for name, x in module.named_parameters()}
    ct.clip_loss(torch.func.functional_call(module, weights, (Q,)), K, 5.0).backward()
    assert weights["weight"].grad is not None


def test_metric_learning_says_so_too() -> None:
    for loss in (pml.NTXentLoss(), pml.SupConLoss()):
        with pytest.raises(RuntimeError, match=r"Loss: expected .*, got a call inside torch.func"):
            torch.func.grad(lambda x, loss=loss: loss(x, LABELS))(Q)


class Plain(Tensor):
    """A subclass that changes nothing."""


STORAGES: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "coo": (lambda x: x.to_sparse(), "a dense tensor, got layout torch.sparse_coo", "{0}.to_dense()"),
    "csr": (lambda x: x.to_sparse_csr(), "a dense tensor, got layout torch.sparse_csr", "{0}.to_dense()"),
    "mkldnn": (lambda x: x.float().to_mkldnn(), "a dense tensor, got layout torch._mkldnn", "{0}.to_dense()"),
    "nested": (lambda x: torch.nested.nested_tensor([x[:2], x[2:]]), "a dense tensor, got a nested", "Pad or pool"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([x[:2], x[2:]], layout=torch.jagged),
        "a dense tensor, got a nested",
        "Pad or pool",
    ),
    "quantized": (
        lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8),
        "dtype float32, float16, bfloat16 or float64, got torch.quint8",
        "{0}.dequantize()",
    ),
    "complex": (lambda x: x.to(torch.complex128), "dtype float32,", "{0}.abs()"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), "a plain tensor, got a MaskedTensor", "to_tensor(0)"),
    "fake": (
        lambda x: torch._subclasses.FakeTensorMode().from_tensor(x),
        "a plain tensor, got a FakeTensor",
        "torch.export",
    ),
}


@pytest.mark.filterwarnings("ignore")  # prototypes of PyTorch
@pytest.mark.parametrize("name", STORAGES)
def test_tensors_that_are_not_plain(name: str) -> None:
    make, expected, remedy = STORAGES[name]
    plain = K.float() if name in ("mkldnn", "quantized") else K
    odd = make(Q)
    calls: list[tuple[str, Callable[[], object]]] = [
        ("image", lambda: ct.clip_loss(odd, plain, 5.0)),
        ("z2", lambda: ct.nt_xent(plain, odd)),
        ("z", lambda: ct.sup_con(odd, LABELS)),
        ("extra_keys", lambda: ct.info_nce(plain, plain, extra_keys=odd)),
        ("query", lambda: ct.nearest(odd, plain, 1)),
        ("image", lambda: ct.retrieval_metrics(odd, plain)),
        ("embeddings", lambda: pml.NTXentLoss()(odd, LABELS)),
    ]
    for where, call in calls:
        with pytest.raises(TypeError, match=f"^{where}: expected {re.escape(expected)}.*") as caught:
            call()
        assert remedy.format(where) in str(caught.value)


def test_sparse_companions() -> None:
    with pytest.raises(TypeError, match=r"^hard_negatives: expected a dense tensor, got layout torch.sparse_coo"):
        ct.clip_loss(Q, K, hard_negatives=HARD.to_sparse())
    with pytest.raises(TypeError, match=r"^ids: expected a dense tensor, got layout torch.sparse_coo"):
        ct.clip_loss(Q, K, ids=LABELS.to_sparse())


def test_subclasses_that_change_nothing() -> None:
    for kind in (torch.nn.Parameter, lambda x: x.as_subclass(Plain)):
        torch.testing.assert_close(ct.clip_loss(kind(Q.clone()), K, 5.0).item(), ct.clip_loss(Q, K, 5.0).item())
    shape = ct.clip_loss(Q.to("meta"), K.to("meta"), 5.0)
    assert shape.is_meta and shape.shape == ()


def test_shards(tmp_path: Path) -> None:
    """Features of a rank are its own rows; a scale that is sharded is asked for whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded, scale = (DTensor.from_local(x, mesh, [Replicate()]) for x in (Q, torch.tensor(5.0)))
        with pytest.raises(TypeError, match=r"^image: expected a plain tensor, got a DTensor.*image.to_local\(\)"):
            ct.clip_loss(sharded, K, 5.0)
        with pytest.raises(TypeError, match=r"^scale: expected a plain tensor, got a DTensor.*scale.full_tensor\(\)"):
            ct.clip_loss(Q, K, scale)
    finally:
        dist.destroy_process_group()
