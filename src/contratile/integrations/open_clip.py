"""open_clip's `ClipLoss`, `SigLipLoss`, `DistillClipLoss` and `CoCaLoss` in linear memory. Change an import:

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
        loss = self._shown(clip_loss(image, text, logit_scale, group=team.group), team)
        if isinstance(logit_bias, Tensor):
            loss = loss + 0 * logit_bias.sum()  # it cancels out, but DDP expects a gradient
        return {"contrastive_loss": loss} if output_dict else loss

    def _shown(self, loss: Tensor, team: Team) -> Tensor:
        """Replace the value by the mean over all ranks' pairs, unless `local_loss`. The gradient stays."""
        if team.size == 1 or self.local_loss:
            return loss
        mine = loss.detach()
        return loss + (team.sum(mine) / team.size - mine)


class DistillClipLoss(ClipLoss):
    """Replaces `open_clip.DistillClipLoss`: the symmetric loss, and the cross-entropy with a teacher's softmax.

    The teacher has no gradient: its features are taken as constants, as open_clip's trainer passes them.

    Relations: `contratile.clip_loss` with `teacher=` is the weighted sum of both.

    Args: as for `ClipLoss`.

    Examples:
        >>> import torch
        >>> image, text = (torch.nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
        >>> teacher = torch.nn.functional.normalize(torch.randn(8, 6), dim=1)
        >>> contrastive, distill = DistillClipLoss()(image, text, 10.0, teacher, teacher, 20.0)
    """

    def forward(  # type: ignore[override]  # open_clip's own call
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float,
        dist_image_features: Tensor,
        dist_text_features: Tensor,
        dist_logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        """Compute both terms as open_clip's trainer calls it.

        Args:
            image_features: Normalised features [N, D].
            text_features: Normalised features [N, D].
            logit_scale: Multiplies the cosines.
            dist_image_features: The teacher's normalised features [N, T].
            dist_text_features: The teacher's normalised features [N, T].
            dist_logit_scale: The teacher's logit scale.
            output_dict: Return {"contrastive_loss": ..., "distill_loss": ...} instead of both in a tuple.
        """
        team = _team(self.world_size)
        image, text = _one_dtype(image_features, text_features)
        seen = _one_dtype(dist_image_features.detach(), dist_text_features.detach())
        if torch.float64 in (image.dtype, seen[0].dtype):
            accumulation = torch.promote_types(image.dtype, torch.float32)
            seen = seen[0].to(accumulation), seen[1].to(accumulation)
        scale = dist_logit_scale.detach() if isinstance(dist_logit_scale, Tensor) else dist_logit_scale
        _, terms = clip_loss(image, text, logit_scale, teacher=(*seen, scale), return_terms=True, group=team.group)
        contrastive, distill = (self._shown(term, team) for term in terms)
        return {"contrastive_loss": contrastive, "distill_loss": distill} if output_dict else (contrastive, distill)


class CoCaLoss(ClipLoss):
    """Replaces `open_clip.CoCaLoss`: the symmetric loss, and the cross-entropy of captions, both weighted.

    Args:
        caption_loss_weight: Factor of the caption loss.
        clip_loss_weight: Factor of the contrastive loss; 0 leaves it out.
        pad_id: The token that captions are padded with.

    The other arguments are those of `ClipLoss`.

    Examples:
        >>> import torch
        >>> image, text = (torch.nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
        >>> logits, tokens = torch.randn(8, 5, 30), torch.randint(1, 30, (8, 5))
        >>> contrastive, caption = CoCaLoss(2.0, 1.0)(image, text, logits, tokens, 10.0)
    """

    def __init__(
        self,
        caption_loss_weight: float,
        clip_loss_weight: float,
        pad_id: int = 0,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
        use_horovod: bool = False,
    ) -> None:
        super().__init__(local_loss, gather_with_grad, cache_labels, rank, world_size, use_horovod)
        self.clip_loss_weight = clip_loss_weight
        self.caption_loss_weight = caption_loss_weight
        self.caption_loss = nn.CrossEntropyLoss(ignore_index=pad_id)

    def forward(  # type: ignore[override]  # open_clip's own call
        self,
        image_features: Tensor,
        text_features: Tensor,
        logits: Tensor,
        labels: Tensor,
        logit_scale: Tensor | float,
        output_dict: bool = False,
    ) -> Any:
        """Compute both terms as open_clip's trainer calls it.

        Args:
            image_features: Normalised features [N, D].
            text_features: Normalised features [N, D].
            logits: Scores of the vocabulary [N, tokens, words].
            labels: The captions' tokens [N, tokens].
            logit_scale: Multiplies the cosines.
            output_dict: Return {"contrastive_loss": ..., "caption_loss": ...} instead of both in a tuple.
        """
        contrastive = torch.zeros((), device=logits.device)
        if self.clip_loss_weight:
            contrastive = self.clip_loss_weight * super().forward(image_features, text_features, logit_scale)
        caption = self.caption_loss_weight * self.caption_loss(logits.permute(0, 2, 1), labels)
        return {"contrastive_loss": contrastive, "caption_loss": caption} if output_dict else (contrastive, caption)


class SigLipLoss(CheckedModule):
    """Replaces `open_clip.SigLipLoss`: the sigmoid loss over the pairs of all ranks.

    The loss is fp32 (fp64 for fp64 features), also for 16-bit features, where open_clip returns 16 bits.

    Relations: `contratile.siglip_loss` is the same loss with more options; `contratile.SigLipLoss` its module.

    Args:
        cache_labels: Has no effect.
        rank: Has no effect.
        world_size: Size of the process group; 1 uses this process alone.
        dist_impl: "bidir", "shift", "reduce" or "gather"; all use the same ring here.
        chunk_size: Has no effect. open_clip 4.2 computes its scores in chunks of this size; here tiles do that.

    Raises:
        ValueError: `dist_impl` is unknown, `chunk_size` is not a number of rows, or `world_size` is not the size of the
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
        A `ClipLoss`, `DistillClipLoss`, `CoCaLoss` or `SigLipLoss`.

    Raises:
        ValueError: The arguments ask for Horovod.

    Examples:
        >>> loss = create_loss(open_clip_train.params.parse_args(["--siglip"]))      # doctest: +SKIP
    """
    _refuse_horovod(getattr(args, "horovod", False))
    if getattr(args, "distill", False):
        return DistillClipLoss(args.local_loss, args.gather_with_grad, True, args.rank, args.world_size)
    if "coca" in str(getattr(args, "model", "")).lower():
        return CoCaLoss(
            args.coca_caption_loss_weight,
            args.coca_contrastive_loss_weight,
            local_loss=args.local_loss,
            gather_with_grad=args.gather_with_grad,
            cache_labels=True,
            rank=args.rank,
            world_size=args.world_size,
        )
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
