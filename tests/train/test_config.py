"""Options: recipes say what they mean, mistakes are named with the nearest right word."""

from pathlib import Path
from typing import Any

import pytest

from contratile.cli.train import parse
from contratile.recipes import find_recipe, recipe_names
from contratile.train.config import RunConfig, TrainConfig
from contratile.train.config_file import load_config, save_config, to_toml
from contratile.train.loop import Trainer
from tests.torchvision_repair import repair_torchvision
from tests.train.runs import shapes, small

RECIPES = [find_recipe(name) for name in recipe_names()]


@pytest.mark.parametrize("chunk", [10, "auto"])
def test_a_saved_config_gives_itself_again(tmp_path: Path, chunk: int | str) -> None:
    changes: dict[str, Any] = {"margin": 0.1, "betas": (0.9, 0.95), "root": tmp_path, "track": ("wandb",)}
    config = small(Path("pairs.csv"), tmp_path / "run", **changes, chunk=chunk)
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert load_config(path) == config
    assert load_config(path) != TrainConfig()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nbacth = 3", r"\[run\]: expected one of .*batch.*got 'bacth'. Did you mean batch\?"),
        ("[rum]\nbatch = 3", r"got 'rum'. Did you mean run\?"),
        ("batch = 3", "expected one of run, data"),
        ("run = 3", r"run: expected a section, got 3. Write \[run\]"),
        ("[run]\nbatch = ", "expected TOML"),
        ("[run]\nbatch = 0", "batch: expected at least 1, got 0"),
        ('[run]\nbatch = "many"', r"recipe.toml \[run\] batch: expected a whole number, got 'many'. .*batch = 4096"),
        ("[run]\nbatch = 0", r"recipe.toml batch: expected at least 1"),
        ('[run]\nfsdp = "false"', r"recipe.toml \[run\] fsdp: expected true or false, got 'false'. .* fsdp = false"),
        ('[run]\nchunk = "many"', "chunk: expected a whole number or 'auto', got 'many'. Write it like chunk = 256"),
        ("[run]\nchunk = true", "chunk: expected a whole number or 'auto', got True"),
        ("[run]\nchunk = 0", "chunk: expected at least 1, got 0"),
        ('[run]\ntrack = "wandb"', "track: expected a list, got 'wandb'"),
        ('[run]\ntensorboard = false\ntrack = ["tensorboard"]', "track: expected other trackers with --no-tensorboard"),
        ("[run]\nbatch = true", "batch: expected a whole number, got True"),
        ("[run]\nbatch = 3.5", "batch: expected a whole number, got 3.5"),
        ("[data]\ndata = 5", r"recipe.toml \[data\] data: expected a text in quotes, got 5"),
        ("[data]\nroot = 5", "root: expected a path in quotes, got 5"),
        ('[data]\nleft = "a\\u0000"', "left: expected a text, got .* Remove the NUL"),
        ("[run]\nout = 1979-05-27", "out: expected a path in quotes, got datetime"),
        ("[optim]\nbetas = [0.9]", r"betas: expected a list of 2, got \[0.9\]"),
        ('[optim]\nbetas = [0.9, "x"]', "betas: expected a number, got 'x'"),
        (f"[run]\nbatch = {'9' * 400}", "batch: expected a finite number of 64 bits, got one of 1,329 bits"),
        (f"[optim]\nlr = {'9' * 400}", "lr: expected a finite number of 64 bits"),
        (f"[optim]\nlr = {'9' * 5000}", "config: expected TOML .*recipe.toml"),
        ("[optim]\nlr = nan", "lr: expected a finite number of 64 bits, got nan"),
        ("[run]\nepochs = inf", "epochs: expected a finite number"),
        ("[run]\nseed = -1", "seed: expected 0 to 4294967295, got -1"),
        ("[loss]\nmax_scale = 0", "max_scale: expected at least 1, got 0"),
        ("[loss]\nlabel_smoothing = 1", "label_smoothing: expected a share"),
        (f"a = {'[' * 5000}", "config: expected sections of values, got .*recipe.toml, nested too deeply"),
        (f"a = {'{a=' * 5000}", "recipe.toml, nested too deeply"),
        (f"run = [{','.join(['[1]'] * 500)}]", r"run: expected a section, got \[\[1\], .{0,60}characters"),
        ("[[run]]\nbatch = 3", r"run: expected a section"),
        ("# " + "x" * 2_000_000, "config: expected TOML in UTF-8, at most 1,048,576 bytes"),
        ('[loss]\nloss = "siglip"\nmargin = 0.1', "margin: expected none with --loss siglip"),
        ("[run]\nsteps = 0\nepochs = 0", "epochs: expected a positive number"),
        ('[towers]\ntowers = "tinny"', "towers: expected tiny, hf:"),
        ('[loss]\nloss = "clap"', "loss: expected one of 'clip'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises((ValueError, TypeError), match=told):
        load_config(path)


def test_a_recipe_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes(b"\xff\xfea\0")
    with pytest.raises(ValueError, match=r"config: expected TOML in UTF-8.*recipe.toml.*can't decode"):
        load_config(tmp_path / "recipe.toml")


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config: expected a TOML file"):
        load_config(tmp_path / "none.toml")


def test_configs_of_earlier_versions(tmp_path: Path) -> None:
    """They have a number of pairs in a chunk, and no trackers but TensorBoard."""
    lines = to_toml(TrainConfig(run=RunConfig(chunk=64, tensorboard=False))).splitlines()
    (tmp_path / "config.toml").write_text("\n".join(line for line in lines if not line.startswith("track =")))
    run = load_config(tmp_path / "config.toml").run
    assert (run.chunk, run.tensorboard, run.track) == (64, False, ())


@pytest.mark.parametrize(
    ("loss", "dedup", "same_id"),
    [
        ("clip", "true", "exclude"),
        ("infonce", "false", "negative"),
        ("siglip", "true", "negative"),
        ("supcon", "false", "exclude"),
    ],
)
def test_what_earlier_versions_called_dedup(loss: str, dedup: str, same_id: str, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(f'[loss]\nloss = "{loss}"\ndedup = {dedup}\n', encoding="utf-8")
    assert load_config(tmp_path / "old.toml").loss.same_id == same_id


def test_a_chunk_and_trackers_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["--chunk", "512"]).run.chunk == 512
    (tmp_path / "recipe.toml").write_text('[run]\nchunk = "auto"\ntrack = ["wandb"]')
    recipe = ["--config", str(tmp_path / "recipe.toml"), "--out", str(tmp_path)]
    assert parse(recipe).run.chunk == parse(["--chunk", "auto"]).run.chunk == "auto"
    assert parse([*recipe, "--chunk", "64"]).run.chunk == 64
    for value, told in (("0", "chunk: expected at least 1, got 0"), ("many", "many")):
        with pytest.raises(SystemExit):
            parse(["--chunk", value])
        assert told in capsys.readouterr().err
    assert parse(["--track", "wandb", "mlflow"]).run.track == ("wandb", "mlflow")
    assert parse(recipe).run.track == ("wandb",) and parse([*recipe, "--track"]).run.track == ()


@pytest.mark.filterwarnings("ignore")  # packages that timm imports
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_does_two_steps(recipe: Path, tmp_path: Path) -> None:
    """With small data, small encoders and a small batch; everything else is the recipe's."""
    from dataclasses import replace

    config = load_config(recipe)
    if config.optim.optimizer.startswith("timm:"):
        repair_torchvision()
        pytest.importorskip("timm")
    little = small(shapes(tmp_path / "shapes", sizes=1), tmp_path / "run", batch=16, steps=2)
    run = replace(config.run, out=tmp_path / "run", batch=16, chunk=6, steps=2, cpu=True, precision="fp32")
    lock, keep = config.towers.lock, config.towers.keep_outputs
    towers = replace(little.towers, lock="none" if lock == "both" else lock, keep_outputs=keep)
    done = replace(config, run=run, data=little.data, towers=towers)
    outcome = Trainer(done).run()
    assert outcome.finished and outcome.step == 2


def test_there_are_recipes() -> None:
    assert {"icons", "icons-whole", "wordnet", "cc3m-clip", "laion400m-lit"} <= {path.stem for path in RECIPES}


def test_text_that_toml_cannot_hold_is_refused_before_it_is_written(tmp_path: Path) -> None:
    """Bytes of the command line that are not UTF-8: the run's own config.toml could not be read any more."""
    config = TrainConfig(run=RunConfig(out=tmp_path, queries=("fine", "\udcff")))
    with pytest.raises(ValueError, match=r"expected text in UTF-8, got '\\udcff'"):
        save_config(config, tmp_path)
    assert not list(tmp_path.iterdir())
