"""Predicts what a run will need, before it starts: GPUs and their rates, and the time of the kernels.

>>> from contratile import planner
>>> step = planner.predict("A100", n=32768, d=512)
>>> round(step.share_of_peak, 1) > 0
True
"""

from contratile.planner.candidates import FIRST_GENERATION, SECOND_GENERATION, KernelCost, candidates
from contratile.planner.gpus import Gpu, all_gpus, find
from contratile.planner.kernel_time import KernelTime, rank
from contratile.planner.library_time import LibraryTime
from contratile.planner.step_time import Prediction, predict
from contratile.planner.tile_time import Assumptions

__all__ = [
    "FIRST_GENERATION",
    "SECOND_GENERATION",
    "Assumptions",
    "Gpu",
    "KernelCost",
    "KernelTime",
    "LibraryTime",
    "Prediction",
    "all_gpus",
    "candidates",
    "find",
    "predict",
    "rank",
]
