"""Good manners in PyTorch: operators, compile, autograd, autocast, modules, imports."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import ast
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import contratile as ct
from contratile import reference
from contratile.engine import compiled
from contratile.engine.rule import PairRule
from contratile.engine.spec import Inputs, Spec
from tests.helpers import features, labels_of, pair_stats, randn

N, D = 21, 6
LABELS = labels_of(N, N, seed=3)
LOSSES: dict[str, Callable[..., Tensor]] = {
    "clip_loss": lambda q, k, s, **options: ct.clip_loss(q, k, s, **options),
    "info_nce": lambda q, k, s, **options: ct.info_nce(q, k, s, labels=LABELS, **options),
}


def leaves(*, dtype: torch.dtype = torch.float32, scale: float = 8.0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        features(N, D, seed=1, dtype=dtype).requires_grad_(),
        features(N, D, seed=2, dtype=dtype).requires_grad_(),
        torch.tensor(scale, dtype=torch.promote_types(dtype, torch.float32), requires_grad=True),
    )


# --- operators ----------------------------------------------------------------------------------------------------

IDS = torch.arange(N) % 5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"labels": LABELS},
        {"labels": LABELS, "cols": False, "cache_bytes": 1 << 20},
        {"rows": False, "tile": 5},
        {"query_ids": IDS, "key_ids": IDS, "labels": LABELS, "cache_bytes": 400},
        {"one_set": True, "exclude_self": True, "cols": False},
        {"reduce": "softplus", "labels": torch.arange(N), "bias": torch.tensor(-3.0), "cols": False},
        {
            "labels": torch.arange(N),
            "margin": 0.1,
            "ranks": True,
            "sums": "equal",
            "query_classes": IDS,
            "key_classes": IDS,
        },
        {"labels": LABELS, "sums": "differ", "query_ids": IDS, "key_ids": LABELS},
        {"labels": LABELS, "key_bias": LABELS.float()},
    ],
    ids=[
        "nothing",
        "labels",
        "rows and cache",
        "cols",
        "ids and half a cache",
        "one set",
        "softplus",
        "everything",
        "differ",
        "biases",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_operators_pass_opcheck(dtype: torch.dtype, options: dict[str, Any]) -> None:
    q, k, scale = leaves(dtype=dtype)
    options = dict(options)
    key = None if options.pop("one_set", False) else k
    spec = Spec(**{name: options.pop(name) for name in list(options) if name in Spec._fields})
    x = Inputs(q, key, scale, **options)
    spec = spec._replace(tile=spec.tile or 8)
    torch.library.opcheck(compiled.pair_statistics, (*x, *spec))
    results = [y.detach() for y in compiled.pair_statistics(*x, *spec)]
    upstream = [randn(*y.shape, seed=4, dtype=y.dtype) for y in results]
    detached = [None if y is None else y.detach() for y in x]
    everything = True, key is not None, True, x.bias is not None, x.key_bias is not None
    for wants in (everything, (False, False, True, False, False), (True, False, False, False, False)):
        # Its derivative is refused on purpose, so the operator is checked for tensors that want none.
        torch.library.opcheck(compiled.pair_gradients, (*detached, *spec, results, upstream, list(wants)))


# --- compile ------------------------------------------------------------------------------------------------------


# The compiler's own imports use what it has deprecated.
own_deprecations = pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated:DeprecationWarning")


@own_deprecations
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("dynamic", "cache_bytes"), [(False, 0), (True, 0), (False, 1 << 20)], ids=["static", "dynamic", "cached"]
)
def test_compiles_without_graph_break(name: str, dynamic: bool, cache_bytes: int) -> None:
    torch._dynamo.reset()

    def step(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        return LOSSES[name](q, k, s.exp(), tile=8, cache_bytes=cache_bytes)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    inputs = leaves(scale=2.0)
    torch.testing.assert_close(value_and_grads(compiled, *inputs), value_and_grads(step, *inputs))


@own_deprecations
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does so
@pytest.mark.parametrize("option", ["hard_negatives", "cache_bytes"])
def test_one_compilation_for_all_batch_sizes(option: str) -> None:
    """The first size is compiled for itself, the second for all."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(q: Tensor, k: Tensor, s: Tensor, hard: Tensor, mask: Tensor) -> Tensor:
        if option == "cache_bytes":
            return ct.clip_loss(q, k, s, cache_bytes=500, tile=4)
        return ct.clip_loss(q, k, s, hard_negatives=hard, hard_mask=mask)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    for n in range(11, 11 + 12):
        q, k = (features(n, D, seed=seed).requires_grad_() for seed in (1, 2))
        s, hard = torch.tensor(3.0, requires_grad=True), randn(n, 3, D, seed=3).requires_grad_()
        mask = torch.arange(3) < (torch.arange(n) % 4).unsqueeze(1)
        results = []
        for function in (compiled, step):
            loss = function(q, k, s, hard, mask)
            results.append([loss.detach(), *torch.autograd.grad(loss, (q, k, s, hard), materialize_grads=True)])
        torch.testing.assert_close(*results)
    assert counter.frame_count == 2


