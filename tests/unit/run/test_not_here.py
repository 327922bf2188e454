"""What docs/upstream_commands.md says is not here is refused by `explain` with the same sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mindspeed_rl.cli.explain import build_report
from mindspeed_rl.config import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, find_project_configs

ROOT = Path(__file__).resolve().parents[3]


def rows(page: str) -> list[tuple[str, str]]:
    """(what is written, what to take instead) of the table."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^\| `((?:megatron_training|rl_config|generate_config)\.[^`]+)` \| (.+) \|$", text, re.MULTILINE)


def test_both_languages_have_the_same_rows() -> None:
    english, chinese = (rows(f"docs/{folder}upstream_commands.md") for folder in ("", "zh/"))
    assert [key for key, _ in english] == [key for key, _ in chinese] and len(english) > 5


@pytest.mark.parametrize(("written", "sentence"), rows("docs/upstream_commands.md"))
def test_explain_prints_the_sentence(written: str, sentence: str) -> None:
    ((key, value),) = yaml.safe_load(written).items()
    tree = apply_values(compose(find_project_configs(), "grpo_tiny_cpu", []), {key: value})
    try:
        config = build_run_config(tree)
    except ConfigError as error:
        assert sentence in str(error)
    else:
        report = build_report(config, 1, checks_files=False)
        assert sentence in "\n".join([*report["errors"], *report["unavailable"]])
