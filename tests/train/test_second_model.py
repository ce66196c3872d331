"""A guide or a teacher in training: what it is given, what the loss makes of it, and that it stays as it was."""

import os
import re
import shlex
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import contratile as ct
from contratile.cli import main
from contratile.data.chunk_maker import Chunk
from contratile.models.base import Pixels
from contratile.models.towers import TowerConfig, build_towers
from contratile.planner.devices import parse_devices
from contratile.planner.loss_memory import tiled_loss_bytes
from contratile.planner.memory import buffer_rows
from contratile.report.tracking import history
from contratile.train import checkpoint
from contratile.train.config import LossConfig, TrainConfig
from contratile.train.config_file import load_config, save_config
from contratile.train.header import header
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from contratile.train.objective import pair_facts
from contratile.train.planning import plan_config, plan_run
from contratile.train.second_model import load_second
from tests.ranks import pool
from tests.train.runs import (
    clip_folder,
    everything,
    losses,
    sentence_folder,
    shapes,
    siglip_folder,
    small,
    texts,
    unlike_pretrained,
    weights,
)

MARGIN = {"guide_margin": 0.05, "guide_margin_strategy": "relative"}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def first(table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose model has more pixels and another width than those that it guides."""
    return unlike_pretrained(small(table, tmp_path_factory.mktemp("first") / "run", width=48, pixels=24, words=32))


def first_chunks(trainer: Trainer) -> tuple[Any, list[Chunk]]:
    """The first batch, and its chunks to look at."""
    batch = next(iter(trainer.loader))
    chunks = list(batch.chunks)
    return batch._replace(chunks=iter(chunks)), chunks


def one_step(config: TrainConfig) -> tuple[Trainer, list[Chunk], dict[str, float], dict[str, Tensor]]:
    """A step: the trainer, its chunks, what it logged, and the weights before it."""
    trainer = Trainer(config)
    before = {name: x.detach().clone() for name, x in trainer.towers.state_dict().items()}
    batch, chunks = first_chunks(trainer)
    return trainer, chunks, trainer.train_step(batch), before


def gradients(trainer: Trainer) -> dict[str, Tensor]:
    return {name: p.grad for name, p in trainer.towers.named_parameters() if p.grad is not None}


def check_step(
    trainer: Trainer, facts: dict[str, float], before: dict[str, Tensor], by_hand: Callable[..., Any]
) -> None:
    """Loss and gradients of a step against those of a call of the loss with the same weights."""
    found = {name: grad.clone() for name, grad in gradients(trainer).items()}
    trainer.towers.load_state_dict(before)
    trainer.optimizer.zero_grad()
    loss = by_hand(trainer.towers)
    loss.backward()
    assert facts["loss"] == pytest.approx(loss.item(), rel=1e-5)
    expected = gradients(trainer)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).norm() < 1e-3 * grad.norm() + 1e-6, name


def rows(table: Path, chunks: list[Chunk]) -> tuple[list[Path], list[str]]:
    """Pictures and texts of a batch, as files and words."""
    return [table.parent / name for chunk in chunks for name in chunk.names], [x for c in chunks for x in c.texts]


@pytest.mark.parametrize("loss", ["clip", "infonce"])
@pytest.mark.parametrize("options", [{}, MARGIN, {"same_id": "negative", "guide_margin": 0.02}])
def test_a_guided_step_is_the_loss_with_its_features(
    table: Path, first: Path, tmp_path: Path, loss: str, options: dict[str, Any]
) -> None:
    """The guide's features come from the files themselves, through `ct.load`."""
    config = small(table, tmp_path, guide=str(first), loss=loss, clip_grad=0.0, **options)
    trainer, chunks, facts, before = one_step(config)
    guide = ct.load(first)
    pictures, words = rows(table, chunks)
    both = guide.encode_image(pictures), guide.encode_text(words)
    keywords = {name: value for name, value in options.items() if name.startswith("guide")}
    if options.get("same_id") != "negative":
        keywords["ids"] = torch.cat([pair_facts(chunk, "right")[:, 0] for chunk in chunks])
    function: Any = {"clip": ct.clip_loss, "infonce": ct.info_nce}[loss]

    def by_hand(towers: Any, **more: Any) -> Tensor:
        left = towers.left(torch.cat([chunk.left for chunk in chunks]))
        right = towers.right(towers.right.prepare(words))
        found: Tensor = function(left, right, towers.log_scale.exp(), **keywords, **more)
        return found

    check_step(trainer, facts, before, lambda towers: by_hand(towers, guide=both))
    similar = both[0] @ both[1].T
    own = similar.diagonal()[:, None]
    margin = options.get("guide_margin", 0.0) * (own.abs() if "guide_margin_strategy" in options else 1)
    others = ~torch.eye(len(words), dtype=torch.bool)
    assert facts["guide_drops"] == pytest.approx((similar > own - margin)[others].float().mean().item())
    keywords = {name: value for name, value in keywords.items() if name == "ids"}
    assert abs(facts["loss"] - by_hand(trainer.towers).item()) > 1e-3, "it dropped nothing"


def test_a_taught_step_is_the_loss_with_its_features(table: Path, first: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"teacher_weight": 0.5, "teacher_temperature": 2.0}
    trainer, chunks, facts, before = one_step(small(table, tmp_path, teacher=str(first), clip_grad=0.0, **options))
    teacher = ct.load(first)
    pictures, words = rows(table, chunks)
    brought = teacher.encode_image(pictures), teacher.encode_text(words), teacher.towers.log_scale.exp().item()
    ids = torch.cat([pair_facts(chunk, "right")[:, 0] for chunk in chunks])
    told = []

    def by_hand(towers: Any) -> Any:
        left = towers.left(torch.cat([chunk.left for chunk in chunks]))
        right = towers.right(towers.right.prepare(words))
        scale = towers.log_scale.exp()
        loss, terms = ct.clip_loss(left, right, scale, ids=ids, teacher=brought, return_terms=True, **options)
        told.append(terms.distill.item())
        return loss

    check_step(trainer, facts, before, by_hand)
    assert facts["distill"] == pytest.approx(told[0], rel=1e-5)
    assert told[0] > 0.1


@pytest.mark.parametrize("mode", ["all", "own"])
@pytest.mark.parametrize("loss", ["clip", "infonce"])
def test_a_guide_judges_hard_negatives_too(tmp_path: Path, loss: str, mode: str) -> None:
    """With several captions, two sources, hard negatives and augmentation: all that data can be."""
    options = everything(tmp_path / "data")
    data = options.pop("data")
    guide = unlike_pretrained(small(tmp_path / "data" / "pairs.csv", tmp_path / "guide", width=48, pixels=24, words=32))
    config = small(tmp_path, tmp_path / "run", guide=str(guide), loss=loss, hard_negatives=mode, clip_grad=0.0)
    config = replace(
        config,
        data=replace(config.data, data=data, data_weights=options["data_weights"], num_negatives=2),
        augment=replace(config.augment, augment="simclr", blur=0.3),
    )
    trainer, chunks, facts, before = one_step(config)
    its = load_run(guide).towers
    own = torch.cat([chunk.second.left for chunk in chunks if chunk.second is not None])
    assert own.shape[-1] == 24 and trainer.config.loss.ids == "left"
    words = [x for chunk in chunks for x in chunk.texts]
    hard = [x for chunk in chunks if chunk.negatives is not None for x in chunk.negatives.texts]
    there = torch.tensor([bool(x) for x in hard])
    ids = torch.cat([pair_facts(chunk, "left")[:, 0] for chunk in chunks])
    with torch.no_grad():
        both = its.left(own), its.right(its.right.prepare(words))
        of_guide = its.right(its.right.prepare([x or "nothing" for x in hard]))

    def by_hand(towers: Any) -> Any:
        left = towers.left(torch.cat([chunk.left for chunk in chunks]))
        right = towers.right(towers.right.prepare(words))
        negatives = towers.right(towers.right.prepare([x or "nothing" for x in hard]))
        more: dict[str, Any] = {"extra_keys": negatives[there], "extra_guide": of_guide[there]}
        if mode == "own":
            shape = (len(words), 2)
            more = {"hard_negatives": negatives.view(*shape, -1), "hard_mask": there.view(shape)}
            more["hard_guide"] = of_guide.view(*shape, -1)
        function: Any = {"clip": ct.clip_loss, "infonce": ct.info_nce}[loss]
        return function(left, right, towers.log_scale.exp(), ids=ids, guide=both, **more)

    check_step(trainer, facts, before, by_hand)


@pytest.mark.filterwarnings("ignore")  # of sentence-transformers, about a model without its own pooling
@pytest.mark.parametrize("kind", ["clip", "siglip", "sentences"])
def test_pretrained_towers_guide_too(table: Path, tmp_path: Path, kind: str) -> None:
    """With their own pixels and tokens: some of fixed length, some in the order of their lengths."""
    make = {"clip": clip_folder, "siglip": siglip_folder, "sentences": sentence_folder}[kind]
    name = f"{'st' if kind == 'sentences' else 'hf'}:{make(tmp_path / 'model')}"
    student = {"towers": name, "pixels": 0, "lock": "both", "head": "linear"} if kind == "sentences" else {}
    data = texts(tmp_path) if kind == "sentences" else table
    config = small(data, tmp_path / "run", guide=name, guide_margin=0.01, clip_grad=0.0, **student)
    trainer, chunks, facts, before = one_step(config)
    its = build_towers(TowerConfig(towers=name)).eval()
    lefts, words = [x for chunk in chunks for x in chunk.names], [x for chunk in chunks for x in chunk.texts]
    with torch.no_grad():
        if kind == "sentences":
            left = its.left(its.left.prepare(lefts))
        else:
            left = its.left(torch.cat([chunk.second.left for chunk in chunks if chunk.second is not None]))
        both = left, its.right(its.right.prepare(words))
    ids = torch.cat([pair_facts(chunk, "right")[:, 0] for chunk in chunks])

    def by_hand(towers: Any) -> Any:
        own = towers.left.prepare(lefts) if kind == "sentences" else torch.cat([chunk.left for chunk in chunks])
        left, right = towers.left(own), towers.right(towers.right.prepare(words))
        return ct.clip_loss(left, right, towers.log_scale.exp(), ids=ids, guide=both, guide_margin=0.01)

    check_step(trainer, facts, before, by_hand)
    similar = both[0] @ both[1].T
    dropped = similar > similar.diagonal()[:, None] - 0.01
    assert dropped.sum() > 2 * len(words), "it dropped more than the pairs themselves"


def test_it_is_neither_trained_nor_saved(table: Path, first: Path, tmp_path: Path) -> None:
    config = small(table, tmp_path, guide=str(first), offload="host", steps=3)
    trainer = Trainer(config)
    assert trainer.second is not None
    its = trainer.second.towers
    before = {name: x.clone() for name, x in its.state_dict().items()}
    trainer.run()
    assert not any(p.requires_grad or p.grad is not None for p in its.parameters())
    # Towers share the module that normalises pixels, which has no mode.
    assert not any(module.training for module in its.modules() if not isinstance(module, Pixels))
    assert all(torch.equal(before[name], x) for name, x in its.state_dict().items())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert not held & {id(p) for p in its.parameters()}
    folder = checkpoint.latest(tmp_path)
    assert folder is not None
    state, facts = checkpoint.load(folder)
    assert state["model"].keys() == trainer.towers.state_dict().keys()
    assert facts["second"] == {"role": "guide", "name": str(first), "weights": trainer.second.weights}


def test_it_encodes_each_pair_once_in_chunks(table: Path, first: Path, tmp_path: Path) -> None:
    trainer = Trainer(small(table, tmp_path, guide=str(first), chunk=10))
    assert trainer.second is not None
    seen: dict[str, list[int]] = {"left": [], "right": []}
    for side, sizes in seen.items():
        tower = getattr(trainer.second.towers, side)
        tower.register_forward_hook(lambda module, given, features, sizes=sizes: sizes.append(len(features)))
    own: list[int] = []
    trainer.towers.left.register_forward_hook(lambda module, given, features: own.append(len(features)))
    batch, _ = first_chunks(trainer)
    trainer.train_step(batch)
    assert seen["left"] == [10, 10, 10, 2]
    assert sum(own) == 64, "the trained model encodes twice"
    # The first step also looks whether the guide's texts can do without their padding.
    seen["right"].clear()
    batches = iter(trainer.loader)
    next(batches)
    trainer.train_step(next(batches))
    assert sum(seen["right"]) == 32 and max(seen["right"]) <= 10


def test_chunks_and_offloading_do_not_matter(table: Path, first: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"guide": str(first), **MARGIN, "steps": 3}
    Trainer(small(table, tmp_path / "a", chunk=32, **options)).run()
    Trainer(small(table, tmp_path / "b", chunk=7, offload="disk", cache_mib=1, **options)).run()
    Trainer(small(table, tmp_path / "c", chunk=32, backend="dense", workers=1, **options)).run()
    found = [torch.tensor(losses(tmp_path / name)) for name in "abc"]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


def test_the_trained_model_starts_as_without_it(table: Path, first: Path, tmp_path: Path) -> None:
    guided = Trainer(small(table, tmp_path / "a", guide=str(first)))
    random = torch.rand(3)
    plain = Trainer(small(table, tmp_path / "b"))
    assert torch.equal(torch.rand(3), random)
    for mine, theirs in zip(guided.towers.parameters(), plain.towers.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    (batch, with_it), (_, without) = first_chunks(guided), first_chunks(plain)
    for a, b in zip(with_it, without, strict=True):
        assert torch.equal(a.left, b.left) and a.texts == b.texts and b.second is None
    guided.train_step(batch)


def test_bf16(table: Path, first: Path, tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        Trainer(small(table, tmp_path / precision, guide=str(first), precision=precision, steps=3)).run()
    a, b = (torch.tensor(losses(tmp_path / precision)) for precision in ("fp32", "bf16"))
    assert (a - b).abs().max() < 0.1 and not torch.equal(a, b)


def test_a_locked_side_with_kept_outputs(table: Path, first: Path, tmp_path: Path) -> None:
    """The guide needs the pictures that the locked tower does not."""
    for name, keep in (("kept", True), ("again", False)):
        options = {"lock": "image", "head": "linear", "keep_outputs": keep, "steps": 3}
        Trainer(small(table, tmp_path / name, guide=str(first), **options)).run()
    a, b = (torch.tensor(losses(tmp_path / name)) for name in ("kept", "again"))
    torch.testing.assert_close(a, b)


# --- several processes ------------------------------------------------------------------------------------------------


def trained(config: TrainConfig) -> list[int]:
    """A run on a rank of a pool: how many pictures of a step its guide encoded."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"]
    trainer = Trainer(config)
    assert trainer.second is not None
    sizes: list[int] = []
    trainer.second.towers.left.register_forward_hook(lambda module, given, features: sizes.append(len(features)))
    trainer.run()
    return sizes


@pytest.mark.parametrize("role", ["guide", "teacher"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp"])
def test_two_ranks_do_what_one_process_does(table: Path, first: Path, tmp_path: Path, role: str, fsdp: bool) -> None:
    options: dict[str, Any] = {role: str(first), "steps": 3, **(MARGIN if role == "guide" else {})}
    Trainer(small(table, tmp_path / "one", **options)).run()
    sizes = pool(2).run(trained, small(table, tmp_path / "two", fsdp=fsdp, **options))
    assert [sum(each) for each in sizes] == [3 * 16, 3 * 16], "each its share"
    one, two = (torch.tensor(losses(tmp_path / name)) for name in ("one", "two"))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
    mine, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=0.02, atol=2e-3)


# --- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["guide", "teacher"])
def test_a_run_goes_on_exactly_also_with_moved_folders(
    table: Path, first: Path, tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"patch_dropout": 0.5, "steps": 5}
    Trainer(small(table, tmp_path / "whole", **{role: str(first)}, **options)).run()
    shutil.copytree(first, tmp_path / "before")
    config = small(table, tmp_path / "stopped", **{role: str(tmp_path / "before")}, **options)
    step = Trainer.train_step

    def interrupted(self: Trainer, batch: Any) -> dict[str, float]:
        if self.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    assert Trainer(config).run().step == 3
    monkeypatch.undo()
    (tmp_path / "stopped").rename(tmp_path / "moved")
    (tmp_path / "before").rename(tmp_path / "after")
    saved = load_config(tmp_path / "moved" / "config.toml")
    saved = replace(saved, run=replace(saved.run, out=tmp_path / "moved"))
    with pytest.raises(ValueError, match=rf"{role}: expected .*before, where nothing is.*--{role} PATH"):
        Trainer(saved)
    assert ct.load(tmp_path / "moved").step == 3, "the trained model needs no guide"
    new: dict[str, Any] = {role: str(tmp_path / "after")}
    trainer = Trainer(replace(saved, loss=replace(saved.loss, **new)))
    assert trainer.step == 3 and not trainer.notices
    assert trainer.run().finished
    assert losses(tmp_path / "moved") == losses(tmp_path / "whole")
    mine, theirs = weights(tmp_path / "moved"), weights(tmp_path / "whole")
    assert all(torch.equal(mine[name], x) for name, x in theirs.items())


def test_a_forgotten_option_of_the_loss_is_told(table: Path, first: Path, tmp_path: Path) -> None:
    config = small(table, tmp_path / "run", teacher=str(first), teacher_weight=0.5, steps=1)
    Trainer(config).run()
    longer = replace(config, run=replace(config.run, steps=2))
    assert not Trainer(longer).notices
    assert not Trainer(replace(longer, loss=replace(longer.loss, backend="dense"))).notices
    (notice,) = Trainer(replace(longer, loss=LossConfig(margin=0.2))).notices
    told = f"margin was None, is 0.2; teacher was '{first}', is ''; teacher_weight was 0.5, is 1.0"
    assert notice == f"the loss changes at this step: {told}"


def test_other_weights_under_its_name_are_told(table: Path, tmp_path: Path) -> None:
    guide = unlike_pretrained(small(table, tmp_path / "guide"))
    config = small(table, tmp_path / "run", guide=str(guide), steps=2)
    Trainer(config).run()
    towers = load_run(guide).towers
    with torch.no_grad():
        towers.left.backbone[1].model["visual_projection"].weight.add_(1)  # type: ignore[index]
    folder = guide / "checkpoints" / checkpoint.step_name(9)
    _, facts = checkpoint.load(guide / "checkpoints" / checkpoint.step_name(7))
    checkpoint.save(folder, {"model": towers.state_dict()}, {**facts, "step": 9, "best_step": 9})
    longer = replace(config, run=replace(config.run, steps=3))
    (notice,) = Trainer(longer).notices
    assert notice.startswith(f"guide: {guide} has other weights than when the run was stopped. To fix them, name a che")
    fixed = replace(longer, loss=replace(longer.loss, guide=str(guide / "checkpoints" / "step-00000007")))
    assert not Trainer(fixed).notices
    shutil.copytree(guide, tmp_path / "copy")
    for name, told in (("copy/checkpoints/step-00000007", 0), ("copy", 1)):
        other = replace(longer, loss=replace(longer.loss, guide=str(tmp_path / name)))
        notices = Trainer(other).notices
        assert len(notices) == told and all(f"other weights than {guide}, which the run had" in x for x in notices)
    trainer = Trainer(fixed)
    assert trainer.second is not None and trainer.second.step == 7


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"guide": "tiny"}, "guide: expected .* got tiny, which has no weights. Train such towers first"),
        ({"guide": "open_clip:ViT-B-32"}, "guide: expected pretrained weights, got open_clip:ViT-B-32, without"),
        ({"guide": "hf:a/vision+b/text"}, "guide: expected .* two models without a common space"),
        ({"guide": "hf:"}, "guide: expected .* got hf:, which has no weights"),
        ({"guide_margin": 0.1}, "guide_margin: expected --guide with it, got 0.1. Pass --guide too"),
        ({"guide_margin_strategy": "relative"}, "guide_margin_strategy: expected --guide with it"),
        ({"teacher_weight": 2.0}, "teacher_weight: expected --teacher with it"),
        ({"teacher_scale": 2.0}, "teacher_scale: expected --teacher with it"),
        ({"teacher": "hf:a"}, "teacher_scale: expected the scale of a pretrained teacher's cosines, got none"),
        ({"teacher": "x", "teacher_temperature": 0.0}, "teacher_temperature: expected a positive number"),
        ({"teacher": "x", "teacher_weight": -1.0}, "teacher_weight: expected at least 0"),
        ({"guide": "x", "guide_margin": float("nan")}, "guide_margin: expected a finite number"),
        ({"guide": "x", "teacher": "y"}, "guide: expected none with --teacher"),
        ({"guide": "x", "loss": "siglip"}, "guide: expected none with --loss siglip"),
        ({"teacher": "x", "loss": "supcon"}, "teacher: expected none with --loss supcon"),
        ({"guide": "x", "margin": 0.1}, "guide: expected none with --margin"),
        ({"guide": "x", "label_smoothing": 0.1}, "guide: expected none with --label-smoothing"),
        ({"teacher": "x", "same_id": "positive"}, "teacher: expected none with --same-id positive"),
        ({"guide": "x", "matryoshka_dims": (4, 8)}, "guide: expected none with --matryoshka-dims"),
        ({"guide": "x", "backend": "triton"}, "guide: expected none with --backend triton"),
        ({"teacher": "x", "num_negatives": 2}, "num_negatives: expected none with --teacher, got 2"),
        ({"teacher": "x", "negatives": ("bad",)}, "negatives: expected none with --teacher"),
        (
            {"guide": "x", "loss": "infonce", "directions": ("query_to_doc", "doc_to_query")},
            "guide: expected none with --directions beyond query_to_doc",
        ),
        (
            {"guide": "x", "loss": "infonce", "hardness_mode": "all_negatives", "hardness_strength": 1.0},
            "guide: expected none with --hardness-mode",
        ),
    ],
)
def test_options_that_mean_nothing(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    """When they are given, before any data is read."""
    with pytest.raises(ValueError, match=told):
        small(tmp_path / "missing.csv", tmp_path, **changes)


def test_models_that_are_not_there(table: Path, first: Path, tmp_path: Path) -> None:
    """Before any data is read: the table is not there either."""

    def refused(guide: Path | str, told: str, **changes: Any) -> None:
        with pytest.raises(ValueError, match=told):
            Trainer(small(tmp_path / "missing.csv", tmp_path / "run", guide=str(guide), **changes))
        assert not (tmp_path / "run").exists()

    refused(tmp_path / "gone", r"guide: expected the folder of a run, or .* got .*gone, where nothing is. Put it back")
    refused(f"hf:{tmp_path / 'gone'}", r"guide: expected a model at .*gone, got nothing")
    refused(tmp_path, r"guide: expected the folder of a run.* without config.toml")
    refused(tmp_path / "run", r"guide: expected .* where nothing is")
    (tmp_path / "none").mkdir()
    save_config(small(table, tmp_path / "none"), tmp_path / "none")
    refused(tmp_path / "none", r"guide: expected a checkpoint, got .*none: the run has none. Train it further")
    step = first / "checkpoints" / "step-00000008"
    refused(step, r"guide: expected a checkpoint, got .*step-00000008: the run has step-00000007")
    with pytest.raises(ValueError, match=r"guide: expected another run, got that of --out"):
        Trainer(small(table, first, guide=str(first)))


def test_models_that_cannot_encode_the_data(table: Path, first: Path, tmp_path: Path) -> None:
    name = f"st:{sentence_folder(tmp_path / 'model')}"
    with pytest.raises(ValueError, match=rf"guide: expected a model of image and text, .* got {name}, of text and"):
        Trainer(small(table, tmp_path / "run", guide=name))
    damaged = tmp_path / "damaged"
    shutil.copytree(first, damaged)
    (damaged / "checkpoints" / "step-00000007" / "model.safetensors").write_bytes(b"no")
    told = rf"guide {damaged}: .*model.safetensors"
    with pytest.raises(ValueError, match=told), pytest.warns(UserWarning, match="passed over"):
        Trainer(small(table, tmp_path / "run", guide=str(damaged)))


def test_a_teacher_has_no_place_for_hard_negatives(first: Path, tmp_path: Path) -> None:
    data = everything(tmp_path)["data"][0]
    with pytest.raises(ValueError, match=r"teacher: expected data without hard negatives, got .*--num-negatives 0"):
        Trainer(small(data, tmp_path / "run", teacher=str(first)))
    found = one_step(small(data, tmp_path / "run", teacher=str(first), num_negatives=0, batch=16))[2]
    assert found["distill"] > 0


# --- the command line -------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^contratile (train .* --(?:width|guide|teacher) .*)$", PAGE, re.MULTILINE)
SMALLER = ["--limit", "60", "--batch", "30", "--width", "32", "--depth", "1", "--steps", "2", "--eval-every", "2"]
SMALLER += ["--gallery", "held-out", "--cpu", "--no-tensorboard"]


@pytest.mark.slow
def test_the_documented_commands_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Word for word."""
    monkeypatch.chdir(tmp_path)
    for command in COMMANDS:
        assert main(shlex.split(command)) == 0
    told = capsys.readouterr().err
    shares = [float(share) for share in re.findall(r"guide drops ([0-9.]+)%", told)]
    assert shares and 0 < max(shares) < 30
    for name in ("first", "guided", "taught"):
        found = losses(tmp_path / "runs" / name)
        assert len(found) == 60 and found[-1] < 0.8 * found[0]


def test_the_documented_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With fewer and smaller steps."""
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) == 3
    for command in COMMANDS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such a guide drops nearly all pairs
            assert main([*shlex.split(command), *SMALLER]) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"guide {tmp_path / 'runs' / 'first'} at step" in told and "guide drops" in told
    assert f"teacher {tmp_path / 'runs' / 'first'} at step" in told and "distill" in told
    assert {"guide_drops", "loss"} <= history(tmp_path / "runs" / "guided")[1].keys()
    guided = shlex.split(COMMANDS[1])
    assert main([*guided, *SMALLER, "--guide", "runs/none", "--out", "runs/other"]) == 2
    assert "guide: expected the folder of a run, or pretrained" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*guided, *SMALLER, "--margin", "0.1", "--out", "runs/other"])
    assert "guide: expected none with --margin" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "other").exists()
    assert main([*guided, *SMALLER, "--plan"]) == 0
    assert "guide weights" in capsys.readouterr().out


def test_a_guide_that_drops_nearly_everything(table: Path, first: Path, tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"the guide drops 100% of the pairs of the first batch.* Lower --guide-margin"
    ):
        found = one_step(small(table, tmp_path, guide=str(first), guide_margin=2.5))[2]
    assert found["loss"] == 0.0 and found["guide_drops"] == 1.0


# --- what is told -----------------------------------------------------------------------------------------------------


def test_the_header_names_it(table: Path, first: Path, tmp_path: Path) -> None:
    lines = header(Trainer(small(table, tmp_path / "a", guide=str(first), **MARGIN)))
    (line,) = [line for line in lines if line.startswith("guide")]
    assert f"{first} at step 7: " in line and "frozen" in line and line.endswith("relative margin 0.05")
    lines = header(Trainer(small(table, tmp_path / "b", teacher=str(first), teacher_scale=30.0)))
    assert any(line.startswith("teacher") and line.endswith("scale 30") for line in lines)
    lines = header(Trainer(small(table, tmp_path / "c")))
    assert not any(line.startswith(("guide", "teacher")) for line in lines)


@pytest.mark.parametrize("role", ["guide", "teacher"])
def test_plans_count_it(table: Path, first: Path, tmp_path: Path, role: str) -> None:
    config = small(table, tmp_path, **{role: str(first)})
    found = plan_config(config, parse_devices("8xA800-80G"))
    terms = {term.name: term.bytes for term in found.memory.terms}
    its = load_second(config)
    assert its is not None
    parameters = sum(x.nbytes for tower in (its.towers.left, its.towers.right) for x in tower.parameters())
    assert parameters <= terms[f"{role} weights"] < 1.01 * parameters, "buffers come on top"
    assert terms[f"{role} features"] == 4 * 2 * buffer_rows(4, 4) * 48, "four rows on each of eight devices"
    assert terms[f"{role} ring buffers"] == 2 * 4 * 4 * 48
    plain = plan_config(small(table, tmp_path), parse_devices("8xA800-80G"))
    assert found.time.seconds > plain.time.seconds and found.memory.peak > plain.memory.peak
    here = plan_run(config)
    assert {f"{role} weights", f"{role} features", f"{role} tiles"} <= {term.name for term in here.memory.terms}
    assert tiled_loss_bytes(32, 32, second=48) > tiled_loss_bytes(32, 32)


def test_chunk_auto_counts_it(table: Path, first: Path, tmp_path: Path) -> None:
    trainer = Trainer(small(table, tmp_path, guide=str(first), chunk="auto"))
    assert trainer.chunk == 32 and trainer.train_step(first_chunks(trainer)[0])["loss"] > 0
