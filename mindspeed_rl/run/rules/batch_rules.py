"""All rules between the numbers of a batch plan, as one generator over `Sizes`, and suggestions that satisfy them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mindspeed_rl.run.batch_sizes import DISPATCH_KEYS, Sizes, round_number
from mindspeed_rl.run.placement import Layout, Number

#: the search for suggestions tries this many neighbours, then multiples of the plan's units
_SCAN = 512


@dataclass(frozen=True)
class _SizeViolation:
    """A broken rule of sizes; `names` are the keys, as `Sizes.with_value` takes them, that may satisfy it."""

    rule: str
    names: tuple[str, ...]
    text: Callable[[dict[str, str]], str]


def find_size_violations(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Yield every broken rule, the most basic first.

    The sentences are functions of the key names, so that a search over thousands of plans pays for no text.
    """
    yield from _positive(sizes)
    # what follows divides by them
    if min(sizes.global_batch_size, sizes.micro_batch_size, sizes.group_size, sizes.mini_batch_size, sizes.actor.num_npus) < 1:
        return
    if sizes.num_nodes > 1 and sizes.actor.num_npus % sizes.num_nodes:
        yield _SizeViolation(
            "devices_per_node",
            ("num_npus",),
            lambda k: f"{k['num_npus']} ({sizes.actor.num_npus}) must be divisible by the number of nodes ({sizes.num_nodes})",
        )
    # where a layout is uneven dp_size is a fraction, and every rule that divides by it would break with it
    uneven = False
    for role in ("actor", "ref", "reward", "critic", "teacher"):
        layout = getattr(sizes, role)
        if layout is not None and (layout.num_npus < 1 or layout.num_npus % layout.replica_size):
            uneven = True
            yield _uneven(role, layout)
    if sizes.rollout.num_npus % sizes.rollout.replica_size:
        uneven = True
        yield _SizeViolation(
            "rollout_replicas",
            ("num_npus",),
            lambda k: (
                f"{k['num_npus']} ({sizes.rollout.num_npus}) must be divisible by generate_config.infer_tensor_parallel_size x "
                f"infer_pipeline_parallel_size ({sizes.rollout.tensor} x {sizes.rollout.pipeline})"
            ),
        )
    if sizes.counting == "samples":
        if not uneven:
            yield from _supervised(sizes)
    elif sizes.counting == "completions":
        yield from _completions(sizes, uneven)
    else:
        yield from _prompts(sizes, uneven)
    if sizes.counting != "samples" and not uneven:
        yield from _dispatch(sizes)


def _positive(sizes: Sizes) -> Iterator[_SizeViolation]:
    names = ["global_batch_size", "micro_batch_size"]
    if sizes.counting != "samples":
        names += [
            "group_size",
            "mini_batch_size",
            "steps_per_generation",
            "generation_batch_size",
            "train_prompts",
            *DISPATCH_KEYS,
        ]
    for name in (*names, "num_npus"):
        value = sizes.value(name)
        if value is not None and value < 1:
            # bound here: the sentence is made, if at all, after the loop
            yield _SizeViolation(
                "positive", (name,), lambda k, name=name, value=value: f"{k[name]} ({value}) must be at least 1"
            )


def _uneven(role: str, layout: Layout) -> _SizeViolation:
    group = f"{role}_config"
    return _SizeViolation(
        f"{role}_replicas",
        ("num_npus",),
        lambda k: (
            f"devices of the {role} ({layout.num_npus}, {k['num_npus'] if role == 'actor' else role + ' resource'}) must be "
            f"divisible by {group}.tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size "
            f"({layout.tensor} x {layout.pipeline} x {layout.context} = {layout.replica_size})"
        ),
    )


def _supervised(sizes: Sizes) -> Iterator[_SizeViolation]:
    unit = sizes.micro_batch_size * sizes.actor.dp_size
    if sizes.global_batch_size % unit:
        yield _SizeViolation(
            "step_micro_batches",
            ("global_batch_size", "micro_batch_size"),
            lambda k: (
                f"{k['global_batch_size']} ({sizes.global_batch_size}) must be divisible by {k['micro_batch_size']} x dp_size "
                f"({sizes.micro_batch_size} x {sizes.actor.dp_size})"
            ),
        )


