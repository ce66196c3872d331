"""Checkpoints: exact, whole or absent, refused when damaged."""

# mypy: allow-untyped-calls
# (torch does not annotate all that is called here.)

import json
import math
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from contratile.train import checkpoint
from contratile.train.optim import load_optimizer
from contratile.train.random_state import random_state, set_random_state
from contratile.train.state_tree import flatten, restore
from tests.helpers import randn

ROOT = Path(__file__).parent.parent.parent


def assert_equal(got: Any, expected: Any) -> None:
    """The same values to the last bit, in the same types."""
    assert type(got) is type(expected) or isinstance(expected, nn.Parameter)
    if isinstance(expected, Tensor):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert bits(got) == bits(expected)
    elif isinstance(expected, dict):
        assert list(got) == list(expected)
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            assert_equal(a, b)
    elif isinstance(expected, float):
        assert repr(got) == repr(expected)
    else:
        assert got == expected


def bits(x: Tensor) -> bytes:
    plain = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).tolist()) if x.numel() else b""


def step(run: Path, number: int) -> Path:
    return run / "checkpoints" / checkpoint.step_name(number)


def written(run: Path, number: int = 1, best: int | None = None) -> Path:
    folder = step(run, number)
    state = {"model": {"w": randn(5, 3, seed=number)}, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}}
    checkpoint.save(folder, state, {"step": number} | ({} if best is None else {"best_step": best}))
    return folder