@own_deprecations
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does so
def test_options_compile_without_graph_break() -> None:
    torch._dynamo.reset()
    hard = randn(N, 3, D, seed=5)

    def step(q: Tensor, k: Tensor, s: Tensor) -> Tensor:
        loss, stats = ct.nt_xent(q, k, 1 / s, return_stats=True)
        return ct.info_nce(q, k, s, hard_negatives=hard, weights=hard[:, 0, 0].abs()) + loss + stats.row_rank

    inputs = leaves()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(value_and_grads(compiled, *inputs), value_and_grads(step, *inputs))


@own_deprecations
def test_compiled_once_for_several_batch_sizes() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(ct.clip_loss, fullgraph=True, dynamic=True, backend=counter)
    compiled_first = 0
    for n in (5, 18, 33):
        inputs = features(n, D, seed=1).requires_grad_(), features(n, D, seed=2).requires_grad_()
        torch.testing.assert_close(value_and_grads(compiled, *inputs), value_and_grads(ct.clip_loss, *inputs))
        compiled_first = counter.frame_count if n == 5 else compiled_first
    assert compiled_first and counter.frame_count == compiled_first


def value_and_grads(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    value = function(*inputs)
    return [value.detach(), *torch.autograd.grad(value, inputs)]


# --- autograd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [5, None])
def test_gradcheck(tile: int | None) -> None:
    q, k = (randn(7, 3, seed=seed, dtype=torch.float64).requires_grad_() for seed in (1, 2))
    key = randn(12, 3, seed=4, dtype=torch.float64).requires_grad_()
    s = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    labels = labels_of(7, 12, seed=3)
    rule = PairRule(exclude_self=True, labels=(torch.arange(7) + 2) % 7)
    functions: list[tuple[Callable[..., Any], tuple[Tensor, ...]]] = [
        (lambda q, k, s: ct.clip_loss(q, k, s, tile=tile), (q, k, s)),
        (lambda q, k, s: ct.clip_loss(q, k, s, tile=tile, reduction="none"), (q, k, s)),
        (lambda q, k, s: ct.info_nce(q, k, s, labels=labels, tile=tile), (q, key, s)),
        (lambda q, k, s: ct.pair_lse(q, k, s, tile=tile), (q, key, s)),
        (lambda q, s: ct.pair_lse(q, None, s, cols=False, tile=tile)[0], (q, s)),
        (lambda q, s: pair_stats(q, None, s, rule, cols=False, tile=tile)[::2], (q, s)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivative_is_refused(name: str) -> None:
    q, k, s = leaves()
    (grad,) = torch.autograd.grad(LOSSES[name](q, k, s), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*backend='dense'"):
        grad.square().sum().backward()


def test_no_second_derivative_of_16_bit_queries_with_hard_negatives() -> None:
    """Their gradients add up in a stand-in; a part of the second derivative would be wrong."""
    q, k, s = leaves(dtype=torch.bfloat16)
    hard = randn(N, 2, D, seed=5, dtype=torch.bfloat16)
    (grad,) = torch.autograd.grad(ct.info_nce(q, k, s, hard_negatives=hard), q, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grad.float().pow(2).sum(), q)


def test_dense_backend_has_a_second_derivative() -> None:
    q, k, s = leaves(dtype=torch.float64)
    (grad,) = torch.autograd.grad(ct.clip_loss(q, k, s, backend="dense"), q, create_graph=True)
    grad.square().sum().backward()
    assert q.grad is not None and q.grad.any()


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@pytest.mark.parametrize("needs", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1) if a or b or c])
@pytest.mark.parametrize("name", LOSSES)
def test_only_wanted_gradients_come(name: str, needs: tuple[int, int, int], cache_bytes: int) -> None:
    inputs, full = leaves(dtype=torch.float64), leaves(dtype=torch.float64)
    for x, needed in zip(inputs, needs, strict=True):
        x.requires_grad_(bool(needed))
    LOSSES[name](*inputs, tile=8, cache_bytes=cache_bytes).backward()
    LOSSES[name](*full, backend="dense").backward()
    for x, reference_x, needed in zip(inputs, full, needs, strict=True):
        if needed:
            torch.testing.assert_close(x.grad, reference_x.grad)
        else:
            assert x.grad is None


@pytest.mark.parametrize("grad_mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", LOSSES)
def test_without_gradients(name: str, grad_mode: Any) -> None:
    inputs = leaves()
    expected = LOSSES[name](*inputs)
    assert expected.requires_grad
    with grad_mode():
        got = LOSSES[name](*inputs, cache_bytes=1 << 20)
    assert not got.requires_grad and torch.equal(got, expected)


def test_plain_tensors_need_no_gradient() -> None:
    q, k, s = (x.detach() for x in leaves())
    assert not ct.clip_loss(q, k, s).requires_grad
    row_lse, col_lse = ct.pair_lse(q, k, 2.0)
    assert not row_lse.requires_grad and not col_lse.requires_grad


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_rounds_nothing(name: str) -> None:
    plain, cast = leaves(), leaves()
    expected = value_and_grads(LOSSES[name], *plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (cast[0] @ cast[1].T).dtype == torch.bfloat16  # autocast is on
        got = value_and_grads(LOSSES[name], *cast)
        assert torch.is_autocast_enabled("cpu")
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_loss_may_be_changed_in_place() -> None:
    for reduction in ("mean", "none"):
        inputs, expected = leaves(), leaves()
        loss = ct.clip_loss(*inputs, reduction=reduction)
        loss /= 2
        loss.sum().backward()
        (ct.clip_loss(*expected, reduction=reduction).sum() / 2).backward()
        for x, y in zip(inputs, expected, strict=True):
            torch.testing.assert_close(x.grad, y.grad)


def test_log_sum_exps_may_be_changed_in_place() -> None:
    q, k, s = leaves()
    for key in (k, None):
        row_lse, col_lse = ct.pair_lse(q, key, s)
        expected = torch.autograd.grad((row_lse * 3).sum() + col_lse.sum(), q)
        row_lse, col_lse = ct.pair_lse(q, key, s)
        before = col_lse.detach().clone()
        row_lse *= 3
        assert torch.equal(col_lse, before)
        torch.testing.assert_close(torch.autograd.grad(row_lse.sum() + col_lse.sum(), q), expected)


def test_features_changed_after_the_loss_are_noticed() -> None:
    for changed in range(3):
        inputs = [x * 1 for x in leaves()]
        loss = ct.clip_loss(*inputs)
        inputs[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("cache_bytes", [0, 500, 1 << 20])
@pytest.mark.parametrize("name", LOSSES)
def test_second_backward_repeats_the_first(name: str, cache_bytes: int) -> None:
    inputs = leaves()
    loss = LOSSES[name](*inputs, tile=8, cache_bytes=cache_bytes)
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_views_of_one_tensor() -> None:
    """Both sides are views of one leaf: its gradient is the sum of both."""
    both = randn(N, 2 * D, seed=1, dtype=torch.float64).requires_grad_()
    grads: list[Tensor] = []
    for loss in (ct.clip_loss, reference.clip_loss):
        image, text = both.view(N, 2, D).unbind(1)
        grads += torch.autograd.grad(loss(nn.functional.normalize(image), text, 3.0), both)
    torch.testing.assert_close(*grads)


def test_the_same_tensor_on_both_sides() -> None:
    x = randn(N, D, seed=1, dtype=torch.float64).requires_grad_()
    torch.testing.assert_close(
        torch.autograd.grad(ct.clip_loss(x, x, 3.0, tile=8), x), torch.autograd.grad(reference.clip_loss(x, x, 3.0), x)
    )


# --- modules ------------------------------------------------------------------------------------------------------


def test_modules_call_the_functions() -> None:
    q, k, s = leaves()
    assert torch.equal(ct.ClipLoss()(q, k, s), ct.clip_loss(q, k, s))
    assert torch.equal(ct.ClipLoss(reduction="none", tile=8)(q, k, s), ct.clip_loss(q, k, s, reduction="none", tile=8))
    assert torch.equal(ct.InfoNCE()(q, k), ct.info_nce(q, k))
    assert torch.equal(ct.InfoNCE(8.0, tile=8)(q, k, labels=LABELS), ct.info_nce(q, k, 8.0, labels=LABELS, tile=8))
    assert torch.equal(ct.InfoNCE(8.0)(q, k, s * 2), ct.info_nce(q, k, s * 2))


def test_modules_take_open_clips_call() -> None:
    q, k, s = leaves()
    for module in (ct.ClipLoss(), ct.InfoNCE()):
        named = module(q, k, s, output_dict=True)
        assert set(named) == {"contrastive_loss"} and torch.equal(named["contrastive_loss"], module(q, k, s))
    got = ct.ClipLoss()(image_features=q, text_features=k, logit_scale=s)
    assert torch.equal(got, ct.clip_loss(q, k, s))


@pytest.mark.parametrize("module", [ct.ClipLoss(tile=64, reduction="sum"), ct.InfoNCE(20.0, tile=64, cache_bytes=5)])
def test_modules_are_plain_values(module: nn.Module) -> None:
    assert "tile=64" in repr(module) and not module.state_dict() and not list(module.parameters())
    q, k, _ = leaves()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert repr(twin) == repr(module) and torch.equal(twin(q, k), module(q, k))


def test_repr_shows_what_was_given() -> None:
    assert repr(ct.InfoNCE(20.0, reduction="none")) == "InfoNCE(scale=20.0, reduction='none')"
    assert repr(ct.ClipLoss(group=None, tile=64)) == "ClipLoss(group=None, tile=64)"


@pytest.mark.parametrize("module", [ct.ClipLoss, ct.InfoNCE, ct.NTXent, ct.SupCon, ct.SigLipLoss])
def test_modules_refuse_unknown_keywords(module: Callable[..., nn.Module]) -> None:
    with pytest.raises(
        TypeError, match=r"expected keywords among .*cache_bytes, precision, ring, got colour=0.1. Drop it"
    ):
        module(colour=0.1)


# --- imports ------------------------------------------------------------------------------------------------------


def test_import_is_lazy() -> None:
    optional = (
        "tyro rich matplotlib triton open_clip torchvision sentence_transformers pykeops info_nce inf_cl accelerate "
        "transformers tokenizers safetensors tensorboard timm PIL psutil "
        "datasets webdataset resvg_py"
    ).split()
    code = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"
        "import contratile\n"
        f"print(*({{name.split('.')[0] for name in set(sys.modules) - before}} & set({optional!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_loaded_modules_are_never_replaced() -> None:
    """`sys.modules` belongs to Python: the package looks packages up there and changes nothing."""
    root = Path(ct.__file__).parent
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            changed = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_modules(node.value)
            called = isinstance(node, ast.Attribute) and node.attr != "get" and _is_modules(node.value)
            assert not (changed or called), f"{path}:{getattr(node, 'lineno', 0)} changes sys.modules"


def _is_modules(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "modules" and ast.unparse(node) == "sys.modules"


def _layers() -> list[str]:
    """The list in CONTRIBUTING.md: the first word of each line."""
    page = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = page.split("## Layers")[1].split("```text\n")[1].split("```")[0]
    return [line.split()[0] for line in block.splitlines()]


ORDER = _layers()


def test_every_layer_exists() -> None:
    root = Path(ct.__file__).parent
    here = {path.stem for path in root.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert sorted(ORDER) == sorted(here - {"__init__"})


def test_imports_point_upward() -> None:
    """A module imports only what stands above it in the layout; within a package, what it likes of the package."""
    root = Path(ct.__file__).parent
    seen = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts == ("__init__",):
            continue
        seen.add(parts[0])
        assert parts[0] in ORDER, f"{path} has no place in the layout"
        for imported in _imports(ast.parse(path.read_text()), parts):
            place = ORDER.index(imported)
            assert place < ORDER.index(parts[0]) or (imported == parts[0] and len(parts) > 1), f"{path}: {imported}"
    assert {"ring", "engine", "losses"} <= seen


def _imports(tree: ast.AST, parts: tuple[str, ...]) -> set[str]:
    """The modules of the package that a file imports, by the name just below the package."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(["contratile", *parts[: len(parts) - node.level], *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("contratile.")}
    # What the package itself exports comes from rooms up to grad_cache and metrics.
    return {name if name in ORDER else "grad_cache" for name in found - {"__version__"}}
