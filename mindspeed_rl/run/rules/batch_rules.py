"""All rules between the numbers of a batch plan, as one generator over `Sizes`, and suggestions that satisfy them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.run.batch_sizes import DISPATCH_KEYS, Sizes, round_number, rows_per_replica
from mindspeed_rl.run.placement import Layout, Number

#: the search for suggestions tries this many neighbours, then multiples of the plan's units
_SCAN = 512


@dataclass(frozen=True)
class _SizeViolation:
    """A broken rule of sizes.

    Attributes:
        names: keys that may satisfy it, as `Sizes.with_value` takes them.
        sentence: the message with such keys in brackets, as in `violation.Broken`.
    """

    rule: str
    names: tuple[str, ...]
    sentence: str


#: the two keys that set the size of a rollout of completions, of which a run file has one
ROLLOUT_SIZES = ("generation_batch_size", "steps_per_generation")
_STEP, _MICRO, _GROUP, _MINI = "global_batch_size", "micro_batch_size", "group_size", "mini_batch_size"
_ROLES = ("actor", "ref", "reward", "critic", "teacher")


def find_size_violations(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Yield every broken rule, the most basic first."""
    yield from _positive(sizes)
    # what follows divides by them
    if min(sizes.global_batch_size, sizes.micro_batch_size, sizes.group_size, sizes.mini_batch_size, sizes.actor.num_npus) < 1:
        return
    if sizes.num_nodes > 1 and sizes.actor.num_npus % sizes.num_nodes:
        text = f"[num_npus] must be divisible by the number of nodes ({sizes.num_nodes})"
        yield _SizeViolation("devices_per_node", ("num_npus",), text)
    # where a layout is uneven dp_size is a fraction, and every rule that divides by it would break with it
    uneven = list(_uneven_layouts(sizes))
    yield from uneven
    if sizes.counting == "completions":
        yield from _completions(sizes)
        yield from () if uneven else _completions_of_replicas(sizes)
    elif sizes.counting == "prompts":
        yield from _prompts(sizes)
        yield from () if uneven else _prompts_of_replicas(sizes)
    elif not uneven:
        yield from _supervised(sizes)
    if sizes.counting != "samples" and not uneven:
        yield from _dispatch(sizes)


def _positive(sizes: Sizes) -> Iterator[_SizeViolation]:
    rollout = (_GROUP, _MINI, *reversed(ROLLOUT_SIZES), "train_prompts", *DISPATCH_KEYS)
    for name in (_STEP, _MICRO, *(() if sizes.counting == "samples" else rollout), "num_npus"):
        value = sizes.value(name)
        if value is not None and value < 1:
            yield _SizeViolation("positive", (name,), f"[{name}] must be at least 1")