# --- what goes in comes out ---------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.98)),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1 / 3, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_goes_on_bitwise(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
        groups = [{"params": list(model[0].parameters())}, {"params": list(model[2].parameters()), "lr": 0.07}]
        return model, OPTIMIZERS[name](model.parameters() if name == "lbfgs" else groups)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for x in (randn(8, 4, seed=seed, dtype=dtype) for seed in steps):

            def closure(x: Tensor = x) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(x).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]  # torch says float

    model, optimizer = fresh()
    train(model, optimizer, range(3))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert optimizer.state_dict()["state"]
    checkpoint.save(step(tmp_path, 3), state, {})
    loaded, _ = checkpoint.load(step(tmp_path, 3))
    assert_equal(loaded["optimizer"], state["optimizer"])
    assert_equal(loaded["model"], dict(state["model"]))
    twin, twin_optimizer = fresh()
    twin.load_state_dict(loaded["model"])
    load_optimizer(twin_optimizer, loaded["optimizer"])
    train(model, optimizer, range(3, 6))
    train(twin, twin_optimizer, range(3, 6))
    assert_equal(dict(twin.state_dict()), dict(model.state_dict()))
    assert_equal(twin_optimizer.state_dict(), optimizer.state_dict())


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
    dtype = draw(st.sampled_from([*dtypes, torch.complex64]))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    itemsize = torch.empty(0, dtype=dtype).element_size()
    number = math.prod(shape) * itemsize
    values: list[int] = draw(st.lists(st.integers(0, 255), min_size=number, max_size=number))
    raw = torch.tensor(values, dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw  # any bits: NaN with payloads too
    x = raw.view(dtype).reshape(shape) if number else torch.empty(shape, dtype=dtype)
    turned: bool = draw(st.booleans())
    return x.transpose(0, -1) if shape and turned else x


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.booleans() | st.tuples(st.integers(), st.text())
SPECIAL = ["$tensor", "$float", "$dtype", "__metadata__", "a", "a.b", "b"]
trees = st.recursive(
    plain | tensors() | st.sampled_from([torch.bfloat16, torch.float32]),
    lambda part: (
        st.lists(part, max_size=4)
        | st.lists(part, max_size=4).map(tuple)
        | st.dictionaries(keys, part, max_size=4)
        | st.dictionaries(
            st.sampled_from(["$tensor", "$float", "$dtype", "__metadata__", "a", "a.b", "b"]), part, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(tree=trees)
def test_any_tree_survives(tree: Any) -> None:
    structure, flat = flatten(tree, "tree")
    text = json.dumps(structure, allow_nan=False)
    assert_equal(restore(json.loads(text), flat), tree)


@settings(max_examples=30, deadline=None)
@given(tree=trees, facts=st.dictionaries(st.text(), plain, max_size=4))
def test_any_tree_survives_the_disk(tree: Any, facts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trees") / "any"
    checkpoint.save(folder, {"part": tree}, facts)
    state, told = checkpoint.load(folder)
    assert_equal(state["part"], tree)
    assert_equal(told, facts)


def test_tied_weights_are_stored_once_and_views_by_their_values(tmp_path: Path) -> None:
    model = nn.Module()
    model.embed, model.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    model.head.weight = model.embed.weight
    base = randn(6, 6, seed=1)
    state = {**model.state_dict(), "all": base, "rows": base[2:4], "turned": base.T, "again": base[2:4]}
    folder = tmp_path / "tied"
    checkpoint.save(folder, {"model": state}, {})
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "all", "rows", "turned"}
    loaded = checkpoint.load(folder)[0]["model"]
    assert_equal(loaded, state)
    assert loaded["head.weight"] is loaded["embed.weight"]


def test_saved_tensors_are_read_by_their_plain_names(tmp_path: Path) -> None:
    """Other programs may use model.safetensors by itself."""
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    checkpoint.save(tmp_path / "c", {"model": model.state_dict()}, {})
    found = load_file(tmp_path / "c" / "model.safetensors")
    assert_equal({name: found.pop(name) for name in model.state_dict()}, dict(model.state_dict()))
    assert not found


def test_random_states_are_put_back(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float, float]:
        return random.random(), random.gauss(0, 1), float(numpy.random.normal()), float(torch.rand(()))

    draw()  # leaves half a pair of normal numbers in each generator
    checkpoint.save(tmp_path / "r", {"random": random_state()}, {})
    first = draw()
    assert draw() != first
    set_random_state(checkpoint.load(tmp_path / "r")[0]["random"])
    assert draw() == first


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "facts.json", "manifest.json"])
@pytest.mark.parametrize("harm", ["cut", "emptied", "flipped", "grown", "removed", "replaced"])
def test_damage_is_refused(file: str, harm: str, tmp_path: Path) -> None:
    folder = written(tmp_path)
    path = folder / file
    content = path.read_bytes()
    if harm == "removed":
        path.unlink()
    else:
        middle = len(content) // 2
        flipped = content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]
        harmed = {"cut": content[:-7], "emptied": b"", "flipped": flipped, "grown": content + b"x", "replaced": b"{}"}
        path.write_bytes(harmed[harm])
    with pytest.raises(ValueError, match=r"checkpoint .*step-00000001: expected .*, got .*remove the folder"):
        checkpoint.load(folder)


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    folder = written(tmp_path)
    expected = checkpoint.load(folder)
    for path in folder.iterdir():
        content = path.read_bytes()
        for place in range(0, len(content), 11):
            path.write_bytes(content[:place] + bytes([content[place] ^ 0x01]) + content[place + 1 :])
            with pytest.raises(ValueError, match="checkpoint"):
                checkpoint.load(folder)
        path.write_bytes(content)
    assert_equal(checkpoint.load(folder), expected)


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("file", ["model.safetensors", "facts.json", "manifest.json"])
def test_nothing_is_unpickled(file: str, tmp_path: Path) -> None:
    """A pickle in the place of a file, with a manifest that vouches for it."""
    folder = written(tmp_path)
    (folder / file).write_bytes(pickle.dumps(Trap(str(tmp_path / "sprung"))))
    if file != "manifest.json":
        manifest = json.loads((folder / "manifest.json").read_text())
        size, checksum = (folder / file).stat().st_size, checkpoint._checksum(folder / file)
        manifest["files"][file] = {"bytes": size, "crc32": checksum}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="damaged or incomplete"):
        checkpoint.load(folder)
    assert not (tmp_path / "sprung").exists()


def test_other_formats_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere: expected a folder, got nothing there"):
        checkpoint.load(tmp_path / "nowhere")
    folder = written(tmp_path)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(checkpoint.FORMAT, "contratile checkpoint 9"))
    with pytest.raises(ValueError, match=r"expected contratile checkpoint 1, got contratile checkpoint 9\."):
        checkpoint.load(folder)


