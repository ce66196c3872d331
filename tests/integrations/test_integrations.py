"""The integrations against the packages whose calls they take: values, gradients, trainers, refusals."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import copy
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import contratile as ct
from contratile.integrations import inf_cl, lightly, listed_pairs, open_clip
from contratile.integrations import pytorch_metric_learning as pml
from tests.helpers import features, labels_of, randn
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

N, D = 24, 12


@pytest.fixture(scope="module", autouse=True)
def _torchvision() -> None:
    repair_torchvision()


def leaves(*, scale: float = 14.3, n: int = N, d: int = D) -> list[Tensor]:
    image, text = (features(n, d, seed=seed) for seed in (1, 2))
    return [x.requires_grad_() for x in (image, text, torch.tensor(scale), torch.tensor(-4.0))]


def value_and_grads(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs, materialize_grads=True)]


def same(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    torch.testing.assert_close(
        value_and_grads(ours, list(inputs)), value_and_grads(theirs, list(inputs)), rtol=1e-4, atol=1e-6
    )


def on_rank(x: Tensor) -> Tensor:
    """This rank's rows, a leaf."""
    return x.detach().chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


def rank_mean(x: Tensor) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x)
    return x / dist.get_world_size()


# --- open_clip ----------------------------------------------------------------------------------------------------


def test_open_clip_on_one_process() -> None:
    from open_clip import loss as theirs

    image, text, scale, bias = leaves()
    same(open_clip.ClipLoss()(image, text, scale), theirs.ClipLoss()(image, text, scale), image, text, scale)
    for logit_bias in (bias, bias.detach().reshape(1).requires_grad_()):
        inputs = image, text, scale, logit_bias
        same(open_clip.ClipLoss()(*inputs), theirs.ClipLoss()(*inputs), *inputs)  # a bias cancels out
        for dist_impl in (None, *open_clip.DIST_IMPL):
            ours = open_clip.SigLipLoss(dist_impl=dist_impl)(*inputs, output_dict=True)
            loss = theirs.SigLipLoss(dist_impl=dist_impl)(*inputs, output_dict=True)
            assert set(ours) == set(loss) == {"contrastive_loss"}
            same(ours["contrastive_loss"], loss["contrastive_loss"], *inputs)
    assert set(open_clip.ClipLoss()(image, text, scale, output_dict=True)) == {"contrastive_loss"}


def test_open_clip_bias_that_is_a_number() -> None:
    from open_clip.loss import ClipLoss

    image, text, scale, _ = leaves()
    same(open_clip.ClipLoss()(image, text, scale, -3.0), ClipLoss()(image, text, scale, -3.0), image, text, scale)


def test_open_clips_chunk_size_changes_nothing() -> None:
    image, text = features(8, 4, seed=1), features(8, 4, seed=2)
    whole = open_clip.SigLipLoss()(image, text, 10.0, -4.0)
    assert open_clip.SigLipLoss(chunk_size=3)(image, text, 10.0, -4.0) == whole
    with pytest.raises(ValueError, match="chunk_size: expected"):
        open_clip.SigLipLoss(chunk_size=-1)


def test_open_clip_towers_of_different_dtype() -> None:
    image, text, scale, _ = leaves()
    loss = open_clip.ClipLoss()(image.bfloat16(), text, scale)
    torch.testing.assert_close(loss, ct.clip_loss(image.bfloat16().float(), text, scale))
    loss = open_clip.SigLipLoss()(image.bfloat16(), text, scale, -4.0)
    torch.testing.assert_close(loss, ct.siglip_loss(image.bfloat16().float(), text, scale, -4.0))


def test_open_clip_bias_has_a_gradient() -> None:
    """DDP waits for the gradient of every parameter, also of one that the loss does not depend on."""
    *inputs, bias = leaves()
    assert torch.autograd.grad(open_clip.ClipLoss()(*inputs, bias), bias)[0] == 0


def teacher_of(n: int) -> list[Tensor]:
    return [*(features(n, 2 * D, seed=seed) for seed in (3, 4)), torch.tensor(20.0)]


def test_open_clip_distillation() -> None:
    from open_clip import loss as theirs

    image, text, scale, _ = leaves()
    teacher = teacher_of(N)
    ours = open_clip.DistillClipLoss()(image, text, scale, *teacher)
    want = theirs.DistillClipLoss()(image, text, scale, *teacher)
    torch.testing.assert_close(ours, want)
    same(ours[0] + 2 * ours[1], want[0] + 2 * want[1], image, text, scale)
    named = open_clip.DistillClipLoss()(image, text, scale, *teacher, output_dict=True)
    assert list(named) == ["contrastive_loss", "distill_loss"]
    learned = [x.clone().requires_grad_() for x in teacher]  # constants, also where they need a gradient
    assert open_clip.DistillClipLoss()(image.double(), text.double(), scale, *learned)[1].dtype == torch.float64
    assert open_clip.DistillClipLoss()(image, text, scale, *(x.double() for x in teacher))[1].dtype == torch.float32
    made = open_clip.create_loss(arguments(distill=True, gather_with_grad=True))
    assert isinstance(made, open_clip.DistillClipLoss) and made.gather_with_grad


