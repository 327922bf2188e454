"""Long texts in messages and reports."""

from __future__ import annotations

#: characters of a text that is an example
SHOWN = 160


def cut_middle(text: str, limit: int = SHOWN) -> str:
    """Return a text without its middle where it has more characters than the limit."""
    return text if len(text) <= limit else f"{text[: limit // 2]} [...] {text[-(limit // 2) :]}"


def cut_end(text: str, limit: int = SHOWN) -> str:
    """Return a text on one line, without its end where it has more characters than the limit."""
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[: limit - 3]}..."
