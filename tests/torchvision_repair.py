"""Repair a torchvision that was built for another torch, for tests of packages that import it.

A CUDA build of torchvision beside a CPU build of torch cannot be imported ("operator torchvision::nms does not exist"),
and transformers, open_clip, timm, lightly and sentence-transformers fail with it. Contratile leaves that to the user;
these tests define the missing operators. Run another program with the repair by

    python -m tests.torchvision_repair examples/hf_trainer.py --arguments
    PYTHONPATH=tests/repair contratile bench loss        # and every process that it starts
"""

import runpy
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch


@cache  # holds the library: the operators live as long as it does
def repair_torchvision() -> Any:
    """Make `import torchvision` work. A build that can be imported is left alone."""
    if find_spec("torchvision") is None:
        return None
    try:
        return import_module("torchvision")
    except RuntimeError:
        library: Any = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, operator):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import_module("torchvision")
        return library


if __name__ == "__main__":
    repair_torchvision()
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
