"""The documentation: its Python runs, its pages are complete, the front page is short."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import contratile as ct
from contratile import data, embed, train

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("DistributedDataParallel", "scaler.scale", "accelerator", "prepare_image", "tokenizer(", "split_fn=")
"""Snippets that need a process group, an accelerator or the reader's own code; examples/ and other tests run these."""


def names() -> dict[str, Any]:
    """What the snippets take for granted, at small sizes."""
    torch.manual_seed(0)

    def unit(*shape: int) -> Tensor:
        return F.normalize(torch.randn(*shape), dim=-1)

    def encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1))

    batches = [(torch.randn(20, 8), torch.randn(20, 8)) for _ in range(2)]
    given: dict[str, Any] = {"ct": ct, "torch": torch, "F": F, "warnings": __import__("warnings")}
    given |= {"image": unit(24, 256), "text": unit(24, 256), "query": unit(24, 256), "key": unit(32, 256)}
    given |= {"z1": unit(12, 64), "z2": unit(12, 64), "z": unit(24, 64), "classes": torch.arange(24) % 5}
    given |= {
        "labels": torch.randperm(32)[:24],
        "ids": torch.arange(24) // 2,
        "scale": torch.tensor(20.0),
        "bias": -10.0,
    }
    given |= {"logit_scale": torch.tensor(2.0), "class_features": unit(5, 256), "targets": torch.arange(24) % 5}
    given |= {"extra_keys": unit(7, 256), "extra_ids": torch.arange(7), "gallery": unit(40, 256)}
    given |= {"hard_negatives": unit(24, 3, 256), "hard_mask": torch.rand(24, 3) > 0.5, "margin": 0.1}
    given |= {"weights": torch.rand(24), "image_encoder": encoder(), "text_encoder": encoder(), "loader": batches}
    log_scale = nn.Parameter(torch.tensor(1.0))
    given |= {"log_scale": log_scale, "optimiser": torch.optim.SGD([log_scale], lr=0.1), "loss": ct.ClipLoss()}
    given |= {"encoders": (given["image_encoder"], given["text_encoder"]), "pairs": lambda: iter(batches)}
    given |= {"images": batches[0][0], "texts": batches[0][1]}
    return given


def snippets(page: str) -> list[str]:
    found = FENCE.findall((DOCS / page).read_text(encoding="utf-8"))
    return [code for code in found if not any(word in code for word in ELSEWHERE)]


@pytest.mark.parametrize("page", ["index.md", "evaluate.md", "mine.md", "api.md", "api-reference.md"])
def test_snippets_run(page: str) -> None:
    given = names()
    assert snippets(page)
    for code in snippets(page):
        exec(code, given)


