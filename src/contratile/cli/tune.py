"""`contratile doctor --tune`: what is printed."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from contratile.cli.pages import WRONG, Grid, show_page
from contratile.doctor.checkup import Notify, all_devices
from contratile.doctor.tune import BUSY, DEFAULT, CandidateResult, TuneOptions, Tuning, subjects, tune
from contratile.engine import tuned

UNTIMED = "checked but not timed, since Triton is interpreted or the default does not run"


def tune_and_show(options: argparse.Namespace, notify: Notify) -> int:
    """Tune the devices, print what was found, and return 1 if a candidate computed something wrong."""
    path = tuned.prepare()  # before the long work
    asked = TuneOptions(
        size=options.size,
        dims=tuple(options.dims) if options.dims else None,
        dtypes=tuple(options.dtypes) if options.dtypes else None,
        quick=options.quick,
    )
    devices = options.device or all_devices()[:2][-1:]  # the first GPU, or the CPU
    every = [subject for device in devices for subject in subjects(device, asked)]
    found = list(tune(every, notify=notify))
    tuned.forget()  # steps of this process use what was found
    notify("")
    wrong = [text for tuning in found for text in tuning.wrong]
    if options.json:
        print(json.dumps({"file": str(path), "tuned": [asdict(tuning) for tuning in found]}, indent=2))
    else:
        grids = [_grid(tuning) for tuning in found]
        show_page([], grids, _remarks(wrong, found), _verdict(found, path), bad=bool(wrong))
    return 1 if wrong else 0


def _grid(tuning: Tuning) -> Grid:
    def remark(trial: CandidateResult) -> str:
        if trial.note:
            return WRONG if trial.note.startswith("wrong") else trial.note
        return "kept" if trial.candidate == tuning.kept else ""

    times = [
        (
            trial.candidate,
            "" if trial.seconds is None else f"{1e3 * trial.seconds:.2f}",
            "" if trial.ratio is None else f"{trial.ratio:.3f}",
            remark(trial),
        )
        for trial in tuning.trials
    ]
    title = f"{tuning.kind} · {tuning.device} · {tuning.dtype} · N = {tuning.n}, D = {tuning.d}"
    return title, ("candidate", "ms", "x default", ""), times


def _remarks(wrong: list[str], found: list[Tuning]) -> list[str]:
    remarks = [f"problem: {text}" for text in wrong]
    for tuning in found:
        if not tuning.timed and not tuning.wrong:
            remarks.append(f"{tuning.kind}, {tuning.dtype}, D = {tuning.d}: {UNTIMED}")
        if tuning.noise > BUSY:
            remarks.append(
                f"{tuning.kind}, {tuning.dtype}, D = {tuning.d}: times of the default differ by {tuning.noise:.0%}, so "
                "this machine is busy. Tune again when it is idle."
            )
    return remarks


def _verdict(found: list[Tuning], path: Path) -> str:
    better = [tuning for tuning in found if tuning.kept != DEFAULT]
    if not any(tuning.timed for tuning in found):
        return "nothing was timed, so nothing is kept"
    if not better:
        return "no candidate is faster than the default by more than the noise: none is kept"
    return f"{len(better)} of {len(found)} kept in {path}; CONTRATILE_TUNED=0 ignores them"