def _completions(sizes: Sizes, uneven: bool) -> Iterator[_SizeViolation]:
    """Check the rules of the GSPO guide; every unit is a completion unless the name has prompts."""
    n, m, total, step = sizes.group_size, sizes.micro_batch_size, sizes.rollout_samples, sizes.step_samples
    total_name = "generation_batch_size" if sizes.generation_batch_size is not None else "steps_per_generation"
    rollout_names = ("global_batch_size", total_name, "group_size")
    if sizes.generation_batch_size is not None and sizes.steps_per_generation is not None:
        yield _SizeViolation(
            "one_rollout_size",
            (),
            lambda k: (
                f"{k['generation_batch_size']} ({sizes.generation_batch_size}) and {k['steps_per_generation']} "
                f"({sizes.steps_per_generation}) both set the size of a rollout; set only one of them"
            ),
        )
    if n < 2:
        yield _SizeViolation(
            "group_of_two",
            ("group_size",),
            lambda k: f"{k['group_size']} ({n}) must be at least 2: advantages compare the completions of one prompt",
        )
    if total % sizes.global_batch_size:
        yield _SizeViolation(
            "whole_steps",
            ("global_batch_size", "generation_batch_size"),
            lambda k: (
                f"generation_batch_size ({total}) must be divisible by {k['global_batch_size']} ({sizes.global_batch_size}): "
                f"a rollout is a whole number of optimizer steps"
            ),
        )
    # Megatron-SWIFT's rule counts devices, not replicas
    if total < sizes.actor.num_npus:
        yield _SizeViolation(
            "completion_per_device",
            rollout_names,
            lambda k: (
                f"per_device_generation_batch_size = generation_batch_size ({total}) / world_size ({sizes.actor.num_npus}) = "
                f"{round_number(total / sizes.actor.num_npus)} must be at least 1"
            ),
        )
    if uneven:
        return
    dp = sizes.actor.dp_size
    prompts = f"num_rollout_prompts ({round_number(sizes.rollout_prompts)})"
    rollout = f"{prompts} = generation_batch_size ({total}) / num_generations ({n})"
    each = f"{prompts} / dp_size ({dp})"
    per_dp = round_number(sizes.rollout_prompts / dp)
    if total % (n * dp):
        yield _SizeViolation(
            "rollout_prompts_per_dp",
            rollout_names,
            lambda k: f"{rollout} must be divisible by dp_size ({dp})",
        )
    if total < n * dp:
        yield _SizeViolation(
            "rollout_prompt_each",
            rollout_names,
            lambda k: f"num_rollout_prompts_per_dp_group ({per_dp}) = {each} must be at least 1",
        )
    elif total % (n * dp * m):
        yield _SizeViolation(
            "rollout_micro_batches",
            (*rollout_names, "micro_batch_size"),
            lambda k: (
                f"num_rollout_prompts_per_dp_group ({per_dp}) = {each} must be divisible by {k['micro_batch_size']} ({m})"
            ),
        )
    train_per_dp = round_number(sizes.step_prompts / dp)
    train = f"num_prompts_per_dp_group = global_batch_size ({step}) / num_generations ({n}) / dp_size ({dp}) = {train_per_dp}"
    if step < n * dp:
        yield _SizeViolation(
            "train_prompt_each",
            ("global_batch_size", "group_size"),
            lambda k: f"{train} must be at least 1",
        )
    elif step % (n * dp * m):
        yield _SizeViolation(
            "train_micro_batches",
            ("global_batch_size", "group_size", "micro_batch_size"),
            lambda k: f"{train} must be divisible by {k['micro_batch_size']} ({m})",
        )
    replicas = sizes.rollout.dp_size
    if total % replicas:
        yield _SizeViolation(
            "rollout_rows_per_replica",
            rollout_names,
            lambda k: f"generation_batch_size ({total}) must be divisible by the {replicas} rollout replicas",
        )


def _prompts(sizes: Sizes, uneven: bool) -> Iterator[_SizeViolation]:
    """Check the rules of MindSpeed-RL, and those it leaves out.

    Its rule that replicas have equally many prompts is one about responses here: a group may be spread over replicas.
    """
    n, m, prompts, mini = sizes.group_size, sizes.micro_batch_size, sizes.global_batch_size, sizes.mini_batch_prompts
    filtered = sizes.train_prompts
    trained = prompts if filtered is None else filtered
    trained_name = "global_batch_size" if filtered is None else "train_prompts"
    if prompts * n % m:
        yield _SizeViolation(
            "samples_in_micro_batches",
            ("global_batch_size", "group_size", "micro_batch_size"),
            lambda k: (
                f"{k['global_batch_size']} x {k['group_size']} ({prompts} x {n}) must be divisible by "
                f"{k['micro_batch_size']} ({m})"
            ),
        )
    if trained % mini:
        yield _SizeViolation(
            "whole_mini_batches",
            ("mini_batch_size", trained_name),
            lambda k: f"{k[trained_name]} ({trained}) must be divisible by {k['mini_batch_size']} ({mini}): both count prompts",
        )
    if uneven:
        return
    dp = sizes.actor.dp_size
    for name, count in (("global_batch_size", prompts), *((("train_prompts", filtered),) if filtered is not None else ())):
        if count * n % dp:
            yield _SizeViolation(
                "samples_per_dp",
                (name, "group_size"),
                lambda k, name=name, count=count: (
                    f"{k[name]} x {k['group_size']} ({count} x {n} = {count * n}) must be divisible by dp_size ({dp})"
                ),
            )
        elif count * n // dp % m:
            yield _SizeViolation(
                "samples_per_dp_in_micro_batches",
                (name, "group_size", "micro_batch_size"),
                lambda k, name=name, count=count: (
                    f"{k[name]} x {k['group_size']} / dp_size ({count} x {n} / {dp} = {count * n // dp}) "
                    f"must be divisible by {k['micro_batch_size']} ({m})"
                ),
            )
    if mini * n % (dp * m):
        yield _SizeViolation(
            "mini_batch_in_micro_batches",
            ("mini_batch_size", "group_size", "micro_batch_size"),
            lambda k: (
                f"{k['mini_batch_size']} x {k['group_size']} ({mini} x {n} = {mini * n}) must be divisible by dp_size x "
                f"{k['micro_batch_size']} ({dp} x {m} = {dp * m})"
            ),
        )
    rows, replicas = prompts * n, sizes.rollout.dp_size

    def describe(k: dict[str, str]) -> str:
        return f"{k['global_batch_size']} x {k['group_size']} ({prompts} x {n} = {rows})"

    if rows % replicas:
        yield _SizeViolation(
            "samples_per_replica",
            ("global_batch_size", "group_size"),
            lambda k: (
                f"{describe(k)} must be divisible by the {replicas} rollout replicas ({k['num_npus']} "
                f"{sizes.rollout.num_npus} / infer_tensor_parallel_size {sizes.rollout.tensor})"
            ),
        )
    for role in ("ref", "reward", "critic", "teacher"):
        layout = getattr(sizes, role)
        if layout is not None and rows % layout.dp_size:
            yield _SizeViolation(
                f"samples_per_{role}_replica",
                ("global_batch_size", "group_size"),
                lambda k, role=role, size=layout.dp_size: (
                    f"{describe(k)} must be divisible by the data-parallel size of the {role} ({size})"
                ),
            )
    if sizes.rule_reward and rows % sizes.num_nodes:
        yield _SizeViolation(
            "samples_per_node",
            ("global_batch_size", "group_size"),
            lambda k: (
                f"{describe(k)} must be divisible by the number of nodes ({sizes.num_nodes}): rules score on every node"
            ),
        )


