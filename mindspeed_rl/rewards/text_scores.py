"""Rewards that compare text with text."""

from __future__ import annotations

from typing import Any


def exact_match(response: str, label: Any) -> float:
    """1.0 if the response is the label, blanks around both aside, else 0.0."""
    return 1.0 if response.strip() == str(label).strip() else 0.0
