"""Contratile: exact contrastive losses at near-infinite batch size, in memory linear in the batch.

import contratile as ct
loss = ct.clip_loss(image_features, text_features, logit_scale)
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from contratile import reference as reference
from contratile.contrast import BatchStats as BatchStats
from contratile.functional import clip_loss as clip_loss
from contratile.functional import info_nce as info_nce
from contratile.functional import nt_xent as nt_xent
from contratile.functional import pair_lse as pair_lse
from contratile.functional import siglip_loss as siglip_loss
from contratile.functional import sup_con as sup_con
from contratile.grad_cache import GradCache as GradCache
from contratile.memory_queue import MemoryQueue as MemoryQueue
from contratile.metrics import nearest as nearest
from contratile.metrics import retrieval_metrics as retrieval_metrics
from contratile.metrics import zero_shot_metrics as zero_shot_metrics
from contratile.modules import ClipLoss as ClipLoss
from contratile.modules import InfoNCE as InfoNCE
from contratile.modules import NTXent as NTXent
from contratile.modules import SigLipLoss as SigLipLoss
from contratile.modules import SupCon as SupCon
from contratile.normalized import NotNormalizedWarning as NotNormalizedWarning
from contratile.tiles import TilePlan as TilePlan
from contratile.tiles import plan_tiles as plan_tiles

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # type checkers know which names there are

    def __getattr__(name: str) -> object:
        """What other packages call the losses."""
        from contratile.keywords import suggestion

        known = [x for x, value in globals().items() if callable(value)]
        raise AttributeError(f"module 'contratile' has no attribute {name!r}{suggestion(name, known)}")
