"""Each command that the README and the guides show is run by some test, in one form; this table says by which."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
GUIDES = "own_task cookbook runs data inference observability planner comparing auditing supervised importing".split()
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: what a test runs in another form: beginning of the command -> the file of the test
RUN_BY = {
    "mindspeed-rl new": "tests/e2e/test_first_hour.py",
    "mindspeed-rl train": "tests/e2e/test_first_hour.py",
    "mindspeed-rl train --config-name ${name}_tiny_cpu": "tests/e2e/test_shipped_run_files.py",
    "mindspeed-rl explain": "tests/e2e/test_first_hour.py",
    "mindspeed-rl plan": "tests/e2e/test_first_hour.py",
    "mindspeed-rl plan fit": "tests/unit/planner/test_planner_memory.py",
    "mindspeed-rl plan tune": "tests/e2e/test_tune_run.py",
    "mindspeed-rl plan experts": "tests/unit/planner/test_experts.py",
    "mindspeed-rl promise": "tests/unit/planner/test_promise.py",
    "mindspeed-rl audit": "tests/e2e/test_first_hour.py",
    "mindspeed-rl audit judges": "tests/unit/audit/test_judges_audit.py",
    "mindspeed-rl report": "tests/unit/observability/test_page.py",
    "mindspeed-rl watch": "tests/unit/cli/test_watch.py",
    "mindspeed-rl trace": "tests/unit/observability/test_page.py",
    "mindspeed-rl diff train": "tests/e2e/test_comparisons.py",
    "mindspeed-rl diff-dump": "tests/e2e/test_accuracy_dumps.py",
    "mindspeed-rl generate": "tests/e2e/test_inference.py",
    "mindspeed-rl chat": "tests/e2e/test_inference.py",
    "mindspeed-rl evaluate": "tests/e2e/test_inference.py",
    "mindspeed-rl evaluate --load runs/quickstart/grpo/hf/latest --task lm-eval": "tests/e2e/test_lm_eval.py",
    "mindspeed-rl import": "tests/unit/importers/test_import.py",
    "mindspeed-rl preprocess": "tests/e2e/test_raw_supervised.py",
    "mindspeed-rl rejection-sample": "tests/e2e/test_rejection_sampling.py",
    "mindspeed-rl teacher-log-probs": "tests/e2e/test_distillation_run.py",
    "python $REPO/examples/quickstart/make_task.py": "tests/e2e/test_own_task.py",
    "python prompts.py": "tests/e2e/test_own_task.py",
    "bash examples/records.sh": "tests/e2e/test_records_example.py",
    "bash examples/mcore/": "tests/unit/npu/test_examples.py",
}
#: what no test runs, and why
NOT_RUN = {
    "bash envs/cpu/install.sh": "makes the environment in which tests run",
    "bash tests/run.sh": "runs the tests",
    "bash examples/quickstart.sh": "half an hour: run before a release; test_shipped_run_files.py has its run files",
    "bash examples/real_model.sh": "half an hour, and a package index: run before a release",
    "mindspeed-rl train --config-name grpo_qwen25_7b_A3": "needs an A3 node",
    "mindspeed-rl train --config-name grpo_qwen3_8b_A3 --strict": "needs an A3 node",
    "pip install": "changes the environment",
    "git clone": "fetches the repository",
}
PAGES = ["README.md", "README.zh.md", *(f"docs/{name}.md" for name in GUIDES), *(f"docs/zh/{name}.md" for name in GUIDES)]


def commands(page: str) -> list[str]:
    """The commands of the bash blocks of a page, each in a line with single blanks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = [line for block in BLOCK.findall(text) for line in re.sub(r"\\\n\s*", " ", block).splitlines()]
    words = [re.sub(r"\s+", " ", re.sub(r"\s#.*", "", line)).strip() for line in lines]
    starts = [part for line in words for part in re.split(r" && | \| |; do |^do |^run=\"", line)]
    return [part for part in starts if re.match(r"mindspeed-rl |bash |python |pip |git clone", part)]


def owner(command: str) -> str:
    """The longest beginning of the command in one of the tables; "" for none."""
    known = [start for start in (*RUN_BY, *NOT_RUN) if command.startswith(start)]
    return max(known, key=len, default="")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_by_a_test_or_says_why_not(page: str) -> None:
    assert [command for command in commands(page) if not owner(command)] == []


def test_the_tests_that_run_them_exist() -> None:
    assert [path for path in {*RUN_BY.values()} if not (ROOT / path).is_file()] == []


def test_commands_are_found() -> None:
    found = commands("docs/observability.md")
    assert "mindspeed-rl report runs/a runs/b -o both.html" in found and len(found) >= 6


def test_what_is_played_is_what_the_guides_show() -> None:
    from test_first_hour import PLAYED

    shown = {command for page in PAGES for command in commands(page)}
    assert [command for command in PLAYED if command not in shown] == []