def test_open_clip_captions() -> None:
    from open_clip import loss as theirs

    image, text, scale, _ = leaves()
    logits = torch.randn(N, 5, 30, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = torch.randint(30, (N, 5), generator=torch.Generator().manual_seed(2))
    for weights in ((2.0, 1.0), (0.5, 0.0)):
        ours, want = (
            package.CoCaLoss(*weights, pad_id=3)(image, text, logits, tokens, scale) for package in (open_clip, theirs)
        )
        same(sum(ours), sum(want), image, text, scale, logits)
    made = open_clip.create_loss(
        arguments(model="coca_ViT-B-32", coca_caption_loss_weight=2.0, coca_contrastive_loss_weight=1.0)
    )
    named = made(image, text, logits, tokens, scale, output_dict=True)
    assert isinstance(made, open_clip.CoCaLoss) and list(named) == ["contrastive_loss", "caption_loss"]


def open_clip_losses() -> Any:
    """The file of open_clip's losses without the rest of the package, which takes a rank several seconds to import."""
    package = find_spec("open_clip")
    assert package is not None and package.origin is not None
    spec = spec_from_file_location("open_clip_loss_file", Path(package.origin).with_name("loss.py"))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def open_clip_clip(local_loss: bool, gather_with_grad: bool) -> None:
    ClipLoss = open_clip_losses().ClipLoss
    whole = leaves(n=6 * N)
    image, text = map(on_rank, whole[:2])
    world = dist.get_world_size()
    options = local_loss, gather_with_grad, False, dist.get_rank(), world
    theirs, ours = (
        value_and_grads(loss(*options)(image, text, whole[2]), [image, text, whole[2]])
        for loss in (ClipLoss, open_clip.ClipLoss)
    )
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(rank_mean(ours[3]), rank_mean(theirs[3]), rtol=1e-4, atol=1e-6)
    if not local_loss or gather_with_grad:  # else theirs lacks the gradient through the others' losses
        factor = 1 if gather_with_grad else world
        torch.testing.assert_close(ours[1:3], [factor * x for x in theirs[1:3]], rtol=1e-4, atol=1e-6)
    value, *grads = value_and_grads(ct.clip_loss(*whole[:3], group=None), whole[:2])
    torch.testing.assert_close(rank_mean(ours[0]), value)
    torch.testing.assert_close([x / world for x in ours[1:3]], list(map(on_rank, grads)), rtol=1e-4, atol=1e-6)


def open_clip_siglip(dist_impl: str) -> None:
    SigLipLoss = open_clip_losses().SigLipLoss
    whole = leaves(n=6 * N)
    image, text = map(on_rank, whole[:2])
    inputs = [image, text, *whole[2:]]
    options: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "dist_impl": dist_impl}
    theirs, ours = (value_and_grads(loss(**options)(*inputs), inputs) for loss in (SigLipLoss, open_clip.SigLipLoss))
    torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(*([rank_mean(x) for x in y[3:]] for y in (ours, theirs)), rtol=1e-4, atol=1e-5)


