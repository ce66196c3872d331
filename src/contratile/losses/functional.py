"""The losses as functions: each is a few lines on the engine.

No loss normalises its features, but for truncated ones (`matryoshka_dims`): pass normalised ones where cosines are
meant. Losses are fp32 (fp64 for fp64 features), also for 16-bit features; gradients have the dtype of the tensors they
belong to.
"""

from contratile.losses.clip import clip_loss as clip_loss
from contratile.losses.info_nce import info_nce as info_nce
from contratile.losses.lse import pair_lse as pair_lse
from contratile.losses.one_set import nt_xent as nt_xent
from contratile.losses.one_set import sup_con as sup_con
from contratile.losses.siglip import siglip_loss as siglip_loss
