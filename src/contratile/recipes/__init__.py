"""Recipes: training configurations in TOML that come with the package and are found by name.

contratile train --config icons
load_config(find_recipe("icons"))
"""

import difflib
from pathlib import Path

from contratile.errors import bad_value

FOLDER = Path(__file__).parent


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def find_recipe(name: str | Path) -> Path:
    """Return the file of a recipe.

    Args:
        name: The name of a packaged recipe, or the path of a TOML file. A plain word means the packaged recipe, even if
            the working directory has something of that name; `./icons` and `icons.toml` are always paths.

    Raises:
        ValueError: A plain word that is neither a packaged recipe nor a file.

    Example:
        >>> find_recipe("icons").name
        'icons.toml'
        >>> find_recipe("my/recipe.toml").name
        'recipe.toml'
    """
    text, names = str(name), recipe_names()
    if text in names:
        return FOLDER / f"{text}.toml"
    path = Path(text)
    if path.suffix or path.name != text or path.is_file():
        return path
    near = difflib.get_close_matches(text, names, n=1)
    remedy = f"Did you mean {near[0]}?" if near else "Pass the path of a TOML file to use your own."
    bad_value("config", expected=f"one of {', '.join(names)}, or a TOML file", got=repr(text), remedy=remedy)
