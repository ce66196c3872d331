"""The calls of `inf_cl`, the package of the Inf-CL paper: its users change an import.

    from contratile.integrations.inf_cl import cal_inf_loss      # was: from inf_cl import cal_inf_loss
    loss = (cal_inf_loss(image, text, scale=scale) + cal_inf_loss(text, image, scale=scale)) / 2

Values are the package's. So are the gradients of features; that of the scale, which there is world_size times too
large under DDP, is right. Features of any width, on any device, contiguous or not, on one process or many. Both
directions at once, at half the work, are `contratile.clip_loss(image, text, scale)`.
"""

from torch import Tensor

from contratile.losses.functional import info_nce


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """The mean InfoNCE loss of this rank's queries against the keys of all ranks; `labels` index this rank's keys.

    `head_dim` is accepted and has no meaning: any number of features will do.
    """
    return info_nce(q, k, _scale(scale), labels=labels)


def cal_ring_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """The same as `cal_inf_loss`: in the package they differ in what computes a block."""
    return info_nce(q, k, _scale(scale), labels=labels)


def cal_flash_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """One loss per query [B], against the keys of this process alone."""
    return info_nce(q, k, _scale(scale), labels=labels, group=None, reduction="none")


def _scale(scale: Tensor | float | None) -> Tensor | float:
    return 1.0 if scale is None else scale