def test_snippets_of_the_gradient_cache_run(tmp_path: Path) -> None:
    given = names()
    first, taught, hard, kept, offload, loop = snippets("grad_cache.md")
    exec(first, given)
    assert given["log_scale"].grad is not None
    given |= {"ids": torch.arange(20) // 2, "teacher_image": nn.Linear(8, 5), "teacher_text": nn.Linear(8, 5)}
    exec(taught, given)
    encoder, rows = nn.Linear(8, 4), [torch.randn(count, 8) for count in (20, 20, 60)]
    exec(hard, given | {"encoder": encoder} | dict(zip(("queries", "documents", "negatives"), rows, strict=True)))
    assert encoder.weight.grad is not None
    cached = encoder.weight.grad.clone()
    query, key, negative = (encoder(x) for x in rows)
    ct.info_nce(query, key, 20.0, hard_negatives=negative.view(20, 3, 4)).backward()
    torch.testing.assert_close(encoder.weight.grad, 2 * cached)
    exec(kept, given)
    given["loss"] = ct.ClipLoss()
    exec(offload.replace("/scratch", str(tmp_path)), given)
    exec(loop, given)


LOSSES = snippets("losses.md")


def test_dense_code_is_what_the_losses_compute() -> None:
    """docs/losses.md: each function there, and the options spelled out, against ours."""
    module, dense, options, positives = LOSSES[:4]
    given = names()
    exec(module, given)
    naive: dict[str, Any] = {"torch": torch, "F": F}
    exec(dense, naive)
    x, y, scale = given["image"], given["text"], given["scale"]
    z, classes = given["z"], given["classes"]
    for got, expected in [
        (ct.clip_loss(x, y, scale), naive["clip_loss"](x, y, scale)),
        (
            ct.info_nce(x, given["key"], scale, labels=given["labels"]),
            naive["info_nce"](x, given["key"], scale, given["labels"]),
        ),
        (ct.nt_xent(given["z1"], given["z2"], 0.5), naive["nt_xent"](given["z1"], given["z2"], 0.5)),
        (ct.sup_con(z, classes, 0.1), naive["sup_con"](z, classes, 0.1)),
        (ct.siglip_loss(x, y, scale, -10.0), naive["siglip_loss"](x, y, scale, -10.0)),
    ]:
        torch.testing.assert_close(got, expected)

    given |= {"key": given["text"], "labels": torch.arange(24)}
    keywords = ("ids", "extra_keys", "extra_ids", "hard_negatives", "hard_mask", "margin", "weights")
    got = ct.info_nce(given["query"], given["key"], scale, **{name: given[name] for name in keywords})
    exec(options, given)
    torch.testing.assert_close(got, given["loss"])
    several = {name: given[name] for name in ("ids", "extra_keys", "extra_ids")} | {"same_id": "positive"}
    exec(positives, given)
    torch.testing.assert_close(ct.info_nce(given["query"], given["key"], scale, **several), given["loss"])


def test_further_sections_are_what_the_losses_compute() -> None:
    """docs/losses.md: biases, directions, Matryoshka dimensions, a teacher and a guide against ours."""
    biases, elsewhere, directions, queue, nested, one_product, taught, asked, guided, warning = LOSSES[4:]
    given = names()
    given |= {"key": given["text"], "labels": torch.arange(24), "strength": 9.0}
    pair, scale = (given["query"], given["key"]), given["scale"]
    more: dict[str, Any] = {name: given[name] for name in ("extra_keys", "hard_negatives")}
    added: dict[str, Any] = {"key_bias": torch.randn(24), "extra_bias": torch.randn(7), "hard_bias": torch.randn(24, 3)}
    given |= added
    exec(biases, given)
    torch.testing.assert_close(ct.info_nce(*pair, scale, **(more | added)), given["loss"])
    exec(elsewhere, given)
    torch.testing.assert_close(ct.info_nce(*pair, scale, **more, in_batch_negatives=False), given["loss"])
    exec(directions, given)
    harder: dict[str, Any] = {"hardness_mode": "in_batch_negatives", "hardness_strength": 9.0}
    four: Any = ("query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc")
    torch.testing.assert_close(ct.info_nce(*pair, scale, directions=four, **harder), given["loss"])
    exec(queue, given)
    given |= {"matryoshka_dims": (2, 4), "matryoshka_weights": (1, 1)}
    exec(nested, given)
    looped = given["loss"]
    exec(one_product.replace("(64, 128, 256, 512, 768)", "(2, 4)"), given)
    torch.testing.assert_close(given["loss"], looped)

    other: list[Any] = [F.normalize(torch.randn(24, 6), dim=1) for _ in range(4)]
    given |= {"teacher_query": other[0], "teacher_key": other[1], "teacher_scale": 30.0, "teacher_temperature": 2.0}
    given |= {"teacher_weight": 0.5, "guide_query": other[2], "guide_key": other[3], "guide_margin": 0.1}
    exec(taught, given)
    found = ct.info_nce(*pair, scale, teacher=(*other[:2], 30.0), teacher_weight=0.5, teacher_temperature=2.0)
    torch.testing.assert_close(found, given["loss"])
    given |= {"teacher_image": other[0], "teacher_text": other[1]}
    exec(asked, given)
    torch.testing.assert_close(sum(given["terms"]), given["loss"])
    exec(guided, given)
    found = ct.info_nce(*pair, scale, guide=(other[2], other[3]), guide_margin=0.1)
    torch.testing.assert_close(found, given["loss"])
    exec(warning, given)


def test_front_page_change() -> None:
    """README's two columns: the same loss before and after."""
    (code,) = FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    column = code.index("# after")
    before, after = names(), names()
    exec("\n".join(line[:column] for line in code.splitlines()), before)
    exec("\n".join(line[column:] for line in code.splitlines()), after)
    torch.testing.assert_close(after["loss"], before["loss"])


def test_front_page_is_short_and_promises_no_package_index() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 140
    pages = page + "".join(path.read_text(encoding="utf-8") for path in DOCS.glob("*.md"))
    assert not re.search(r"pip install \"?contratile", pages)


@pytest.mark.parametrize("module", [ct, data, embed, train, ct.reference], ids=lambda module: module.__name__)
def test_every_public_name_has_an_entry_in_the_api_reference(module: ModuleType) -> None:
    entries = set(re.findall(r"^::: (\S+)$", "\n".join(x.read_text() for x in DOCS.glob("api*.md")), re.MULTILINE))
    public = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (inspect.isroutine(value) or inspect.isclass(value))
    ]
    assert public
    if module is train:
        public = [name for name in public if not hasattr(data, name)]  # listed there
    for name in public:
        assert f"{module.__name__}.{name}" in entries or module.__name__ in entries, name


