"""`contratile doctor --report`: one page for people and machines, with nothing private in it."""

import json
import platform
import types
from pathlib import Path

import pytest
import torch

from contratile import planner
from contratile.bench.clock import CpuClock
from contratile.bench.contestants.family import CASES
from contratile.bench.contestants.loss import CLIP
from contratile.cli import main
from contratile.doctor import checkup, compare, report
from contratile.doctor.checkup import BackendState, Findings
from contratile.doctor.compare import LIMIT, MODEL, Comparison, contestants_for, predicted_seconds
from contratile.packages import BrokenPackage

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "broken_packages", lambda names: [])


def test_the_command_writes_a_page_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--device", "cpu", "--report", str(tmp_path / "new" / "mine.md")]) == 0
    said = capsys.readouterr()
    assert "verdict: healthy" in said.out and "mine.md" in said.err and "mine.json" in said.err
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["mine.json", "mine.md"]
    found = json.loads((tmp_path / "new" / "mine.json").read_text())
    page = (tmp_path / "new" / "mine.md").read_text()
    assert json.loads(page.split("```json\n")[1].split("\n```")[0]) == found
    assert {row["loss"] for row in found["accuracy"]} >= {"clip_loss", "info_nce", "nt_xent", "sup_con", "siglip_loss"}
    assert found["environment"]["torch"] == torch.__version__ and found["environment"]["version_siglip-kernel"]
    rows = {(row["loss"], row["contestant"]): row for row in found["comparison"]}
    for loss in ("clip_loss", "siglip_loss"):
        ours, dense = rows[loss, "contratile"], rows[loss, "dense"]
        assert ours["seconds"] > 0 and dense["seconds"] > 0 and ours["limit_seconds"] == dense["limit_seconds"] > 0
        assert ours["predicted_seconds"] == ours["limit_seconds"] and ours["predicted_by"] == LIMIT
        assert dense["predicted_seconds"] is None
        assert f"| {loss} | 512 | 256 | float32 | contratile |" in page
    for heading in ("Versions", "Backends", "Times", "Errors relative to fp64"):
        assert f"\n## {heading}\n" in page


def test_a_report_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.md").write_text("old")
    paths = report.report_paths(tmp_path / "x")
    assert (tmp_path / "x.md").read_text() == "old"
    report.write(report.content(Findings({"torch": "1"}), [], "healthy"), paths)
    assert (tmp_path / "x.md").read_text().startswith("# contratile doctor: healthy\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.md"]


@pytest.mark.parametrize("name", ["x", "x.md", "x.json"])
def test_the_two_files_have_one_stem(name: str, tmp_path: Path) -> None:
    assert report.report_paths(tmp_path / name) == (tmp_path / "x.md", tmp_path / "x.json")
    assert report.report_paths(tmp_path / "v1.2") == (tmp_path / "v1.2.md", tmp_path / "v1.2.json")


def test_a_bad_path_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("contratile.cli.doctor.examine", None)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.md").mkdir()
    for bad, told in (("file/x", "cannot be written"), ("folder", "is a folder. Name a file")):
        assert main(["doctor", "--report", str(tmp_path / bad)]) == 2
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1 and told in said


# --- nothing private ----------------------------------------------------------------------------------------------


def private_findings() -> Findings:
    home, host = "/home/my files/ann.smith", "anns-laptop.example.org"
    error = f"OSError: {home}/.venv/lib/libfoo.so: cannot open; user ann.smith on anns-laptop ({host})"
    found = Findings({"torch": "2.13.0", "system": "Linux x86_64"}, devices=["cpu: Some CPU"])
    found.backends.append(BackendState("cpu", "triton", False, error))
    found.packages.append(BrokenPackage("torchvision", "1.0", error, ["timm"]))
    found.problems += [f"it fails: {error}", r"see C:\Users\ann.smith\x.dll, or \\server\share\x"]
    found.advice.append(f"look at https://github.com/a/b/issues, {home}, PATH=/opt/x:/srv/team/bin, file:///srv/team")
    return found


