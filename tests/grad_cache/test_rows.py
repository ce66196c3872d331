"""Inputs that are not rows of tensors: patches with a grid, packed sequences, several images, lists and a processor."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import contratile as ct
from contratile.grad_cache.rows import image_patches, packed_sequences, processed, ragged_rows, several_images
from tests.grad_cache.test_cache import clip
from tests.grad_cache.towers import gap, gradients, padded, twins

N = 7
CLOSE = 1e-6


class Patches(nn.Module):
    """As Qwen2-VL: the mean of a row's patches, over all of its images, beside its tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.patches = nn.Embedding(50, 8).double(), nn.Linear(5, 8).double()

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor, **more: Any) -> Tensor:
        images = (input_ids == 7).sum(1)  # a token for each image
        assert int(images.sum()) == len(image_grid_thw) and "num_images" not in more
        owner = torch.repeat_interleave(torch.arange(len(images)), images)
        row = torch.repeat_interleave(owner, image_grid_thw.prod(1))
        seen = torch.zeros(len(images), 8, dtype=torch.double).index_add(0, row, self.patches(pixel_values))
        return F.normalize(self.words(input_ids).mean(1) + seen, dim=1)


def patch_batch(seed: int, images: list[int]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(8, 50, (len(images), 6), generator=draw)
    for row, count in enumerate(images):
        ids[row, :count] = 7
    grid = torch.randint(1, 4, (sum(images), 3), generator=draw)
    pixels = torch.randn(int(grid.prod(1).sum()), 5, generator=draw, dtype=torch.double)
    batch = {"input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid}
    return batch if set(images) == {1} else {**batch, "num_images": torch.tensor(images)}


IMAGES = [[1] * N, [2, 0, 1, 3, 0, 1, 1]]


@pytest.mark.parametrize("images", IMAGES, ids=["one each", "several"])
@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("offload", ["none", "disk"])
def test_patches(images: list[int], kept: int, offload: Any) -> None:
    ours, theirs = twins(Patches())
    batches = [patch_batch(seed, images) for seed in (1, 2)]
    whole = [{name: x for name, x in batch.items() if name != "num_images"} for batch in batches]
    clip(*(theirs[0](**x) for x in whole)).backward()
    cache = ct.GradCache(ours[0], clip, 3, split_fn=image_patches, keep_graphs=kept, offload=offload)
    cache.step(*batches)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE and cache.kept_chunks == kept


def test_patches_are_sorted_by_tokens_and_patches_together() -> None:
    batch = patch_batch(1, IMAGES[1])
    mask = torch.ones_like(batch["input_ids"])
    mask[3, 2:] = 0
    patches = batch["image_grid_thw"].prod(1).split(IMAGES[1])
    want = mask.sum(1) + torch.stack([x.sum() for x in patches])
    batch["attention_mask"] = mask
    assert torch.equal(image_patches(batch).lengths, want)  # type: ignore[arg-type]
    for lengths, order in (("auto", want.argsort(descending=True, stable=True)), ("off", torch.arange(N))):
        cache = ct.GradCache(Patches(), clip, 3, split_fn=image_patches, lengths=lengths)  # type: ignore[arg-type]
        known = cache.feed.agenda((batch,)).known
        assert known is not None and torch.equal(torch.cat([item.piece.rows for item in known]), order)
    tokens = int(want.max())
    known = ct.GradCache(Patches(), clip, chunk_tokens=tokens, split_fn=image_patches).feed.agenda((batch,)).known
    assert known is not None and len(known) > 1 and all(item.piece.cost <= tokens for item in known)


class Several(nn.Module):
    """Takes images of all rows, and knows the rows from the texts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.pixels = nn.Embedding(50, 8).double(), nn.Linear(4, 8).double()

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_sizes: Tensor) -> Tensor:
        assert len(pixel_values) == len(image_sizes)
        owner = torch.repeat_interleave(torch.arange(len(input_ids)), (input_ids == 7).sum(1))
        seen = torch.zeros(len(input_ids), 8, dtype=torch.double).index_add(0, owner, self.pixels(pixel_values))
        return F.normalize(self.words(input_ids).mean(1) + seen, dim=1)


def image_batch(seed: int) -> dict[str, Tensor]:
    batch = patch_batch(seed, IMAGES[1])
    total = int(batch["num_images"].sum())
    pixels = torch.randn(total, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
    sizes = torch.ones(total, 2, dtype=torch.long)
    return {
        "input_ids": batch["input_ids"],
        "pixel_values": pixels,
        "image_sizes": sizes,
        "num_images": batch["num_images"],
    }


def test_several_images() -> None:
    ours, theirs = twins(Several())
    batches = [image_batch(seed) for seed in (1, 2)]
    clip(*(theirs[0](**{k: v for k, v in x.items() if k != "num_images"}) for x in batches)).backward()
    ct.GradCache(ours[0], clip, 3, split_fn=several_images).step(*batches)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE


class Packed(nn.Module):
    """Pools sequences by their ends; checks what else it is given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, 8).double()
        self.tokens: list[int] = []

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: Tensor,
        max_length_q: int,
        max_length_k: int,
        seq_idx: Tensor,
    ) -> Tensor:
        lengths = cu_seq_lens_q.diff().long()
        assert cu_seq_lens_q.dtype == torch.int32 and torch.equal(cu_seq_lens_q, cu_seq_lens_k)
        assert max_length_q == max_length_k == int(lengths.max()) and int(lengths.sum()) == input_ids.shape[1]
        assert torch.equal(position_ids[0], torch.cat([torch.arange(int(n)) for n in lengths]))
        row = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        assert torch.equal(seq_idx[0].long(), row)
        self.tokens.append(input_ids.shape[1])
        weighted = self.words(input_ids[0]) * (1 + position_ids[0].unsqueeze(1))
        return F.normalize(torch.zeros(len(lengths), 8, dtype=torch.double).index_add(0, row, weighted), dim=1)


