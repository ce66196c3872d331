"""The losses as functions, one file each.

Losses do not normalise features, except truncated ones (`matryoshka_dims`): pass normalised features where you mean
cosines. Losses are fp32 (fp64 for fp64 features), even for 16-bit features; a gradient has the dtype of its tensor.
"""

from contratile.losses.clip import clip_loss as clip_loss
from contratile.losses.info_nce import info_nce as info_nce
from contratile.losses.lse import pair_lse as pair_lse
from contratile.losses.one_set import nt_xent as nt_xent
from contratile.losses.one_set import sup_con as sup_con
from contratile.losses.siglip import siglip_loss as siglip_loss
