"""`contratile doctor --tune`: right candidates are timed, the fastest is kept, and later runs use it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import contratile as ct
from contratile.bench.clock import Step
from contratile.cli import main
from contratile.doctor import tune as tuning
from contratile.doctor.tune import AGAIN, DEFAULT, CpuTiles, Subject, TuneOptions, Tuning, subjects, tune
from contratile.engine import cuts, tuned
from contratile.engine.backends import torch_tiles
from contratile.engine.plan import WORKSPACE_LIMIT, TilePlan, plan_tiles
from tests.helpers import features

CPU = torch.device("cpu")
N, D = 256, 24
SMALL = f"--tune --device cpu --size {N} --dims {D}".split()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What candidates take, by name; one second if nothing else is said."""
    said: dict[str, float] = {}

    def timed(subject: Subject, steps: dict[str, Step], notify: Any) -> dict[str, list[float]]:
        for step in steps.values():
            step()
        return {name: [said.get(name, 1.0)] * 2 for name in (*steps, AGAIN)}

    monkeypatch.setattr(tuning, "_timed", timed)
    return said


def tune_tiles() -> Tuning:
    (found,) = tune(subjects(CPU, TuneOptions(size=N, dims=(D,))))
    tuned.forget()
    return found


def test_the_fastest_tiles_are_kept_and_used(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*CpuTiles(N, D, torch.float32).candidates()]
    assert names[0] == DEFAULT and len(names) > 2
    seconds |= {names[1]: 0.9, names[2]: 0.8}
    found = tune_tiles()
    assert found.kept == names[2] and not found.wrong and found.timed
    assert {trial.candidate: trial.ratio for trial in found.trials} == {
        **dict.fromkeys([*names, AGAIN], 1.0),
        names[1]: 0.9,
        names[2]: 0.8,
    }
    shape = tuple(map(int, names[2].split(" x ")))
    assert tuned.tiles(D, 4) == shape and tuned.tiles(D, 8) is None
    made: list[Any] = []

    def noted(*sizes: int, **how: Any) -> TilePlan:
        made.append(how)
        return plan_tiles(*sizes, **how)

    monkeypatch.setattr(cuts, "plan_tiles", noted)
    cuts._cuts.cache_clear()
    ct.clip_loss(features(N, D, seed=0), features(N, D, seed=1), group=None)
    assert {how["shape"] for how in made} == {shape}
    (entry,) = tuned.entries().values()
    assert (entry.seconds, entry.default_seconds) == (0.8, 1.0)


def test_gains_within_the_noise_change_nothing(seconds: dict[str, float]) -> None:
    name = list(CpuTiles(N, D, torch.float32).candidates())[1]
    seconds[name] = 0.975
    assert tune_tiles().kept == DEFAULT and not tuned.entries()
    seconds |= {name: 0.9, AGAIN: 1.2}  # the default differs from itself by more
    found = tune_tiles()
    assert found.kept == DEFAULT and found.noise == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("default", "candidate", "noise", "kept"),
    [
        ([1.0, 1.01, 1.0, 1.01], [0.9, 0.91], 0.03, True),
        ([1.0, 1.3, 1.4, 1.3], [0.9, 0.91], 0.3, False),  # a busy machine: nothing below 0.7 could be told from it
        ([1.0, 1.3, 1.4, 1.3], [0.6, 0.61], 0.3, True),
        ([1.0, 1.01, 1.0, 1.01], [0.9, 1.1, 1.1], 0.03, False),  # one lucky turn
    ],
)
def test_what_counts_as_faster(default: list[float], candidate: list[float], noise: float, kept: bool) -> None:
    times = {DEFAULT: default[:2], AGAIN: default[2:], "other": candidate}
    assert tuning._noise(times) == pytest.approx(noise, abs=0.01)
    assert tuning._faster(times, noise) == (["other"] if kept else [])