def test_nothing_private_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/my files/ann.smith")
    monkeypatch.setattr("getpass.getuser", lambda: "ann.smith")
    monkeypatch.setattr(platform, "node", lambda: "anns-laptop.example.org")
    row = Comparison(
        device="cpu",
        loss="clip_loss",
        contestant="dense",
        n=8,
        d=8,
        dtype="float32",
        seconds=None,
        limit_seconds=None,
        predicted_seconds=None,
        predicted_by="",
        peak_extra_mib=None,
        note="failed: OSError: /home/ann.smith/data|x",
    )
    paths = report.report_paths(tmp_path / "x")
    report.write(report.content(private_findings(), [row], "not healthy"), paths)
    for path in paths:
        text = path.read_text()
        for private in ("ann.smith", "anns-laptop", "/home", "my files", "Users", "server", "team"):
            assert private not in text, private
        assert "<path>" in text and "<user>" in text and "<host>" in text
        assert "https://github.com/a/b/issues" in text and "torchvision" in text and "Linux x86_64" in text


def test_a_real_report_names_neither_user_nor_machine_nor_folder(tmp_path: Path) -> None:
    """The names of this one, with environment variables that would give them away."""
    found = checkup.examine([torch.device("cpu")], quick=True)
    made = json.dumps(report.content(found, [], "healthy"))
    folders = {str(Path.home()), str(Path.cwd()), str(Path(torch.__file__).parent), str(tmp_path)}
    assert [name for name in folders if len(name) > 1 and name in made] == []
    host = platform.node()
    assert not host or (f'"{host}"' not in made and f" {host} " not in made)


def test_words_of_the_vocabulary_stay_even_if_a_user_has_such_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "private_names", lambda: {"torch": "<user>"})
    found = Findings({"torch": "2.13.0"}, backends=[BackendState("cpu", "torch", True, "torch failed")])
    made = report.content(found, [], "healthy")
    assert made["environment"]["torch"] == "2.13.0"
    assert made["backends"] == [{"device": "cpu", "backend": "torch", "works": True, "reason": "<user> failed"}]


def test_json_has_no_nan() -> None:
    assert report.without_private({"x": [float("nan"), float("inf"), 1.5]}) == {"x": [None, None, 1.5]}


# --- what is compared ---------------------------------------------------------------------------------------------


def test_who_is_compared_where() -> None:
    names = {device: [who.name for who in contestants_for(CLIP, torch.device(device))] for device in ("cpu", "cuda")}
    assert names["cpu"] == ["contratile", "dense", "open_clip", "inf_cl_ring"]
    assert names["cuda"] == ["contratile", "contratile_torch", "dense", "open_clip", "inf_cl"]
    siglip = [who.name for who in contestants_for(CASES["siglip"], GPU)]
    assert siglip == ["contratile", "contratile_torch", "dense", "open_clip", "siglip_kernel"]


def test_what_fails_or_does_not_fit_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "ROUNDS", 1)
    monkeypatch.setattr(CpuClock, "available", lambda self: 3 << 20)  # room for ours, not for dense
    rows = {row.contestant: row for row in compare.compare(torch.device("cpu"), quick=True) if row.loss == "clip_loss"}
    assert rows["contratile"].seconds and not rows["contratile"].note
    assert rows["dense"].seconds is None and rows["dense"].note.startswith("out of memory (predicted")


@pytest.mark.parametrize(("name", "listed"), [("NVIDIA H100 80GB HBM3", True), ("Tesla T4", False)])
def test_predictions_come_from_the_planner(name: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    expected = planner.predict(name, 4096, 512, torch.bfloat16).seconds if listed else None
    assert predicted_seconds(GPU, 4096, 512, torch.bfloat16) == expected
    row = Comparison(
        device="cuda:0",
        loss="clip_loss",
        contestant="contratile",
        n=4096,
        d=512,
        dtype="bfloat16",
        seconds=0.2,
        limit_seconds=0.1,
        predicted_seconds=None,
        predicted_by="",
        peak_extra_mib=1.0,
    )
    made = compare._with_prediction(row, GPU, torch.bfloat16)
    assert (made.predicted_seconds, made.predicted_by) == ((expected, MODEL) if listed else (None, ""))


def test_there_is_no_prediction_for_a_cpu() -> None:
    assert predicted_seconds(torch.device("cpu"), 64, 8, torch.float32) is None


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert report.driver() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert report.driver() == "torch for CUDA 13.0"
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/nvidia-smi")
    answer = types.SimpleNamespace(stdout="580.65.06\n580.65.06\n")
    monkeypatch.setattr("subprocess.run", lambda words, **how: answer)
    assert report.driver() == "driver 580.65.06, torch for CUDA 13.0"
