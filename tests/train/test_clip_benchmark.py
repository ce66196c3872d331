"""`contratile eval --benchmark`: the numbers of an independent computation, by one rank and several; damaged data."""

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from contratile.cli import main
from contratile.data.clip_benchmark import BenchmarkShards, open_set
from contratile.train import load
from contratile.train.clip_benchmark import encode_classes, encode_part, merge, merge_classes, set_metrics
from contratile.train.load import load_run
from contratile.train.loop import Trainer
from tests.data import benchmarks
from tests.ranks import launch_environment, torchrun
from tests.train.runs import sentence_folder, shapes, small, texts


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learned a little."""
    folder = tmp_path_factory.mktemp("benchmark")
    Trainer(small(shapes(folder / "shapes"), folder / "run", steps=40, warmup=0)).run()
    return folder / "run"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmarks.benchmark(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="module")
def expected(run: Path) -> dict[str, dict[str, float]]:
    """Sample by sample, in numpy."""
    towers = load_run(run).towers
    return {
        "vtab/wds_two": benchmarks.expected_classification(towers, benchmarks.TWO, range(13)),
        "wds_colours": benchmarks.expected_classification(towers, benchmarks.NAMES, range(31)),
        "wds_many": benchmarks.expected_multilabel(towers, benchmarks.MANY, range(23)),
        "wds_pairs": benchmarks.expected_retrieval(towers, range(19)),
    }


def evaluated(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, dict[str, Any]]:
    assert main(["eval", *map(str, words), "--json"]) == code
    found: dict[str, dict[str, Any]] = json.loads(capsys.readouterr().out)["datasets"]
    return found


FACTS = ("task", "samples", "broken", "classes", "templates", "texts")


def metrics(row: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name not in FACTS}


def test_the_numbers_are_those_of_an_independent_computation(
    run: Path, bench: Path, expected: dict[str, dict[str, float]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluated(capsys, run, "--benchmark", bench, "--out", tmp_path / "found.json", "--chunk", 5)
    assert {name: metrics(row) for name, row in found.items()} == {
        name: pytest.approx(values, abs=1e-9) for name, values in expected.items()
    }
    assert {name: row["samples"] for name, row in found.items()} == {
        "vtab/wds_two": 13,
        "wds_colours": 31,
        "wds_many": 23,
        "wds_pairs": 19,
    }
    assert json.loads((tmp_path / "found.json").read_text())["datasets"] == found
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
    # The numbers tell something: neither all right nor all wrong, and the two means differ.
    colours = found["wds_colours"]
    assert 0.1 < colours["acc1"] < 0.95 and colours["acc1"] != pytest.approx(colours["mean_per_class_recall"])
    assert 0 < found["wds_pairs"]["image_retrieval_recall@5"] < 1
    assert "acc5" not in found["vtab/wds_two"] and "acc5" in colours


def test_the_table(
    run: Path, bench: Path, expected: dict[str, dict[str, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--benchmark", str(bench)]) == 0
    told = capsys.readouterr()
    first, head, *rows = told.out.splitlines()
    assert first.startswith("4 data sets, weights of step ")
    assert head.split()[:7] == ["data", "set", "task", "samples", "acc1", "acc5", "per"]
    values = expected["wds_colours"]
    accuracy = [f"{values[name]:.4f}" for name in ("acc1", "acc5", "mean_per_class_recall")]
    assert rows[1].split() == ["wds_colours", "classification", "31", *accuracy, *"-----"]
    assert rows[2].split()[6] == f"{expected['wds_many']['mean_average_precision']:.4f}"
    assert rows[-1] == "vtab/wds_two: no acc5, it has 2 classes"
    assert "wds_pairs: 19 samples" in told.err, "progress"


def test_some_of_the_data_sets(run: Path, bench: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = evaluated(capsys, run, "--benchmark", bench)
    few = evaluated(capsys, run, "--benchmark", bench, "--datasets", "pairs", "wds_many")
    assert few == {name: whole[name] for name in ("wds_pairs", "wds_many")}
    assert evaluated(capsys, run, "--benchmark", bench / "wds_many") == {"wds_many": whole["wds_many"]}
    assert evaluated(capsys, run, "--benchmark", bench / "wds_many", "--workers", 1) == {"wds_many": whole["wds_many"]}
    assert evaluated(capsys, run, "--benchmark", bench, "--limit", 7)["wds_many"]["samples"] == 7


def test_other_prompts(run: Path, bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(benchmarks.TEMPLATES))
    words = run, "--benchmark", bench / "wds_colours"
    assert evaluated(capsys, *words, "--templates", prompts) == evaluated(capsys, *words)
    prompts.write_text("{} of size 1")
    found = evaluated(capsys, *words, "--templates", prompts)["wds_colours"]
    assert found["templates"] == 1


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])  # three: shares that differ
def test_several_ranks_share_the_work(
    run: Path, bench: Path, expected: dict[str, dict[str, float]], tmp_path: Path, world: int
) -> None:
    """The same numbers; one of them prints. A data set that cannot be read gives all of them exit code 1."""
    folder = tmp_path / "sets"
    folder.mkdir()
    for path in bench.iterdir():
        (folder / path.name).symlink_to(path)
    benchmarks.classification(folder / "wds_cut", benchmarks.TWO, shards=2 * world)
    tar = folder / "wds_cut" / "test" / "1.tar"  # that of the second rank
    words = [*torchrun(world, tmp_path), "-m", "contratile", "eval", str(run), "--benchmark", str(folder), "--json"]

    def ranks(*more: str, code: int) -> tuple[dict[str, Any], str]:
        done = subprocess.run(
            [*words, *more], env=launch_environment(), capture_output=True, text=True, timeout=600, check=False
        )
        assert (done.returncode != 0) == bool(code), done.stderr[-3000:]
        (line,) = done.stdout.splitlines()
        return json.loads(line)["datasets"], done.stderr

    tar.write_bytes(tar.read_bytes()[:2000])
    found, errors = ranks(code=1)
    assert "cannot be read to its end" in found["wds_cut"]["error"] and "exitcode: 1" in errors
    good = {name: metrics(row) for name, row in found.items() if name != "wds_cut"}
    assert good == {name: pytest.approx(values, abs=1e-9) for name, values in expected.items()}
    assert "terminate called" not in errors


@pytest.mark.parametrize("parts", [1, 2, 7, 40])
@pytest.mark.parametrize("name", ["wds_colours", "wds_many", "wds_pairs"])
def test_parts_together_are_the_whole(
    run: Path, bench: Path, expected: dict[str, dict[str, float]], name: str, parts: int
) -> None:
    """Also if there are more ranks than samples or classes, so that some have none."""
    towers, data = load_run(run).towers, open_set(bench / name)
    shares = [{"part": part, "parts": parts} for part in range(parts)]
    samples = [encode_part(towers, BenchmarkShards(data, **share), chunk=4) for share in shares]
    classes = [encode_classes(towers, data, chunk=5, **share) for share in shares]
    found = set_metrics(data, merge(samples), merge_classes(classes), broken_limit=0)
    assert found == pytest.approx(expected[name], abs=1e-9)
    assert parts < 40 or any(not part.labels for part in samples)


def test_ordinary_data_under_torchrun_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["eval", str(run)]) == 2
    assert "processes: expected one, got 2. Start it without torchrun" in capsys.readouterr().err


# --- what cannot be evaluated ---------------------------------------------------------------------------------------


def test_a_data_set_that_cannot_be_read_does_not_stop_the_others(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmarks.classification(tmp_path / "wds_good", benchmarks.NAMES)
    (tmp_path / "wds_empty").mkdir()
    benchmarks.retrieval(tmp_path / "wds_missing")
    (tmp_path / "wds_missing" / "test" / "nshards.txt").unlink()
    benchmarks.multilabel(tmp_path / "wds_cut", benchmarks.MANY)
    tar = tmp_path / "wds_cut" / "test" / "0.tar"
    tar.write_bytes(tar.read_bytes()[:3000])
    benchmarks.write_set(tmp_path / "wds_none", [], classes=benchmarks.TWO)
    assert main(["eval", str(run), "--benchmark", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "wds_good  classification  31" in told
    assert "wds_empty  not evaluated: " in told and "wds_cut  not evaluated: wds_cut/test/0.tar: expected a tar" in told
    assert "wds_missing  not evaluated: " in told and "nshards.txt: expected a file, got nothing there" in told
    assert "wds_none  not evaluated: wds_none: expected samples, got none" in told
    found = evaluated(capsys, run, "--benchmark", tmp_path, code=1)
    assert {name for name, row in found.items() if "error" in row} == {
        "wds_empty",
        "wds_missing",
        "wds_cut",
        "wds_none",
    }


def test_broken_samples_are_counted_within_the_limit(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of 20: a class out of range, one that is no number, none at all. The others are evaluated."""
    labels = [("cls", f"{i * i % 6}".encode()) for i in range(20)]
    labels[3], labels[8], labels[9] = ("cls", b"6"), ("cls", b"cat"), ("txt", b"1")
    folder = benchmarks.write_set(tmp_path / "wds_x", labels, classes=benchmarks.NAMES)
    words = run, "--benchmark", folder
    (row,) = evaluated(capsys, *words).values()
    assert (row["samples"], row["broken"]) == (17, 3)
    sound = [i for i in range(20) if i not in (3, 8, 9)]
    alone = benchmarks.expected_classification(load_run(run).towers, benchmarks.NAMES, sound)
    assert metrics(row) == pytest.approx(alone, abs=1e-9)
    assert main(["eval", *map(str, words)]) == 0
    assert "wds_x: 3 broken samples are left out" in capsys.readouterr().out
    (row,) = evaluated(capsys, *words, "--broken-limit", 2, code=1).values()
    assert "samples of wds_x: expected at most 2 broken, got 3 of 20 (1 x " in row["error"]


