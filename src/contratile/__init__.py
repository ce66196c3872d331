"""Contratile: exact contrastive losses at near-infinite batch size, in memory linear in the batch.

import contratile as ct
loss = ct.clip_loss(image_features, text_features, logit_scale)
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from contratile import reference as reference
from contratile.engine.plan import TilePlan as TilePlan
from contratile.engine.plan import plan_tiles as plan_tiles
from contratile.grad_cache import ByLength as ByLength
from contratile.grad_cache import GradCache as GradCache
from contratile.grad_cache import Rows as Rows
from contratile.losses.batch_stats import BatchStats as BatchStats
from contratile.losses.beside import LossTerms as LossTerms
from contratile.losses.functional import clip_loss as clip_loss
from contratile.losses.functional import info_nce as info_nce
from contratile.losses.functional import nt_xent as nt_xent
from contratile.losses.functional import pair_lse as pair_lse
from contratile.losses.functional import siglip_loss as siglip_loss
from contratile.losses.functional import sup_con as sup_con
from contratile.losses.memory_queue import MemoryQueue as MemoryQueue
from contratile.losses.modules import ClipLoss as ClipLoss
from contratile.losses.modules import InfoNCE as InfoNCE
from contratile.losses.modules import NTXent as NTXent
from contratile.losses.modules import SigLipLoss as SigLipLoss
from contratile.losses.modules import SupCon as SupCon
from contratile.losses.normalized import NotNormalizedWarning as NotNormalizedWarning
from contratile.metrics import mean_average_precision as mean_average_precision
from contratile.metrics import nearest as nearest
from contratile.metrics import retrieval_metrics as retrieval_metrics
from contratile.metrics import zero_shot_metrics as zero_shot_metrics
from contratile.mining import HardNegatives as HardNegatives
from contratile.mining import mine_hard_negatives as mine_hard_negatives

__version__ = "0.2.0"

if _TYPE_CHECKING:
    from contratile.planner.run_plan import plan as plan
    from contratile.train.loaded import load as load
else:  # type checkers see the two imports above

    def __getattr__(name: str) -> object:
        """Import `load` and `plan` on first use; for unknown names, suggest the name that they have here."""
        if name == "load":
            from contratile.train.loaded import load

            return load
        if name == "plan":
            from contratile.planner.run_plan import plan

            return plan
        from contratile.keywords import suggestion

        known = [*(x for x, value in globals().items() if callable(value)), "load", "plan"]
        raise AttributeError(f"module 'contratile' has no attribute {name!r}{suggestion(name, known)}")
