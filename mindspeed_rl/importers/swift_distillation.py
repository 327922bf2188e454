"""Teachers in commands of ms-swift: in the advantages of GRPO, and in the loss of GKD."""

from __future__ import annotations

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
    teacher, is_server = _read_teacher(run, command)
    return _under_distillation(
        {
            "enabled": True,
            "teacher_models": [teacher],
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
    teacher, is_server = _read_teacher(run, command)
    temperature = command.number("temperature", 0.9)
    if is_server and temperature != 1.0:
        form = f"{temperature:g} next to a teacher's server, whose log-probs it divides there; with 1 it is available"
        run.refuse("--temperature", form)
    if data and has_images:
        run.refuse("--lmbda", "responses of the data next to images; with 1 the student samples all of them")
    if is_server and has_images:
        run.refuse("--teacher_model_server", "images for a teacher on a server; --teacher_model takes its weights")
    topk = command.get("gkd_logits_topk")
    reads_own_prompt = teacher in ("actor", command.text("model"))
    columns = {
        _TEACHER_PROMPT: "the teacher, which is the student, reads it in place of the prompt" if reads_own_prompt else "",
        str(data.get("response_column")): "the responses of the data" if data else "",
    }
    if read := {name: reason for name, reason in columns.items() if reason}:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in read.items())
        run.add_default(f"{ACTOR}.dataset_additional_keys", list(read), reasons)
    return _under_distillation(
        {
            "enabled": True,
            "teacher_models": [teacher],
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
    topk = command.get("gkd_logits_topk")
    return name_divergence("jsd", command.number("beta", 0.5), None if topk is None else (int(str(topk)), "renormalize"))


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


def _read_teacher(run: Import, command: SourceCommand) -> tuple[str, bool]:
    """Return the teacher, and whether it is a server; "actor" for the student with its present weights."""
    option = next((name for name in TEACHERS if command.has(name)), "")
    teacher, is_server = command.text(option) if option else "actor", option == "teacher_model_server"
    if teacher.startswith(("[", "{")):
        run.refuse(f"--{option}", "several teachers in a command; see rl_config.distillation.teacher_keys")
    return (teacher.rstrip("/").removesuffix("/v1") + "/v1" if is_server else teacher), is_server


def _under_distillation(values: dict[str, object]) -> dict[str, object]:
    return {f"{RL}.distillation.{name}": value for name, value in values.items()}