def test_features_that_are_not_finite_are_never_a_result(
    run: Path, bench: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = load.load_run
    for side in ("left", "right"):

        def spoiled(*arguments: Any, side: str = side, **options: Any) -> load.Run:
            found = real(*arguments, **options)
            with torch.no_grad():
                next(getattr(found.towers, side).parameters()).fill_(math.nan)
            return found

        monkeypatch.setattr(load, "load_run", spoiled)
        rows = evaluated(capsys, run, "--benchmark", bench, code=1)
        assert len(rows) == 4 and all("features are not finite" in row["error"] for row in rows.values())
        assert all(set(row) == {"error"} for row in rows.values())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "icons"], "--data: expected no other data with --benchmark, got icons"),
        (["--classes", "imagenet"], "--classes: expected no other data with --benchmark, got imagenet"),
        (["--split", "all"], "--split: expected no other data"),
        (["--allow-pipe"], "--allow-pipe: expected no other data"),
        (["--datasets", "nothing"], "datasets: expected one of vtab/wds_two"),
        (["--templates", "none.txt"], "templates: expected openai or simple, or a file"),
        (["--broken-limit", "-1"], "broken_limit: expected 0 or more, got -1"),
        (["--chunk", "0"], "--chunk: expected at least 1"),
        (["--workers", "-1"], "--workers: expected at least 0"),
        (["--out", "."], "--out: expected the name of a file to write, got the folder ."),
        (["--out", "none/found.json"], "--out: expected the name of a file to write"),
    ],
)
def test_options_that_do_not_fit(
    run: Path, bench: Path, words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run), "--benchmark", str(bench), *words]) == 2
    assert told in capsys.readouterr().err


def test_options_without_a_benchmark(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--datasets", "x"]) == 2
    assert "--datasets: expected a benchmark folder, got x. Pass --benchmark" in capsys.readouterr().err
    assert main(["eval", str(run), "--templates", "openai"]) == 2
    assert "--templates: expected class names (--classes), got openai" in capsys.readouterr().err
    assert main(["eval", str(run), "--workers", "1", "--json", "--out", str(tmp_path / "x.json")]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "x.json").read_text())


def test_encoders_of_texts_have_no_benchmark(bench: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    towers = f"st:{sentence_folder(tmp_path / 'model')}"
    Trainer(small(texts(tmp_path), tmp_path / "run", towers=towers, steps=1, words=16, width=128, depth=3)).run()
    assert main(["eval", str(tmp_path / "run"), "--benchmark", str(bench)]) == 2
    assert "run: expected encoders of image and text, got text and text" in capsys.readouterr().err
