"""Metrics of retrieval in words: a line while a run goes on, a table at its end.

print(in_a_line(metrics))           # text to image R@1 0.043, R@5 0.12, R@10 0.18, median rank 66 · image to text ...
print("\\n".join(table(metrics, chance, kinds)))
"""

from collections.abc import Mapping

WAYS = ("text_to_image", "image_to_text")
PICTURES = ("image", "text")


def ways(kinds: tuple[str, str]) -> dict[str, str]:
    """The directions by what they are called; of two texts neither is an image."""
    names = ("text to image", "image to text") if "image" in kinds else ("right to left", "left to right")
    return dict(zip(names, WAYS, strict=True))


def in_a_line(metrics: Mapping[str, float], kinds: tuple[str, str] = PICTURES) -> str:
    """Each direction with its metrics but the mean rank; what belongs to none comes last."""
    parts = []
    for called, way in ways(kinds).items():
        mine = [f"{name} {value:.4g}" for name, value in of_way(metrics, way).items() if name != "mean rank"]
        parts += [f"{called} {', '.join(mine)}"] if mine else []
    rest = [f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items() if not name.startswith(WAYS)]
    return " · ".join(parts + rest)


def table(metrics: Mapping[str, float], chance: Mapping[str, float], kinds: tuple[str, str]) -> list[str]:
    """A row for each direction and one for guessing, under one heading."""
    found = {called: of_way(metrics, way) for called, way in ways(kinds).items()}
    columns = list(next(iter(found.values())))
    found["chance"] = of_way(chance, WAYS[0])
    rows = [["", *columns]]
    for name, values in found.items():
        rows.append([name, *(_number(column, values[column]) if column in values else "" for column in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def of_way(metrics: Mapping[str, float], way: str) -> dict[str, float]:
    """The metrics of one direction by their short names: shares first, then ranks."""
    mine = {name[len(way) + 1 :].replace("_", " "): x for name, x in metrics.items() if name.startswith(f"{way}_")}
    return dict(sorted(mine.items(), key=lambda item: "rank" in item[0]))


def _number(name: str, value: float) -> str:
    return f"{value:,.1f}" if "rank" in name else f"{value:.4f}"