def _uneven_layouts(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Yield the roles whose devices do not divide into replicas."""
    for role in _ROLES:
        layout: Layout | None = getattr(sizes, role)
        if layout is not None and (layout.num_npus < 1 or layout.num_npus % layout.replica_size):
            key = "[num_npus:name]" if role == "actor" else f"{role} resource"
            yield _SizeViolation(
                f"{role}_replicas",
                ("num_npus",),
                f"devices of the {role} ({layout.num_npus}, {key}) must be divisible by "
                f"{role}_config.tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size "
                f"({layout.tensor} x {layout.pipeline} x {layout.context} = {layout.replica_size})",
            )
    rollout = sizes.rollout
    if rollout.num_npus % rollout.replica_size:
        yield _SizeViolation(
            "rollout_replicas",
            ("num_npus",),
            f"[num_npus:name] ({rollout.num_npus}) must be divisible by generate_config.infer_tensor_parallel_size x "
            f"infer_pipeline_parallel_size ({rollout.tensor} x {rollout.pipeline})",
        )


def _can_share(rows: int, replicas: Number, unit: int = 1) -> bool:
    """Return True where replicas have equally many rows, in whole units, or one each and some none."""
    return rows < replicas or not rows % (replicas * unit)


def _supervised(sizes: Sizes) -> Iterator[_SizeViolation]:
    m, dp = sizes.micro_batch_size, sizes.actor.dp_size
    if sizes.global_batch_size % (m * dp):
        text = f"[{_STEP}] must be divisible by [{_MICRO}:name] x dp_size ({m} x {dp})"
        yield _SizeViolation("step_micro_batches", (_STEP, _MICRO), text)


def _list_rollout_names(sizes: Sizes) -> tuple[str, ...]:
    """Return the keys that change how many completions, or prompts, a rollout has."""
    total, steps = ROLLOUT_SIZES
    return (_STEP, total if sizes.generation_batch_size is not None else steps, _GROUP)


def _completions(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the rules of the GSPO guide that hold for every layout; every unit is a completion unless the name has prompts."""
    total, devices = sizes.rollout_samples, sizes.actor.num_npus
    if sizes.generation_batch_size is not None and sizes.steps_per_generation is not None:
        text = " and ".join(f"[{name}]" for name in ROLLOUT_SIZES)
        yield _SizeViolation("one_rollout_size", (), f"{text} both set the size of a rollout; set only one of them")
    if sizes.group_size < 2:
        text = f"[{_GROUP}] must be at least 2: advantages compare the completions of one prompt"
        yield _SizeViolation("group_of_two", (_GROUP,), text)
    if total % sizes.global_batch_size:
        yield _SizeViolation(
            "whole_steps",
            (_STEP, "generation_batch_size"),
            f"generation_batch_size ({total}) must be divisible by [{_STEP}]: a rollout is a whole number of optimizer steps",
        )
    # Megatron-SWIFT's rule counts devices, not replicas
    if total < devices:
        yield _SizeViolation(
            "completion_per_device",
            _list_rollout_names(sizes),
            f"per_device_generation_batch_size = generation_batch_size ({total}) / world_size ({devices}) = "
            f"{round_number(total / devices)} must be at least 1",
        )


def _completions_of_replicas(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the rules of the GSPO guide about the prompts of a data-parallel replica, and of a rollout replica."""
    n, m, total, step = sizes.group_size, sizes.micro_batch_size, sizes.rollout_samples, sizes.step_samples
    dp, replicas, names = sizes.actor.dp_size, sizes.rollout.dp_size, _list_rollout_names(sizes)
    prompts = f"num_rollout_prompts ({round_number(sizes.rollout_prompts)})"
    each = f"num_rollout_prompts_per_dp_group ({round_number(sizes.rollout_prompts / dp)}) = {prompts} / dp_size ({dp})"
    if total % (n * dp):
        text = f"{prompts} = generation_batch_size ({total}) / num_generations ({n}) must be divisible by dp_size ({dp})"
        yield _SizeViolation("rollout_prompts_per_dp", names, text)
    if total < n * dp:
        yield _SizeViolation("rollout_prompt_each", names, f"{each} must be at least 1")
    elif total % (n * dp * m):
        yield _SizeViolation("rollout_micro_batches", (*names, _MICRO), f"{each} must be divisible by [{_MICRO}]")
    train_per_dp = round_number(sizes.step_prompts / dp)
    train = f"num_prompts_per_dp_group = global_batch_size ({step}) / num_generations ({n}) / dp_size ({dp}) = {train_per_dp}"
    if step < n * dp:
        yield _SizeViolation("train_prompt_each", (_STEP, _GROUP), f"{train} must be at least 1")
    elif step % (n * dp * m):
        yield _SizeViolation("train_micro_batches", (_STEP, _GROUP, _MICRO), f"{train} must be divisible by [{_MICRO}]")
    # servers take samples one by one
    if not sizes.rollout.dedicated and not _can_share(total, replicas):
        text = f"generation_batch_size ({total}) must be divisible by the {replicas} rollout replicas, or less than that"
        yield _SizeViolation("rollout_rows_per_replica", names, text)


def _prompts(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the rules of MindSpeed-RL that hold for every layout."""
    n, m, prompts, mini = sizes.group_size, sizes.micro_batch_size, sizes.global_batch_size, sizes.mini_batch_prompts
    name = _STEP if sizes.train_prompts is None else "train_prompts"
    if prompts * n % m:
        text = f"[{_STEP}:name] x [{_GROUP}:name] ({prompts} x {n}) must be divisible by [{_MICRO}]"
        yield _SizeViolation("samples_in_micro_batches", (_STEP, _GROUP, _MICRO), text)
    if (prompts if sizes.train_prompts is None else sizes.train_prompts) % mini:
        text = f"[{name}] must be divisible by [{_MINI}:name] ({mini}): both count prompts"
        yield _SizeViolation("whole_mini_batches", (_MINI, name), text)


def _prompts_of_replicas(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the rules of MindSpeed-RL about replicas, and those it leaves out.

    Its rule that replicas have equally many prompts is one about responses here: a group may be spread over replicas.
    """
    n, m, prompts, mini = sizes.group_size, sizes.micro_batch_size, sizes.global_batch_size, sizes.mini_batch_prompts
    dp, rows, rollout = sizes.actor.dp_size, prompts * n, sizes.rollout
    for name, count in {_STEP: prompts, "train_prompts": sizes.train_prompts}.items():
        if count is None:
            continue
        samples = f"[{name}:name] x [{_GROUP}:name]"
        if not _can_share(count * n, dp):
            text = f"{samples} ({count} x {n} = {count * n}) must be divisible by dp_size ({dp}), or less than that"
            yield _SizeViolation("samples_per_dp", (name, _GROUP), text)
        elif not _can_share(count * n, dp, m):
            text = f"{samples} / dp_size ({count} x {n} / {dp} = {count * n // dp}) must be divisible by [{_MICRO}]"
            yield _SizeViolation("samples_per_dp_in_micro_batches", (name, _GROUP, _MICRO), text)
    if not _can_share(mini * n, dp, m):
        yield _SizeViolation(
            "mini_batch_in_micro_batches",
            (_MINI, _GROUP, _MICRO),
            f"[{_MINI}:name] x [{_GROUP}:name] ({mini} x {n} = {mini * n}) must be divisible by dp_size x "
            f"[{_MICRO}:name] ({dp} x {m} = {dp * m}), or less than dp_size",
        )
    # divisors of the rows of an iteration: rule -> (number, its description)
    divisors: dict[str, tuple[Number, str]] = {}
    # servers take samples one by one
    if not rollout.dedicated:
        divisors["samples_per_replica"] = (
            rollout.dp_size,
            f"the {rollout.dp_size} rollout replicas ([num_npus:name] {rollout.num_npus} / infer_tensor_parallel_size "
            f"{rollout.tensor})",
        )
    for role in _ROLES[1:]:
        if (layout := getattr(sizes, role)) is not None:
            text = f"the data-parallel size of the {role} ({layout.dp_size})"
            divisors[f"samples_per_{role}_replica"] = layout.dp_size, text
    if sizes.rule_reward:
        divisors["samples_per_node"] = sizes.num_nodes, f"the number of nodes ({sizes.num_nodes}): rules score on every node"
    for rule, (divisor, text) in divisors.items():
        if not _can_share(rows, divisor):
            numbers = f"{prompts} x {n} = {rows}"
            text = f"[{_STEP}:name] x [{_GROUP}:name] ({numbers}) must be divisible by {text}, or less than that"
            yield _SizeViolation(rule, (_STEP, _GROUP), text)


def _dispatch(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the sizes in which rows leave the data plane."""
    # a rollout with a fraction of a prompt is named by the rules above
    if any(rows.__class__ is not int for rows in (sizes.rollout_prompts, sizes.train_samples)):
        return
    for name, (rows, limit) in _compute_dispatch_bounds(sizes).items():
        size = sizes.dispatch.get(name)
        if size is None:
            continue
        max_size = round_number(limit)
        if size > limit:
            yield _SizeViolation("dispatch_limit", (name,), f"[{name}] must be at most {max_size}, the rows of one replica")
        elif rows % size:
            yield _SizeViolation("dispatch_divides", (name,), f"[{name}] must divide the {rows} rows of an iteration")
        elif name == "actor_rollout_dispatch_size" and limit % size:
            yield _SizeViolation("dispatch_divides", (name,), f"[{name}] must divide the {max_size} rows of a rollout replica")
        if name == "dynamic_sampling_dispatch_size" and size % sizes.group_size:
            yield _SizeViolation("dispatch_whole_groups", (name,), f"[{name}] must be a multiple of [{_GROUP}]")


def _compute_dispatch_bounds(sizes: Sizes) -> dict[str, tuple[int, Number | float]]:
    """Return for each dispatch key the rows of an iteration, which it must divide, and its maximum."""
    rows, trained = sizes.rollout_samples, sizes.train_samples
    # functions score on every node; only a model has replicas that split the rows
    scorers = 1 if sizes.rule_reward or sizes.reward is None else sizes.reward.dp_size
    bounds: dict[str, tuple[int, Number | float]] = {
        "actor_rollout_dispatch_size": (rows, sizes.rollout_rows),
        "actor_logprob_dispatch_size": (trained, rows_per_replica(trained, sizes.actor.dp_size)),
        # a reference without keys has the actor's layout
        "ref_dispatch_size": (rows, rows_per_replica(rows, (sizes.ref or sizes.actor).dp_size)),
        "reward_dispatch_size": (rows, rows_per_replica(rows, scorers)),
        "adv_dispatch_size": (trained, trained),
        "actor_update_dispatch_size": (trained, rows_per_replica(trained, sizes.actor.dp_size)),
        "dynamic_sampling_dispatch_size": (rows, rows_per_replica(rows, sizes.num_nodes)),
        "kl_dispatch_size": (rows, rows),
    }
    if sizes.critic is not None:
        for name in ("critic_value_dispatch_size", "critic_update_dispatch_size"):
            bounds[name] = (rows, rows_per_replica(rows, sizes.critic.dp_size))
    return bounds


# ---------------------------------------------------------------------- suggestions


def suggest_values(sizes: Sizes, name: str) -> list[int]:
    """Return the nearest sound values of one key, below and above its present one, the nearer first."""
    current = sizes.value(name)
    if current is None:
        return []
    # the strides between sound values
    dp, replicas = max(1, int(sizes.actor.dp_size)), max(1, int(sizes.rollout.dp_size))
    n, m, mini = (max(1, value) for value in (sizes.group_size, sizes.micro_batch_size, sizes.mini_batch_size))
    both = math.lcm(dp, replicas, sizes.num_nodes)
    devices = math.lcm(sizes.actor.replica_size, sizes.rollout.replica_size, sizes.num_nodes)
    units = {dp, both, n, n * dp, n * dp * m, n * both * m, math.lcm(mini, both), math.lcm(mini, dp), dp * m, devices, m}
    multiples = {unit * factor for unit in units for factor in range(1, 65)}
    far_above = multiples | {max(current, 1) * factor for factor in range(2, 17)}
    far_below = multiples | set(range(1, 65))
    above = (*range(max(current + 1, 1), current + _SCAN + 1), *sorted(value for value in far_above if value > current + _SCAN))
    below = (
        *range(current - 1, max(0, current - _SCAN - 1), -1),
        *sorted((value for value in far_below if value < current - _SCAN), reverse=True),
    )
    nearest = (
        next((value for value in candidates if not any(find_size_violations(sizes.with_value(name, value)))), None)
        for candidates in (below, above)
    )
    return sorted((value for value in nearest if value is not None), key=lambda value: abs(value - current))
