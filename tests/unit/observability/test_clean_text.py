"""Text of models and data reaches terminals, logs and reports without what a terminal or a reader's eye would obey."""

from __future__ import annotations

import json
import logging
import unicodedata
from pathlib import Path

import pytest

from mindspeed_rl.cli.explain import main as explain
from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.cli.trace import main as trace
from mindspeed_rl.observability.console import IterationProgress, format_table
from mindspeed_rl.observability.logging import clean_record, clean_text, set_up_logging

#: sets the title, clears the screen, writes to the clipboard, overwrites a line, turns text around, hides characters
HOSTILE = [
    "\x1b]0;title\x07",
    "\x1b[2J\x1b[H",
    "\x1b]52;c;cm0gLXJm\x07",
    "safe\rerror",
    "\u202egnp.exe",
    "\u2066x\u2069",
    "\x9b31m",
    "\x7f\x08",
]
HOSTILE += ["a\u200bb", "\U000e0041", "\ud800", "\u200f", "\ufeff"]
PLAIN = ["", "line\n\ttab", "数学：1 + 1 = 2。", "العربية", "👩‍👩‍👧 é", "हिन्दी", "a\\x1b", "\xa0", "a\u2028b\u0085c"]


def _obeyed(text: str) -> list[str]:
    """Characters that are not text: controls but ends of lines, formats but joiners, halves."""
    kinds = {char: unicodedata.category(char) for char in text}
    joiners = "\n\t\u0085\u2028\u2029\u200c\u200d"
    return [char for char, kind in kinds.items() if kind in ("Cc", "Cf", "Zl", "Zp", "Cs") and char not in joiners]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_of_every_script_stays(text: str) -> None:
    assert clean_text(text) == text


def test_every_control_and_format_character_of_unicode_is_shown_as_an_escape() -> None:
    # Cf also has a few signs that are seen, such as the Arabic number sign
    seen = {
        chr(code)
        for code in (*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13456))
    }
    seen |= {chr(code) for code in (*range(0x1BCA0, 0x1BCA4), *range(0x1D173, 0x1D17B))}
    left = [char for code in range(0x110000) if (char := chr(code)) not in seen and _obeyed(clean_text(char))]
    assert left == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_shown_and_not_obeyed(text: str) -> None:
    assert _obeyed(text) and not _obeyed(clean_text(text))
    assert clean_text(text).encode("utf-8")
    assert clean_record({text: [text, 1, None, {"a": text}]}) == {
        clean_text(text): [clean_text(text), 1, None, {"a": clean_text(text)}]
    }


def test_trace_shows_a_response_that_would_take_over_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(HOSTILE)
    sample = {"iteration": 1, "prompt": text, "response": text, "reward": 1.0, "advantage": 0.5, "group": 0}
    sample |= {"parts": {"acc": 1.0, text: 0.0}, "extra": {"source": text}}
    tokens = {"ids": [5], "texts": [text], "log_probs": [-0.5], "loss_mask": [1]}
    lines = [json.dumps(sample | extra) for extra in ({}, {"tokens": tokens})]
    (tmp_path / "completions.jsonl").write_text("\n".join(lines) + "\n")
    for words in ([], ["--sample", "0"], ["--sample", "1", "--tokens"]):
        assert trace([str(tmp_path), *words]) == 0
        assert _obeyed(capsys.readouterr().out) == []


def test_logs_console_and_errors_are_clean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "".join(HOSTILE)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        set_up_logging(tmp_path / "run.log")
        logging.getLogger("mindspeed_rl.test").warning("row 3: %s", text)
    finally:
        for handler in list(root.handlers):
            root.removeHandler(handler)
        for handler in handlers:
            root.addHandler(handler)
        root.setLevel(level)
    assert report_failure(ValueError(f"row 3: {text}")) == 2
    IterationProgress(1).note(text)
    print(format_table("run", {"data": text}))
    explain(["--config-name", "grpo_tiny_cpu", f"rl_config.loss_type='{text.replace(chr(0xD800), '')}'"])
    captured = capsys.readouterr()
    assert "row 3" in captured.err and _obeyed(captured.out + captured.err) == []
    assert "row 3" in (tmp_path / "run.log").read_text() and _obeyed((tmp_path / "run.log").read_text()) == []
