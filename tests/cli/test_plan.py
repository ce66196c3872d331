"""`contratile plan` and `contratile train --plan`."""

import json
from pathlib import Path

import pytest

from contratile.cli import main
from contratile.train.config_file import load_config
from tests.train.runs import shapes

pytest.importorskip("accelerate")
SMALL = ["--towers", "tiny", "--width", "32", "--depth", "1", "--batch", "4096", "--chunk", "16"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--devices", "8xA800-80G", "--samples-per-epoch", "100000")
    assert code == 0
    for text in ("prediction", "activations of a chunk", "ring buffers", "largest batch", "open_clip, local loss"):
        assert text in out
    assert "24 steps per epoch" in out and "warning: 245 steps" in out and "fits:" in out


def test_json_recipe_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recipe, picture = tmp_path / "recipe.toml", tmp_path / "bars.png"
    words = [
        *SMALL,
        "--devices",
        "4x8xH100",
        "--json",
        "--write",
        str(recipe),
        "--picture",
        str(picture),
        "--seed",
        "7",
    ]
    code, out, _ = run(capsys, *words)
    found = json.loads(out)
    assert code == 0 and found["work"]["ranks"] == 32 and found["devices"]["nodes"] == 4
    config = load_config(recipe)
    assert (config.run.batch, config.run.chunk, config.run.seed, config.towers.width) == (4096, 16, 7, 32)
    assert picture.stat().st_size > 1000


def test_a_run_that_does_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Exit code 1, the smallest change, and a recipe with that change."""
    recipe = tmp_path / "recipe.toml"
    by_hand = ["--devices", "1", "--device-memory", "0.9", "--device-flops", "100", "--write", str(recipe)]
    code, out, _ = run(capsys, *SMALL[:-2], "--chunk", "4096", *by_hand)
    assert code == 1 and "does not fit" in out and "Smallest change: --chunk" in out
    chunk = load_config(recipe).run.chunk
    assert isinstance(chunk, int) and chunk < 4096 and f"--chunk {chunk}" in out


def test_options_of_training_are_options_here(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--devices", "8xH100", "--json", "--fsdp", "--offload", "disk", "--precision", "bf16"]
    code, out, _ = run(capsys, *words, "--optimizer", "sgd", "--loss", "ntxent")
    work = json.loads(out)["work"]
    assert code == 0 and work["fsdp"] and work["offload"] == "disk" and work["precision"] == "bf16"
    assert work["optimizer"]["name"] == "sgd" and work["optimizer"]["state_bytes"] == 0 and work["loss"]["views"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "8xV100"], "gpu: expected one of"),
        (["--devics", "8xH100"], "unknown option --devics. Did you mean --devices?"),
        (["--devices", "8xH100", "--calibrate"], "calibrate: expected this machine as the device"),
    ],
)
def test_errors(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    try:
        code = main(["plan", *SMALL, *words])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 2
    assert code == 2 and message in capsys.readouterr().err


def test_train_plan_stops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--data", str(shapes(tmp_path)), *SMALL[:-4], "--batch", "32", "--chunk", "8", "--epochs", "2"]
    code = main(["train", *words, "--out", str(tmp_path / "run"), "--plan"])
    out = capsys.readouterr().out
    assert code == 0 and "tiny on 1xcpu (prediction)" in out and "steps per epoch" in out
    assert not (tmp_path / "run").exists()
