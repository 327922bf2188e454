"""ROLL's distillation on the answers of rows, as distillation of which the student samples nothing."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, ENGINE, RL, SAMPLING, Batch, Objective, Recipe, Rewards, list_answer_defaults
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.roll_objective import read_rate
from mindspeed_rl.importers.roll_rows import count_steps, is_uneven
from mindspeed_rl.importers.source_plan import name_divergence, name_sampled_steps

#: variable of the user: rows with a column messages, whose last message is the answer
_PROMPTS, _MESSAGES = "PROMPTS", "messages"
#: divergence there -> here
_DIVERGENCES = {"forward_kl": "forward_kl_topk", "reverse_kl": "reverse_kl_topk"}
#: epsilon of Adam there
_ADAM_EPSILON = 1e-8


def describe_distillation(run: Import, command: SourceCommand, shared: Recipe, role: str) -> Recipe:
    """Return the run of a pipeline that learns from a teacher's distributions on the answers of rows.

    Its loss is w * divergence + (1 - w) * cross entropy, here divided by w: divergence + (1 - w) / w * cross entropy. The
    limit of the gradient and Adam's epsilon are divided by w too, so that each update is the same.

    Raises:
        ConfigError: a value that ROLL does not have, or the rows are not in a file of the user.
    """
    weight = command.number("distill_loss_weight", 0.5)
    if not 0 < weight <= 1:
        raise ConfigError([f"distill_loss_weight is {weight:g}, but must be above 0 and at most 1; 0 is the pipeline of SFT"])
    if command.number("logits_topk", 64) == 0:
        raise ConfigError(["logits_topk: not available here: the divergence over the whole vocabulary; write a number"])
    topk, kind = command.count("logits_topk", 64), command.text("kd_objective", "forward_kl")
    if kind not in _DIVERGENCES:
        raise ConfigError([f"kd_objective {kind}: not available here; {', '.join(_DIVERGENCES)} are"])
    teacher = command.text("teacher.model_args.model_name_or_path") or command.text("teacher_pretrain")
    if not teacher:
        raise ConfigError(["the file names no teacher: teacher_pretrain is missing"])
    path, coefficient = _find_rows(run, command, role), (1 - weight) / weight
    epochs, length = command.number(f"{role}training_args.num_train_epochs", 1), command.count("sequence_length", 2048)
    if epochs != int(epochs) or epochs < 1:
        raise ConfigError([f"{role}training_args.num_train_epochs is {epochs:g}, but ROLL takes a whole number"])
    total, decay = count_steps(run, epochs, shared.step_samples)
    ends = is_uneven(run, shared.step_samples)
    rate, schedule = read_rate(command, role, total, decay=decay)
    limit = command.number("max_grad_norm", 0.0) / weight
    prompt, answer = length - length // 2, length // 2
    teachers = [name for name in command.options if name.startswith("teacher.")]
    run.note_given(f"{' '.join(teachers)} teacher_pretrain logits_topk distill_loss_weight kd_objective",
                   "distillation, by the loss divided by distill_loss_weight", changes_nothing=False)  # fmt: skip
    run.note_given("sequence_length", f"{prompt} and {answer} tokens; longer rows are an error, and are cut there",
                   changes_nothing=False)  # fmt: skip
    run.note_given(f"{role}training_args.num_train_epochs", f"{total} steps of {run.settings.rows} rows", changes_nothing=False)
    values: dict[str, object] = {
        "enabled": True,
        "teacher_models": [teacher],
        "loss_mode": _DIVERGENCES[kind],
        "topk": topk,
        "topk_rest": "renormalize",
        "use_task_rewards": False,
        "on_policy_fraction": 0.0,
        "response_column": _MESSAGES,
        "supervised_coef": coefficient or None,
    }
    reason = "rows are conversations, whose last message is the answer"
    return replace(
        shared,
        stage="ray_grpo",
        rollout_completions=shared.step_samples,
        total_steps=total,
        loss="grpo",
        aggregation="token",
        advantage_scale="none",
        divergence=name_divergence(kind, 0.0, (topk, "renormalize")),
        sampled_steps=name_sampled_steps(0.0, coefficient, 1.0),
        weight_decay=rate.weight_decay,
        clip_grad=limit,
        batch=Batch(shared.batch.micro if shared.batch else None, 1, 1),
        rates=(replace(rate, clip_grad=limit, decay=decay if decay != total else None),),
        train_iters=total if ends else None,
        train_epochs=None if ends else epochs,
        prompt_length=prompt,
        response_length=answer,
        temperature=1.0,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        infer_tp=1,
        objective=Objective(loss_type="bnpo"),
        rewarding=Rewards(),
        data=(path,),
        keys={
            **shared.keys,
            f"{ACTOR}.data_path": path,
            f"{ACTOR}.adam_eps": _ADAM_EPSILON / weight,
            f"{RL}.max_prompt_length": prompt,
            f"{SAMPLING}.max_tokens": answer,
            f"{ENGINE}.max_model_len": length,
            f"{ENGINE}.infer_tensor_parallel_size": 1,
            **{f"{RL}.distillation.{name}": value for name, value in values.items()},
        },
        notes={
            **shared.notes,
            "loss_type": "the average over tokens",
            **dict.fromkeys(("clip_grad", "adam_eps"), "divided by distill_loss_weight, as the loss is"),
            "distillation.topk": "the distributions are normalized over these tokens, as there",
        },
        defaults=(
            *shared.defaults,
            *list_answer_defaults(_MESSAGES, reason),
            (f"{ACTOR}.prompt_type", "hf", "the tokenizer's chat template; ROLL's is not compared"),
        ),
    ).follow(schedule)


def _find_rows(run: Import, command: SourceCommand, role: str) -> str:
    """Return the rows, which the user writes as conversations.

    Raises:
        ConfigError: they are not named.
    """
    if (given := command.environment.get(_PROMPTS)) is None:
        raise ConfigError([f"{role}data_args.file_name: ROLL makes conversations of the rows, with a line break in front of "
                           f"each question: write them to a file, in a column {_MESSAGES} that ends with the answer, and say "
                           f"--set {_PROMPTS}=FILE"])  # fmt: skip
    for option in command.options:
        if option.startswith(f"{role}data_args."):
            run.note_given(option, "the data of the plan", changes_nothing=False)
    run.note_given("question_key answer_key prompt_key system_key global_template", f"the rows of {_PROMPTS}",
                   changes_nothing=False)  # fmt: skip
    return given
