"""`ClipLoss` and `SigLipLoss` with open_clip's constructor and call, for its trainer or yours.

    from contratile.integrations.open_clip import create_loss    # was: from open_clip import create_loss
    loss = create_loss(args)
    train_one_epoch(model, data, loss, ...)                      # as it is, --accum-freq included

The gradients are those of the loss over the global batch, whatever `local_loss`, `gather_with_grad` and `dist_impl`
say, in linear memory: after DDP's average they are exact. (In open_clip they are so with `gather_with_grad`; without
it and without `local_loss` they are world_size times smaller, and with `local_loss` alone a part is missing.)
The constructor's arguments are attributes, as there. Losses of 16-bit features are fp32; open_clip's are of 16 bits.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value, check_choice
from contratile.integrations.attributes import CheckedModule
from contratile.losses.functional import clip_loss, siglip_loss
from contratile.ring.team import Team

DIST_IMPL = ("bidir", "shift", "reduce", "gather")


class ClipLoss(CheckedModule):
    """The symmetric loss over the pairs of all ranks.

    `local_loss` decides which value a rank reports, as in open_clip: the mean over its own pairs, or over all.
    `gather_with_grad`, `cache_labels` and `rank` are kept as attributes and not needed. The loss is fp32 (fp64 for fp64
    features), also for 16-bit features, where open_clip returns 16 bits.
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
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.use_horovod = use_horovod

    def check_option(self, name: str, value: Any) -> Any:
        if name == "use_horovod":
            _refuse_horovod(value)
        return value

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


class SigLipLoss(CheckedModule):
    """The sigmoid loss over the pairs of all ranks. Every `dist_impl` is the same ring here.

    `cache_labels` and `rank` are kept as attributes and not needed. The loss is fp32 (fp64 for fp64 features), also for
    16-bit features, where open_clip returns 16 bits.
    """

    def __init__(
        self, cache_labels: bool = False, rank: int = 0, world_size: int = 1, dist_impl: str | None = None
    ) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"

    def check_option(self, name: str, value: Any) -> Any:
        if name == "dist_impl":
            check_choice(name, value, DIST_IMPL)
        return value

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
    """open_clip's factory, from the arguments of its command line. Those that a version does not have are off."""
    remedy = "Use open_clip.create_loss."
    distill, model = getattr(args, "distill", False), str(getattr(args, "model", ""))
    if distill:
        bad_value("distill", expected="False", got=distill, remedy=remedy)
    if "coca" in model.lower():
        bad_value("model", expected="a CLIP or SigLIP model", got=model, remedy=remedy)
    _refuse_horovod(getattr(args, "horovod", False))
    if getattr(args, "siglip", False):
        dist_impl = getattr(args, "loss_dist_impl", None)
        return SigLipLoss(rank=args.rank, world_size=args.world_size, dist_impl=dist_impl)
    return ClipLoss(args.local_loss, args.gather_with_grad, True, args.rank, args.world_size)


def install(trainer: ModuleType) -> None:
    """Make `open_clip_train.main` use these losses: `install(trainer)` before `trainer.main(arguments)`.

    Raises:
        ValueError: if that module does not make its loss with `create_loss`, so that nothing would change.
    """
    main = getattr(getattr(trainer, "main", None), "__code__", None)
    if not hasattr(trainer, "create_loss") or (main is not None and "create_loss" not in main.co_names):
        name = getattr(trainer, "__name__", repr(trainer))
        got = f"{name}, which has create_task" if hasattr(trainer, "create_task") else f"{name} without it"
        remedy = (
            "Versions of open_clip with tasks take the loss there: CLIPTask(model, loss=ClipLoss(rank=rank, "
            "world_size=world_size)), with ClipLoss from contratile.integrations.open_clip."
        )
        bad_value("trainer", expected="a module whose main() calls create_loss", got=got, remedy=remedy)
    trainer.create_loss = create_loss  # type: ignore[attr-defined]  # of somebody else's module


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
