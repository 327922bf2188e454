"""report.png: the result of a run on one page, with its curves, and each chart as a picture; for slides and messages."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw, ImageFont

from mindspeed_rl.observability.history import Series
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.observability.result import Example, Result

_WIDTH, _MARGIN, _CHART_HEIGHT = 1200, 60, 330
_INK, _GREY, _GRID = (32, 32, 36), (110, 110, 118), (225, 225, 230)
_COLOURS = ((31, 94, 168), (200, 84, 26), (38, 122, 66), (163, 73, 164), (180, 130, 20), (86, 150, 190), (110, 110, 118))
_TICKS = 4
#: size of the picture of a chart, which fits a slide
_SLIDE = (1200, 640)
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
    return _to_png(image)


@dataclass(frozen=True)
class Line:
    """A line of a chart.

    Attributes:
        label: its name in the legend.
        x: iterations.
        y: values.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]


def draw_chart(title: str, lines: Sequence[Line], *, unit: str = "", log: bool = False) -> bytes:
    """Draw a chart with a legend; return it as a PNG.

    Args:
        title: heading.
        lines: what is drawn; on a logarithmic axis without values that are not positive.
        unit: unit of the values.
        log: logarithmic axis.
    """
    heading, small = ImageFont.load_default(30), ImageFont.load_default(20)
    image = Image.new("RGB", _SLIDE, "white")
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, 30), _make_drawable(f"{title} ({unit})" if unit else title), font=heading, fill=_INK)
    points = [[(x, y) for x, y in zip(line.x, line.y) if not log or y > 0] for line in lines]
    xs, ys = [x for part in points for x, _ in part], [y for part in points for _, y in part]
    if not xs:
        draw.text((_MARGIN, 120), "no value can be drawn", font=small, fill=_GREY)
        return _to_png(image)
    area = _Area.fit(xs, ys, log=log, box=(_MARGIN + 90, 90, _SLIDE[0] - _MARGIN, _SLIDE[1] - 110))
    area.draw_axes(draw, small)
    left = _MARGIN
    for index, (line, part) in enumerate(zip(lines, points)):
        colour = _COLOURS[index % len(_COLOURS)]
        places = [(area.place_x(x), area.place_y(y)) for x, y in part]
        draw.line(places, fill=colour, width=3, joint="curve")
        if len(places) == 1:
            draw.ellipse((places[0][0] - 4, places[0][1] - 4, places[0][0] + 4, places[0][1] + 4), fill=colour)
        label = _make_drawable(line.label)
        draw.rectangle((left, _SLIDE[1] - 38, left + 16, _SLIDE[1] - 22), fill=colour)
        draw.text((left + 24, _SLIDE[1] - 42), label, font=small, fill=_INK)
        left += 60 + int(draw.textlength(label, font=small))
    return _to_png(image)


def _to_png(image: Image.Image) -> bytes:
    output = io.BytesIO()
    image.save(output, "PNG", optimize=True)
    return output.getvalue()


@dataclass(frozen=True)
class _Area:
    """The place of a chart, and the range of its values.

    Attributes:
        box: left, top, right and bottom in the picture.
        x, y: ranges.
        log: logarithmic values.
    """

    box: tuple[int, int, int, int]
    x: tuple[float, float]
    y: tuple[float, float]
    log: bool = False

    @classmethod
    def fit(cls, xs: Sequence[float], ys: Sequence[float], *, log: bool, box: tuple[int, int, int, int]) -> _Area:
        """Return the area that shows all points, with a little room."""
        low, high = min(ys), max(ys)
        if log:
            room = (high / low) ** 0.05 if high > low else 2.0
            return cls(box, (min(xs), max(max(xs), min(xs) + 1)), (low / room, high * room), log)
        spread = (high - low) or max(abs(high), 1.0) * 0.1
        return cls(box, (min(xs), max(max(xs), min(xs) + 1)), (low - 0.05 * spread, high + 0.05 * spread))

    def place_x(self, iteration: float) -> float:
        left, _, right, _ = self.box
        return left + (iteration - self.x[0]) / (self.x[1] - self.x[0]) * (right - left)

    def place_y(self, value: float) -> float:
        _, top, _, bottom = self.box
        low, high = self.y
        part = math.log(value / low) / math.log(high / low) if self.log else (value - low) / (high - low)
        return bottom - part * (bottom - top)

    def draw_axes(self, draw: ImageDraw.ImageDraw, font: _Font) -> None:
        """Draw the grid, the values on the left and the iterations below."""
        left, _, right, bottom = self.box
        for value in list_log_ticks(*self.y) if self.log else list_ticks(*self.y):
            draw.line((left, self.place_y(value), right, self.place_y(value)), fill=_GRID)
            draw.text((left - 12, self.place_y(value)), f"{value:g}", font=font, fill=_GREY, anchor="rm")
        for iteration in list_ticks(*self.x):
            if iteration == round(iteration):
                draw.text((self.place_x(iteration), bottom + 8), f"{iteration:g}", font=font, fill=_GREY, anchor="ma")
        draw.text((right, bottom + 30), "iteration", font=font, fill=_GREY, anchor="ra")


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
    area = _Area.fit(series.x, series.y, log=False, box=(_MARGIN + 90, top + 30, _WIDTH - _MARGIN, top + _CHART_HEIGHT - 80))
    draw.text((_MARGIN, top), f"{name}: {series.y[0]:.4g} -> {series.y[-1]:.4g}", font=font, fill=colour)
    area.draw_axes(draw, font)
    draw.line([(area.place_x(x), area.place_y(y)) for x, y in zip(series.x, series.y)], fill=colour, width=3, joint="curve")


def list_log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten between two bounds; over less than two of them 2 and 5 times each as well."""
    decades = math.log10(high / low)
    if decades < 1:
        return list_ticks(low, high)
    every = max(1, math.ceil(decades / (2 * _TICKS)))
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if decades < 2 else (1,)
    values = (float(f"{factor}e{power}") for power in powers if not power % every for factor in factors)
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


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
