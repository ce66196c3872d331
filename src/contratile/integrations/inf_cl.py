"""Losses of `inf_cl`, the package of the Inf-CL paper. Change an import:

    from contratile.integrations.inf_cl import cal_inf_loss      # was: from inf_cl import cal_inf_loss
    loss = (cal_inf_loss(image, text, scale=scale) + cal_inf_loss(text, image, scale=scale)) / 2

Values and gradients of features are those of the package. The gradient of the scale is correct under DDP, where the
package's is world_size times too large. Features may have any width, device and memory layout; one process is enough.
`contratile.clip_loss(image, text, scale)` computes both directions at once, for half the work.
"""

from torch import Tensor

from contratile.losses.functional import info_nce


def cal_inf_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """Replaces `inf_cl.cal_inf_loss`: the mean InfoNCE loss of this rank's queries against the keys of all ranks.

    Args:
        q: Queries [N, D] of this rank.
        k: Keys [M, D] of this rank.
        labels: Index of each query's positive among this rank's keys; None: the same row.
        scale: Multiplies the scores; None: 1.
        head_dim: Ignored: any number of features is supported.

    Returns:
        A scalar, the mean over this rank's queries.

    Examples:
        >>> import torch
        >>> x = torch.eye(4)
        >>> cal_inf_loss(x, x, scale=10.0)
        tensor(0.0001)
    """
    return info_nce(q, k, _scale(scale), labels=labels)


def cal_ring_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """Replaces `inf_cl.cal_ring_loss`. Same as `cal_inf_loss`: in the package they differ only in their kernels.

    Args:
        q: Queries [N, D] of this rank.
        k: Keys [M, D] of this rank.
        labels: Index of each query's positive among this rank's keys; None: the same row.
        scale: Multiplies the scores; None: 1.
        head_dim: Ignored: any number of features is supported.

    Returns:
        A scalar, the mean over this rank's queries.

    Examples:
        >>> import torch
        >>> x = torch.eye(4)
        >>> cal_ring_loss(x, x, scale=10.0)
        tensor(0.0001)
    """
    return info_nce(q, k, _scale(scale), labels=labels)


def cal_flash_loss(
    q: Tensor, k: Tensor, labels: Tensor | None = None, scale: Tensor | float | None = None, head_dim: int = 256
) -> Tensor:
    """Replaces `inf_cl.cal_flash_loss`: one loss per query, against the keys of this process alone.

    Args:
        q: Queries [N, D].
        k: Keys [M, D].
        labels: Index of each query's positive among the keys; None: the same row.
        scale: Multiplies the scores; None: 1.
        head_dim: Ignored: any number of features is supported.

    Returns:
        The losses of the queries [N].

    Examples:
        >>> import torch
        >>> x = torch.eye(4)
        >>> cal_flash_loss(x, x, scale=10.0).shape
        torch.Size([4])
    """
    return info_nce(q, k, _scale(scale), labels=labels, group=None, reduction="none")


def _scale(scale: Tensor | float | None) -> Tensor | float:
    return 1.0 if scale is None else scale