def test_a_busy_machine_leaves_the_old_choice(
    seconds: dict[str, float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = list(CpuTiles(N, D, torch.float32).candidates())[1]
    seconds[name] = 0.5
    assert tune_tiles().kept == name
    seconds |= {name: 1.0, AGAIN: 1.5}
    assert main(["doctor", *SMALL]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "differ by 50%, so this machine is busy. Tune again when it is idle." in said
    assert tuned.tiles(D, 4) is not None


def test_a_default_that_became_the_fastest_removes_the_old_choice(seconds: dict[str, float]) -> None:
    name = list(CpuTiles(N, D, torch.float32).candidates())[1]
    seconds[name] = 0.5
    assert tune_tiles().kept == name and tuned.tiles(D, 4) is not None
    seconds[name] = 2.0
    assert tune_tiles().kept == DEFAULT and tuned.tiles(D, 4) is None


def test_wrong_candidates_are_not_timed(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one height give gradients that are off by one in a thousand."""
    candidates = CpuTiles(N, D, torch.float32).candidates()
    name = list(candidates)[2]
    shape = candidates[name]
    backward = torch_tiles.backward

    def wrong(scores: Any, spec: Any, given: Any, into: Any) -> None:
        backward(scores, spec, given, into)
        if tuned._forced.get(tuned.TILES) == shape:
            into.dq.mul_(1.001)

    monkeypatch.setattr(torch_tiles, "backward", wrong)
    seconds[name] = 0.1
    found = tune_tiles()
    assert found.kept == DEFAULT and len(found.wrong) == 1 and f"tiles, {name}: cpu: clip_loss" in found.wrong[0]
    (trial,) = (trial for trial in found.trials if trial.candidate == name)
    assert trial.seconds is None and trial.note.startswith("wrong")


def test_a_winner_that_is_wrong_in_another_loss_is_not_kept(
    seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = list(CpuTiles(N, D, torch.float32).candidates())[1:3]
    seconds |= {first: 0.5, second: 0.6}
    check = CpuTiles.check

    def wrong(self: CpuTiles, choice: Any, loss: str) -> Any:
        found = check(self, choice, loss)
        bad = loss == "siglip_loss" and choice == self.candidates()[first]
        return type(found)(**{**vars(found), "ok": found.ok and not bad})

    monkeypatch.setattr(CpuTiles, "check", wrong)
    found = tune_tiles()
    assert found.kept == second and len(found.wrong) == 1 and "siglip_loss" in found.wrong[0]


def test_a_candidate_that_raises_is_a_note(seconds: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    name = list(CpuTiles(N, D, torch.float32).candidates())[1]
    step = CpuTiles.step

    def broken(self: CpuTiles, choice: Any) -> Step:
        if choice == self.candidates()[name]:
            raise RuntimeError("out of resources")
        return step(self, choice)

    monkeypatch.setattr(CpuTiles, "step", broken)
    found = tune_tiles()
    assert [trial.note for trial in found.trials if trial.candidate == name] == ["RuntimeError: out of resources"]
    assert not found.wrong


def test_every_candidate_has_turns_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def turn(step: Step, clock: Any) -> list[float]:
        step()
        return [float(len(order))]

    monkeypatch.setattr(tuning, "turn", turn)
    steps: dict[str, Step] = {name: lambda name=name: order.append(name) for name in (DEFAULT, "a", "b")}  # type: ignore[misc]
    times = tuning._timed(CpuTiles(16, 8, torch.float32), steps, lambda text: None)
    rounds = [order[at : at + 4] for at in range(0, len(order), 4)]
    assert len(rounds) == CpuTiles.rounds and all(sorted(one) == ["a", "b", DEFAULT, DEFAULT] for one in rounds)
    assert len({tuple(one) for one in rounds}) > 1, "nobody is always last"
    assert set(times) == {DEFAULT, "a", "b", AGAIN} and {len(found) for found in times.values()} == {CpuTiles.rounds}


@pytest.mark.parametrize("d", [16, 768, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_candidates_keep_the_workspace(d: int, dtype: torch.dtype) -> None:
    subject = CpuTiles(4, d, dtype)
    subject.n = 1 << 16
    for choice in subject.candidates().values():
        shape = (choice[0], choice[1]) if choice else None
        made = plan_tiles(1 << 16, 1 << 16, d, itemsize=subject.itemsize, shape=shape)
        assert made.workspace_bytes <= WORKSPACE_LIMIT and choice in (None, (made.rows, made.cols))


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_times_and_prints(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert main(["doctor", *SMALL, "--dtypes", "float32", "float64"]) == 0
    said = capsys.readouterr().out
    assert said.count(" candidate  ") == said.count("default, again") == 2
    assert "x default" in said and "N = 256, D = 24" in said
    assert ("none is kept" in said) == (not tuned.entries())
    assert (str(folder / tuned.NAME) in said.replace("\n", "")) == bool(tuned.entries())


def test_the_command_as_json(capsys: pytest.CaptureFixture[str], folder: Path, seconds: dict[str, float]) -> None:
    name = list(CpuTiles(N, D, torch.float32).candidates())[1]
    seconds[name] = 0.5
    assert main(["doctor", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == str(folder / tuned.NAME) and found["tuned"][0]["kept"] == name


def test_wrong_candidates_give_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seconds: dict[str, float]
) -> None:
    backward = torch_tiles.backward

    def wrong(scores: Any, spec: Any, given: Any, into: Any) -> None:
        backward(scores, spec, given, into)
        into.dq.mul_(1.001)

    monkeypatch.setattr(torch_tiles, "backward", wrong)
    assert main(["doctor", *SMALL]) == 1
    said = capsys.readouterr().out
    assert "problem: tiles, default" in said and "WRONG" in said and "nothing was timed, so nothing is kept" in said


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--size 64", "--size: only with --tune"),
        ("--dims 8 --dtypes float32", "--dims, --dtypes: only with --tune"),
        ("--tune --size 0", "--size: expected a whole number from 1"),
        ("--tune --dims 8 -3", "--dims: expected a whole number from 1"),
        ("--tune --json --report x", "--json: expected either --tune or --report"),
        ("--tune --dtypes int8", "invalid choice: 'int8'"),
    ],
)
def test_options_that_do_not_fit_are_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *words.split()])
    assert stop.value.code == 2 and told in capsys.readouterr().err


def test_dtypes_without_tiles_of_their_own_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *SMALL, "--dtypes", "bfloat16"]) == 2
    assert "16-bit features use float32's tiles" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuned.FOLDER, str(tmp_path / "file"))
    monkeypatch.setattr(tuning, "_tune", None)
    assert main(["doctor", *SMALL]) == 2
    assert "CONTRATILE_CACHE" in capsys.readouterr().err


def test_a_gpu_without_kernels_has_nothing_to_tune() -> None:
    with pytest.raises(ValueError, match=r"device: expected a device that kernels run on, or the CPU, got a device"):
        subjects(torch.device("meta"), TuneOptions())