def test_the_menu_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f": {page.name}\n" in menu, page.name


def recorded(run: Callable[[], Any]) -> tuple[Any, list[tuple[str, str]], set[str]]:
    """Its result, the frames of the package above the first `torch.mm`, and the files of the package that run."""
    package, stacks, files = Path(ct.__file__).parent, [], set()

    def inside(frame: FrameType) -> str | None:
        file = Path(frame.f_code.co_filename)
        return file.relative_to(package).as_posix() if file.is_relative_to(package) else None

    def note(frame: FrameType | None, event: str, called: Any) -> None:
        assert frame is not None
        file = inside(frame)
        if event == "call" and file is not None:
            files.add(file)
        if event != "c_call" or getattr(called, "__name__", "") != "mm":
            return
        stack = []
        while frame is not None:
            file = inside(frame)
            stack += [] if file is None else [(frame.f_code.co_name, file)]
            frame = frame.f_back
        stacks.append(stack[::-1])

    sys.setprofile(note)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return result, stacks[0], files


def test_how_it_works_shows_the_frames_of_a_call() -> None:
    section = (DOCS / "how-it-works.md").read_text(encoding="utf-8").partition("## What happens in a call")[2]
    section = section.partition("\n## ")[0]

    def documented(direction: str) -> list[tuple[str, str]]:
        rows = section.partition(f"| {direction} | file |")[2].partition("\n\n")[0]
        return [(name.rpartition(".")[2], file) for name, file in re.findall(r"^\| `(\S+)` \| `(\S+)` \|", rows, re.M)]

    # More scores than are kept for the backward pass, which therefore multiplies again.
    image, text = (F.normalize(torch.randn(600, 8), dim=1).requires_grad_() for _ in range(2))
    scale = torch.tensor(10.0, requires_grad=True)

    def step() -> Tensor:
        return ct.clip_loss(image, text, scale, group=None)

    step().backward()  # what is made once is no part of a call
    loss, forward, first = recorded(step)
    _, backward, second = recorded(loss.backward)
    assert forward[0] == ("call", "keywords.py")  # the decorator, which the page describes below its tables
    forward = forward[1:]
    assert documented("forward") == forward
    assert documented("backward") == backward
    for row in (
        f"to `torch.mm`, forward / backward | 8 / 4 | {len(forward)} / {len(backward)} |",
        f"files on that stack, forward and backward | 6 | {len({file for _, file in forward + backward})} |",
        f"files that run at all, forward / backward | 19 / 12 | {len(first)} / {len(second)} |",
    ):
        assert row in section
    assert {file.rpartition("/")[2] for file in first | second} <= set(re.findall(r"(\w+\.py)`", section))
