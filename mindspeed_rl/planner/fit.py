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

from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.rules.validation import is_valid, unavailable
from mindspeed_rl.config.run_files import with_values
from mindspeed_rl.planner.devices import GIB, Device
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.memory import VERDICTS, MemoryPlan, plan_memory
from mindspeed_rl.planner.samples import UNKNOWN, SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time

#: what may be printed: it fits as it is computed
_ACCEPTED = ("fits", "tight")
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
        trainers: devices that train where the engines have the others; None where all do both in turn.
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


def fit(wanted: Wanted, device: Device, efficiency: Efficiency | None = None, *, samples: SampleMeans = UNKNOWN) -> list[Found]:
    """Return layouts that fit, the fastest first; those that fit with room before those that are tight.

    Raises:
        ValueError: nothing fits; the message has what came nearest.
    """
    search = _Search(wanted, device, efficiency, samples)
    found = search.layouts(None)
    for part in (2, 4):  # the engines on half of the devices, or on all but a quarter
        if wanted.npus % part == 0 and wanted.npus >= 2 * part:
            found += search.layouts(wanted.npus // part)
    if not found:
        raise ValueError(search.nothing())
    return sorted(found, key=_rank)


def _rank(one: Found) -> tuple[int, int, int, float]:
    """What fits before what is tight, faster before slower; where times are within a twentieth, fewer splits of the model."""
    split = math.prod(int(one.values.get(f"actor_config.{name}_parallel_size", 1)) for name in _SPLITS[:3])
    return VERDICTS.index(one.memory.verdict), round(math.log(one.time.total) / 0.05), split, one.time.total


class _Search:
    """One model on one number of devices.

    Attributes:
        nearest: the plan with the fewest bytes of those that do not fit.
    """

    def __init__(self, wanted: Wanted, device: Device, efficiency: Efficiency | None, samples: SampleMeans) -> None:
        self._wanted, self._chip, self._efficiency, self._samples = wanted, device, efficiency, samples
        self.nearest: MemoryPlan | None = None

    def layouts(self, trainers: int | None) -> list[Found]:
        """Everything on all devices in turn, or training on `trainers` of them and the engines on the others."""
        wanted = self._wanted
        tree = base_tree(wanted)
        if trainers is not None:
            tree = with_values(tree, _apart(trainers, wanted.npus - trainers))
        engines = self._engines(tree, wanted.npus - (trainers or 0))
        if not engines:
            return []
        training = self._training(tree, trainers or wanted.npus, engines[0])
        pairs = itertools.product(_varied(training), engines[:4])
        found = (self._together(tree, train, serve, trainers) for train, serve in pairs)
        return [one for one in found if one is not None]

    def nothing(self) -> str:
        """Why there is no layout."""
        wanted = self._wanted
        length, memory = wanted.prompt + wanted.response, self._chip.memory / GIB
        text = (
            f"--npus: {wanted.model} with sequences of {length} tokens does not fit on {wanted.npus} devices of {memory:.0f} GiB"
        )
        if self.nearest is None:
            return f"{text}: no engine does, or no layout keeps the rules; another number of devices, or another batch, may."
        peak = self.nearest.fullest.peak
        return f"{text}; the nearest layout takes {peak.total / GIB:.0f} GiB in phase {peak.name}."

    def _engines(self, tree: dict[str, Any], npus: int) -> list[dict[str, Any]]:
        """Keys of the engines that fit on so many devices, the fastest first."""
        wanted = self._wanted
        found: list[tuple[float, dict[str, Any]]] = []
        # a training layout that keeps the rules on any number of devices: only the engine's phases are looked at here
        alone = {
            "actor_config.tensor_model_parallel_size": 1,
            "actor_config.pipeline_model_parallel_size": 1,
            "rl_config.max_packing_token_size": wanted.prompt + wanted.response,
        }
        for values in _engine_layouts(wanted, npus, self._chip):
            for share in _SHARES:
                planned = self._planned(tree, alone | values | {_SHARE: share})
                if planned is None:
                    continue
                memory, time = planned
                generate = memory.only("generate")
                own = tuple(devices for group in generate.groups if group.name == "rollout")
                if replace(generate, groups=own or generate.groups).verdict == "fits":
                    found.append((time.phases["rollout"] + time.phases["resharding_to_infer"], values | {_SHARE: share}))
                    break  # with less of the device it would only be slower
        return [values for _, values in sorted(found, key=lambda one: one[0])]

    def _training(self, tree: dict[str, Any], npus: int, engine: dict[str, Any]) -> list[dict[str, Any]]:
        """Keys of training layouts that fit, the fastest first.

        Args:
            engine: any that serves: its share is out of the way while the model trains.
        """
        found: list[tuple[int, float, dict[str, Any]]] = []
        for values in _training_layouts(self._wanted, npus, self._chip):
            planned = self._planned(tree, values | engine)
            if planned is None:
                continue
            memory, time = planned[0].without(("generate", "start")), planned[1]
            if memory.verdict in _ACCEPTED:
                seconds = sum(time.phases.get(name, 0.0) for name in _TRAINING)
                found.append((VERDICTS.index(memory.verdict), seconds, values))
            elif self.nearest is None or memory.fullest.peak.total < self.nearest.fullest.peak.total:
                self.nearest = memory
        return [values for _, _, values in sorted(found, key=lambda one: one[:2])]

    def _together(
        self, tree: dict[str, Any], train: dict[str, Any], serve: dict[str, Any], trainers: int | None
    ) -> Found | None:
        """Both with the largest share of the device for the engine with which they fit, else with which they are tight."""
        best: Found | None = None
        for share in (share for share in _SHARES if share <= serve[_SHARE]):
            values = train | serve | {_SHARE: share}
            planned = self._planned(tree, values)
            if planned is None or planned[0].verdict not in _ACCEPTED:
                continue
            found = Found(with_values(tree, values), values, *planned, trainers)
            if planned[0].verdict == "fits":
                return found
            best = best or found
        return best

    def _planned(self, tree: dict[str, Any], values: dict[str, Any]) -> tuple[MemoryPlan, TimePlan] | None:
        """None where the values break a rule."""
        nodes = self._wanted.num_nodes
        try:
            cfg = build_run_config(with_values(tree, values), config_name="fit")
            if not is_valid(cfg, nodes) or unavailable(cfg):
                return None
            memory = plan_memory(cfg, self._chip, nodes)
            return memory, plan_time(cfg, self._chip, nodes, samples=self._samples, efficiency=self._efficiency)
        except ValueError:  # a ConfigError is one
            return None


def _apart(trainers: int, engines: int) -> dict[str, Any]:
    """Engines on devices of their own generate for the next iteration while this one trains."""
    return {
        "rl_config.use_integrated_worker": False,
        "rl_config.actor_resource.num_npus": trainers,
        "rl_config.rollout_resource": {"num_npus": engines},
        "rl_config.trainer_mode": "one_step_off",
        **{f"generate_config.offload_train_{part}": False for part in ("optimizer", "grad", "param")},
    }


def _varied(training: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best few, each split of the model once."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for values in training:
        kept.setdefault(tuple(values.get(f"actor_config.{name}_parallel_size") for name in _SPLITS), values)
    return list(kept.values())[:_KEPT]


# ---------------------------------------------------------------------- what is tried


def _powers(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent <= most]


def _training_layouts(wanted: Wanted, npus: int, device: Device) -> Iterator[dict[str, Any]]:
    layers, experts = int(wanted.block["num_layers"]), int(wanted.block.get("num_experts") or 0)
    node = min(device.devices_per_node, 16)
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


def _engine_layouts(wanted: Wanted, npus: int, device: Device) -> Iterator[dict[str, Any]]:
    experts = int(wanted.block.get("num_experts") or 0)
    for tensor in _powers(min(16, npus, device.devices_per_node)):
        if npus % tensor:
            continue
        replicas = npus // tensor
        for sharing in _powers(replicas) if experts else (1,):
            yield {
                "generate_config.infer_tensor_parallel_size": tensor,
                "generate_config.max_num_seqs": min(256, max(1, math.ceil(wanted.prompts * wanted.samples / replicas))),
                **({"generate_config.infer_expert_parallel_size": sharing} if experts else {}),
            }
