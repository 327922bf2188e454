"""TRL's GKDTrainer as on-policy distillation: its options, and the run of a command."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.importers.options import Option, SourceCommand, no_effect, part, refused, to
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, SAMPLING, Objective, Recipe, Rewards, list_answer_defaults
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import Command
from mindspeed_rl.importers.source_files import find_file, read_first_row
from mindspeed_rl.importers.source_plan import name_divergence, name_sampled_steps

#: tokens of the teacher where TRL computes the divergence over all tokens, which no data plane holds
_MANY_TOKENS = 512
#: column of the conversations, whose last message is the response
_MESSAGES = "messages"

#: options of GKDConfig and of the part of SFTConfig that its trainer reads
OPTIONS: dict[str, Option] = {
    "temperature": to(f"{SAMPLING}.temperature", default=0.9),
    "max_new_tokens": to(f"{SAMPLING}.max_tokens", default=128),
    "max_length": part("max_prompt_length"),
    **dict.fromkeys(
        "lmbda beta teacher_model_name_or_path".split(),
        part("distillation.on_policy_fraction distillation.beta distillation.teacher_models"),
    ),
    "teacher_model_init_kwargs": no_effect("the teacher has the format of the run", None),
    "seq_kd": refused("sequence distillation"),
    "packing": refused("rows that are joined into blocks"),
    "truncation_mode": no_effect("a conversation above max_length is an error here, with its row", "keep_start"),
    "completion_only_loss": no_effect("only the last answer trains"),
    "assistant_only_loss": no_effect("only the last answer trains"),
    "dataset_text_field": no_effect("rows are conversations", "text"),
    "dataset_kwargs": no_effect("rows are read as conversations", None),
    **dict.fromkeys(
        "disable_dropout padding_free packing_strategy eval_packing activation_offloading pad_token dataset_num_proc "
        "logging_steps shuffle_dataset loss_type".split(),
        no_effect("it changes speed, memory or logging, or belongs to a feature that is off"),
    ),
    "eos_token": refused("another end token"),
    "chat_template_path": refused("another chat template; write it into megatron_training.prompt_type_path"),
    "router_aux_loss_coef": to("megatron_training.moe_aux_loss_coeff"),
}


def describe_gkd(run: Import, command: SourceCommand, shared: Recipe, *, completions: int, passes: int) -> Recipe:
    """Return the run of a command; nothing but the divergence from the teacher trains.

    Args:
        shared: what all trainers have.
        completions: rows of an optimizer step.
        passes: forward passes of an optimizer step.
    """
    temperature, beta = command.number("temperature", 0.9), command.number("beta", 0.5)
    share = min(1.0, max(0.0, command.number("lmbda", 0.5)))
    prompt, response = command.count("max_length", 1024), command.count("max_new_tokens", 128)
    divergence, sampled = name_divergence("jsd", beta, None), name_sampled_steps(share, 0.0, 1.0)
    if temperature != 1.0:
        divergence += " at temperature 1"
    if sampled is not None and passes > 1 and share > 0.0:
        sampled = f"{sampled}, chosen for each of its {passes} passes"
    teacher = command.text("teacher_model_name_or_path") or command.text("model_name_or_path")
    distillation: dict[str, object] = {
        "enabled": True,
        "teacher_models": [teacher],
        "loss_mode": "jsd_topk",
        "beta": beta,
        "topk": _MANY_TOKENS,
        "topk_rest": "lump",
        "use_task_rewards": False,
        "on_policy_fraction": None if share >= 1.0 else share,
        "response_column": None if share >= 1.0 else _MESSAGES,
    }
    # the data's answers are counted before the student's replace them
    aggregation = "token" if share <= 0.0 else "token of the data's responses"
    file = find_file(Command((), {}, 0, folder=run.settings.folder), command.text("dataset_name"))
    if (row := read_first_row(file)) and _MESSAGES not in row:
        run.refuse(f"--dataset_name {command.text('dataset_name')}", "rows of GKD without the column messages")
    reason = "TRL's rows are conversations, whose last message is the response"
    return replace(
        shared,
        rollout_completions=completions,
        level=None,
        aggregation=aggregation,
        advantage_scale="none",
        divergence=divergence,
        sampled_steps=sampled,
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        prompt_length=prompt,
        response_length=response,
        infer_tp=1,
        objective=Objective(loss_type="bnpo"),
        rewarding=Rewards(),
        keys={
            **shared.keys,
            f"{RL}.max_prompt_length": prompt,
            f"{ENGINE}.dtype": None if command.flag("bf16", default=True) else "float32",
            **{f"{RL}.distillation.{name}": value for name, value in distillation.items()},
        },
        notes={
            **shared.notes,
            "loss_type": "the average over tokens",
            "distillation.topk": "the most probable tokens; all of them there",
        },
        defaults=(
            *shared.defaults,
            *list_answer_defaults(_MESSAGES, reason),
            (f"{ACTOR}.prompt_type", "hf", "the tokenizer's chat template"),
            (f"{RL}.use_remove_padding", True, "sequences are packed without padding"),
        ),
    )
