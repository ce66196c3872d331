"""`contratile mine`: the negatives of a dense search, in a table that `contratile train` reads."""

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from contratile.cli import main
from contratile.data.catalog import DataConfig, open_source
from contratile.data.sample import Kinds, Sample
from contratile.data.tables import Table
from contratile.embed import mine as mining
from contratile.embed.mine import mine_source
from contratile.mining.options import Rules
from contratile.models.encoding import encode, matches
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from tests.mining.dense import candidates
from tests.ranks import launch_environment, torchrun
from tests.train.runs import COLOURS, SHAPES, losses, shapes, small


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a table in which captions and pictures occur several times."""
    folder = tmp_path_factory.mktemp("mine")
    table = shapes(folder / "shapes")
    Trainer(small(table, folder / "run", steps=20, warmup=0)).run()
    lines = table.read_text().splitlines()
    repeated = [f"{line.split(',')[0]},{line.split(',')[1].split(' of ')[0]}" for line in lines[1::2]]
    (folder / "shapes" / "repeated.csv").write_text("\n".join([*lines, *repeated, *repeated[:5]]) + "\n")
    return folder


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def expected(folder: Path, rules: Rules) -> dict[tuple[str, str], list[str]]:
    """The negatives of every pair (picture, caption), from all scores."""
    towers = load_run(folder / "run").towers
    found = encode(towers, Table(folder / "shapes" / "repeated.csv", "train", test_share=None), chunk=256)
    groups = matches(found)
    names, texts = list(dict.fromkeys(found.names)), list(dict.fromkeys(found.texts))
    pairs = torch.tensor([[names.index(n), texts.index(t)] for n, t in zip(found.names, found.texts, strict=True)])
    options = {name: value for name, value in asdict(rules).items() if name not in ("sampling", "seed")}
    lists = candidates(found.left[groups.left], found.right[groups.right], pairs, **options)
    return {(names[q], texts[k]): [texts[i] for i in lists[q][: rules.num_negatives]] for q, k in pairs.tolist()}


@pytest.mark.parametrize(
    "rules",
    [Rules(num_negatives=4), Rules(num_negatives=3, relative_margin=0.02, range_min=1), Rules(relative_margin=0.3)],
    ids=str,
)
def test_the_negatives_of_a_dense_search(folder: Path, tmp_path: Path, rules: Rules) -> None:
    towers = load_run(folder / "run").towers
    source = Table(folder / "shapes" / "repeated.csv", "train", test_share=None)
    mined = mine_source(towers, source, tmp_path / "mined.jsonl", rules, scores=True)
    assert mined is not None and (mined.pairs, mined.queries, mined.keys) == (149, 96, 96 + 32)
    want, rows = expected(folder, rules), rows_of(tmp_path / "mined.jsonl")
    assert len(rows) == 149
    for row in rows:
        path = (tmp_path / row["image"]).resolve()
        assert path.is_file() and path.parent == (folder / "shapes").resolve()
        assert row["negatives"] == want[path.name, row["caption"]]
        assert len(row["scores"]) == 1 + len(row["negatives"])
        assert row["scores"][1:] == sorted(row["scores"][1:], reverse=True)
    known = {(Path(row["image"]).name, row["caption"]) for row in rows}
    assert not [row for row in rows if any((Path(row["image"]).name, text) in known for text in row["negatives"])]
    assert len(rows[0]["negatives"]) == max(len(row["negatives"]) for row in rows)
    assert mined.negatives == sum(len(row["negatives"]) for row in rows)
    lists = {row["image"]: row["scores"] for row in rows}
    scored = [scores for scores in lists.values() if len(scores) > 1]
    means = [sum(scores[1:]) / (len(scores) - 1) for scores in scored]
    assert (mined.none, mined.short) == (96 - len(scored), sum(len(s) <= rules.num_negatives for s in lists.values()))
    assert mined.positive == pytest.approx(sum(scores[0] for scores in scored) / len(scored), abs=1e-5)
    assert mined.negative == pytest.approx(sum(means) / len(means), abs=1e-5)
    assert [path.name for path in tmp_path.iterdir()] == ["mined.jsonl"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_train_reads_the_table(
    folder: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From another folder than where training ran."""
    if suffix == ".parquet":
        pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    out = f"mined{suffix}"
    command = ["mine", str(folder / "run"), str(folder / "shapes" / "repeated.csv"), "--out", out]
    assert main([*command, "--num-negatives", "3", "--absolute-margin", "0.01"]) == 0
    told = capsys.readouterr().out
    assert "149 pairs of 96 left sides and 128 texts" in told and "hard negatives, weights of step 20" in told
    source: Any = open_source(DataConfig(data=out), "train")
    assert source.traits.negatives == "text" and source.traits.negatives_count == 3
    assert source.kinds == ("image", "text") and len(source[0].negatives) == 3
    Trainer(small(Path(out), tmp_path / "again", steps=2)).run()
    assert len(losses(tmp_path / "again")) == 2
    Trainer(small(Path(out), tmp_path / "without", steps=2, num_negatives=0)).run()
    more, without = (losses(tmp_path / name) for name in ("again", "without"))
    assert sum(more) > sum(without), "negatives add to the loss"


