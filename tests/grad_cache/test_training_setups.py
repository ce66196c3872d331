"""GradCache with adapters, 16-bit weights, checkpointing, compiled encoders and DeepSpeed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import contratile as ct
from contratile.grad_cache.lengths import ByLength
from tests.grad_cache.test_cache import clip
from tests.grad_cache.test_lengths import seen_shapes
from tests.grad_cache.test_ranks import mean_over_ranks
from tests.grad_cache.towers import ROUNDING, Tower, gap, gradients, padded, twins
from tests.ranks import pool
from tests.torchvision_repair import repair_torchvision

N = 23
PAIR = padded(N, 1), padded(N, 3)


def with_lora(tower: nn.Module) -> Any:
    repair_torchvision()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["linear1", "linear2", "out"], init_lora_weights=False)
    torch.manual_seed(7)
    return peft.get_peft_model(tower, config)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # of the package
@pytest.mark.parametrize("kept", [0, 3])
def test_lora(kept: int) -> None:
    """Only the adapters get gradients, those of the whole batch."""
    ours, theirs = (with_lora(Tower(1, dropout=0.0).double()) for _ in range(2))
    clip(*(theirs(**x) for x in PAIR)).backward()
    cache = ct.GradCache(ours, clip, 5, keep_graphs=kept)
    cache.step(*PAIR)
    assert gap(gradients(ours), gradients(theirs)) <= 1e-6
    assert cache.padding.encoded < cache.padding.given and cache.kept_chunks == kept
    trained = [name for name, p in ours.named_parameters() if p.grad is not None]
    assert trained and all("lora_" in name for name in trained)


def lora_ranks() -> float:
    """Under DDP, uneven ranks, against gradients averaged by hand."""
    rank = dist.get_rank()
    ours, theirs = (with_lora(Tower(1, dropout=0.0).double()) for _ in range(2))
    inputs = padded((14, 6)[rank], rank), padded((14, 6)[rank], 5 + rank)
    ct.GradCache(DistributedDataParallel(ours), ct.ClipLoss(), 4).step(*inputs, logit_scale=5.0)
    ct.clip_loss(theirs(**inputs[0]), theirs(**inputs[1]), 5.0).backward()
    return gap(gradients(ours), mean_over_ranks(gradients(theirs)))


@pytest.mark.peers
def test_lora_over_ranks() -> None:
    repair_torchvision()
    pytest.importorskip("peft")
    assert max(pool(2).run(lora_ranks)) <= 1e-6


class Checkpointed(Tower):
    reentrant = False

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        x = checkpoint(self._layer, self.words(input_ids), attention_mask == 0, use_reentrant=self.reentrant)
        weights = attention_mask.unsqueeze(2).to(x.dtype)
        return F.normalize(self.out((x * weights).sum(1) / weights.sum(1)), dim=1)

    def _layer(self, x: Tensor, mask: Tensor) -> Tensor:
        features: Tensor = self.layer(x, src_key_padding_mask=mask)
        return features


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # said without grad mode
def test_checkpointing_inside(reentrant: bool) -> None:
    """With dropout, sorted rows and kept graphs, which hold the inputs of the layers only."""
    found = []
    for kept in (0, 4):
        encoder = Checkpointed(1)
        encoder.reentrant = reentrant
        torch.manual_seed(5)
        ct.GradCache(encoder, clip, 5, keep_graphs=kept).step(*PAIR)
        found.append(gradients(encoder))
    assert gap(*found) == 0


def test_bf16_weights_with_an_fp32_scale() -> None:
    ours, theirs = twins(Tower(1, dropout=0.0).bfloat16())
    scales = [torch.tensor(2.0, requires_grad=True) for _ in range(2)]
    cache = ct.GradCache(ours[0], clip, 5, keep_graphs=3)
    cache.step(*PAIR, scale=scales[0].exp())
    features = [theirs[0](**x) for x in PAIR]
    clip(features[0], features[1], scales[1].exp()).backward()
    assert all(g is not None and g.dtype == torch.bfloat16 for g in gradients(*ours))
    assert gap(gradients(*ours), gradients(*theirs)) <= 5e-2  # gradients of chunks are added up in bf16
    assert scales[0].grad is not None and scales[0].grad.dtype == torch.float32
    torch.testing.assert_close(scales[0].grad, scales[1].grad, rtol=2e-2, atol=1e-3)
    assert cache.padding.encoded < cache.padding.given


@pytest.mark.parametrize("method", [False, True], ids=["torch.compile", "module.compile"])
def test_compiled_encoders(method: bool) -> None:
    """Few shapes, by default; the same gradients. A backend that compiles nothing counts the graphs."""
    shapes: set[tuple[int, ...]] = set()

    def backend(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        shapes.update(tuple(x.shape) for x in example if isinstance(x, Tensor) and x.dtype == torch.long)
        return graph.forward

    torch._dynamo.reset()
    long = {name: F.pad(x, (0, 58)) for name, x in PAIR[0].items()}
    long["attention_mask"][:4, :40] = 1
    ours, theirs = twins(Tower(1, dropout=0.0))
    encoder: Any = ours[0]
    if method:
        encoder.compile(backend=backend, dynamic=False)
    else:
        encoder = torch.compile(encoder, backend=backend, dynamic=False)
    widths = seen_shapes(ours[0]) if not method else []
    ct.GradCache(encoder, clip, 4, lengths=ByLength(check=False)).step(long, long)
    clip(theirs[0](**long), theirs[0](**long)).backward()
    assert gap(gradients(*ours), gradients(*theirs)) <= ROUNDING
    assert {width for _, width in widths} <= {8, 16, 32, 64}
    assert {shape[1] for shape in shapes if len(shape) == 2} <= {8, 16, 32, 64}


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed(stage: int) -> None:
    """Two ranks, two steps: the weights of DDP within 1e-6, with uneven chunks where ZeRO allows them.

    The first run builds an operator of DeepSpeed with ninja, about a minute.
    """
    pytest.importorskip("deepspeed")
    root = Path(__file__).parents[2]
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    environment = {**os.environ, "PATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{root / 'src'}:{root}"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *words, "-m", "tests.grad_cache.deepspeed_rank", str(stage)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("gap") == 2
