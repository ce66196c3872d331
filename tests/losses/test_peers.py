"""The same numbers as the packages that people use today."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import contratile as ct
from tests.helpers import features, randn

pytestmark = pytest.mark.peers


def value_and_grads(loss: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.fixture(scope="module")
def torchvision_operators() -> torch.library.Library:
    """open_clip imports torchvision, whose CUDA build misses two operators on a machine without it."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


@pytest.mark.filterwarnings("ignore")
def test_open_clip(torchvision_operators: torch.library.Library) -> None:
    from open_clip.loss import ClipLoss

    inputs = [features(97, 40, seed=seed).requires_grad_() for seed in (1, 2)]
    scale = torch.tensor(14.3, requires_grad=True)
    for theirs, ours in ((ClipLoss(), ct.ClipLoss()), (ClipLoss(), ct.ClipLoss(tile=16, cache_bytes=10_000))):
        torch.testing.assert_close(
            value_and_grads(ours(*inputs, scale), *inputs, scale),
            value_and_grads(theirs(*inputs, scale), *inputs, scale),
        )
        named = theirs(*inputs, scale, output_dict=True)
        assert set(named) == set(ours(*inputs, scale, output_dict=True))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_info_nce_pytorch(reduction: str) -> None:
    """It normalises its features and takes a temperature."""
    from info_nce import InfoNCE

    query, key = (randn(61, 12, seed=seed).requires_grad_() for seed in (1, 2))
    theirs = InfoNCE(temperature=0.1, reduction=reduction)(query, key)
    normal = [torch.nn.functional.normalize(x, dim=1) for x in (query, key)]
    ours = ct.InfoNCE(10.0, reduction=reduction, tile=16)(*normal)  # type: ignore[arg-type]
    torch.testing.assert_close(value_and_grads(ours.sum(), query, key), value_and_grads(theirs.sum(), query, key))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_info_nce_pytorch_with_shared_negatives(reduction: str) -> None:
    """Its negatives are shared by all queries: with one query they are simply further keys."""
    from info_nce import InfoNCE

    query, positive, negatives = randn(1, 12, seed=1), randn(1, 12, seed=2), randn(40, 12, seed=3)
    theirs = InfoNCE(temperature=0.2, reduction=reduction, negative_mode="unpaired")(query, positive, negatives)
    query, keys = (torch.nn.functional.normalize(x, dim=1) for x in (query, torch.cat([positive, negatives])))
    ours = ct.InfoNCE(5.0, reduction=reduction)(query, keys)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs)


INF_CL = """
import sys, tempfile
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton

triton.language.inline_asm_elementwise = lambda asm, constraints, args, **keywords: args[0]

def pairs():
    torch.manual_seed(0)
    return [torch.nn.functional.normalize(torch.randn(128, 256)) for _ in range(2)], torch.tensor(14.3)

def both_ways(loss, image, text):
    return (loss(image, text) + loss(text, image)) / 2

def same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

def ours(image, text, scale):
    import contratile as ct
    inputs = [x.clone().requires_grad_() for x in (image, text, scale)]
    loss = ct.clip_loss(*inputs, group=None)
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]

def flash():
    from inf_cl import cal_flash_loss
    (image, text), scale = pairs()
    inputs = [x.clone().requires_grad_() for x in (image, text, scale)]
    loss = both_ways(lambda q, k: cal_flash_loss(q * inputs[2], k).mean(), *inputs[:2])
    same([loss.detach(), *torch.autograd.grad(loss, inputs)], ours(image, text, scale))

def ring(rank, store):
    from inf_cl import cal_ring_loss
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    (image, text), scale = pairs()
    mine = [x[64 * rank : 64 * rank + 64].clone().requires_grad_() for x in (image, text)]
    loss = both_ways(lambda q, k: cal_ring_loss(q * scale, k), *mine)
    grads = torch.autograd.grad(loss, mine)
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    value, *expected, _ = ours(image, text, scale)
    same(mean / 2, value)
    for grad, whole in zip(grads, expected):
        same(grad / 2, whole[64 * rank : 64 * rank + 64])  # of the sum over two ranks of the ranks' means
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1] == "flash":
        flash()
    else:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(ring, (folder + "/store",), nprocs=2, start_method="fork")
    print("same")
"""


@pytest.mark.parametrize("path", ["flash", "ring"])
def test_inf_cl(path: str) -> None:
    """The paper's package on the CPU: its kernels, interpreted, in one process, and its ring of two processes."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONOPTIMIZE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", INF_CL, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0 and done.stdout.split()[-1:] == ["same"], done.stdout + done.stderr
