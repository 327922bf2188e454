"""Layouts of a model on a number of devices: which fit, and which of them are fastest.

Training layouts and rollout layouts are searched one after the other, since they share a device in time and not in space: the
fastest few of either that fit are put together and planned whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.mend import with_values
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.validation import unavailable, validate
from mindspeed_rl.planner.chips import Chip
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.memory import VERDICTS, MemoryPlan, plan_memory
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time

_KEPT = 10
#: shares of the device that an engine is offered
_SHARES = (0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_SHARE = "generate_config.gpu_memory_utilization"
_SPLITS = ("tensor_model", "pipeline_model", "context", "expert_model")
_TRAINING = ("reference_model", "old_log_p", "update", "offload")


@dataclass(frozen=True)
class Wanted:
    """What is to run.

    Attributes:
        block: the model block's keys; `model` its name.
        prompt, response: longest, in tokens.
        prompts, samples: of an iteration, and of a prompt.
    """

    model: str
    block: dict[str, Any]
    npus: int
    prompt: int
    response: int
    prompts: int = 64
    samples: int = 8
    num_nodes: int = 1


@dataclass(frozen=True)
class Found:
    """A layout that fits.

    Attributes:
        tree: its run file.
        values: the keys that the search chose, by dotted name.
        trainers: dies that train where the engines have the others; None where all do both in turn.
    """

    tree: dict[str, Any]
    values: dict[str, Any]
    memory: MemoryPlan
    time: TimePlan
    trainers: int | None = None


def base_tree(wanted: Wanted) -> dict[str, Any]:
    """Return the run file that the search fills in: GRPO with everything that costs nothing switched on."""
    is_moe = bool(wanted.block.get("num_experts"))
    return {
        "model": {wanted.model: wanted.block},
        "platform": "npu",
        "megatron_training": {
            "stage": "ray_grpo",
            "model": wanted.model,
            "global_batch_size": wanted.prompts,
            "train_iters": 100,
            "bf16": True,
            "use_distributed_optimizer": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "reset_attention_mask": True,
            "use_flash_attn": True,
            "use_fused_rmsnorm": True,
            "use_fused_swiglu": True,
            "use_fused_rotary_pos_emb": True,
        },
        "actor_config": {"model": wanted.model, "micro_batch_size": 1, "lr": 1e-6, "lr_decay_style": "constant"},
        "rl_config": {
            "actor_resource": {"num_npus": wanted.npus},
            "n_samples_per_prompt": wanted.samples,
            "mini_batch_size": wanted.prompts,
            "max_prompt_length": wanted.prompt,
            "init_kl_coef": 0.001,
            "use_remove_padding": True,
            "use_dynamic_bsz": True,
            "rule_reward": True,
            "verifier_function": ["math_verify_reward"],
            "verifier_weight": [1.0],
        },
        "generate_config": {
            "max_model_len": wanted.prompt + wanted.response,
            "max_num_batched_tokens": max(8192, wanted.prompt + wanted.response),
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "offload_train_optimizer": True,
            "offload_train_grad": True,
            "offload_train_param": True,
            "sampling_config": {"max_tokens": wanted.response, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        }
        | ({"enable_expert_parallel": True} if is_moe else {}),
    }


def fit(wanted: Wanted, chip: Chip, efficiency: Efficiency | None = None, *, mean_response: float | None = None) -> list[Found]:
    """Return layouts that fit, the fastest first; those that fit with room before those that are tight.

    Raises:
        ValueError: nothing fits; the message has what came nearest.
    """
    nearest: list[tuple[int, MemoryPlan]] = []
    found = _searched(wanted, None, chip, efficiency, mean_response, nearest)
    for part in (2, 4):  # the engines on half of the dies, or on all but a quarter
        if wanted.npus % part == 0 and wanted.npus >= 2 * part:
            trainers = wanted.npus // part
            found += _searched(wanted, trainers, chip, efficiency, mean_response, nearest)
    if not found:
        raise ValueError(_nothing(wanted, chip, nearest))
    return sorted(found, key=_rank)


def _rank(one: Found) -> tuple[int, int, int, float]:
    """What fits before what is tight, faster before slower; where times are within a twentieth, fewer splits of the model."""
    split = math.prod(int(one.values.get(f"actor_config.{name}_parallel_size", 1)) for name in _SPLITS[:3])
    return VERDICTS.index(one.memory.verdict), round(math.log(one.time.total) / 0.05), split, one.time.total


def _searched(
    wanted: Wanted,
    trainers: int | None,
    chip: Chip,
    efficiency: Efficiency | None,
    mean_response: float | None,
    nearest: list[tuple[int, MemoryPlan]],
) -> list[Found]:
    """Layouts with everything on all dies in turn, or with training on `trainers` of them and the engines on the others.

    Args:
        nearest: gets the bytes of what does not fit.
    """
    tree = base_tree(wanted)
    if trainers is not None:
        tree = with_values(tree, _apart(trainers, wanted.npus - trainers))
    engines = _rollouts(tree, wanted, wanted.npus - (trainers or 0), chip, efficiency, mean_response)
    if not engines:
        return []
    layouts: list[tuple[int, float, dict[str, Any]]] = []
    for values in _training_layouts(wanted, trainers or wanted.npus, chip):
        # the engine's share is out of the way while the model trains, so that any engine serves to look at training
        planned = _planned(tree, values | engines[0][1], chip, wanted, efficiency, mean_response, ("generate", "start"))
        if planned is None:
            continue
        memory, time = planned
        if not _acceptable(memory):
            nearest.append((memory.fullest.peak.total, memory))
            continue
        layouts.append((VERDICTS.index(memory.verdict), sum(time.phases.get(name, 0.0) for name in _TRAINING), values))
    layouts.sort(key=lambda one: one[:2])
    found: list[Found] = []
    for train, (_, serve) in itertools.product(_varied(layouts), engines[:4]):
        best: Found | None = None
        for share in (share for share in _SHARES if share <= serve[_SHARE]):
            values = train | serve | {_SHARE: share}
            planned = _planned(tree, values, chip, wanted, efficiency, mean_response)
            if planned is not None and _acceptable(planned[0]):
                fits = planned[0].verdict == "fits"
                best = Found(with_values(tree, values), values, *planned, trainers) if fits or best is None else best
                if fits:
                    break
        if best is not None:
            found.append(best)
    return found


def _apart(trainers: int, engines: int) -> dict[str, Any]:
    """Engines on dies of their own generate for the next iteration while this one trains."""
    return {
        "rl_config.use_integrated_worker": False,
        "rl_config.actor_resource.num_npus": trainers,
        "rl_config.rollout_resource": {"num_npus": engines},
        "rl_config.trainer_mode": "one_step_off",
        **{f"generate_config.offload_train_{part}": False for part in ("optimizer", "grad", "param")},
    }


def _nothing(wanted: Wanted, chip: Chip, nearest: list[tuple[int, MemoryPlan]]) -> str:
    text = f"--npus: {wanted.model} with sequences of {wanted.prompt + wanted.response} tokens does not fit on {wanted.npus}"
    text += f" dies of {chip.memory / (1 << 30):.0f} GiB"
    if not nearest:
        return f"{text}: no engine does, or no layout keeps the rules; another number of dies, or another batch, may."
    total, memory = min(nearest, key=lambda one: one[0])
    return f"{text}; the nearest layout takes {total / (1 << 30):.0f} GiB in phase {memory.fullest.peak.name}."


def _acceptable(memory: MemoryPlan) -> bool:
    """It fits as it is computed, and by the error of what is modelled at least perhaps."""
    return memory.verdict in ("fits", "tight")


def _varied(trainers: list[tuple[int, float, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The best few, each split of the model once."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, _, values in trainers:
        kept.setdefault(tuple(values.get(f"actor_config.{name}_parallel_size") for name in _SPLITS), values)
    return list(kept.values())[:_KEPT]


def _planned(
    tree: dict[str, Any],
    values: dict[str, Any],
    chip: Chip,
    wanted: Wanted,
    efficiency: Efficiency | None,
    mean_response: float | None,
    without: tuple[str, ...] = (),
) -> tuple[MemoryPlan, TimePlan] | None:
    """None where the values break a rule. Phases named in `without` do not count."""
    cfg = _sound(tree, values, wanted.num_nodes)
    if cfg is None:
        return None
    try:
        memory = plan_memory(cfg, chip, wanted.num_nodes)
        time = plan_time(cfg, chip, wanted.num_nodes, samples=SampleMeans(mean_response), efficiency=efficiency)
    except ValueError:
        return None
    return memory.without(without) if without else memory, time


def _sound(tree: dict[str, Any], values: dict[str, Any], num_nodes: int) -> RunConfig | None:
    try:
        cfg = build_run_config(with_values(tree, values), config_name="fit")
    except ConfigError:
        return None
    return None if validate(cfg, num_nodes) or unavailable(cfg) else cfg


# ---------------------------------------------------------------------- what is tried


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _training_layouts(wanted: Wanted, npus: int, chip: Chip) -> Iterator[dict[str, Any]]:
    layers, experts = int(wanted.block["num_layers"]), int(wanted.block.get("num_experts") or 0)
    node = min(chip.devices_per_node, 16)
    longest = wanted.prompt + wanted.response
    for tp, pp, cp in itertools.product(_powers(min(node, npus)), _powers(32), (1, 2, 4, 8)):
        if npus % (tp * pp * cp) or pp > layers or (cp > 1 and longest / cp < 1024):
            continue
        stage = npus // pp
        for ep in _powers(min(experts, stage)) if experts else (1,):
            if experts % ep or stage % ep:
                continue
            base: dict[str, Any] = {
                "actor_config.tensor_model_parallel_size": tp,
                "actor_config.pipeline_model_parallel_size": pp,
                "actor_config.context_parallel_size": cp,
            }
            if tp > 1:
                base["actor_config.sequence_parallel"] = True
            if experts:
                base |= {"actor_config.expert_model_parallel_size": ep, "actor_config.expert_tensor_parallel_size": 1}
            if layers % pp:
                base["actor_config.num_layer_list"] = ",".join(str(count) for count in _even(layers, pp))
            yield from _memory_choices(base, layers, pp, longest)


def _memory_choices(base: dict[str, Any], layers: int, pp: int, longest: int) -> Iterator[dict[str, Any]]:
    chunks: list[int | None] = [None]
    if pp > 1 and layers % pp == 0:
        chunks += [layers // pp // 2] if layers // pp % 2 == 0 and layers // pp > 1 else []
    full = {
        "actor_config.recompute_granularity": "full",
        "actor_config.recompute_method": "uniform",
        "actor_config.recompute_num_layers": 1,
    }
    for chunk, recompute, factor, swap in itertools.product(chunks, ({}, full), (1, 2), (False, True)):
        values = {**base, **recompute, "rl_config.max_packing_token_size": longest * factor}
        if chunk is not None:
            values["actor_config.num_layers_per_virtual_pipeline_stage"] = chunk
        if swap:
            if factor > 1 or chunk is not None:
                continue  # where memory is that short, larger micro-batches are no choice
            values["actor_config.swap_optimizer"] = True
        yield values


def _even(layers: int, stages: int) -> list[int]:
    """Layers of each stage; the first and the last, which hold the vocabulary, get the fewer."""
    least, more = divmod(layers, stages)
    counts = [least] * stages
    for place in range(more):
        counts[(place + 1) % stages] += 1
    return counts


def _rollouts(
    tree: dict[str, Any], wanted: Wanted, npus: int, chip: Chip, efficiency: Efficiency | None, mean_response: float | None
) -> list[tuple[float, dict[str, Any]]]:
    """Seconds and keys of the engines that fit, the fastest first."""
    found: list[tuple[float, dict[str, Any]]] = []
    experts = int(wanted.block.get("num_experts") or 0)
    alone = {
        "actor_config.tensor_model_parallel_size": 1,
        "actor_config.pipeline_model_parallel_size": 1,
        "rl_config.max_packing_token_size": wanted.prompt + wanted.response,
    }
    for tensor in _powers(min(16, npus, chip.devices_per_node)):
        replicas = npus // tensor
        if npus % tensor:
            continue
        for sharing in _powers(replicas) if experts else (1,):
            for share in _SHARES:
                sequences = min(256, max(1, math.ceil(wanted.prompts * wanted.samples / replicas)))
                values: dict[str, Any] = {
                    "generate_config.infer_tensor_parallel_size": tensor,
                    _SHARE: share,
                    "generate_config.max_num_seqs": sequences,
                }
                if experts:
                    values["generate_config.infer_expert_parallel_size"] = sharing
                planned = _planned(tree, alone | values, chip, wanted, efficiency, mean_response)
                if planned is None:
                    continue
                memory, time = planned
                generate = memory.only("generate")
                engines = tuple(dies for dies in generate.dies if dies.name == "rollout")
                if replace(generate, dies=engines or generate.dies).verdict == "fits":
                    found.append((time.phases["rollout"] + time.phases["resharding_to_infer"], values))
                    break  # with less of the device it would only be slower
    return sorted(found, key=lambda one: one[0])
