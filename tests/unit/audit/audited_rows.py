"""Files of rows that an audit reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """Write rows as JSON lines; a text is a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
