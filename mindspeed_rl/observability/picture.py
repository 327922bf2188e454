"""report.png: the result of a run on one page, with its curves; for slides and messages."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence

from PIL import Image, ImageDraw, ImageFont

from mindspeed_rl.observability.history import Series
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.result import Example, Result

_WIDTH, _MARGIN, _CHART_HEIGHT = 1200, 60, 330
_INK, _GREY, _GRID = (32, 32, 36), (110, 110, 118), (225, 225, 230)
_COLOURS = ((31, 94, 168), (200, 84, 26), (38, 122, 66))
_TICKS = 4
#: characters of a line at the size of the text
_LINE = 108
_Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
#: a line of text, its font and its colour
_Line = tuple[str, _Font, tuple[int, int, int]]


def draw_result(result: Result) -> bytes:
    """Draw the page; return it as a PNG."""
    heading, text, small = (ImageFont.load_default(size) for size in (34, 20, 17))
    lines: list[_Line] = [(result.title, heading, _INK), (result.outcome[:_LINE], small, _GREY)]
    for name, value in result.rows.items():
        wrapped = textwrap.wrap(value.strip("`"), _LINE - 14) or [""]
        lines += [(name, text, _GREY), *((f"    {line}", text, _INK) for line in wrapped)]
    for title, examples in (("better after the run", result.better), ("worse after the run", result.worse)):
        lines += _list_examples(title, examples, text, small)
    charts = [(name, series) for name, series in result.curves.items()][:2]
    height = 2 * _MARGIN + sum(_line_height(font) for _, font, _ in lines) + len(charts) * _CHART_HEIGHT
    image = Image.new("RGB", (_WIDTH, height), "white")
    draw = ImageDraw.Draw(image)
    y = _MARGIN // 2
    for line, font, colour in lines:
        draw.text((_MARGIN, y), _make_drawable(line), font=font, fill=colour)
        y += _line_height(font)
    for index, (name, series) in enumerate(charts):
        _draw_chart(draw, y + 20, name, series, _COLOURS[index], small)
        y += _CHART_HEIGHT
    output = io.BytesIO()
    image.save(output, "PNG", optimize=True)
    return output.getvalue()


def _list_examples(title: str, examples: Sequence[Example], text: _Font, small: _Font) -> list[_Line]:
    lines: list[_Line] = [(title, text, _GREY)] if examples else []
    for item in examples:
        rows: Mapping[str, str] = {
            "prompt": item.prompt,
            f"before ({item.reward_before:.3g})": item.before,
            f"after ({item.reward_after:.3g})": item.after,
        }
        for name, value in rows.items():
            short = textwrap.shorten(clean_text(value), _LINE, placeholder=" ...")
            lines.append((f"    {name}: {short}", small, _INK))
    return lines


def _draw_chart(
    draw: ImageDraw.ImageDraw, top: int, name: str, series: Series, colour: tuple[int, int, int], font: _Font
) -> None:
    """Draw a curve with its axes: name and last value above it, iterations below."""
    left, right, bottom = _MARGIN + 90, _WIDTH - _MARGIN, top + _CHART_HEIGHT - 80
    low, high = min(series.y), max(series.y)
    spread = (high - low) or max(abs(high), 1.0) * 0.1
    low, high = low - 0.05 * spread, high + 0.05 * spread
    first, last = series.x[0], max(series.x[-1], series.x[0] + 1)

    def place_x(iteration: float) -> float:
        return left + (iteration - first) / (last - first) * (right - left)

    def place_y(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top - 30)

    draw.text((_MARGIN, top), f"{name}: {series.y[0]:.4g} -> {series.y[-1]:.4g}", font=font, fill=colour)
    for value in list_ticks(low, high):
        draw.line((left, place_y(value), right, place_y(value)), fill=_GRID)
        draw.text((left - 12, place_y(value)), f"{value:g}", font=font, fill=_GREY, anchor="rm")
    for iteration in list_ticks(first, last):
        if iteration == round(iteration):
            draw.text((place_x(iteration), bottom + 8), f"{iteration:g}", font=font, fill=_GREY, anchor="ma")
    draw.text((right, bottom + 30), "iteration", font=font, fill=_GREY, anchor="ra")
    points = [(place_x(x), place_y(y)) for x, y in zip(series.x, series.y)]
    draw.line(points, fill=colour, width=3, joint="curve")


def list_ticks(low: float, high: float) -> list[float]:
    """Return round values between two bounds, a step of 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * unit for factor in (1, 2, 5, 10) if factor * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _line_height(font: _Font) -> int:
    return round(1.45 * font.size) if isinstance(font, ImageFont.FreeTypeFont) else 16


def _make_drawable(text: str) -> str:
    """Return a text with a question mark for each character that the built-in font does not have."""
    return "".join(character if character.isprintable() and ord(character) < 0x250 else "?" for character in text)
