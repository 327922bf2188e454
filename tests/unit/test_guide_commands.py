"""Each command that the README and the guides show is run by some test, in one form; tables say by which, or why not."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest

from mindspeed_rl.cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
GUIDES = "index own_task cookbook recipes runs tuning cpu data inference observability planner comparing".split()
GUIDES += "auditing supervised importing".split()
PAGES = ["README.md", "README.zh.md", *(f"docs/{name}.md" for name in GUIDES), *(f"docs/zh/{name}.md" for name in GUIDES)]
#: beginning of a command -> the file of a test in the default suite that runs it in another form
RUN_BY = {
    "mindspeed-rl new": "tests/unit/cli/test_new.py",
    "mindspeed-rl train": "tests/e2e/test_supervised_commands.py",
    "mindspeed-rl explain": "tests/unit/cli/test_new.py",
    "mindspeed-rl recipe": "tests/unit/cli/test_recipes.py",
    "mindspeed-rl plan": "tests/unit/planner/test_planner_seconds.py",
    "mindspeed-rl plan fit": "tests/unit/planner/test_planner_memory.py",
    "mindspeed-rl plan tune": "tests/unit/planner/test_tune.py",
    "mindspeed-rl plan experts": "tests/unit/planner/test_experts.py",
    "mindspeed-rl promise": "tests/unit/planner/test_promise.py",
    "mindspeed-rl audit": "tests/unit/audit/test_data_audit.py",
    "mindspeed-rl audit judges": "tests/unit/audit/test_judges_audit.py",
    "mindspeed-rl report": "tests/unit/observability/test_page.py",
    "mindspeed-rl watch": "tests/unit/cli/test_watch.py",
    "mindspeed-rl trace": "tests/unit/observability/test_agent_turns.py",
    "mindspeed-rl diff": "tests/unit/cli/test_diff_config.py",
    "mindspeed-rl diff-dump": "tests/unit/dumps/test_dump_comparison.py",
    "mindspeed-rl doctor": "tests/unit/npu/test_doctor.py",
    "mindspeed-rl generate": "tests/unit/inference/test_inference_commands.py",
    "mindspeed-rl chat": "tests/e2e/test_inference.py",
    "mindspeed-rl evaluate": "tests/unit/inference/test_inference_commands.py",
    "mindspeed-rl import": "tests/unit/importers/test_import.py",
    "mindspeed-rl preprocess": "tests/unit/data/test_data_preprocess.py",
    "mindspeed-rl rejection-sample": "tests/unit/data/test_selection.py",
    "mindspeed-rl convert": "tests/unit/checkpoint/test_convert_command.py",
    "mindspeed-rl download": "tests/unit/data/test_hub.py",
    "mindspeed-rl launch": "tests/unit/npu/test_launch.py",
    "mindspeed-rl rollout": "tests/unit/cli/test_rollout_command.py",
    "mindspeed-rl serve": "tests/unit/cli/test_serve_command.py",
    "python $REPO/examples/quickstart/make_task.py": "tests/e2e/test_supervised_commands.py",
    "python tools/preprocess_data.py": "tests/unit/importers/test_upstream.py",
    "bash examples/mcore/": "tests/unit/npu/test_examples.py",
    "envs/npu_": "tests/unit/npu/test_installation.py",
    "tools/npu_smoke.sh": "tests/unit/npu/test_smoke_report.py",
}
#: the same, of tests that are marked slow
RUN_SLOWLY_BY = {
    "mindspeed-rl train --config-name ${name}_tiny_cpu": "tests/e2e/test_shipped_run_files.py",
    "mindspeed-rl evaluate --load runs/quickstart/grpo/hf/latest --task lm-eval": "tests/e2e/test_lm_eval.py",
    "python prompts.py": "tests/e2e/test_own_task.py",  # it runs all of the page
    "bash examples/quickstart.sh": "tests/e2e/test_shipped_run_files.py",
    "bash examples/agent.sh": "tests/e2e/test_shipped_run_files.py",
    "bash examples/vision.sh": "tests/e2e/test_shipped_run_files.py",
    "bash examples/records.sh": "tests/e2e/test_records_example.py",
    "bash examples/real_model.sh": "tests/e2e/test_first_hour.py",
}
#: what no test runs, and why
NOT_RUN = {
    "bash envs/": "makes the environment in which tests run",
    "bash tests/run.sh": "runs the tests",
    "tests/run.sh": "runs the tests",
    "python -m tests.importing FOLDER": "needs a checkout of another project",
    "mindspeed-rl train --config-name grpo_qwen25_7b_A3": "needs an A3 node",
    "mindspeed-rl train --config-name grpo_qwen3_8b_A3 --strict": "needs an A3 node",
    "msprobe compare": "a program of mindstudio-probe; test_msprobe_compare.py reads our dumps by it where it is installed",
    "mkdocs serve": "a program of mkdocs-material; tests/unit/test_documents.py checks what it reads",
    "pip install": "changes the environment",
    "git clone": "fetches the repository",
}
TABLES = (RUN_BY, RUN_SLOWLY_BY, NOT_RUN)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
#: languages of the blocks that readers paste into a shell
SHELLS = {"bash", "sh", "shell", "console"}
#: parts of a line that run no program of their own
SHELL_WORDS = re.compile(r"(cd|source|for|done|printf|export|echo) ?\b|\w+=[^ ]*$|\w+=\"|\$run |$")
#: commands within a sentence or a table
INLINE = re.compile(r"`((?:mindspeed-rl|mkdocs|(?:bash |python |)(?:examples|envs|tests|tools)/|python -m tests)[^`]*)`")


def commands(page: str) -> list[str]:
    """The commands of the shell blocks and sentences of a page, each in a line with single blanks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for language, block in FENCE.findall(text) if language in SHELLS]
    lines = [line for block in blocks for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    words = [re.sub(r"\s+", " ", re.sub(r"(^|\s)#.*", "", line)).strip() for line in lines]
    parts = [part.strip() for line in words for part in re.split(r" && | \| |; do |^do |^run=\"", line)]
    shown = [part.removesuffix('"') if part.count('"') % 2 else part for part in parts if not SHELL_WORDS.match(part)]
    sentences = [re.sub(r"\s+", " ", span) for span in INLINE.findall(FENCE.sub("", text))]
    return shown + [span for span in sentences if " " in span or span.endswith(".sh")]


def owner(command: str) -> str:
    """The longest beginning of the command in one of the tables; "" for none."""
    return max((start for table in TABLES for start in table if command.startswith(start)), key=len, default="")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_by_a_test_or_says_why_not(page: str) -> None:
    assert [command for command in commands(page) if not owner(command)] == []


def test_the_tests_that_run_them_name_them() -> None:
    for start, file in [*RUN_BY.items(), *RUN_SLOWLY_BY.items()]:
        text = (ROOT / file).read_text(encoding="utf-8")
        program, *words = start.split()
        if program == "mindspeed-rl":
            module = COMMANDS[words[0]][0]
            names = [f'"{word}"' for word in words[:2]]
            names += [module, f"import {module.rpartition('.')[2]}", f"mindspeed-rl {words[0]}"]
        else:
            names = [Path(start.split()[-1]).stem, "own_task.md" if start == "python prompts.py" else "\0"]
        assert any(name in text for name in names), (start, file)


def test_each_line_of_the_tables_is_of_a_command_that_is_shown() -> None:
    owners = {owner(command) for page in PAGES for command in commands(page)}
    assert [start for table in TABLES for start in table if start not in owners] == []


@cache
def help_of(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return shown.getvalue()


@pytest.mark.parametrize("page", PAGES)
def test_the_options_of_a_command_are_those_of_its_help(page: str) -> None:
    for command in commands(page):
        program, *words = shlex.split(command.partition(" -- ")[0])
        if program != "mindspeed-rl" or len(words) < 2 or words[0] not in COMMANDS:
            continue
        first = next((index for index, word in enumerate(words) if word.startswith("-") or "=" in word), len(words))
        names = [word for word in words[1:first] if re.fullmatch(r"[a-z]+", word)][:1]
        options = [word.partition("=")[0] for word in words if word.startswith("--")]
        for option in options:
            # `plan` without a kind is `plan run`
            texts = [help_of(words[0], *(names or ["run"] if words[0] == "plan" else names)), help_of(words[0])]
            assert any(re.search(rf"(?<![\w-]){option}(?![\w-])", text) for text in texts), (command, option)


@pytest.mark.parametrize("page", PAGES)
def test_a_script_that_is_shown_is_there(page: str) -> None:
    scripts = [word for command in commands(page) for word in command.split()[:2] if word.endswith(".sh")]
    assert [script for script in scripts if not (ROOT / script).is_file()] == []


def test_commands_are_found() -> None:
    found = commands("docs/observability.md")
    assert "mindspeed-rl report runs/a runs/b -o both.html" in found and len(found) >= 6
    assert {"mindspeed-rl recipe list", "bash examples/agent.sh", "mindspeed-rl doctor --hang"} <= set(commands("README.md"))


def test_a_translation_shows_the_same_commands() -> None:
    def without_text(page: str) -> list[str]:
        starts = [re.split(r'[<"$:]|[A-Z]{3}|[^\x00-\x7f]', command)[0].strip() for command in commands(page)]
        return sorted({start for start in starts if start})

    for english, chinese in [PAGES[:2], *((f"docs/{name}.md", f"docs/zh/{name}.md") for name in GUIDES)]:
        assert without_text(english) == without_text(chinese), english


def test_what_is_played_is_what_the_guides_show() -> None:
    from test_first_hour import PLAYED

    shown = {command for page in PAGES for command in commands(page)}
    assert [command for command in PLAYED if command not in shown] == []
