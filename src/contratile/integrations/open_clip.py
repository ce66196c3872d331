"""`ClipLoss` and `SigLipLoss` with open_clip's constructor and call, for its trainer or yours.

    from contratile.integrations.open_clip import create_loss    # was: from open_clip import create_loss
    loss = create_loss(args)
    train_one_epoch(model, data, loss, ...)                      # as it is, --accum-freq included

The gradients are those of the loss over the global batch, whatever `local_loss`, `gather_with_grad` and `dist_impl`
say, in linear memory: after DDP's average they are exact. (In open_clip they are so with `gather_with_grad`; without
it and without `local_loss` they are world_size times smaller, and with `local_loss` alone a part is missing.)
"""

from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value, check_choice
from contratile.functional import clip_loss, siglip_loss
from contratile.team import Team

DIST_IMPL = ("bidir", "shift", "reduce", "gather")


class ClipLoss(nn.Module):
    """The symmetric loss over the pairs of all ranks.

    `local_loss` decides which value a rank reports, as in open_clip: the mean over its own pairs, or over all.
    `gather_with_grad`, `cache_labels` and `rank` are accepted and not needed.
    """

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__()
        _refuse_horovod(use_horovod)
        self.local_loss, self.world_size = local_loss, world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None = None,
        output_dict: bool = False,
    ) -> Any:
        team = _team(self.world_size)
        image, text = _one_dtype(image_features, text_features)
        loss = clip_loss(image, text, logit_scale, group=team.group)
        if team.size > 1 and not self.local_loss:
            mine = loss.detach()
            loss = loss + (team.sum(mine) / team.size - mine)  # the gradient is the same
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum()  # it cancels out, but DDP waits for its gradient
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(nn.Module):
    """The sigmoid loss over the pairs of all ranks. Every `dist_impl` is the same ring here."""

    def __init__(
        self, cache_labels: bool = False, rank: int = 0, world_size: int = 1, dist_impl: str | None = None
    ) -> None:
        super().__init__()
        check_choice("dist_impl", dist_impl or "bidir", DIST_IMPL)
        self.world_size = world_size

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        output_dict: bool = False,
    ) -> Any:
        image, text = _one_dtype(image_features, text_features)
        bias = 0.0 if logit_bias is None else logit_bias
        loss = siglip_loss(image, text, logit_scale, bias, group=_team(self.world_size).group)
        return {"contrastive_loss": loss} if output_dict else loss


def create_loss(args: Any) -> nn.Module:
    """open_clip's factory, from the arguments of its command line."""
    remedy = "Use open_clip.create_loss."
    if args.distill:
        bad_value("distill", expected="False", got=args.distill, remedy=remedy)
    if "coca" in args.model.lower():
        bad_value("model", expected="a CLIP or SigLIP model", got=args.model, remedy=remedy)
    _refuse_horovod(args.horovod)
    if args.siglip:
        return SigLipLoss(rank=args.rank, world_size=args.world_size, dist_impl=args.loss_dist_impl)
    return ClipLoss(args.local_loss, args.gather_with_grad, rank=args.rank, world_size=args.world_size)


def _refuse_horovod(asked: bool) -> None:
    if asked:
        bad_value("use_horovod", expected="False", got=True, remedy="Start the ranks with torchrun instead.")


def _team(world_size: int) -> Team:
    """All ranks, or this process alone where open_clip was told that it is alone."""
    team = Team.of("auto" if world_size > 1 else None)
    if team.size != world_size:
        remedy = "Call torch.distributed.init_process_group before the loss, and pass the size of that group."
        bad_value("world_size", expected=f"the {team.size} of the process group", got=world_size, remedy=remedy)
    return team


def _one_dtype(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast the towers may end in different dtypes."""
    dtype = torch.promote_types(image.dtype, text.dtype)
    return image.to(dtype), text.to(dtype)
