"""A vision-language model as an embedder, as in VLM2Vec: Qwen2-VL with random weights, and a gradient cache.

    python examples/vlm_cached.py

The patches of all images of a batch are one tensor, with a grid for each image. `image_patches` takes the patches of a
chunk's rows. Queries are pictures of one brightness with a question, targets are texts; nothing is downloaded.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen2VLConfig, Qwen2VLModel

import contratile as ct
from contratile.grad_cache.rows import image_patches

PAIRS, CHUNK, STEPS, KINDS = 24, 6, 12, 8
IMAGE, START, WORDS, PATCH = 90, 91, 100, 2


class Embedder(nn.Module):
    """The last token's state, as a unit vector."""

    def __init__(self) -> None:
        super().__init__()
        text: dict[str, Any] = {
            "vocab_size": WORDS,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        }
        vision: dict[str, Any] = {
            "depth": 1,
            "embed_dim": 32,
            "num_heads": 2,
            "hidden_size": 32,
            "patch_size": PATCH,
            "mlp_ratio": 2,
        }
        ids: dict[str, Any] = {
            "image_token_id": IMAGE,
            "vision_start_token_id": START,
            "video_token_id": 92,
            "vision_end_token_id": 93,
        }
        self.model = Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision, **ids))

    def forward(self, **inputs: Any) -> Tensor:
        return F.normalize(self.model(**inputs).last_hidden_state[:, -1], dim=1)


def queries(kinds: Tensor) -> dict[str, Tensor]:
    """Pictures of 4 x 4 or 4 x 8 patches, a quarter as many tokens, and a question; padded on the left."""
    grids = torch.tensor([[1, 4, 4 + 4 * int(kind % 2)] for kind in kinds])
    patches = [
        torch.full((int(grid.prod()), 3 * 2 * PATCH * PATCH), float(kind) / KINDS)
        for kind, grid in zip(kinds, grids, strict=True)
    ]
    texts = [[START, *[IMAGE] * (int(grid.prod()) // 4), 5, 6] for grid in grids]
    longest = max(map(len, texts))
    ids = torch.tensor([[0] * (longest - len(x)) + x for x in texts])
    kind = (ids == IMAGE).int()
    mask = (ids > 0).long()
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "mm_token_type_ids": kind,
        "pixel_values": torch.cat(patches),
        "image_grid_thw": grids,
    }


def targets(kinds: Tensor) -> dict[str, Tensor]:
    ids = torch.stack([10 + kinds, 20 + kinds, torch.full_like(kinds, 5)], dim=1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def main() -> None:
    torch.manual_seed(0)
    embedder = Embedder()
    optimiser = torch.optim.AdamW(embedder.parameters(), lr=3e-3)
    cache = ct.GradCache((embedder, embedder), ct.ClipLoss(), CHUNK, split_fn=(image_patches, None))
    for step in range(STEPS):
        kinds = torch.randint(KINDS, (PAIRS,))
        optimiser.zero_grad()
        loss = cache.step(queries(kinds), targets(kinds), logit_scale=10.0, ids=kinds)
        optimiser.step()
        if step % 4 == 0 or step == STEPS - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
