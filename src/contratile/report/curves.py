"""Curves as inline SVG, coloured by the CSS of the page.

    html = curve([(1, 8.3), (2, 7.9)], title="loss")

Colours come from the CSS variables --ink, --faint and --accent, so the curve is readable on light and dark pages.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 380, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 34, 30
_MOST = 400
"""Maximum number of points of a line; more could not be distinguished."""


def curve(
    points: Sequence[Point], *, title: str, level: float | None = None, form: Callable[[float], str] = "{:.4g}".format
) -> str:
    """Draw a line through points.

    Args:
        points: (step, value), in order of steps.
        title: Heading of the curve.
        level: Where to draw a dashed line, for example chance.
        form: Formats a value.

    Returns:
        An `<svg>` element; the last point is marked with its value.
    """
    drawn, note = thinned(points)
    xs, ys = zip(*drawn, strict=True)
    x_ticks = ticks(min(xs), max(xs), 5, whole=True)
    y_ticks = ticks(min([*ys, *([] if level is None else [level])]), max([*ys, *([] if level is None else [level])]), 5)
    x_low, x_high = min(xs[0], x_ticks[0]), max(xs[-1], x_ticks[-1])
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1)
        up = (y - y_low) / ((y_high - y_low) or 1)
        return _LEFT + across * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - up * (HEIGHT - _TOP - _BOTTOM)

    parts = [_text(8, 18, title, "title")]
    for y in y_ticks:
        _, down = at(x_low, y)
        parts.append(f'<path class="grid" d="M{_LEFT} {down:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(_LEFT - 6, down + 4, form(y), "end"))
    for x in x_ticks:
        parts.append(_text(at(x, y_low)[0], HEIGHT - 10, f"{x:,.0f}", "middle"))
    if level is not None:
        _, down = at(x_low, level)
        parts.append(f'<path class="level" d="M{_LEFT} {down:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(_text(WIDTH - _RIGHT, down - 5, f"chance {form(level)}", "end"))
    path = "L".join("{:.1f} {:.1f}".format(*at(*point)) for point in drawn)
    right, down = at(*drawn[-1])
    parts.append(f'<path class="line" d="M{path}"/><circle cx="{right:.1f}" cy="{down:.1f}" r="3.5"/>')
    last = f"{form(points[-1][1])} at step {points[-1][0]:,.0f}"
    parts.append(_text(WIDTH - _RIGHT, 18, last, "end last"))
    told = f"{title}: {form(points[0][1])} at step {points[0][0]:,.0f}, {last}{note}"
    label = escape(told, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def thinned(points: Sequence[Point]) -> tuple[list[Point], str]:
    """Reduce to at most 400 points by averaging neighbours; first and last stay. Also returns a note about it."""
    bunch = math.ceil((len(points) - 2) / (_MOST - 2))
    if bunch <= 1:
        return list(points), ""
    inner = points[1:-1]
    groups = [inner[start : start + bunch] for start in range(0, len(inner), bunch)]
    means = [(sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups]
    return [points[0], *means, points[-1]], f" (each point a mean of {bunch})"


def ticks(low: float, high: float, number: int, *, whole: bool = False) -> list[float]:
    """About `number` round values that enclose `low` to `high`; with `whole`, integers inside that range."""
    most = max(abs(low), abs(high))
    if high - low <= 1e-11 * most or most < 1e-300:  # practically constant
        low, high = (low - 1, high + 1) if most < 1e-300 or whole else (min(0.0, 2 * low), max(0.0, 2 * high))
    rough = (high - low) / number
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(nice * power for nice in (1, 2, 5, 10) if nice * power >= rough * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
