"""Numbers of a run by ms-swift's formulas: batches, steps, lengths and learning rates."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand, read_count, read_scalar
from mindspeed_rl.importers.recipe import Rate
from mindspeed_rl.importers.result import ImportSettings
from mindspeed_rl.importers.source_plan import Schedule
from mindspeed_rl.importers.swift_commands import MEGATRON, PAIRS, WITH_ROLLOUTS
from mindspeed_rl.importers.writer import read_shape

#: variable that the user sets: rows of a preference stage that fit into one pack
_ROWS_PER_PACK = "ROWS_PER_PACK"
#: variable that the user sets: documents of pretraining, or packs of them
_SAMPLES = "NUM_SAMPLES"
#: longest prompt where the command has no limit
PROMPT_LENGTH = 2048
#: variable that the user sets: the model's limit
_MAX_LENGTH = "MAX_LENGTH"


class Sizes:
    """The numbers of a batch, by ms-swift's formulas.

    Attributes:
        tp, pp, cp, ep: layout.
        dp: replicas.
        micro: rows of one forward pass.
        step: rows of an optimizer step: completions, samples or pairs.
        packed: rows of a pack; None where rows are not packed.
        group: responses of a prompt; 1 without rollouts.
        iterations: passes over a rollout.
        steps: optimizer steps of one rollout, over all its iterations; 1 without rollouts.
        rollout: completions of one rollout; None without rollouts.
    """

    def __init__(self, command: SourceCommand) -> None:
        self.is_megatron = command.program.startswith(MEGATRON)
        self.kind = command.program.removeprefix(MEGATRON)
        world = command.devices
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        self.tp, self.pp, self.cp = (command.count(name, 1) if self.is_megatron else 1 for name in names)
        self.ep = command.count("expert_model_parallel_size", 1) if self.is_megatron else 1
        if not self.is_megatron:
            self.cp = command.count("sequence_parallel_size", 1)
        self.dp, rest = divmod(world, self.tp * self.pp * self.cp)
        if rest or not self.dp:
            raise ConfigError(
                [f"{world} devices are not whole replicas of {self.tp} x {self.pp} x {self.cp}; --devices says them"]
            )
        self.group, self.iterations, self.steps = 1, 1, 1
        self.packed = _count_packed_rows(command, self.kind)
        self.rollout: int | None = None
        if self.is_megatron:
            self.micro, self.step = command.count("micro_batch_size", 1), command.count("global_batch_size", 16)
            passes, per_pass = 1, self.step
        else:
            self.micro = command.count("per_device_train_batch_size", 1)
            default = 1 if self.kind == "grpo" else max(1, math.ceil(16 / self.micro / world))
            accumulated = command.count("gradient_accumulation_steps", default)
            # a rollout's forward passes count for all processes, also where several share a sequence
            per_pass, passes = self.micro * (world if self.kind in WITH_ROLLOUTS else self.dp), accumulated
            self.step = per_pass * accumulated
        if self.packed is not None:
            self.micro, self.step = self.micro * self.packed, self.step * self.packed
        if self.kind == "ppo":
            parts = command.count("num_mini_batches", 1)
            self.iterations = command.count("num_ppo_epochs", 4)
            self.rollout, self.steps = self.step * parts, parts * self.iterations
        elif self.kind in WITH_ROLLOUTS:
            self._set_rollout(command, passes, per_pass)

    def _set_rollout(self, command: SourceCommand, accumulated: int, per_pass: int) -> None:
        self.group = 1 if self.kind == "gkd" else command.count("num_generations", 8)
        self.iterations = command.count("num_iterations", 1)
        total = command.get("generation_batch_size")
        if total is not None:
            passes, rest = divmod(command.count("generation_batch_size", 1), per_pass)
            if rest or not passes:
                raise ConfigError([f"--generation_batch_size {total} must be a multiple of {per_pass}"])
        else:
            passes = command.count("steps_per_generation", accumulated)
        if passes * per_pass % self.group:
            raise ConfigError([f"{passes * per_pass} completions of a rollout are not whole groups of {self.group}"])
        if passes % accumulated == 0:
            self.rollout, self.steps = passes * per_pass, passes // accumulated * self.iterations
        elif accumulated % passes == 0 and self.iterations == 1:
            # the rollouts of one optimizer step are of the same weights, and are one here
            self.rollout = accumulated * per_pass
        else:
            raise ConfigError(
                [f"--steps_per_generation {passes} and --gradient_accumulation_steps {accumulated}: an optimizer step must be "
                 "a whole number of rollouts, or a rollout one of steps"]
            )  # fmt: skip

    @property
    def counts_completions(self) -> bool:
        """True where sizes are written in completions, as Megatron-SWIFT has them, or as a step has no whole groups.

        Counted so, the prompts of a step and of a rollout must divide by the replicas and by the rows of a pass.
        """
        if self.rollout is None or self.step % self.group:
            return self.rollout is not None
        unit = self.group * self.dp * self.micro
        return self.is_megatron and self.group > 1 and self.step % unit == 0 and self.rollout % unit == 0

    def count_steps(self, command: SourceCommand, rows: int) -> int:
        """Return the optimizer steps of the run over so many rows of data."""
        limit = command.number("train_iters" if self.is_megatron else "max_steps", -1)
        epochs = command.get("num_train_epochs")
        if limit > 0 and (epochs is None or not self.is_megatron):
            return int(limit)
        if self.is_megatron:
            if epochs is None:
                raise ConfigError(["the command says no length: --num_train_epochs and --train_iters are missing"])
            unit = self.micro * self.dp
            return int(rows // unit * unit * self.group * command.number("num_train_epochs", 1) // self.step)
        number = command.number("num_train_epochs", 3.0)
        if self.kind == "ppo":
            assert self.rollout is not None, "PPO has rollouts"
            return math.ceil(int(number * rows) / self.rollout) * self.steps
        if self.rollout is not None:
            return math.ceil(number * max(1, rows // (self.rollout // self.group) * self.steps))
        batches = math.ceil(rows / (self.micro * self.dp))
        accumulated = self.step // (self.micro * self.dp)
        return math.ceil(number * max(1, math.ceil(batches / accumulated)))


def _count_packed_rows(command: SourceCommand, kind: str) -> int | None:
    """Return the rows that a pack of a preference stage has on average; None where rows are not joined in a preference stage.

    Raises:
        ConfigError: the user does not say it.
    """
    if not command.flag("packing") or kind not in (*PAIRS, "kto"):
        return None
    if (count := command.environment.get(_ROWS_PER_PACK)) is None:
        length = read_length(command)
        text = f"--packing: a step has as many rows as fit into packs of {length} tokens, which only the data knows"
        raise ConfigError([f"{text}; --set {_ROWS_PER_PACK}=NUMBER says how many fit into one on average"])
    return read_count(_ROWS_PER_PACK, read_scalar(count))


def read_schedule(command: SourceCommand, total: int) -> Schedule:
    """Return the learning rate over optimizer steps.

    Raises:
        ConfigError: there is no such form.
    """
    is_megatron = command.program.startswith(MEGATRON)
    peak = command.number("lr" if is_megatron else "learning_rate", 1e-5 if read_tuner(command) == "full" else 1e-4)
    if is_megatron:
        style = command.text("lr_decay_style", "cosine")
        decay = command.count("lr_decay_iters", max(total, 1))
        fraction = command.get("lr_warmup_fraction")
        share = command.number("lr_warmup_fraction", 0.0)
        warmup = int(command.number("lr_warmup_iters", 0)) if fraction is None else int(share * decay)
        return Schedule(peak, style, decay, warmup, command.number("lr_warmup_init", 0.0), command.number("min_lr", 0.0))
    forms = {
        "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
        "cosine_with_min_lr": "cosine", "inverse_sqrt": "inverse-square-root",
    }  # fmt: skip
    name = command.text("lr_scheduler_type", "cosine")
    if name not in forms:
        raise ConfigError([f"--lr_scheduler_type {name}: not available here; available are {', '.join(forms)}"])
    steps, ratio = command.number("warmup_steps", 0), command.number("warmup_ratio", 0.0)
    warmup = int(steps) if steps >= 1 else math.ceil(total * (steps or ratio))
    floor = 0.0
    if name == "cosine_with_min_lr":
        least = re.search(r'"(min_lr(?:_rate)?)"\s*:\s*([-+.\deE]+)', command.text("lr_scheduler_kwargs"))
        if least is None:
            raise ConfigError(["--lr_scheduler_type cosine_with_min_lr needs --lr_scheduler_kwargs '{\"min_lr\": ...}'"])
        floor = float(least.group(2)) * (peak if least.group(1) == "min_lr_rate" else 1.0)
    return Schedule(peak, forms[name], total, warmup, 0.0, floor)


def read_tuner(command: SourceCommand) -> str:
    return command.text("tuner_type", "full" if command.program.startswith(MEGATRON) else "lora")


def read_rows(command: SourceCommand, settings: ImportSettings) -> tuple[int, bool]:
    """Return the rows of the data, and True where the command or the user says them: name#count, and samples of documents.

    Raises:
        ConfigError: a length in epochs is one of samples that documents are cut into, whose number is not known.
    """
    kind, packs = command.program.removeprefix(MEGATRON), command.flag("packing")
    counts = [name.rpartition("#")[2] for name in command.list_texts("dataset")]
    # rows of the data are not rows of a step where they are joined
    if counts and all(count.isdigit() for count in counts) and not (packs and kind in ("sft", "pt")):
        known = sum(int(count) for count in counts)
        return max(1, round(known * (1 - command.number("split_dataset_ratio", 0.0)))), True
    is_megatron = command.program.startswith(MEGATRON)
    has_limit = command.number("train_iters" if is_megatron else "max_steps", -1) > 0
    if kind != "pt" or has_limit:
        return settings.rows, False
    if (samples := command.environment.get(_SAMPLES)) is not None:
        return read_count(_SAMPLES, read_scalar(samples)), True
    units = f"packs of {read_length(command)} tokens" if packs else "documents"
    text = f"--num_train_epochs: a length in epochs of {units}, whose number only the data knows"
    raise ConfigError([f"{text}; --set {_SAMPLES}=NUMBER says it"])


@dataclass(frozen=True)
class _Names:
    """Names of options that transformers' Trainer and Megatron-SWIFT have for one number, and those that one does not read."""

    limit: str
    rate: str
    warmup: str
    clip: str
    unread: tuple[str, ...]


