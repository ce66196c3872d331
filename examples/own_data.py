"""Your own pictures: train a small CLIP on a table of paths and captions, evaluate it, and search the pictures.

    python examples/own_data.py                # in a temporary folder
    python examples/own_data.py folder         # keeps folder/run/report.html to look at

The example draws its own pictures: shapes in several colours. On the command line, `contratile train --data pairs.csv`
does the same.
"""

import csv
import sys
import tempfile
from itertools import product
from pathlib import Path

from PIL import Image, ImageDraw

from contratile.train import (
    DataConfig,
    OptimConfig,
    RunConfig,
    TowerConfig,
    TrainConfig,
    Trainer,
    chance,
    encode,
    load_gallery,
    load_run,
    open_source,
    retrieval,
    search,
    write_results,
)

COLOURS = ("red", "green", "blue", "orange", "purple", "black", "gray", "brown")
SHAPES = ("disc", "ring", "square", "frame", "cross", "bar")
PLACES = ("left", "right", "top", "bottom")
SIZE = 32


def draw(colour: str, shape: str, place: str) -> Image.Image:
    """One picture."""
    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(image)
    x, y = {"left": (9, 16), "right": (22, 16), "top": (16, 9), "bottom": (16, 22)}[place]
    box = (x - 7, y - 7, x + 7, y + 7)
    if shape in ("disc", "ring"):
        pen.ellipse(box, fill=colour if shape == "disc" else None, outline=colour, width=3)
    elif shape in ("square", "frame"):
        pen.rectangle(box, fill=colour if shape == "square" else None, outline=colour, width=3)
    else:
        pen.line((x - 7, y, x + 7, y), fill=colour, width=4)
        if shape == "cross":
            pen.line((x, y - 7, x, y + 7), fill=colour, width=4)
    return image


def make_table(folder: Path) -> Path:
    """pairs.csv with a column of paths, relative to the table, and one of captions."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pairs.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["path", "caption"])
        for colour, shape, place in product(COLOURS, SHAPES, PLACES):
            name = f"{colour}-{shape}-{place}.png"
            draw(colour, shape, place).save(folder / name)
            table.writerow([name, f"{colour} {shape} at the {place}"])
    return path


def main(folder: Path) -> None:
    config = TrainConfig(
        run=RunConfig(out=folder / "run", batch=128, chunk=32, steps=40, eval_every=20),
        data=DataConfig(data=str(make_table(folder / "pictures")), test_share=0.2),
        towers=TowerConfig(towers="tiny", width=64, depth=2, patch=8),
        optim=OptimConfig(lr=3e-3, warmup=5),
    )
    trainer = Trainer(config)
    outcome = trainer.run()  # started again, it continues from the last checkpoint
    if outcome.held_out is not None:  # None if the run was complete before
        write_results(trainer, outcome)

    # From here on only the run's folder is needed.
    towers, config, _ = load_run(folder / "run", "last")
    held_out = encode(towers, open_source(config.data, "test"), chunk=64)
    metrics, guess = retrieval(held_out), chance(held_out)
    name = "text_to_image_R@5"
    print(f"{len(held_out.keys)} held-out pictures: R@5 {metrics[name]:.3f}, chance {guess[name]:.3f}")

    (found,) = search(towers, load_gallery(folder / "run"), ["red ring"], k=3)
    print(f"nearest to {found.query!r} among all pictures:")
    for place, (score, caption) in enumerate(zip(found.scores, found.captions, strict=True)):
        print(f"  {score:.3f}  {caption} ({found.mark(place)})")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
