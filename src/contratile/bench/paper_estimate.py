"""Memory and time of the paper's training steps, estimated from its settings: a few lines of arithmetic per term.

    estimate = MODELS["ViT-L/14"].peak(method="inf_cl", batch=262144, devices=8, offload=False)

The paper names: gradient caching with chunks of 128 pairs, data parallelism, AMP, AdamW, A800 GPUs with 80 GB. It does
not say how many bytes of activations a pair needs or how well the encoders use the GPU. Each is fitted to one row, and
every other row is a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

from contratile.bench.paper_tables import PAPER_GB
from contratile.planner.gpus import find
from contratile.planner.peers import Peer, peer_loss_bytes

CHUNK = 128
"""Pairs of a chunk of the encoders, as the caption of table 1 says; assumed for ViT-B/16 too."""
STATE_BYTES = 16
"""Per parameter: fp32 weight, gradient and two moments of AdamW."""
ACTIVATION_BYTES = 41.1
"""Per token, layer and unit of width, fitted to the peak of Inf-CL at 32k on 8 devices."""
CAPACITY = 80 * PAPER_GB
"""What tensors may use of a device with 81,920 MiB, without the CUDA context and NCCL's buffers."""
FLOAT = 4
BACKBONE_PASSES = 4
"""A chunk costs a forward pass for the features, then forward and backward (twice a forward)."""
UTILISATION = 0.378
"""Share of the peak rate that encoders reach, fitted to the iteration time of OpenCLIP at 64k."""
TF32_SHARE = 0.4
"""Share of the TF32 peak that the kernels of Inf-CL are assumed to reach."""
SCORE_PASSES = 16
"""How often the elementwise operations of the dense losses read or write each score."""


@dataclass(frozen=True)
class Transformer:
    """A transformer."""

    width: int
    layers: int
    tokens: int

    @property
    def units(self) -> int:
        """Numbers of one activation in all layers."""
        return self.width * self.layers * self.tokens

    @property
    def forward_flops(self) -> int:
        """Flops of a forward pass: per token 24 width² for products with weights, 4 tokens * width for attention."""
        return self.layers * self.tokens * (24 * self.width**2 + 4 * self.tokens * self.width)


@dataclass(frozen=True)
class PaperModel:
    """A CLIP model at 224 pixels."""

    parameters: int
    width: int
    """Width of the joint features."""

    image: Transformer
    text: Transformer
    input_bytes: int = 3 * 224 * 224 * FLOAT + 77 * 8
    """A picture in fp32 and 77 token ids in int64."""

    def held(self, batch: int, devices: int, *, offload: bool) -> float:
        """Bytes per device of states, inputs, and the features of the local pairs."""
        local = batch / devices
        inputs = 0 if offload else local * self.input_bytes
        return self.parameters * STATE_BYTES + inputs + 2 * local * self.width * FLOAT

    def peak(self, *, method: Peer, batch: int, devices: int, offload: bool) -> float:
        """Peak bytes of a step per device: the loss, or a chunk of the encoders with gradients of all features."""
        held, local = self.held(batch, devices, offload=offload), batch / devices
        loss = peer_loss_bytes(method, batch=batch, ranks=devices, width=self.width, itemsize=FLOAT)
        chunk = CHUNK * (self.image.units + self.text.units) * ACTIVATION_BYTES + 2 * local * self.width * FLOAT
        return held + max(loss, chunk)

    def largest_batch(self, *, method: Peer, devices: int, offload: bool) -> int:
        """The largest batch in units of 1,024 pairs that fits into CAPACITY."""
        low, high = 1, 1 << 20
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.peak(method=method, batch=middle << 10, devices=devices, offload=offload) <= CAPACITY
            low, high = (middle, high) if fits else (low, middle)
        return low

    def encoder_seconds(self, batch: int, devices: int) -> float:
        """Time of the encoders in a step on A800s."""
        flops = BACKBONE_PASSES * (self.image.forward_flops + self.text.forward_flops) * batch / devices
        return flops / (UTILISATION * find("A800").peak("16-bit"))

    def loss_seconds(self, method: Peer, batch: int, devices: int) -> float:
        """Time of the loss on A800s: products in fp32 and passes over the scores, or the kernels of Inf-CL in TF32."""
        local = batch / devices
        if method == "inf_cl":
            return 10 * 2 * local * batch * self.width / (TF32_SHARE * find("A800").peak("tf32"))
        rows, products = (batch, 3) if method == "clip" else (local, 6)
        scores = rows * batch
        sides = 1 if method == "clip" else 2
        traffic = SCORE_PASSES * sides * scores * FLOAT / find("A800").dram_bandwidth
        return products * 2 * scores * self.width / find("A800").peak("ieee") + traffic

    def step_seconds(self, *, method: Peer, batch: int, devices: int) -> float:
        """Time of a step without anything that overlaps or waits."""
        return self.encoder_seconds(batch, devices) + self.loss_seconds(method, batch, devices)


MODELS = {
    "ViT-L/14": PaperModel(427_616_513, 768, Transformer(1024, 24, 257), Transformer(768, 12, 77)),
    "ViT-B/16": PaperModel(149_620_737, 512, Transformer(768, 12, 197), Transformer(512, 12, 77)),
}