TRANSFORMERS_NAMES = _Names(
    limit="max_steps",
    rate="learning_rate",
    warmup="warmup_ratio",
    clip="max_grad_norm",
    unread=("train_iters", "lr", "lr_decay_style"),
)
MEGATRON_NAMES = _Names(
    limit="train_iters",
    rate="lr",
    warmup="lr_warmup_fraction",
    clip="clip_grad",
    unread=("max_steps", "learning_rate", "lr_scheduler_type", "gradient_checkpointing"),
)


def count_interval(command: SourceCommand, sizes: Sizes, name: str, default: int) -> int | None:
    """Return an interval in iterations; None where there is none, or checkpoints are not counted in steps."""
    interval = command.number(name, default)
    counts = name != "save_steps" or command.text("save_strategy", "steps") == "steps"
    return math.ceil(interval / sizes.steps) if interval >= 1 and counts else None


def read_rate(command: SourceCommand, sizes: Sizes, schedule: Schedule, total: int, engine: _Names, *, in_epochs: bool) -> Rate:
    """Return the learning rate in iterations."""
    warmup, share = None, None
    if schedule.warmup and schedule.warmup % sizes.steps == 0 and command.has("warmup_steps", "lr_warmup_iters"):
        warmup = schedule.warmup // sizes.steps
    elif schedule.warmup:
        share = command.number(engine.warmup, 0.0)
        if not in_epochs or not share:
            # rounded up there, and down here
            share = (schedule.warmup + 0.01) / (math.ceil(schedule.decay / sizes.steps) * sizes.steps)
    return Rate(
        peak=schedule.peak,
        style=schedule.style,
        floor=schedule.floor,
        decay=None if schedule.decay == total else math.ceil(schedule.decay / sizes.steps),
        warmup=warmup,
        warmup_share=share,
        clip_grad=command.number(engine.clip, 1.0),
    )


def find_length(command: SourceCommand) -> int | None:
    """Return the tokens of the longest row, or of a pack: without an option the model's limit; None where it is elsewhere."""
    name = "packing_length" if command.has("packing_length") else "max_length"
    if command.has(name):
        return command.count(name, 1)
    limit = read_shape(command.text("model")).get("max_position_embeddings")
    if isinstance(limit, int) and limit > 0:
        return limit
    given = command.environment.get(_MAX_LENGTH)
    return None if given is None else read_count(_MAX_LENGTH, read_scalar(given))


def read_length(command: SourceCommand) -> int:
    """Return the tokens of a pack, or of a sample of documents.

    Raises:
        ConfigError: no option has them, and the model is elsewhere.
    """
    if (length := find_length(command)) is not None:
        return length
    text = f"--max_length is missing: packs have the model's limit, and config.json of {command.text('model')} is not here"
    raise ConfigError([f"{text}; --set {_MAX_LENGTH}=TOKENS says it"])