def _dispatch(sizes: Sizes) -> Iterator[_SizeViolation]:
    """Check the sizes in which rows leave the data plane."""
    # a rollout with a fraction of a prompt is named by the rules above
    if any(rows.__class__ is not int for rows in (sizes.rollout_prompts, sizes.train_samples)):
        return
    for name, (rows, limit) in _compute_dispatch_bounds(sizes).items():
        size = sizes.dispatch.get(name)
        if size is None:
            continue
        if size > limit:
            yield _SizeViolation(
                "dispatch_limit",
                (name,),
                lambda k, name=name, size=size, limit=limit: (
                    f"{k[name]} ({size}) must be at most {round_number(limit)}, the rows of one replica"
                ),
            )
        elif rows % size:
            yield _SizeViolation(
                "dispatch_divides",
                (name,),
                lambda k, name=name, size=size, rows=rows: f"{k[name]} ({size}) must divide the {rows} rows of an iteration",
            )
        elif name == "actor_rollout_dispatch_size" and limit % size:
            yield _SizeViolation(
                "dispatch_divides",
                (name,),
                lambda k, name=name, size=size, limit=limit: (
                    f"{k[name]} ({size}) must divide the {round_number(limit)} rows of a rollout replica"
                ),
            )
        if name == "dynamic_sampling_dispatch_size" and size % sizes.group_size:
            yield _SizeViolation(
                "dispatch_whole_groups",
                (name,),
                lambda k, name=name, size=size: (
                    f"{k[name]} ({size}) must be a multiple of {k['group_size']} ({sizes.group_size})"
                ),
            )


def _compute_dispatch_bounds(sizes: Sizes) -> dict[str, tuple[int, Number | float]]:
    """Return for each dispatch key the rows of an iteration, which it must divide, and its maximum."""
    rows, trained = sizes.rollout_samples, sizes.train_samples
    bounds: dict[str, tuple[int, Number | float]] = {
        "actor_rollout_dispatch_size": (rows, rows / sizes.rollout.dp_size),
        "actor_logprob_dispatch_size": (trained, trained / sizes.actor.dp_size),
        # a reference without keys has the actor's layout
        "ref_dispatch_size": (rows, rows / (sizes.ref or sizes.actor).dp_size),
        # functions score on every node; only a model has replicas that split the rows
        "reward_dispatch_size": (rows, rows if sizes.rule_reward or sizes.reward is None else rows / sizes.reward.dp_size),
        "adv_dispatch_size": (trained, trained),
        "actor_update_dispatch_size": (trained, trained / sizes.actor.dp_size),
        "dynamic_sampling_dispatch_size": (rows, rows / sizes.num_nodes),
        "kl_dispatch_size": (rows, rows),
    }
    if sizes.critic is not None:
        for name in ("critic_value_dispatch_size", "critic_update_dispatch_size"):
            bounds[name] = (rows, rows / sizes.critic.dp_size)
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
    above = (
        *range(max(current + 1, 1), current + _SCAN + 1),
        *sorted(value for value in far_above if value > current + _SCAN),
    )
    below = (
        *range(current - 1, max(0, current - _SCAN - 1), -1),
        *sorted((value for value in far_below if value < current - _SCAN), reverse=True),
    )
    nearest = (
        next((value for value in candidates if not any(find_size_violations(sizes.with_value(name, value)))), None)
        for candidates in (below, above)
    )
    return sorted((value for value in nearest if value is not None), key=lambda value: abs(value - current))
