"""Retrieval metrics as text: one line during a run, a table at its end.

print(in_a_line(metrics))           # text to image R@1 0.043, R@5 0.12, R@10 0.18, median rank 66 · image to text ...
print("\\n".join(table(metrics, chance, side_names(source))))

Metric names always speak of images and texts (`text_to_image_R@1`: from the right side to the left one). In text, the
sides get their own names, for example the columns of a text-pair table.
"""

from collections.abc import Mapping
from typing import Any

from contratile.data.sample import Source

WAYS = ("text_to_image", "image_to_text")
PICTURES = ("image", "text")
VIEWS = ("image", "view")
PAIRWISE = "_pairwise"
"""Suffix of metrics that accept only a row's own other half, where images or texts repeat."""

ZERO_SHOT = {
    "zero_shot_top1": "zero-shot top-1",
    "zero_shot_top5": "zero-shot top-5",
    "zero_shot_per_class": "zero-shot mean per-class recall",
    "zero_shot_mAP": "zero-shot mAP",
    "zero_shot_left_out": "zero-shot samples left out",
}
"""Zero-shot metrics in words."""

Sides = tuple[str, str]


def columns_of(source: Any) -> Any:
    """The columns of a table, also through wrappers that select rows; None for other sources."""
    while hasattr(source, "source"):
        source = source.source
    return getattr(source, "columns", None)


def side_names(source: Source, *, views: bool = False) -> Sides:
    """Names for left and right: image and text, the two columns of a text-pair table, or an image and a view of it."""
    columns = columns_of(source)
    if views:
        return VIEWS
    if "image" in source.kinds:
        return PICTURES
    if columns is not None:
        return columns.left, columns.right
    found: Sides = getattr(source, "sides", ("left", "right"))
    return found


def ways(sides: Sides) -> dict[str, str]:
    """Name of each direction -> its prefix in metric names. Sides of equal name are called left and right."""
    left, right = sides if sides[0] != sides[1] else ("left", "right")
    return {f"{right} to {left}": WAYS[0], f"{left} to {right}": WAYS[1]}


def in_words(name: str, sides: Sides) -> str:
    """A metric name in words, with the direction named after the sides."""
    for called, way in ways(sides).items():
        if name.startswith(f"{way}_"):
            kind = ", pair by pair" if name.endswith(PAIRWISE) else ""
            return f"{called} {_short(name, way)}{kind}"
    return ZERO_SHOT.get(name) or name.replace("_", " ")


def in_digits(value: float) -> str:
    """A count in full, other numbers in four digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def zero_shot_lines(metrics: Mapping[str, float], chance: Mapping[str, float]) -> list[str]:
    """A line per zero-shot metric, with its chance level if it has one."""
    lines = []
    for name, called in ZERO_SHOT.items():
        if name in metrics:
            value = metrics[name]
            level = f" (chance {chance[name]:.4f})" if name in chance else ""
            lines.append(f"{called} {value:,}" if isinstance(value, int) else f"{called} {value:.4f}{level}")
    return lines


def in_a_line(metrics: Mapping[str, float], sides: Sides = PICTURES) -> str:
    """All metrics on one line, by direction and without the mean rank; other metrics come last."""
    parts = []
    for called, way in ways(sides).items():
        mine = [f"{name} {value:.4g}" for name, value in of_way(metrics, way).items() if name != "mean rank"]
        parts += [f"{called} {', '.join(mine)}"] if mine else []
    rest = [f"{in_words(name, sides)} {in_digits(x)}" for name, x in metrics.items() if not name.startswith(WAYS)]
    return " · ".join(parts + rest)


def table(metrics: Mapping[str, float], chance: Mapping[str, float], sides: Sides) -> list[str]:
    """A table with a row per direction and its chance level, then the same for pairwise metrics."""
    found: list[tuple[str, dict[str, float]]] = []
    for ending, kind in (("", ""), (PAIRWISE, ", pair by pair")):
        rows = {
            called: (of_way(metrics, way, ending), of_way(chance, way, ending)) for called, way in ways(sides).items()
        }
        levels = [level for _, level in rows.values()]
        for called, (values, level) in rows.items():
            if values:
                found.append((f"{called}{kind}", values))
                if levels[0] != levels[1]:
                    found.append(("  chance", level))
        if levels[0] and levels[0] == levels[1]:
            found.append((f"chance{kind}", levels[0]))
    columns = list(found[0][1])
    lines = [["", *columns]]
    for name, values in found:
        lines.append([name, *(_number(column, values[column]) if column in values else "" for column in columns)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def neighbor_line(metrics: Mapping[str, float]) -> str:
    """How often an image's nearest neighbour has the same text; "" if that was not measured."""
    if "neighbor_top1" not in metrics:
        return ""
    found, chance = metrics["neighbor_top1"], metrics["neighbor_chance"]
    return f"nearest other image has the same text: {found:.4f} (chance {chance:.4f})"


def of_way(metrics: Mapping[str, float], way: str, ending: str = "") -> dict[str, float]:
    """The metrics of one direction under short names: R@k first, then ranks."""
    mine = {
        _short(name, way): x
        for name, x in metrics.items()
        if name.startswith(f"{way}_") and name.endswith(PAIRWISE) == bool(ending)
    }
    return dict(sorted(mine.items(), key=lambda item: "rank" in item[0]))


def _short(name: str, way: str) -> str:
    return name[len(way) + 1 :].removesuffix(PAIRWISE).replace("_", " ")


def _number(name: str, value: float) -> str:
    return f"{value:,.1f}" if "rank" in name else f"{value:.4f}"
