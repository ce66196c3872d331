"""open_clip's losses and those of Contratile: change an import.

    python examples/open_clip_loss.py            # 3072 pairs
    python examples/open_clip_loss.py 8192

Prints time and memory of forward and backward before and after, and both losses.
"""

import sys
from collections.abc import Callable

import torch
from compare import print_table
from open_clip import loss as before
from torch import Tensor, nn
from torch.nn import functional as F

from contratile.integrations import open_clip as after


def main(pairs: int = 3072, width: int = 256) -> None:
    torch.manual_seed(0)
    image, text = (F.normalize(torch.randn(pairs, width), dim=1).requires_grad_() for _ in range(2))
    inputs = image, text, torch.tensor(14.3, requires_grad=True)
    bias = torch.tensor(-10.0, requires_grad=True)

    def step(loss: nn.Module, *inputs: Tensor) -> Callable[[], None]:
        """What open_clip's train_one_epoch does with the loss."""

        def call() -> None:
            for x in inputs:
                x.grad = None
            losses = loss(*inputs, output_dict=True)
            sum(losses.values()).backward()

        return call

    clip = {"open_clip": before.ClipLoss(), "contratile": after.ClipLoss()}
    siglip = {"open_clip": before.SigLipLoss(), "contratile": after.SigLipLoss()}
    print_table(f"ClipLoss, {pairs} pairs", {name: step(loss, *inputs) for name, loss in clip.items()})
    print_table(f"SigLipLoss, {pairs} pairs", {name: step(loss, *inputs, bias) for name, loss in siglip.items()})
    with torch.no_grad():
        values = [float(loss(*inputs)) for loss in clip.values()]
    print(f"loss before {values[0]:.6f}, after {values[1]:.6f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
