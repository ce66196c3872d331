"""open_clip's `ClipLoss` and `SigLipLoss` in linear memory, for its trainer or yours. Change an import:

    from contratile.integrations.open_clip import create_loss    # was: from open_clip import create_loss
    loss = create_loss(args)
    train_one_epoch(model, data, loss, ...)                      # unchanged, also with --accum-freq

After DDP's average, gradients are exactly those of the loss over the global batch, whatever `local_loss`,
`gather_with_grad` and `dist_impl` are. (In open_clip this holds with `gather_with_grad`; without it gradients are
world_size times smaller, and with `local_loss` alone a part of them is missing.) The constructor's arguments are also
attributes, as in open_clip.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from contratile.errors import bad_value, check_choice, check_count
from contratile.integrations.attributes import CheckedModule
from contratile.losses.functional import clip_loss, siglip_loss
from contratile.ring.team import Team

DIST_IMPL = ("bidir", "shift", "reduce", "gather")


class ClipLoss(CheckedModule):
    """Replaces `open_clip.ClipLoss`: the symmetric loss over the pairs of all ranks.

    The loss is fp32 (fp64 for fp64 features), also for 16-bit features, where open_clip returns 16 bits.

    Relations: `contratile.clip_loss` is the same loss with more options; `contratile.ClipLoss` its module.

    Args:
        local_loss: Return the mean over this rank's pairs instead of the mean over all pairs. Gradients are the same.
        gather_with_grad: Has no effect; gradients are always complete.
        cache_labels: Has no effect.
        rank: Has no effect.
        world_size: Size of the process group; 1 uses this process alone.
        use_horovod: Must be False.

    Raises:
        ValueError: `use_horovod` is set, or `world_size` is not the size of the process group.

    Examples:
        >>> import torch
        >>> image, text = (torch.nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
        >>> ClipLoss()(image, text, torch.tensor(14.3), output_dict=True).keys()
        dict_keys(['contrastive_loss'])
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
        """Compute the loss as open_clip's trainer calls it.

        Args:
            image_features: Normalised features [N, D].
            text_features: Normalised features [N, D].
            logit_scale: Multiplies the cosines.
            logit_bias: Cancels out in this loss; accepted as in open_clip.
            output_dict: Return {"contrastive_loss": loss}.
        """
        team = _team(self.world_size)
        image, text = _one_dtype(image_features, text_features)
        loss = clip_loss(image, text, logit_scale, group=team.group)
        if team.size > 1 and not self.local_loss:
            mine = loss.detach()
            loss = loss + (team.sum(mine) / team.size - mine)  # changes the value, not the gradient
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum()  # it cancels out, but DDP expects a gradient
        return {"contrastive_loss": loss} if output_dict else loss


class SigLipLoss(CheckedModule):
    """Replaces `open_clip.SigLipLoss`: the sigmoid loss over the pairs of all ranks.

    The loss is fp32 (fp64 for fp64 features), also for 16-bit features, where open_clip returns 16 bits.

    Relations: `contratile.siglip_loss` is the same loss with more options; `contratile.SigLipLoss` its module.

    Args:
        cache_labels: Has no effect.
        rank: Has no effect.
        world_size: Size of the process group; 1 uses this process alone.
        dist_impl: "bidir", "shift", "reduce" or "gather"; all use the same ring here.
        chunk_size: Has no effect: open_clip 4.2 computes its scores in such parts, tiles are never larger here.

    Raises:
        ValueError: `dist_impl` is unknown, `chunk_size` is no number of rows, or `world_size` is not the size of the
            process group.

    Examples:
        >>> import torch
        >>> image, text = (torch.nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
        >>> SigLipLoss()(image, text, torch.tensor(10.0), torch.tensor(-10.0)).shape
        torch.Size([])
    """

    def __init__(
        self,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        dist_impl: str | None = None,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.dist_impl = dist_impl or "bidir"
        self.chunk_size = chunk_size

    def check_option(self, name: str, value: Any) -> Any:
        if name == "dist_impl":
            check_choice(name, value, DIST_IMPL)
        if name == "chunk_size" and value is not None:
            check_count(name, value, least=0)
        return value

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        logit_bias: Tensor | float | None,
        output_dict: bool = False,
    ) -> Any:
        """Compute the loss as open_clip's trainer calls it.

        Args:
            image_features: Normalised features [N, D].
            text_features: Normalised features [N, D].
            logit_scale: Multiplies the cosines.
            logit_bias: Added to the scores; None: 0.
            output_dict: Return {"contrastive_loss": loss}.
        """
        image, text = _one_dtype(image_features, text_features)
        bias = 0.0 if logit_bias is None else logit_bias
        loss = siglip_loss(image, text, logit_scale, bias, group=_team(self.world_size).group)
        return {"contrastive_loss": loss} if output_dict else loss


def create_loss(args: Any) -> nn.Module:
    """Replaces `open_clip.create_loss`: make the loss that open_clip's command-line arguments ask for.

    Args:
        args: Parsed arguments of open_clip's trainer. Arguments that its version does not have count as off.

    Returns:
        A `ClipLoss` or `SigLipLoss`.

    Raises:
        ValueError: The arguments ask for distillation, CoCa or Horovod.
    """
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
    """Make open_clip's trainer use these losses. Call it before `open_clip_train.main.main(arguments)`.

    Args:
        trainer: The module `open_clip_train.main`.

    Raises:
        ValueError: The module does not call `create_loss`, so that replacing it would have no effect.

    Examples:
        >>> from open_clip_train import main as trainer          # doctest: +SKIP
        >>> install(trainer); trainer.main(arguments)            # doctest: +SKIP
    """
    main = getattr(getattr(trainer, "main", None), "__code__", None)
    if not hasattr(trainer, "create_loss") or (main is not None and "create_loss" not in main.co_names):
        name = getattr(trainer, "__name__", repr(trainer))
        got = f"{name}, which has create_task" if hasattr(trainer, "create_task") else f"{name} without it"
        remedy = (
            "In versions of open_clip with tasks, pass the loss to the task: CLIPTask(model, loss=ClipLoss(rank=rank, "
            "world_size=world_size)), with ClipLoss from contratile.integrations.open_clip."
        )
        bad_value("trainer", expected="a module whose main() calls create_loss", got=got, remedy=remedy)
    trainer.create_loss = create_loss  # type: ignore[attr-defined]  # a module of another package


def _refuse_horovod(asked: bool) -> None:
    if asked:
        bad_value("use_horovod", expected="False", got=True, remedy="Start the ranks with torchrun instead.")


def _team(world_size: int) -> Team:
    """All ranks, or this process alone if `world_size` is 1."""
    team = Team.of("auto" if world_size > 1 else None)
    if team.size != world_size:
        remedy = "Call torch.distributed.init_process_group before the loss, and pass the size of that group."
        bad_value("world_size", expected=f"the {team.size} of the process group", got=world_size, remedy=remedy)
    return team


def _one_dtype(image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to one dtype: under autocast the towers may return different ones."""
    dtype = torch.promote_types(image.dtype, text.dtype)
    return image.to(dtype), text.to(dtype)
