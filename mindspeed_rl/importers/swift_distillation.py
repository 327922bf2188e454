"""Teachers in commands of ms-swift: in the advantages of GRPO, and in the loss of GKD."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, RL
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.source_plan import name_divergence, name_sampled_steps
from mindspeed_rl.importers.swift_commands import MEGATRON
from mindspeed_rl.importers.swift_rows import find_response_column

#: options that name a teacher
TEACHERS = ("teacher_model", "teacher_model_server")
#: tokens of the teacher where ms-swift computes the divergence over all tokens, which no data plane holds
_MANY_TOKENS = 512
#: column of the prompt that a teacher reads instead of the student's
_TEACHER_PROMPT = "teacher_prompt"


def read_policy_teacher(run: Import, command: SourceCommand, *, has_rewards: bool) -> dict[str, object]:
    """Return the keys of a teacher of GRPO: coef * (log-prob of the teacher - old log-prob) is added to the advantage."""
    coefficient = command.number("teacher_kl_coef", 1.0)
    if not command.has(*TEACHERS):
        run.note_given("teacher_kl_coef", "there is no teacher", changes_nothing=False)
        return {}
    if not has_rewards and coefficient != 1.0:
        form = "a coefficient of a teacher without task rewards; it scales the loss like lr"
        run.refuse("--teacher_kl_coef", form)
    teachers = _read_teachers(run, command)
    is_server = teachers.is_server
    if teachers.tags:
        columns = ["labels", teachers.column] if has_rewards else [teachers.column]
        run.add_default(f"{ACTOR}.dataset_additional_keys", columns, f"{teachers.column}: chooses the teacher")
    return _under_distillation(
        {
            "enabled": True,
            **teachers.keys,
            "loss_mode": "k1",
            "use_policy_gradient": True,
            # prompt log-probs of a server have no temperature
            "teacher_temperature": 1.0 if is_server else None,
            "use_task_rewards": has_rewards,
            "distillation_loss_coef": coefficient if has_rewards and command.has("teacher_kl_coef") else None,
        }
    )


def read_distillation(run: Import, command: SourceCommand, *, has_images: bool) -> dict[str, object]:
    """Return the keys of GKD: a divergence from the teacher over the tokens of the student's own responses is the loss.

    Args:
        has_images: the prompts have some.
    """
    data = _read_data_responses(run, command)
    teachers = _read_teachers(run, command)
    is_server = teachers.is_server
    temperature = command.number("temperature", 0.9)
    if is_server and temperature != 1.0:
        form = f"{temperature:g} next to a teacher's server, whose log-probs it divides there; with 1 it is available"
        run.refuse("--temperature", form)
    if data and has_images:
        run.refuse("--lmbda", "responses of the data next to images; with 1 the student samples all of them")
    if is_server and has_images:
        run.refuse("--teacher_model_server", "images for a teacher on a server; --teacher_model takes its weights")
    topk = command.get("gkd_logits_topk")
    reads_own_prompt = teachers.models in (["actor"], [command.text("model")])
    columns = {
        _TEACHER_PROMPT: "the teacher, which is the student, reads it in place of the prompt" if reads_own_prompt else "",
        str(data.get("response_column")): "the responses of the data" if data else "",
        teachers.column: "chooses the teacher" if teachers.tags else "",
    }
    if read := {name: reason for name, reason in columns.items() if reason}:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in read.items())
        run.add_default(f"{ACTOR}.dataset_additional_keys", list(read), reasons)
    return _under_distillation(
        {
            "enabled": True,
            **teachers.keys,
            "loss_mode": "jsd_topk",
            "beta": command.number("beta", 0.5),
            "topk": _MANY_TOKENS if topk is None else command.count("gkd_logits_topk", 1),
            "topk_rest": "lump" if topk is None else "renormalize",
            "use_task_rewards": False,
            "teacher_temperature": 1.0 if is_server else None,
            "teacher_prompt": _TEACHER_PROMPT if reads_own_prompt else None,
            **data,
        }
    )


def name_divergence_of(command: SourceCommand) -> str:
    """Return the loss of GKD as the plan has it."""
    topk = None if command.get("gkd_logits_topk") is None else (command.count("gkd_logits_topk", 1), "renormalize")
    return name_divergence("jsd", command.number("beta", 0.5), topk)


def read_mixture(command: SourceCommand) -> tuple[float, float]:
    """Return the probability of a step on the student's responses, and the weight of the supervised loss on the others.

    Megatron-SWIFT samples nothing without vLLM.
    """
    never = command.program.startswith(MEGATRON) and not command.flag("use_vllm", default=True)
    share = 0.0 if never else min(1.0, max(0.0, command.number("lmbda", 0.5)))
    return share, 0.0 if share >= 1.0 else command.number("sft_alpha", 0.0)


def name_sampled_steps_of(command: SourceCommand) -> str | None:
    """Return whose responses train as the plan has it; the supervised loss there is one without temperature."""
    share, coefficient = read_mixture(command)
    return name_sampled_steps(share, coefficient, 1.0)


def _read_data_responses(run: Import, command: SourceCommand) -> dict[str, object]:
    """Return the keys of steps on the responses of the data."""
    share, coefficient = read_mixture(command)
    if share >= 1.0:
        run.note_given("lmbda", "all responses are the student's", changes_nothing=False)
        run.note_given("sft_alpha", "it is for responses of the data set, of which no step has any")
        return {}
    run.note_given("lmbda sft_alpha", "see rl_config.distillation", changes_nothing=False)
    return {
        "on_policy_fraction": share,
        "response_column": find_response_column(run, command.list_texts("dataset")),
        "supervised_coef": coefficient or None,
    }


@dataclass(frozen=True)
class _Teachers:
    """The teachers of a command.

    Attributes:
        models: folders, addresses, or "actor" for the student with its present weights.
        tags: value of the column for each of them; empty where there is one.
        column: column of the rows that chooses the teacher.
    """

    models: list[str]
    is_server: bool
    tags: list[str] = field(default_factory=list)
    column: str = ""

    @property
    def keys(self) -> dict[str, object]:
        """Keys of the distillation."""
        several = {"teacher_keys": self.tags, "teacher_key": self.column} if self.tags else {}
        return {"teacher_models": self.models, **several}


def _read_teachers(run: Import, command: SourceCommand) -> _Teachers:
    """Return the teachers; several are servers, each for the rows with one of its tags."""
    option = next((name for name in TEACHERS if command.has(name)), "")
    value = command.get(option) if option else "actor"
    is_server = option == "teacher_model_server"
    listed = value if isinstance(value, list) else _parse_list(str(value))
    if listed is None:
        teacher = str(value)
        return _Teachers([_name_address(teacher) if is_server else teacher], is_server)
    column, pairs = command.text("teacher_tag_key", "dataset"), list[tuple[str, str]]()
    for item in listed:
        entry = item if isinstance(item, Mapping) else {}
        tags = entry.get("tags") or []
        if not isinstance(tags, list) or not tags or not isinstance(entry.get("url"), str) or not is_server:
            run.refuse(f"--{option}", "several teachers that are not servers with a url and tags each")
            continue
        pairs += [(str(tag), _name_address(str(entry["url"]))) for tag in tags]
    run.note_given("teacher_tag_key", "the column that chooses the teacher", changes_nothing=False)
    return _Teachers([url for _, url in pairs] or ["actor"], is_server, [tag for tag, _ in pairs], column)


def _parse_list(text: str) -> list[object] | None:
    """Return the list of a JSON text; None for another text."""
    if not text.startswith(("[", "{")):
        return None
    with contextlib.suppress(ValueError):
        value = json.loads(text)
        return value if isinstance(value, list) else [value]
    return []


def _name_address(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/v1"


def _under_distillation(values: dict[str, object]) -> dict[str, object]:
    return {f"{RL}.distillation.{name}": value for name, value in values.items()}
