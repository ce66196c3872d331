"""Options: recipes say what they mean, mistakes are named with the nearest right word."""

from pathlib import Path

import pytest

from contratile.train.config import TrainConfig, load_config, to_toml
from contratile.train.loop import Trainer
from tests.train.runs import shapes, small

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def test_a_saved_config_gives_itself_again(tmp_path: Path) -> None:
    config = small(Path("pairs.csv"), tmp_path / "run", margin=0.1, betas=(0.9, 0.95), root=tmp_path)
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
        ('[run]\nbatch = "many"', "batch: expected an int, got str"),
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


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="config: expected a TOML file"):
        load_config(tmp_path / "none.toml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_does_two_steps(recipe: Path, tmp_path: Path) -> None:
    """With small data, small encoders and a small batch; everything else is the recipe's."""
    from dataclasses import replace

    config = load_config(recipe)
    little = small(shapes(tmp_path / "shapes", sizes=1), tmp_path / "run", batch=16, steps=2)
    run = replace(config.run, out=tmp_path / "run", batch=16, chunk=6, steps=2, cpu=True, precision="fp32")
    towers = replace(little.towers, lock="none" if config.towers.lock == "both" else config.towers.lock)
    done = replace(config, run=run, data=little.data, towers=towers)
    outcome = Trainer(done).run()
    assert outcome.finished and outcome.step == 2


def test_there_are_recipes() -> None:
    assert {"icons", "icons-whole", "wordnet", "cc3m-clip", "cc12m-clip", "cc12m-lit", "laion400m-lit"} <= {
        path.stem for path in RECIPES
    }
