"""Benchmarks on local data. A new one is one class and one line here; importing this package loads only the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl import registry

if TYPE_CHECKING:
    from mindspeed_rl.inference.tasks.task import Task

TASKS: dict[str, str] = {
    "gsm8k": "mindspeed_rl.inference.tasks.maths:Gsm8k",
    "math": "mindspeed_rl.inference.tasks.maths:Math",
    "mmlu": "mindspeed_rl.inference.tasks.choices:Mmlu",
    "mmlu_ppl": "mindspeed_rl.inference.tasks.choices:Mmlu",
    "ceval": "mindspeed_rl.inference.tasks.choices:CEval",
    "cmmlu": "mindspeed_rl.inference.tasks.choices:Cmmlu",
    "multiple_choice": "mindspeed_rl.inference.tasks.choices:MultipleChoice",
    "agieval": "mindspeed_rl.inference.tasks.agieval:AgiEval",
    "needlebench": "mindspeed_rl.inference.tasks.needlebench:NeedleBench",
    "boolq": "mindspeed_rl.inference.tasks.boolq:BoolQ",
    "bbh": "mindspeed_rl.inference.tasks.bbh:Bbh",
    "human_eval": "mindspeed_rl.inference.tasks.human_eval:HumanEval",
    "jsonl": "mindspeed_rl.inference.tasks.jsonl:Jsonl",
}


def load_task_class(name: str) -> type[Task]:
    """Load the class of a task by name, or your own by "module:Class".

    Raises:
        ValueError: unknown name (the message has the known ones and the nearest), no such class, or one that is not a task.
    """
    subject = f"--task {name}"
    hint = "or module:Class of your own; jsonl takes any questions with labels"
    target = registry.target_of(TASKS, name, subject, hint)
    return registry.load_class(target, subject, "mindspeed_rl.inference.tasks.task:Task")
