"""Random inputs of the checks, and how dtypes and exceptions are shown."""

import torch
from torch import Tensor
from torch.nn import functional as F

SCALE = 10.0


def unit_features(n: int, d: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return unit queries [n, d], keys [n, d] that resemble them, and the scale."""
    source = torch.Generator().manual_seed(n + d)
    q = torch.randn(n, d, generator=source)
    k = q + torch.randn(n, d, generator=source)
    q, k = (F.normalize(x).to(device, dtype) for x in (q, k))
    return [q, k, torch.tensor(SCALE, dtype=compute_dtype(dtype), device=device)]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that losses of such features are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def error_text(error: BaseException) -> str:
    """Return an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".rstrip(".")
