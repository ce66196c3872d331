"""docs/from-open-clip.md: a row for each option of open_clip, and options of ours that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from contratile.cli.options import options_of
from contratile.train.config import TrainConfig

PAGE = (Path(__file__).parents[1] / "docs" / "from-open-clip.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(--[a-z0-9-]+)` \| (.*?) \| (.*?) ?\|$", re.MULTILINE)
"""Their option, ours, and a remark."""


def test_options_of_ours_exist() -> None:
    known = {*options_of(TrainConfig())}
    rows = ROW.findall(PAGE)
    assert len(rows) > 80 and PAGE.count("\n| `--") == len(rows)
    theirs = {option for option, _, _ in rows}
    for option, ours, remark in rows:
        assert ours in ("**missing**", "always", "not needed") or re.fullmatch(r"`--[a-z-]+`", ours), option
        named = set(re.findall(r"`(--[a-z-]+)", f"{ours} {remark}"))
        assert named <= known | theirs, option
        assert re.match(r"`(--[a-z-]+)`", ours) is None or ours.strip("`") in known, option
    rest = re.sub(r"^\|.*$", "", PAGE, flags=re.MULTILINE)
    (command,) = re.findall(r"^torchrun .* -m contratile train (.*)$", rest, re.MULTILINE)
    prose = set(re.findall(r"`(--[a-z-]+)", rest))
    assert set(re.findall(r"(--[a-z-]+)", command)) | prose <= known


@pytest.mark.peers
def test_every_option_of_open_clip_has_a_row() -> None:
    spec = importlib.util.find_spec("open_clip_train")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "params.py").read_text(encoding="utf-8")
    options = re.findall(r"""["'](--[a-z0-9-]+)["']""", source)
    assert len(options) > 80
    rows = [option for option, _, _ in ROW.findall(PAGE.partition("## Inf-CLIP")[0])]
    assert sorted(rows) == sorted(options)
