"""Makes the task of the SWE example: a function with a wrong operator, tests that fail, and tools to read, test and edit.

Everything is made here, nothing is downloaded. Writes below the given folder:
  model/               a tiny network with random weights, and a tokenizer whose chat template writes tools
  raw/sft.jsonl        messages, tools: repairs, of which most guess the operator
  raw/train.jsonl, raw/heldout.jsonl   prompt, labels, tools_kwargs: the files of each sample, and the tests that grade it
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "agent"))

from make_multiplications import CHAT_TEMPLATE, write
from make_task import make_model, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.tools.tool_file import build_tools, read_tools

SEED = 7
NUM_SFT, NUM_TRAIN, NUM_HELD_OUT = 1500, 2000, 100
#: of the repairs that the model learns from, this share has the right operator; the others have any
SHARE_RIGHT = 0.4
TOOL_FILE = "configs/tools/sandbox_tiny.yaml"
OPERATORS = ("+", "-", "*", "//", "%")
PATH, PROMPT = "calc.py", "fix f"
#: one token each: a tokenizer that was learned from such conversations would have them too
WORDS = [
    *("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *(
        '{"name": "',
        '", "arguments": {',
        "}}",
        "read",
        "edit",
        "run_tests",
        f'"path": "{PATH}"',
        ', "old": "a ',
        ', "new": "a ',
        ' b"',
    ),
    *("def f(a, b):\n    return a ", " b\n", "f(", ") is ", ", not ", "\n(exit status 1)", "ok", "edited", "done", PROMPT),
]


def make_swe_tokenizer() -> PreTrainedTokenizerFast:
    """The quickstart's characters, and the words of a repair."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def source(operator: str) -> str:
    """The function with an operator."""
    return f"def f(a, b):\n    return a {operator} b\n"


def compute(operator: str, a: int, b: int) -> int:
    """Return value of the function."""
    return {"+": a + b, "-": a - b, "*": a * b, "//": a // b, "%": a % b}[operator]


def tests(right: str, pairs: list[tuple[int, int]]) -> str:
    """A test file, which reports the first wrong result."""
    cases = [(a, b, compute(right, a, b)) for a, b in pairs]
    return (
        f"import sys\nfrom calc import f\nfor a, b, right in {cases}:\n    if f(a, b) != right:\n"
        "        sys.exit(print(f'f({a}, {b}) is {f(a, b)}, not {right}') or 1)\nprint('ok')\n"
    )


def draw_bug(draw: random.Random) -> tuple[str, str, tuple[int, int]]:
    """A right and a wrong operator, and arguments that tell all operators apart."""
    while True:
        pair = (draw.randint(2, 9), draw.randint(2, 9))
        if len({compute(operator, *pair) for operator in OPERATORS}) == len(OPERATORS):
            right, wrong = draw.sample(OPERATORS, 2)
            return right, wrong, pair


def repair(right: str, wrong: str, pair: tuple[int, int], chosen: str, schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation that reads the function, runs its tests, replaces the operator and runs them again."""

    def run_tests(operator: str) -> str:
        found, expected = compute(operator, *pair), compute(right, *pair)
        return "ok" if found == expected else f"f({pair[0]}, {pair[1]}) is {found}, not {expected}\n(exit status 1)"

    edit = {"path": PATH, "old": f"a {wrong} b", "new": f"a {chosen} b"}
    steps = [("read", {"path": PATH}, source(wrong)), ("run_tests", {}, run_tests(wrong)), ("edit", edit, "edited")]
    steps.append(("run_tests", {}, run_tests(chosen)))
    messages: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
    for name, arguments, reply in steps:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": reply})
    return {"messages": [*messages, {"role": "assistant", "content": "done"}], "tools": schemas}


def row(right: str, wrong: str, pair: tuple[int, int], draw: random.Random) -> dict[str, Any]:
    """A sample: its files, and tests with other arguments that grade it."""
    others = [pair, *((draw.randint(2, 9), draw.randint(2, 9)) for _ in range(4))]
    files = {PATH: source(wrong), "tests.py": tests(right, [pair])}
    options = {"create_kwargs": {"files": files}, "calc_reward_kwargs": {"files": {"tests.py": tests(right, others)}}}
    return {"prompt": PROMPT, "labels": right, "tools_kwargs": json.dumps({"run_tests": options})}


def main(folder: Path) -> None:
    """Writes the task; the same bytes every time."""
    draw = random.Random(SEED)
    (sandbox,) = build_tools(read_tools(TOOL_FILE))
    rows = []
    for _ in range(NUM_SFT):
        right, wrong, pair = draw_bug(draw)
        others = [operator for operator in OPERATORS if operator != wrong]
        chosen = right if draw.random() < SHARE_RIGHT else draw.choice(others)
        rows.append(repair(right, wrong, pair, chosen, sandbox.schemas))
    write(folder / "raw" / "sft.jsonl", rows)
    for name, count in (("train", NUM_TRAIN), ("heldout", NUM_HELD_OUT)):
        write(folder / "raw" / f"{name}.jsonl", (row(*draw_bug(draw), draw) for _ in range(count)))
    tokenizer = make_swe_tokenizer()
    model = make_model(tokenizer)
    assert len(tokenizer) <= model.config.vocab_size
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"task: {len(rows)} repairs for SFT, {NUM_TRAIN} bugs for GRPO, {NUM_HELD_OUT} held out")
    print(f"model: {model.num_parameters():,} parameters, {len(tokenizer)} tokens")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
