"""Ranking losses of sentence-transformers without their score matrices. Change an import:

    from contratile.integrations.sentence_transformers import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(model, scale=20.0, gather_across_devices=True)
    SentenceTransformerTrainer(model=model, train_dataset=pairs, loss=loss).train()

Values and gradients are those of the package's losses. An option that is not supported raises an error, whether it is
passed to the constructor or set as an attribute later; none is ignored. `margin`, `tile` and `cache_bytes` are
additions and mean the same as in `contratile.info_nce`; `exclude_duplicates` makes a sampler without duplicates
unnecessary. Losses of 16-bit embeddings are fp32, as in the package; under autocast they stay fp32, where the package
returns 16 bits. The package itself is not imported.
"""

from contratile.integrations.sentence_transformers.cached import (
    CachedMultipleNegativesRankingLoss as CachedMultipleNegativesRankingLoss,
)
from contratile.integrations.sentence_transformers.cached import (
    CachedMultipleNegativesSymmetricRankingLoss as CachedMultipleNegativesSymmetricRankingLoss,
)
from contratile.integrations.sentence_transformers.cached_gist import CachedGISTEmbedLoss as CachedGISTEmbedLoss
from contratile.integrations.sentence_transformers.gist import GISTEmbedLoss as GISTEmbedLoss
from contratile.integrations.sentence_transformers.options import Similarity as Similarity
from contratile.integrations.sentence_transformers.options import cos_sim as cos_sim
from contratile.integrations.sentence_transformers.ranking import (
    MultipleNegativesRankingLoss as MultipleNegativesRankingLoss,
)
from contratile.integrations.sentence_transformers.ranking import (
    MultipleNegativesSymmetricRankingLoss as MultipleNegativesSymmetricRankingLoss,
)
from contratile.losses.directions import Direction as Direction
