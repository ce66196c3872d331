"""Repairs a broken torchvision in every Python process that has this folder on PYTHONPATH, when it is imported.

PYTHONPATH=tests/repair contratile bench loss

Tests set it for the processes that benchmarks start; see `tests/torchvision_repair.py`.
"""

import sys
from typing import Any


class Repair:
    """Defines the missing operators just before torchvision is imported; finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        library: Any = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        Repair.library = library  # the operators live as long as it does

    library: Any = None


sys.meta_path.insert(0, Repair())
