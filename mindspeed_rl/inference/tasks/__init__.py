"""Benchmarks on local data. A new one is one class and one line here; importing this package loads the registry alone."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

TASKS: dict[str, str] = {
    "gsm8k": "mindspeed_rl.inference.tasks.maths:Gsm8k",
    "math": "mindspeed_rl.inference.tasks.maths:Math",
    "mmlu": "mindspeed_rl.inference.tasks.choices:Mmlu",
    "mmlu_ppl": "mindspeed_rl.inference.tasks.choices:Mmlu",
    "ceval": "mindspeed_rl.inference.tasks.choices:CEval",
    "cmmlu": "mindspeed_rl.inference.tasks.choices:Cmmlu",
    "multiple_choice": "mindspeed_rl.inference.tasks.choices:MultipleChoice",
    "boolq": "mindspeed_rl.inference.tasks.boolq:BoolQ",
    "bbh": "mindspeed_rl.inference.tasks.bbh:Bbh",
    "human_eval": "mindspeed_rl.inference.tasks.human_eval:HumanEval",
    "jsonl": "mindspeed_rl.inference.tasks.jsonl:Jsonl",
}


def task_class(name: str) -> Any:
    """The class of a task by name.

    Raises:
        ValueError: unknown name; lists the known ones and the nearest.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"--task {name} is unknown{hint} There are {', '.join(TASKS)}; jsonl takes any questions with labels")
    module, _, attribute = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