def packed_batch(seed: int) -> dict[str, Any]:
    texts = padded(N, seed)
    lengths = texts["attention_mask"].sum(1)
    ends = F.pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    return {
        "input_ids": texts["input_ids"][texts["attention_mask"] == 1].view(1, -1),
        "position_ids": torch.cat([torch.arange(int(n)) for n in lengths]).view(1, -1),
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
        "seq_idx": torch.repeat_interleave(torch.arange(N), lengths).view(1, -1).int(),
    }


@pytest.mark.parametrize("sizes", [{"chunk_size": 3}, {"chunk_tokens": 8}], ids=str)
def test_packed_sequences(sizes: dict[str, Any]) -> None:
    ours, theirs = twins(Packed())
    batches = [packed_batch(seed) for seed in (1, 2)]
    clip(*(theirs[0](**x) for x in batches)).backward()
    ct.GradCache(ours[0], clip, split_fn=packed_sequences, **sizes).step(*batches)
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE
    assert "chunk_tokens" not in sizes or max(ours[0].tokens) <= 8  # type: ignore[arg-type]


def test_lists_with_a_processor() -> None:
    """A list of pictures on one side, texts as tensors on the other; the processor sees one chunk at a time."""
    pillow = pytest.importorskip("PIL.Image")
    pictures = [pillow.new("L", (2, 2), 30 * row) for row in range(N)]
    sizes: list[int] = []

    def processor(images: list[Any], return_tensors: str) -> dict[str, Tensor]:
        assert return_tensors == "pt"
        sizes.append(len(images))
        return {
            "pixel_values": torch.stack([torch.tensor(list(x.tobytes()), dtype=torch.double) for x in images]) / 255
        }

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.out = nn.Linear(4, 8).double()

        def forward(self, pixel_values: Tensor) -> Tensor:
            return F.normalize(self.out(pixel_values), dim=1)

    ours, theirs = twins(Flat(), Several().words)
    texts = padded(N, 1)["input_ids"][:, 0]
    clip(theirs[0](**processor(pictures, "pt")), F.normalize(theirs[1](texts), dim=1)).backward()
    sizes.clear()
    split = processed(processor), None
    for given in (pictures, {"images": pictures}):
        for module in ours:
            module.zero_grad()
        loss = lambda a, b: clip(a, F.normalize(b, dim=1))  # noqa: E731
        ct.GradCache(ours, loss, 3, split_fn=split).step(given, texts)
        assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE
    assert sizes == [3, 3, 1] * 2


