"""open_clip's trainer with the losses of Contratile: one import changes.

    python examples/open_clip_loss.py            # 3072 pairs
    python examples/open_clip_loss.py 8192

Prints time and memory of loss and backward before and after, and that both give the same loss.
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from contratile.bench.before_after import print_table
from contratile.bench.contestants.loss import LossProblem, cure_torchvision, quiet
from contratile.integrations import open_clip as after

with quiet():
    cure_torchvision()
    from open_clip import loss as before


def main(pairs: int = 3072, width: int = 256) -> None:
    torch.manual_seed(0)
    problem = LossProblem.make(pairs, width, scale=14.3)
    inputs = problem.args
    bias = torch.tensor(-10.0, requires_grad=True)

    def step(loss: nn.Module, *inputs: Tensor) -> Callable[[], None]:
        """What open_clip's train_one_epoch does with its loss."""

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
