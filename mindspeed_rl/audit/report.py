"""The result of an audit as text for a terminal and as one HTML file in the style of a run's report."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from mindspeed_rl.observability.logging import clean_text

#: widest cell of a table on a terminal; longer texts go on in the next line
_WIDTH = 100


@dataclass(frozen=True)
class Section:
    """A table of a report.

    Attributes:
        title: heading.
        header: names of the columns; empty names have no line.
        rows: cells, whose lines are paragraphs.
        empty: text in place of a table without rows; without one the section is left out.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    empty: str = ""


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        title: subject of the audit.
        verdict: the most important figures in one sentence.
        passes: nothing exceeds the bound.
        sections: tables, in order.
    """

    title: str
    verdict: str
    passes: bool
    sections: Sequence[Section] = field(default_factory=list)

    @property
    def _shown(self) -> list[Section]:
        return [section for section in self.sections if section.rows or section.empty]

    def format(self) -> str:
        """Return the report as lines for a terminal."""
        lines = [self.title, f"{'passes' if self.passes else 'FAILS'}: {self.verdict}"]
        for section in self._shown:
            lines += ["", section.title]
            lines += _format_table(section) if section.rows else [f"  {section.empty}"]
        return clean_text("\n".join(lines))

    def render(self) -> str:
        """Return the report as an HTML page that needs no network."""
        style = files("mindspeed_rl.observability.page").joinpath("page.css").read_text(encoding="utf-8")
        outcome = "finished" if self.passes else "failed"
        parts = [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="color-scheme" content="light dark"><title>{_escape(self.title)}</title>',
            f"<style>{style}</style></head><body><header><h1>{_escape(self.title)}</h1>",
            f'<p><span class="outcome {outcome}">{"passes" if self.passes else "fails"}</span> {_escape(self.verdict)}</p>',
            "</header><main>",
        ]
        for section in self._shown:
            parts.append(f"<h2>{_escape(section.title)}</h2>")
            parts.append(_render_table(section) if section.rows else f'<p class="dim">{_escape(section.empty)}</p>')
        return "\n".join([*parts, "</main></body></html>", ""])


def _escape(text: str) -> str:
    return html.escape(clean_text(text))


def _render_table(section: Section) -> str:
    head = "".join(f"<th>{_escape(name)}</th>" for name in section.header) if any(section.header) else ""
    rows = "".join(
        "<tr>" + "".join(f"<td>{_escape(cell).replace(chr(10), '<br>')}</td>" for cell in row) + "</tr>" for row in section.rows
    )
    return f'<div class="card"><table>{f"<tr>{head}</tr>" if head else ""}{rows}</table></div>'


def _format_table(section: Section) -> list[str]:
    """Return aligned lines; only the last column wraps."""
    rows = [*([section.header] if any(section.header) else []), *section.rows]
    last = len(section.header) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last)]
    lines = []
    for row in rows:
        left = "  ".join(cell.ljust(width) for cell, width in zip(row, widths))
        paragraphs = [line for text in row[last].split("\n") for line in textwrap.wrap(text, _WIDTH) or [""]]
        indent = " " * (len(left) + 2 if last else 0)
        first = f"{left}  {paragraphs[0]}" if last else paragraphs[0]
        lines += [f"  {first}".rstrip(), *(f"  {indent}{text}" for text in paragraphs[1:])]
    return lines