@pytest.mark.parametrize("name", ["../model", "a/b", "", "facts", "manifest", "a.b"])
def test_names_that_are_no_words_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="name of a part: expected an identifier"):
        checkpoint.save(tmp_path / "c", {name: {}}, {})
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_stored_is_refused_before_anything_is_replaced(tmp_path: Path) -> None:
    folder = written(tmp_path)
    expected = checkpoint.load(folder)
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"model": {"w": object()}}, {}, r"model\.w: expected numbers, texts, tensors.*got object"),
        ({"model": {"w": [numpy.zeros(2)]}}, {}, r"model\.w\.0: expected numbers, texts, tensors.*got ndarray"),
        ({"model": {"w": torch.eye(2).to_sparse()}}, {}, r"model\.w: expected a plain tensor, got layout torch.sparse"),
        ({"model": {"w": torch.empty(2, device="meta")}}, {}, r"model\.w: expected a plain tensor, got .*meta"),
        ({"model": {}}, {"w": torch.zeros(2)}, r"facts: expected numbers.*got tensors \['w'\]"),
    ]
    for state, facts, message in bad:
        with pytest.raises(TypeError, match=message):
            checkpoint.save(folder, state, facts)
        assert_equal(checkpoint.load(folder), expected)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]


# --- which one ----------------------------------------------------------------------------------------------------


def test_latest_is_the_highest_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for number in (9, 100, 20, 123_456_789):
        written(tmp_path, number)
    (tmp_path / "checkpoints" / "step-best").mkdir()
    (tmp_path / "checkpoints" / "step-99999999999.tmp-1").mkdir()
    assert checkpoint.latest(tmp_path) == step(tmp_path, 123_456_789)


@pytest.mark.parametrize("harm", ["no manifest", "no model", "short model"])
def test_latest_passes_over_what_is_incomplete_and_says_so(harm: str, tmp_path: Path) -> None:
    written(tmp_path, 1)
    folder = written(tmp_path, 2)
    if harm == "short model":
        os.truncate(folder / "model.safetensors", 20)
    else:
        (folder / ("manifest.json" if harm == "no manifest" else "model.safetensors")).unlink()
    with pytest.warns(UserWarning, match="passed over: checkpoint .*step-00000002: expected"):
        assert checkpoint.latest(tmp_path) == step(tmp_path, 1)


def test_keep_leaves_the_newest_and_the_best(tmp_path: Path) -> None:
    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())

    for number in range(1, 6):
        written(tmp_path, number, best=3 if number >= 3 else 1)
        checkpoint.keep(tmp_path, last=2)
    assert names() == [checkpoint.step_name(number) for number in (3, 4, 5)]
    assert_equal(checkpoint.load(tmp_path / "best"), checkpoint.load(step(tmp_path, 3)))
    assert not (tmp_path / "best").readlink().is_absolute()  # a run may be moved
    written(tmp_path, 6, best=6)
    checkpoint.keep(tmp_path, last=1)
    assert names() == [checkpoint.step_name(6)] and checkpoint.load(tmp_path / "best")[1]["step"] == 6
    with pytest.raises(ValueError, match="last: expected at least 1, got 0"):
        checkpoint.keep(tmp_path, last=0)


def test_keep_does_not_count_damaged_ones(tmp_path: Path) -> None:
    for number in (1, 2):
        written(tmp_path, number)
    (step(tmp_path, 2) / "manifest.json").unlink()
    checkpoint.keep(tmp_path, last=1)
    assert checkpoint.load(step(tmp_path, 1))[1] == {"step": 1}


# --- killed -------------------------------------------------------------------------------------------------------


def killed(mode: str, folder: Path) -> list[str]:
    words = [sys.executable, "-m", "tests.train.killed", mode, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks of a process")


@posix
def test_a_kill_before_any_operation_leaves_a_checkpoint(tmp_path: Path) -> None:
    moments = {name: int(number) for name, number in map(str.split, killed("moments", tmp_path))}
    assert set(moments) == {"new", "again", "keep"}
    assert moments["new"] > 8 and moments["again"] > moments["new"] and moments["keep"] > 5


@posix
def test_kills_at_random_leave_a_checkpoint(tmp_path: Path) -> None:
    (line,) = killed("random", tmp_path)
    kills, last = map(int, line.split())
    assert kills >= 50 and last > 10


@posix
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    lines = killed("full", tmp_path)
    assert len(lines) == 8
    assert all("could not be written" in line and "Is the disk full? Free some space" in line for line in lines)


@pytest.mark.skipif(os.name != "posix", reason="access rights of POSIX")
def test_weights_can_be_read_by_whom_other_files_can(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        checkpoint.save(tmp_path / "step-00000001", {"model": {"x": torch.ones(2)}}, {"step": 1})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "step-00000001").iterdir()} == {0o644}