def test_iterators_of_inputs_that_are_split() -> None:
    ours, theirs = twins(Patches())
    batches = [patch_batch(seed, IMAGES[0]) for seed in (1, 2, 3, 4)]
    features = [theirs[0](**x) for x in batches]
    clip(torch.cat(features[:2]), torch.cat(features[2:])).backward()
    ct.GradCache(ours[0], clip, 3, split_fn=image_patches).step(iter(batches[:2]), iter(batches[2:]))
    assert gap(gradients(*ours), gradients(*theirs)) <= CLOSE


GOOD = patch_batch(1, IMAGES[1])
WRONG: list[tuple[str, Any, dict[str, Any]]] = [
    ("pixel_values: expected .* entries, as its grid", image_patches, {**GOOD, "pixel_values": torch.zeros(3, 5)}),
    ("image_grid_thw: expected 7 entries, one for each row, got 8", image_patches, {**GOOD, "num_images": None}),
    ("num_images: expected 7 entries that add up to 8", image_patches, {**GOOD, "num_images": torch.ones(7)}),
    ("position_ids: expected 7 entries, one for each row", image_patches, {**GOOD, "position_ids": torch.ones(3)}),
    ("inputs: expected input_ids, attention_mask", image_patches, {"pixel_values": torch.ones(3)}),
    ("num_images: expected a tensor .rows., got NoneType", several_images, {"pixel_values": torch.ones(3)}),
    ("pixel_values: expected 8 entries", several_images, {**image_batch(1), "pixel_values": torch.ones(3, 4)}),
    ("cu_seq_lens_q: expected a tensor .rows . 1., got NoneType", packed_sequences, {"input_ids": torch.ones(1, 3)}),
    (
        "cu_seq_lens_q: expected 0 and then rising numbers, got .1, 3.",
        packed_sequences,
        {"input_ids": torch.ones(1, 3), "cu_seq_lens_q": torch.tensor([1, 3])},
    ),
    (
        "cu_seq_lens_q: expected 0 and then rising numbers, got .0, 3, 2, 5.",
        packed_sequences,
        {"input_ids": torch.ones(1, 5), "cu_seq_lens_q": torch.tensor([0, 3, 2, 5])},
    ),
    ("input_ids: expected .* tokens", packed_sequences, {**packed_batch(1), "input_ids": torch.ones(1, 3)}),
    ("inputs: expected lists of one length, got a 1, b 2", processed(dict), {"a": [1], "b": [1, 2]}),
    ("chunk_size: expected a number with split_fn, got 'auto'", image_patches, GOOD),
]


@pytest.mark.parametrize(("text", "split", "inputs"), WRONG, ids=[text[:40] for text, _, _ in WRONG])
def test_errors(text: str, split: Any, inputs: dict[str, Any]) -> None:
    size: Any = "auto" if text.startswith("chunk_size") else 3
    with pytest.raises(ValueError, match=text):
        ct.GradCache(Patches(), clip, size, split_fn=split).step(inputs, inputs)


def test_without_split_fn_the_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"7 and .*\(input_ids 7, pixel_values .*, image_grid_thw .*split_fn="):
        ct.GradCache(Patches(), clip, 3).step(GOOD, GOOD)
    with pytest.raises(ValueError, match="split_fn: expected one for each of 1 inputs, got 2"):
        ct.GradCache(Patches(), clip, 3, split_fn=(None, None)).step(GOOD)
    with pytest.raises(TypeError, match=r"split_fn of input 0: expected ct.Rows, got dict"):
        ct.GradCache(Patches(), clip, 3, split_fn=dict).step(GOOD, GOOD)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="inputs 'images': expected a list, got Tensor"):
        processed(dict)({"images": torch.ones(3)})


def test_rows_of_ones_own() -> None:
    bags = [torch.ones(n, 2) * n for n in (3, 1, 2)]
    rows = ragged_rows({"x": torch.cat(bags), "name": "bag"}, {"x": torch.tensor([3, 1, 2])}, 3)
    taken = rows.take(torch.tensor([2, 0]))
    assert torch.equal(taken["x"], torch.cat([bags[2], bags[0]])) and taken["name"] == "bag"