def open_clip_distill(local_loss: bool) -> None:
    theirs, n = open_clip_losses(), 6 * N
    whole, teacher = leaves(n=n), teacher_of(n)
    inputs = [*map(on_rank, whole[:2]), whole[2]]
    seen = [*(on_rank(x).detach() for x in teacher[:2]), teacher[2]]
    options = local_loss, True, False, dist.get_rank(), dist.get_world_size()
    for term in range(2):
        want, got = (
            value_and_grads(package.DistillClipLoss(*options)(*inputs, *seen)[term], inputs)
            for package in (theirs, open_clip)
        )
        torch.testing.assert_close(got[:3], want[:3], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(rank_mean(got[3]), rank_mean(want[3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_open_clip_on_ranks(world: int) -> None:
    for local_loss in (False, True):
        for gather_with_grad in (False, True):
            pool(world).run(open_clip_clip, local_loss, gather_with_grad)
        pool(world).run(open_clip_distill, local_loss)
    for dist_impl in ("bidir", "gather"):
        pool(world).run(open_clip_siglip, dist_impl)


def open_clip_alone_in_a_group() -> None:
    image, text, scale, _ = leaves(n=N + dist.get_rank())
    torch.testing.assert_close(open_clip.ClipLoss()(image, text, scale), ct.clip_loss(image, text, scale, group=None))
    with pytest.raises(ValueError, match="world_size: expected the 2 of the process group, got 3"):
        open_clip.ClipLoss(world_size=3)(image, text, scale)


def test_open_clip_world_size_decides() -> None:
    pool(2).run(open_clip_alone_in_a_group)
    image, text, scale, _ = leaves()
    with pytest.raises(ValueError, match=r"expected the 1 of the process group, got 2\. Call torch"):
        open_clip.ClipLoss(world_size=2)(image, text, scale)


def tiny_clip(*, siglip: bool) -> nn.Module:
    from open_clip import CLIP

    torch.manual_seed(0)
    vision = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"context_length": 6, "vocab_size": 40, "width": 16, "heads": 2, "layers": 1}
    bias = {"init_logit_bias": -4.0} if siglip else {}
    return CLIP(embed_dim=8, vision_cfg=vision, text_cfg=text, output_dict=True, **bias)  # type: ignore[no-any-return]


def arguments(**changed: Any) -> SimpleNamespace:
    """The command line of open_clip's trainer, as far as it is read here."""
    known: dict[str, Any] = dict(  # noqa: C408  # names as on the command line
        device="cpu", precision="fp32", distill=False, horovod=False, skip_scheduler=True, grad_clip_norm=None,
        accum_freq=1, batch_size=8, log_every_n_steps=1, wandb=False, rank=0, local_rank=0, world_size=1,
        log_local=False, local_loss=False, gather_with_grad=False, siglip=False, loss_dist_impl=None, model="ViT-B-32",
    )  # fmt: skip
    return SimpleNamespace(**{**known, **changed})


class Loader(list[Any]):
    """Batches with the two numbers that the trainer asks of its loader."""

    @property
    def num_batches(self) -> int:
        return len(self)

    @property
    def num_samples(self) -> int:
        return sum(len(images) for images, _ in self)


def epoch(args: SimpleNamespace, loss: nn.Module, *, world: int = 1) -> dict[str, Tensor]:
    """One optimiser step by open_clip's own `train_one_epoch`; the gradients that it used."""
    from open_clip_train.train import train_one_epoch

    model = tiny_clip(siglip=args.siglip)
    images = randn(24, 3, 16, 16, seed=1)
    texts = labels_of(24 * 6, 39, seed=2).view(24, 6)
    mine = [x.chunk(world)[args.rank] for x in (images, texts)]
    loader = Loader(zip(*(x.chunk(args.accum_freq) for x in mine), strict=True))
    data = {"train": SimpleNamespace(set_epoch=lambda number: None, dataloader=loader)}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    train_one_epoch(wrapped, data, loss, 0, optimiser, None, None, None, args)
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_same_gradients(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
def test_open_clip_trainer(siglip: bool) -> None:
    """With `--accum-freq 3` as with one batch. The trainer runs the scale through every one of the three losses."""
    from open_clip import create_loss

    whole = epoch(arguments(siglip=siglip), open_clip.create_loss(arguments(siglip=siglip)))
    assert_same_gradients(whole, epoch(arguments(siglip=siglip), create_loss(arguments(siglip=siglip))))
    args = arguments(siglip=siglip, accum_freq=3)
    parts = epoch(args, open_clip.create_loss(args))
    assert_same_gradients(parts, epoch(args, create_loss(args)))
    assert {"logit_scale", "visual.proj", "text_projection"} <= set(parts)
    for name, grad in parts.items():
        times = 3 if name in ("logit_scale", "logit_bias") else 1
        torch.testing.assert_close(grad, times * whole[name], rtol=1e-3, atol=1e-6, msg=name)


def open_clip_trainer_on_ranks(accum_freq: int) -> dict[str, Tensor]:
    repair_torchvision()
    from open_clip import create_loss

    world = dist.get_world_size()
    args = arguments(rank=dist.get_rank(), world_size=world, accum_freq=accum_freq, gather_with_grad=True)
    ours, theirs = epoch(args, open_clip.create_loss(args), world=world), epoch(args, create_loss(args), world=world)
    assert_same_gradients(ours, theirs)
    return ours


def test_open_clip_trainer_under_ddp() -> None:
    """One step over two ranks, in one go and accumulated, is the step of one process with the whole batch."""
    args = arguments()
    whole = epoch(args, open_clip.create_loss(args))
    for accum_freq in (1, 3):
        for grads in pool(2).run(open_clip_trainer_on_ranks, accum_freq):
            grads["logit_scale"] /= accum_freq
            assert_same_gradients(grads, whole)


def test_open_clip_refusals() -> None:
    with pytest.raises(ValueError, match=r"use_horovod: expected False, got True\. Start the ranks"):
        open_clip.ClipLoss(use_horovod=True)
    with pytest.raises(ValueError, match="dist_impl: expected one of 'bidir', 'shift', 'reduce', 'gather', got 'tree'"):
        open_clip.SigLipLoss(dist_impl="tree")
    with pytest.raises(ValueError, match="use_horovod"):
        open_clip.create_loss(arguments(horovod=True))


def test_open_clip_attributes() -> None:
    """Those of open_clip's losses, but for their caches of labels; what cannot be honoured is refused when set."""
    from open_clip import loss as theirs

    clip = {"local_loss": True, "gather_with_grad": True, "cache_labels": True, "rank": 0, "world_size": 1}
    siglip = {"cache_labels": True, "rank": 0, "world_size": 1, "dist_impl": "gather"}
    for name, options in (("ClipLoss", {}), ("ClipLoss", clip), ("SigLipLoss", {}), ("SigLipLoss", siglip)):
        ours, want = (getattr(package, name)(**options) for package in (open_clip, theirs))
        kept = {x for x in vars(want) if not x.startswith("_")} - {"labels", "prev_num_logits"}
        assert {x: getattr(ours, x) for x in kept} == {x: getattr(want, x) for x in kept}
    with pytest.raises(ValueError, match="use_horovod: expected False"):
        open_clip.ClipLoss().use_horovod = True
    with pytest.raises(ValueError, match="dist_impl: expected one of"):
        open_clip.SigLipLoss().dist_impl = "tree"
    made = open_clip.create_loss(arguments(gather_with_grad=True))
    assert made.cache_labels and made.gather_with_grad  # as open_clip's factory makes it


def test_open_clip_arguments_that_a_version_does_not_have() -> None:
    """Those of the next version have no horovod; a script of one's own may have only the ones that matter."""
    args = arguments()
    del args.horovod
    assert isinstance(open_clip.create_loss(args), open_clip.ClipLoss)
    args.siglip = True
    assert isinstance(open_clip.create_loss(args), open_clip.SigLipLoss)
    few = SimpleNamespace(rank=0, world_size=1, local_loss=False, gather_with_grad=True)
    assert isinstance(open_clip.create_loss(few), open_clip.ClipLoss)


def test_open_clip_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import open_clip_train.main as trainer

    monkeypatch.setattr(trainer, "create_loss", trainer.create_loss)  # and back
    open_clip.install(trainer)
    assert trainer.create_loss is open_clip.create_loss and "create_loss" in trainer.main.__code__.co_names


NEXT = """
def create_task(args, model): ...
def main(args):
    return create_task(args, None)
"""


def test_open_clip_install_fails_loudly_where_it_would_do_nothing() -> None:
    trainer = ModuleType("open_clip_train.main")
    exec(NEXT, trainer.__dict__)
    told = (
        r"trainer: expected a module whose main\(\) calls create_loss, got open_clip_train.main, which has create_task"
    )
    with pytest.raises(ValueError, match=rf"{told}.*CLIPTask\(model, loss=ClipLoss\(") as caught:
        open_clip.install(trainer)
    assert not hasattr(trainer, "create_loss") and "contratile.integrations.open_clip" in str(caught.value)
    trainer.create_loss = None  # type: ignore[attr-defined]  # imported there, and not called
    with pytest.raises(ValueError, match="expected a module whose main"):
        open_clip.install(trainer)


class CLIPTask(nn.Module):
    """What open_clip's next version does with a loss, by its documented interface."""

    def __init__(self, model: nn.Module, *, loss: nn.Module) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, images: Tensor, texts: Tensor) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = self.loss(**self.model(images, texts), output_dict=True)
        losses["loss"] = torch.stack([value for name, value in losses.items() if name.endswith("_loss")]).sum()
        return losses


@pytest.mark.parametrize("siglip", [False, True], ids=["clip", "siglip"])
def test_open_clip_task(siglip: bool) -> None:
    from open_clip import create_loss

    args, grads = arguments(siglip=siglip), []
    for loss in (open_clip.create_loss(args), create_loss(args)):
        model = tiny_clip(siglip=siglip)
        CLIPTask(model, loss=loss)(randn(8, 3, 16, 16, seed=1), labels_of(48, 39, seed=2).view(8, 6))["loss"].backward()
        grads.append({name: x.grad for name, x in model.named_parameters() if x.grad is not None})
    assert grads[0]
    assert_same_gradients(*grads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_of_16_bits_are_fp32(dtype: torch.dtype) -> None:
    """As the documentation says, of ours and of theirs."""
    from lightly.loss import NTXentLoss
    from open_clip import loss as theirs

    image, text = (features(N, D, seed=seed, dtype=dtype) for seed in (1, 2))
    labels, scale, bias = LABELS["classes"], torch.tensor(5.0), torch.tensor(-1.0)
    pairs: list[tuple[Tensor, Tensor]] = [
        (open_clip.ClipLoss()(image, text, scale), theirs.ClipLoss()(image, text, scale)),
        (open_clip.SigLipLoss()(image, text, scale, bias), theirs.SigLipLoss()(image, text, scale, bias)),
        (lightly.NTXentLoss()(image, text), NTXentLoss()(image, text)),
        *((ours(0.5)(image, labels), want(0.5)(image, labels)) for ours, want in kinds()),
    ]
    for ours, want in pairs:
        assert ours.dtype == torch.float32 and want.dtype == dtype
        torch.testing.assert_close(ours, want.float(), rtol=0.05, atol=0.05)


# --- the paper's package ------------------------------------------------------------------------------------------


def inf_cl_ring(n: int) -> None:
    import inf_cl as package

    whole = leaves(n=n * dist.get_world_size(), d=32)
    query, key = map(on_rank, whole[:2])
    scale, world = whole[2], dist.get_world_size()
    labels = labels_of(n, n, seed=dist.get_rank())
    for options in ({}, {"labels": labels}, {"scale": scale}, {"labels": labels, "scale": scale}):
        inputs = [query, key, *([scale] if "scale" in options else [])]
        theirs = value_and_grads(package.cal_ring_loss(query, key, head_dim=16, **options), inputs)
        if "scale" in options:
            theirs[3] = theirs[3] / world  # the sum over ranks there, which DDP would average
        for function in (inf_cl.cal_ring_loss, inf_cl.cal_inf_loss):
            ours = value_and_grads(function(query, key, head_dim=16, **options), inputs)
            torch.testing.assert_close(ours[:3], theirs[:3], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(*([rank_mean(x) for x in y[3:]] for y in (ours, theirs)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_inf_cl_ring(world: int) -> None:
    pool(world).run(inf_cl_ring, 20)


KERNELS = """
import torch, triton
triton.language.inline_asm_elementwise = lambda asm, constraints, args, **keywords: args[0]
import inf_cl
from contratile.integrations import inf_cl as ours

torch.manual_seed(0)
q, k = (torch.nn.functional.normalize(torch.randn(64, 256)).requires_grad_() for _ in range(2))
scale, labels = torch.tensor(14.3, requires_grad=True), torch.randperm(64)
upstream = torch.randn(64)
found = []
for module in (ours, inf_cl):
    rows = module.cal_flash_loss(q, k, labels, scale)
    found.append([rows.detach(), *torch.autograd.grad((rows * upstream).sum(), (q, k, scale))])
torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
with torch.no_grad():  # without a process group the others are the mean of the same
    torch.testing.assert_close(ours.cal_inf_loss(q, k, labels), inf_cl.cal_inf_loss(q, k, labels))
print("same")
"""


def test_inf_cl_kernels() -> None:
    """The package's kernels, interpreted, in one process."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["same"], done.stdout + done.stderr


def dense(query: Tensor, key: Tensor, labels: Tensor, scale: Tensor | float) -> Tensor:
    return nn.functional.cross_entropy(scale * query @ key.T, labels, reduction="none")


@pytest.mark.parametrize("d", [3, 12, 300])
def test_inf_cl_on_one_process(d: int) -> None:
    """Any width, rows that are not contiguous, no process group; `cal_flash_loss` has one value per row."""
    image, text, scale, _ = leaves(d=2 * d)
    query, key = image[:, ::2], text[:, 1::2]
    labels = labels_of(N, N, seed=3)
    same(inf_cl.cal_flash_loss(query, key).sum(), dense(query, key, torch.arange(N), 1).sum(), image, text)
    rows = inf_cl.cal_flash_loss(query, key, labels, scale)
    torch.testing.assert_close(rows, dense(query, key, labels, scale), rtol=1e-4, atol=1e-5)
    for function in (inf_cl.cal_ring_loss, inf_cl.cal_inf_loss):
        same(function(query, key, labels, scale), dense(query, key, labels, scale).mean(), image, text, scale)


def test_inf_cl_has_the_signatures_of_the_package() -> None:
    import inspect

    package = pytest.importorskip("inf_cl")
    for name in ("cal_inf_loss", "cal_ring_loss", "cal_flash_loss"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (inf_cl, package))
        assert [(x.name, x.default) for x in ours.values()] == [(x.name, x.default) for x in theirs.values()]


# --- lightly ------------------------------------------------------------------------------------------------------


def views(n: int = N, d: int = D, *, seed: int = 0) -> list[Tensor]:
    """Not normalised: the package does it."""
    return [(3 * randn(n, d, seed=seed + i)).requires_grad_() for i in (1, 2)]


def test_lightly() -> None:
    from lightly.loss import NTXentLoss

    for options in ({}, {"temperature": 0.1}, {"gather_distributed": True}):
        out = views()
        same(lightly.NTXentLoss(**options)(*out), NTXentLoss(**options)(*out), *out)


def lightly_on_ranks(gather: bool, size: int | tuple[int, int]) -> None:
    repair_torchvision()
    from lightly.loss import NTXentLoss

    losses = []
    for kind in (lightly.NTXentLoss, NTXentLoss):
        torch.manual_seed(dist.get_rank())
        losses.append(kind(0.2, size, gather))
    for batch in range(3):
        out = views(seed=10 * dist.get_rank() + 100 * batch)
        same(losses[0](*out), losses[1](*out), *out)


@pytest.mark.parametrize("size", [0, (100, D)], ids=["batch", "memory bank"])
@pytest.mark.parametrize("gather", [False, True])
def test_lightly_on_ranks(gather: bool, size: int | tuple[int, int]) -> None:
    pool(2).run(lightly_on_ranks, gather, size)


def test_lightly_memory_bank() -> None:
    """Batches that do and do not fit before the end of the bank; none is stored where no gradient is wanted."""
    from lightly.loss import NTXentLoss

    losses: list[Any] = []
    for kind in (lightly.NTXentLoss, NTXentLoss):
        torch.manual_seed(0)
        losses.append(kind(temperature=0.2, memory_bank_size=(40, D)))
    ours, theirs = losses
    for batch, n in enumerate((24, 10, 24, 60, 16, 24)):
        out = views(n, seed=10 * batch)
        same(ours(*out), theirs(*out), *out)
        assert torch.equal(ours.memory_bank.bank, theirs.memory_bank.bank)
        with torch.no_grad():
            torch.testing.assert_close(ours(*out), theirs(*out))
    assert not ours.state_dict()


def test_lightly_refusals() -> None:
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="temperature: expected at least 1e-8"):
            lightly.NTXentLoss(temperature=temperature)
    for size in (4096, (), (10,), (10, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"memory_bank_size: expected \(number of keys, features\), got"):
            lightly.NTXentLoss(memory_bank_size=size)
    loss: Any = lightly.NTXentLoss(memory_bank_size=(10, D))
    with pytest.raises(ValueError, match="temperature: expected at least 1e-8, got 0"):
        loss.temperature = 0.0
    told = r"cross_entropy: expected a plain nn.CrossEntropyLoss\(\), got CrossEntropyLoss with .*0.1.*info_nce"
    with pytest.raises(ValueError, match=told):
        loss.cross_entropy = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert loss.temperature == 0.5 and loss.eps == 1e-8 and loss.cross_entropy.reduction == "mean"
    loss.cross_entropy.label_smoothing = 0.1
    with pytest.raises(ValueError, match=told):
        loss(*views())
    loss.cross_entropy.label_smoothing = 0.0
    bank = loss.memory_bank.bank.clone()
    for shapes, told in (
        (((4, D), (3, D)), "out0 and out1: expected equally many rows, got 4 and 3"),
        (((4, D + 1), (4, D + 1)), f"out0 and memory bank: expected one number of features D, got {D + 1} and {D}"),
    ):
        with pytest.raises(ValueError, match=told):
            loss(*(torch.ones(shape, requires_grad=True) for shape in shapes))
    assert torch.equal(loss.memory_bank.bank, bank) and loss.memory_bank.place == 0


def test_lightly_memory_bank_of_half_precision() -> None:
    """The bank stays fp32, the keys are compared in the dtype of the views."""
    loss: Any = lightly.NTXentLoss(temperature=0.2, memory_bank_size=(40, D))
    bank = loss.memory_bank.bank.clone()
    out0, out1 = (x.detach().bfloat16() for x in views())
    negatives, _ = ct.pair_lse(nn.functional.normalize(out0), bank.bfloat16(), 5.0, cols=False)
    positive = (nn.functional.normalize(out0) * nn.functional.normalize(out1)).sum(1).float() * 5
    torch.testing.assert_close(loss(out0, out1), nn.functional.softplus(negatives - positive).mean())


# --- pytorch-metric-learning --------------------------------------------------------------------------------------

LABELS = {
    "two views": torch.arange(12).repeat(2),
    "classes": labels_of(N, 5, seed=1),
    "some alone": labels_of(N, 20, seed=2),
    "all alone": torch.arange(N),
    "one class": torch.zeros(N, dtype=torch.long),
    "negative numbers": labels_of(N, 4, seed=3) - 2,
}


def kinds() -> list[tuple[Callable[..., nn.Module], Callable[..., nn.Module]]]:
    from pytorch_metric_learning import losses

    return [(pml.NTXentLoss, losses.NTXentLoss), (pml.SupConLoss, losses.SupConLoss)]


@pytest.mark.parametrize("name", LABELS)
def test_metric_learning(name: str) -> None:
    embeddings, _ = views()
    for ours, theirs in kinds():
        for options in ({}, {"temperature": 0.5}):
            labels = LABELS[name]
            same(ours(**options)(embeddings, labels), theirs(**options)(embeddings, labels), embeddings)


@pytest.mark.parametrize("name", LABELS)
def test_metric_learning_with_references(name: str) -> None:
    embeddings, ref = views()[0], views(31, seed=5)[0]
    for ref_labels in (labels_of(31, 6, seed=4), torch.zeros(31, dtype=torch.long)):
        for ours, theirs in kinds():
            arguments = {"labels": LABELS[name], "ref_emb": ref, "ref_labels": ref_labels}
            same(ours()(embeddings, **arguments), theirs()(embeddings, **arguments), embeddings, ref)


FLOATS = {
    "floats": torch.tensor([0.5, 0.25, -1.5, 2.0]).repeat(6),
    "bools": torch.arange(N) % 3 == 0,
    "far apart": torch.tensor([1e30, -1e30, 0.0, -0.0, float("inf"), -float("inf")]).repeat(4),
    "close": torch.tensor([2.0**53, 2.0**53 - 1, 2.0**24 + 1, 2.0**24], dtype=torch.float64).repeat(6),
    "16 bits": torch.tensor([0.1, 0.2, 0.3], dtype=torch.bfloat16).repeat(8),
    "bytes": (torch.arange(N) % 5).to(torch.uint8),
}


@pytest.mark.parametrize("name", FLOATS)
def test_metric_learning_labels_are_compared(name: str) -> None:
    """Any dtype that can be, as in the package; labels and references of two dtypes as PyTorch compares them."""
    embeddings, ref = views()[0], views(4, seed=5)[0]
    labels = FLOATS[name]
    for ours, theirs in kinds():
        same(ours()(embeddings, labels), theirs()(embeddings, labels), embeddings)
        for other in (labels[:4].clone(), torch.tensor([0, 1, 2**24, 2**24 + 1]), torch.tensor([0.5, 0, 1, 2**24])):
            given = {"ref_emb": ref, "ref_labels": other}
            same(ours()(embeddings, labels, **given), theirs()(embeddings, labels, **given), embeddings, ref)


@pytest.mark.parametrize("name", ["classes", "some alone"])
def test_metric_learning_with_a_learned_temperature(name: str) -> None:
    embeddings, ref = views()[0], views(31, seed=5)[0]
    temperature = nn.Parameter(torch.tensor(0.2))
    others = {"ref_emb": ref, "ref_labels": labels_of(31, 6, seed=4)}
    for ours, theirs in kinds():
        for more in ({}, others):
            losses = (kind(temperature=temperature)(embeddings, LABELS[name], **more) for kind in (ours, theirs))
            same(*losses, embeddings, temperature)


def test_metric_learning_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytorch_metric_learning.losses import NTXentLoss

    monkeypatch.setattr(pml._PairLosses, "CHUNK", 7 * D + 1)
    embeddings, _ = views()
    for labels in LABELS.values():
        same(pml.NTXentLoss()(embeddings, labels), NTXentLoss()(embeddings, labels), embeddings)


def test_metric_learning_chunks_are_of_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide embeddings come in fewer pairs at a time."""
    sizes: list[int] = []
    chunks = pml.Positives.chunks

    def spy(self: pml.Positives, size: int) -> Any:
        sizes.append(size)
        return chunks(self, size)

    monkeypatch.setattr(pml.Positives, "chunks", spy)
    for width in (16, 4096):
        pml.NTXentLoss()(randn(8, width, seed=1).requires_grad_(), torch.arange(8) // 2).backward()
    assert sizes == [pml._PairLosses.CHUNK // width for width in (16, 16, 4096, 4096)]


def test_metric_learning_self_supervised() -> None:
    from pytorch_metric_learning.losses import SelfSupervisedLoss

    out = views()
    for ours, theirs in kinds():
        for symmetric in (True, False):
            wrapped = (SelfSupervisedLoss(kind(), symmetric=symmetric)(*out) for kind in (ours, theirs))
            same(*wrapped, *out)


def test_metric_learning_with_miners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs and triplets, some of them several times, also against references, a few at a time."""
    from pytorch_metric_learning import miners

    monkeypatch.setattr(listed_pairs, "CHUNK", 7 * D + 1)
    embeddings, ref = views()[0], views(31, seed=5)[0]
    labels, ref_labels = LABELS["some alone"], labels_of(31, 6, seed=4)
    for miner in (miners.MultiSimilarityMiner(), miners.TripletMarginMiner(0.3)):
        mined = miner(embeddings, labels)
        across = miner(embeddings, labels, ref, ref_labels)
        nothing = tuple(x[:0] for x in mined)
        for ours, theirs in kinds():
            same(ours()(embeddings, labels, mined), theirs()(embeddings, labels, mined), embeddings)
            given = {"ref_emb": ref, "ref_labels": ref_labels}
            want = theirs()(embeddings, labels, across, **given)
            same(ours()(embeddings, labels, across, **given), want, embeddings, ref)
            assert ours()(embeddings, labels, nothing) == 0


def test_metric_learning_with_pairs_that_are_both() -> None:
    """The package's SupCon refuses them too; its NT-Xent takes both."""
    embeddings = views()[0]
    listed = (torch.tensor([0, 2]), torch.tensor([1, 3]), torch.tensor([0, 0]), torch.tensor([4, 1]))
    for kind, error in ((pml.SupConLoss, ValueError), (kinds()[1][1], AssertionError)):
        with pytest.raises(error, match=r"indices_tuple: expected positives or negatives|either be positive or neg"):
            kind()(embeddings, LABELS["classes"], listed)
    same(*(kind()(embeddings, LABELS["classes"], listed) for kind in kinds()[0]), embeddings)


def test_metric_learning_of_two_pairs() -> None:
    """One positive and one negative: the package's losses are 0, whatever the pairs are, unlike with one more."""
    embeddings, ref = views(3)[0], views(3, seed=5)[0]
    labels = torch.zeros(3, dtype=torch.long)
    for ours, theirs in kinds():
        for ref_labels in (torch.tensor([0, 1]), torch.tensor([0, 1, 1])):
            given = {"ref_emb": ref[: len(ref_labels)], "ref_labels": ref_labels}
            found = [kind()(embeddings[:1], labels[:1], **given) for kind in (ours, theirs)]
            if len(ref_labels) > 2:
                same(*found, embeddings)
            else:
                assert found[0] > 0 and found[1] == 0


def test_metric_learning_with_a_memory() -> None:
    from pytorch_metric_learning.losses import CrossBatchMemory

    for ours, theirs in kinds():
        memories = [CrossBatchMemory(kind(), D, memory_size=40) for kind in (ours, theirs)]
        for step in range(3):
            embeddings = views(seed=step)[0]
            same(*(memory(embeddings, labels_of(N, 5, seed=step)) for memory in memories), embeddings)


def wrapped_over_ranks(kind: str, efficient: bool, memory: bool) -> list[list[Tensor]]:
    """Values and gradients of ours and of theirs in the wrapper, which gathers all embeddings."""
    from pytorch_metric_learning import losses
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    found = []
    for module in (pml, losses):
        loss = getattr(module, kind)()
        if memory:
            loss = losses.CrossBatchMemory(loss, D, memory_size=60)
        wrapper, results = DistributedLossWrapper(loss, efficient=efficient), []
        for step in range(2):
            mine, labels = on_rank(features(N, D, seed=step)), on_rank(labels_of(N, 5, seed=step).float()).long()
            results += value_and_grads(wrapper(mine, labels), [mine])
        found.append(results)
    return found


@pytest.mark.parametrize("kind", ["NTXentLoss", "SupConLoss"])
@pytest.mark.parametrize(("efficient", "memory"), [(False, False), (True, False), (False, True)])
def test_metric_learning_over_ranks(kind: str, efficient: bool, memory: bool) -> None:
    for ours, theirs in pool(2).run(wrapped_over_ranks, kind, efficient, memory):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_metric_learning_modules_can_be_stored(tmp_path: Path) -> None:
    """Copies and pickles of a loss that is an instance of the package's base class, too."""
    from pytorch_metric_learning.losses import BaseMetricLossFunction

    embeddings, labels = views()[0], LABELS["classes"]
    for kind in (pml.NTXentLoss, pml.SupConLoss):
        loss = kind(temperature=nn.Parameter(torch.tensor(0.2)))
        torch.save(loss, tmp_path / "loss.pt")
        for other in (torch.load(tmp_path / "loss.pt", weights_only=False), copy.deepcopy(loss), type(loss)(0.2)):
            assert type(other) is type(loss) and isinstance(other, kind) and isinstance(other, BaseMetricLossFunction)
            assert repr(other) == repr(loss) or other.temperature == 0.2
            torch.testing.assert_close(other(embeddings, labels), loss(embeddings, labels))
        assert pickle.loads(pickle.dumps(type(loss)(0.3))).temperature == 0.3


def test_metric_learning_without_the_package() -> None:
    code = (
        "import sys, torch, pickle\n"
        "sys.modules['pytorch_metric_learning'] = None\n"
        "from contratile.integrations.pytorch_metric_learning import NTXentLoss\n"
        "loss = pickle.loads(pickle.dumps(NTXentLoss(0.2)))\n"
        "assert type(loss) is NTXentLoss\n"
        "print(float(loss(torch.eye(4), torch.tensor([0, 0, 1, 1]))))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(float(torch.tensor(2 + 1.0).log()))


def test_metric_learning_distances_and_reducers() -> None:
    from pytorch_metric_learning import distances, miners, reducers

    embeddings, labels = views()[0], LABELS["some alone"]
    mined = miners.MultiSimilarityMiner()(embeddings, labels)
    for distance in (distances.DotProductSimilarity(), distances.DotProductSimilarity(normalize_embeddings=True), None):
        for reducer in (reducers.MeanReducer(), reducers.SumReducer(), None):
            options = {"distance": distance, "reducer": reducer, "temperature": 0.5}
            for ours, theirs in kinds():
                for pairs in (None, mined):
                    arguments = embeddings, labels, pairs
                    same(ours(**options)(*arguments), theirs(**options)(*arguments), embeddings)


def test_metric_learning_refusals() -> None:
    from pytorch_metric_learning import distances, reducers, regularizers

    embeddings, ref = (x.detach() for x in views())
    labels = LABELS["classes"]
    for kind, _ in kinds():
        kind(reducer=None, collect_stats=False, distance=distances.CosineSimilarity(), embedding_reg_weight=2)
        kind(reducer=reducers.MeanReducer() if kind is pml.NTXentLoss else reducers.AvgNonZeroReducer())
        with pytest.raises(TypeError, match="unexpected keyword argument 'tempreature'"):
            kind(tempreature=None)
        for temperature in (0.0, -1.0):
            with pytest.raises(ValueError, match="temperature: expected a positive number"):
                kind(temperature=temperature)
        for options in (
            {"reducer": reducers.PerAnchorReducer()},
            {"distance": distances.LpDistance()},
            {"distance": distances.DotProductSimilarity(power=2)},
            {"distance": distances.CosineSimilarity(power=2)},
            {"distance": distances.CosineSimilarity(p=1)},
            {"embedding_regularizer": regularizers.LpRegularizer()},
            {"collect_stats": True},
        ):
            (name,) = options
            with pytest.raises(ValueError, match=rf"(?s){name}: expected the default, \w+.*, got .*. Drop {name}="):
                kind(**options)
            with pytest.raises(ValueError, match=f"{name}: expected the default"):
                setattr(kind(), name, options[name])  # as later as well
        with pytest.raises(ValueError, match=r"DotProductSimilarity\(\) with p=2 and power=1, got CosineSimilarity"):
            kind(distance=distances.CosineSimilarity(power=2))
        with pytest.raises(
            ValueError, match=r"reducer: expected the default, (AvgNonZeroReducer\(\) or )?MeanReducer\(\) or Sum"
        ):
            kind(reducer=reducers.PerAnchorReducer())
        loss: Any = kind()
        with pytest.raises(ValueError, match="temperature: expected a positive number, got 0"):
            loss.temperature = 0.0
        with pytest.raises(ValueError, match=r"labels: expected labels that can be compared, got NaN .* of its own"):
            loss(embeddings, labels * torch.tensor(float("nan")))
        with pytest.raises(ValueError, match=r"labels: expected shape \[24\]"):
            loss(embeddings, labels.float()[:5])
        for bad in ((labels,), 3, [[0], [1], [2]]):
            with pytest.raises(ValueError, match=r"indices_tuple: expected three or four tensors of indices, got"):
                loss(embeddings, labels, bad)
        for missing, given in (("labels", {}), ("ref_labels", {"labels": labels, "ref_emb": ref})):
            with pytest.raises(ValueError, match=f"{missing}: expected a tensor, got None"):
                loss(embeddings, **given)
        for name in ("labels", "ref_labels"):
            three: dict[str, Any] = {"labels": labels, "ref_emb": ref, "ref_labels": labels.clone()}
            with pytest.raises(TypeError, match=f"{name}: expected an integer tensor, got list"):
                loss(embeddings, **{**three, name: labels.tolist()})
        with pytest.raises(ValueError, match=r"ref_labels: expected another tensor .* pass ref_labels.clone\(\)"):
            loss(embeddings, labels, ref_emb=ref, ref_labels=labels)
        torch.testing.assert_close(
            loss(embeddings, labels, ref_emb=embeddings, ref_labels=labels), loss(embeddings, labels)
        )


# --- imports ------------------------------------------------------------------------------------------------------


def test_no_package_is_imported() -> None:
    ours = "open_clip inf_cl lightly pytorch_metric_learning".split()
    code = (
        "import sys, importlib\n"
        f"for name in {ours}: importlib.import_module('contratile.integrations.' + name)\n"
        f"print(*({{name.split('.')[0] for name in sys.modules}} & {set(ours) | {'torchvision', 'triton', 'timm'}}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
