"""The large step and its check, at a size where the dense loss can be asked too."""

import json
from pathlib import Path

import pytest
import torch

from contratile import clip_loss, pair_lse, reference
from contratile.bench import million, sampled_check
from contratile.bench.contestants.loss import LossProblem
from contratile.bench.sampled_check import SampledErrors, brute_force, sampled_errors

Lse = tuple[torch.Tensor, torch.Tensor]


def step(n: int = 96, d: int = 8) -> tuple[LossProblem, float, Lse]:
    problem = LossProblem.make(n, d, scale=10.0)
    value = clip_loss(*problem.args, group=None)
    value.backward()
    return problem, value.item(), pair_lse(*problem.args, group=None)


def check(problem: LossProblem, value: float, lse: Lse) -> SampledErrors:
    image, text, scale = problem.args
    return sampled_errors(image, text, scale, value, lse, samples=16)


def test_brute_force_is_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled_check, "BLOCK", 40)  # ragged blocks
    image, text, _ = LossProblem.make(96, 8, scale=10.0).args
    image, text = (x.detach().double().requires_grad_() for x in (image, text))
    reference.clip_loss(image, text, 10.0).backward()
    scores = (10 * image @ text.T).detach()
    rows = torch.tensor([3, 95, 40])
    found = brute_force(image.detach(), text.detach(), 10.0, rows, scores.logsumexp(0))
    assert image.grad is not None
    torch.testing.assert_close(found.lse, scores.logsumexp(1)[rows])
    torch.testing.assert_close(found.grad, image.grad[rows])


def test_a_right_step_passes() -> None:
    errors = check(*step())
    # fp32 rounding of sums over 96 keys, far from any real mistake
    assert max(errors.row_lse, errors.col_lse, errors.value, errors.image_grad, errors.text_grad) < 1e-5
    assert errors.scale_grad < 1e-4 and errors.samples == 16


@pytest.mark.parametrize("which", ["image", "text", "scale", "rows", "value"])
def test_a_wrong_step_is_found(which: str) -> None:
    problem, value, (row_lse, col_lse) = step()
    image, text, scale = problem.args
    for tensor, name in ((image, "image"), (text, "text"), (scale, "scale")):
        assert tensor.grad is not None
        if name == which:
            tensor.grad *= 1.01
    if which == "rows":
        row_lse = row_lse + 0.01
    errors = check(problem, value * 1.01 if which == "value" else value, (row_lse, col_lse))
    seen = {"image": errors.image_grad, "text": errors.text_grad, "scale": errors.scale_grad}
    seen |= {"rows": errors.row_lse, "value": errors.value}
    assert seen[which] > 1e-3


def test_record_writes_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(million, "TRIAL", 128)
    path = million.run_and_record(512, 8, scale=14.3, samples=4, threads=1, out=tmp_path)
    written = json.loads(path.read_text())
    assert written["command"].startswith("python -m contratile.bench.million --n 512 --d 8")
    assert written["measured"]["cpu_seconds"] > 0 and written["errors"]["row_lse"] < 1e-5
    assert written["measured"]["dense_gib"] == 4 * 512 * 512 / 2**30
    assert [file.name for file in tmp_path.iterdir()] == ["million.json"]


def test_progress_tells_how_far(capsys: pytest.CaptureFixture[str]) -> None:
    with million.progress(100.0, every=0.01):
        while "CPU seconds" not in capsys.readouterr().err:
            pass


def test_counts_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        million.run_and_record(0, 8, scale=1.0, samples=1, threads=1, out=tmp_path)