class Drawn:
    """Pictures that are not files."""

    kinds: Kinds = ("image", "text")
    name = "drawn"

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Sample:
        colour = COLOURS[index % 6]
        return Sample(Image.new("RGB", (16, 16), colour), f"{colour} {SHAPES[index // 6]}", f"{index}", name=colour)

    def texts(self) -> Any:
        return iter(())


def test_pictures_that_are_not_files_are_written(folder: Path, tmp_path: Path) -> None:
    towers, images = load_run(folder / "run").towers, tmp_path / "mined.jsonl-images"
    mine_source(towers, Drawn(), tmp_path / "mined.jsonl", Rules(num_negatives=2))
    assert len(list(images.iterdir())) == 6, "equal pictures are written once"
    source = Table(tmp_path / "mined.jsonl", "train", test_share=None)
    assert len(source) == 12
    for index in range(12):
        sample, original = source[index], Drawn()[index]
        assert sample.right == original.right and len(sample.negatives) == 2
        assert sample.left.convert("RGB").tobytes() == original.left.tobytes()  # type: ignore[union-attr]
        assert not any(str(text).startswith(COLOURS[index % 6]) for text in sample.negatives)


def test_pictures_of_other_data_are_not_written_over(folder: Path, tmp_path: Path) -> None:
    class Others(Drawn):
        def __getitem__(self, index: int) -> Sample:
            return super().__getitem__(index)._replace(left=Image.new("RGB", (16, 16), (index, 7, 7)))

    towers, images = load_run(folder / "run").towers, tmp_path / "mined.jsonl-images"
    mine_source(towers, Drawn(), tmp_path / "mined.jsonl", Rules(num_negatives=2))
    before = {path: path.read_bytes() for path in images.iterdir()}
    mine_source(towers, Others(), tmp_path / "mined.jsonl", Rules(num_negatives=2))
    assert len(list(images.iterdir())) == 12 and all(path.read_bytes() == data for path, data in before.items())
    mine_source(towers, Drawn(), tmp_path / "mined.parquet", Rules(num_negatives=2))
    assert len(list((tmp_path / "mined.parquet-images").iterdir())) == 6


def test_an_interrupted_search_does_not_encode_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    towers = load_run(folder / "run").towers
    source = Table(folder / "shapes" / "pairs.csv", "train", test_share=None)
    mine_source(towers, source, tmp_path / "whole.jsonl", Rules())

    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(mining, "mine_hard_negatives", interrupted)
        mine_source(towers, source, tmp_path / "mined.jsonl", Rules())
    told: list[str] = []
    shutil.copytree(tmp_path / ".mined.jsonl.unfinished", tmp_path / ".part.jsonl.unfinished")
    mine_source(towers, source, tmp_path / "mined.jsonl", Rules(), notify=told.append)
    assert not [text for text in told if text.startswith("encoding")] and told[-1] == "writing"
    assert (tmp_path / "mined.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    # Features that are partly gone are made again.
    (tmp_path / ".part.jsonl.unfinished" / "features.left.npy").unlink()
    mine_source(towers, source, tmp_path / "part.jsonl", Rules())
    assert (tmp_path / "part.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mined.jsonl", "part.jsonl", "whole.jsonl"]


def test_processes_share_the_work(folder: Path, tmp_path: Path) -> None:
    words = ["mine", str(folder / "run"), str(folder / "shapes" / "repeated.csv"), "--chunk", "8", "--range-min", "1"]
    assert main([*words, "--out", str(tmp_path / "alone.jsonl")]) == 0
    command = [*torchrun(3, tmp_path), "-m", "contratile", *words, "--out", "mined.jsonl"]
    done = subprocess.run(
        command, cwd=tmp_path, env=launch_environment(), capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mined.jsonl").read_bytes() == (tmp_path / "alone.jsonl").read_bytes()


def test_the_data_is_not_written_over(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"image": f"{folder}/shapes/red-line-{1 + n % 3}.png", "caption": f"text {n}"} for n in range(6)]
    data = Path("in.jsonl")
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("same.jsonl").symlink_to("in.jsonl")
    before = data.read_bytes()
    for out in ("in.jsonl", "./in.jsonl", "same.jsonl"):
        assert main(["mine", str(folder / "run"), "in.jsonl", "--out", out]) == 2
        assert "which is the data" in capsys.readouterr().err and data.read_bytes() == before
    data.rename("in.keys.jsonl")
    assert main(["embed", str(folder / "run"), "in.keys.jsonl", "--out", "in.npy"]) == 2
    assert "in.keys.jsonl, which is the data" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.keys.jsonl", "same.jsonl"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out mined.csv", "--out: expected a name that ends in .jsonl or .parquet"),
        ("--out mined.jsonl --seed 3", "seed: expected random sampling with it"),
        ("--out mined.jsonl --num-negatives 0", "num_negatives: expected at least 1"),
        ("--out mined.jsonl --range-max 3", "range_max: expected at least range_min + num_negatives = 5, got 3"),
    ],
)
def test_refused(
    folder: Path,
    tmp_path: Path,
    words: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["mine", str(folder / "run"), str(folder / "shapes" / "pairs.csv"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
