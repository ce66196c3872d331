"""The encoder of `contratile bench cache`: a small transformer over token ids, with dropout."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, TOKENS, LAYERS = 1000, 32, 4


class Encoder(nn.Module):
    """Encodes token ids to unit vectors: the normalised mean of a transformer's outputs."""

    def __init__(self, width: int = 128, layers: int = LAYERS, *, dropout: float = 0.1, longest: int = TOKENS) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Parameter(torch.randn(longest, width) / width**0.5)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.words(input_ids) + self.places[: input_ids.shape[1]]
        if attention_mask is None:
            return F.normalize(self.layers(x).mean(1), dim=1)
        x = self.layers(x, src_key_padding_mask=attention_mask == 0)
        weights = attention_mask.unsqueeze(2).to(x.dtype)
        return F.normalize((x * weights).sum(1) / weights.sum(1), dim=1)


class SentenceModel(nn.Sequential):
    """The same encoder with the interface of sentence-transformers."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__(encoder)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"sentence_embedding": self[0](features["input_ids"], features.get("attention_mask"))}


def tokens(n: int, *, seed: int) -> Tensor:
    """Return random token ids of n texts."""
    return torch.randint(VOCABULARY, (n, TOKENS), generator=torch.Generator().manual_seed(seed))
