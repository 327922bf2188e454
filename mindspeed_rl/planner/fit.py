"""Layouts of a model on a number of devices: those that fit, the fastest first, and the best one as a run file.

Training layouts and rollout layouts are searched one after the other, since they share a device in time and not in space; the
fastest few of each that fit are combined and planned together.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR
from mindspeed_rl.config.device_limits import HEAD_ROWS
from mindspeed_rl.config.errors import suggest_name
from mindspeed_rl.config.keys.megatron import MegatronConfig
from mindspeed_rl.config.keys.model import ModelKeys
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, find_project_configs
from mindspeed_rl.models.model_keys import fill_model_keys
from mindspeed_rl.models.plan import read_model
from mindspeed_rl.planner.devices import GIB, Device
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.memory import MemoryPlan, plan_memory
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.validation import is_valid, unavailable

#: verdicts of layouts that may be printed
_ACCEPTED = ("fits", "tight")
_MAX_TRAINING_LAYOUTS = 10
#: layouts of which training state is left on the device where there is room
_MAX_RELAXED = 5
_CHUNKED_HEAD: dict[str, object] = {"actor_config.loss_vocab_chunk_size": HEAD_ROWS}
_HALF_GRADIENTS: dict[str, object] = {"actor_config.grad_reduce_in_fp32": False}
#: keys that save memory and cost time: a layout that does not fit gets one entry, and computes the vocabulary in chunks
_SAVERS: tuple[dict[str, object], ...] = (
    # parts of a swapped optimizer, of which one is on the device at a time
    {"actor_config.swap_optimizer": True, "actor_config.swap_optimizer_times": 64},
    {"actor_config.optimizer_offload_fraction": 0.5},
    {"actor_config.optimizer_offload_fraction": 1.0},
)
#: the same where that is not enough: gradients are rounded
_ROUNDING_SAVERS: tuple[dict[str, object], ...] = (
    _HALF_GRADIENTS,
    {"actor_config.optimizer_offload_fraction": 0.5, **_HALF_GRADIENTS},
    {"actor_config.optimizer_offload_fraction": 1.0, **_HALF_GRADIENTS},
)
_STREAMED: dict[str, object] = {"actor_config.stream_ref_weights": True}
#: parts of the training state that may stay on the device while the engine generates, the most first
_RESIDENT = (("optimizer", "grad", "param"), ("grad", "param"), ("param",))
#: fractions of the device's memory that an engine may take
_FRACTIONS = (0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_FRACTION = "generate_config.gpu_memory_utilization"
_SPLITS = ("tensor_model", "pipeline_model", "context", "expert_model")
_TRAINING = ("reference_model", "old_log_p", "update", "offload")

#: keys that a user has to set, each with an example value
_EXAMPLES = (
    ("megatron_training", "data_path", "./dataset/deepscaler/data"),
    ("megatron_training", "dataset_additional_keys", ["labels"]),
    ("megatron_training", "tokenizer_name_or_path", "./models/{model}"),
    ("actor_config", "load", "./models/{model}"),
    ("actor_config", "save", "./ckpt/{model}"),
    ("actor_config", "finetune", True),
)

#: values of keys, by dotted name
_Values = dict[str, object]
#: (index of a verdict, seconds, values) of a training layout
_Ranked = tuple[int, float, _Values]


@dataclass(frozen=True)
class FitRequest:
    """A model and the run that it must fit.

    Attributes:
        block: the model block's keys, of which `model` is the name.
        prompt, response: maximum tokens.
        prompts, samples: number of prompts of an iteration, and of samples of a prompt.
        stage: one of STAGES.
        folder: Hugging Face folder whose config.json has the model's shape; None for a model block.
    """

    model: str
    block: dict[str, Any]
    npus: int
    prompt: int
    response: int
    prompts: int = 64
    samples: int = 8
    num_nodes: int = 1
    stage: str = "GRPO"
    folder: str | None = None

    @property
    def max_len(self) -> int:
        """Maximum tokens of a sequence."""
        return self.prompt + self.response


@dataclass(frozen=True)
class FitResult:
    """A layout that fits.

    Attributes:
        tree: its run file.
        values: the keys that the search chose, by dotted name.
        trainers: devices that train where the engines have the others; None where all do both in turn.
    """

    tree: dict[str, Any]
    values: _Values
    memory: MemoryPlan
    time: TimePlan
    trainers: int | None = None


_LORA = {"lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"], "lora_r": 16, "lora_alpha": 32}


def _keep(tree: dict[str, Any]) -> dict[str, Any]:
    return tree


def _train_adapters(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the run file with adapters on all linear layers; the weights below them are the reference."""
    tree["actor_config"] |= _LORA
    if "rl_config" in tree:
        tree["rl_config"] |= {"share_backbone": True}
    return tree


def _add_critic(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the run file of PPO: a critic of the same model, on the same devices."""
    tree["megatron_training"]["stage"] = "ray_ppo"
    tree["critic_config"] = dict(tree["actor_config"])
    tree["rl_config"] |= {"adv_estimator": CRITIC_ESTIMATOR}
    return tree


def _drop_rollouts(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the run file of SFT on rows as long as the samples of a rollout."""
    rl, generate = tree.pop("rl_config"), tree.pop("generate_config")
    tree["megatron_training"] |= {
        "stage": "sft",
        "num_npus": rl["actor_resource"]["num_npus"],
        "global_batch_size": rl["n_samples_per_prompt"] * tree["megatron_training"]["global_batch_size"],
        "seq_length": generate["max_model_len"],
    }
    return tree


#: stage of `plan smallest` -> what makes its run file from GRPO's
STAGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "SFT with LoRA": lambda tree: _train_adapters(_drop_rollouts(tree)),
    "SFT": _drop_rollouts,
    "GRPO with LoRA": _train_adapters,
    "GRPO": _keep,
    "PPO": _add_critic,
}


def _build_base_tree(request: FitRequest) -> dict[str, Any]:
    """Return the run file that the search completes, of the request's stage, with every feature that costs nothing."""
    return STAGES[request.stage](build_grpo_tree(request))


def build_grpo_tree(request: FitRequest) -> dict[str, Any]:
    """Return the run file of GRPO of a request's model, with every feature that costs nothing and no layout."""
    is_moe = bool(request.block.get("num_experts"))
    named = {"model": request.model} if request.folder is None else {}
    actor = named if request.folder is None else {"load": request.folder}
    return {
        **({"model": {request.model: request.block}} if request.folder is None else {}),
        "platform": "npu",
        "megatron_training": {
            "stage": "ray_grpo",
            **named,
            "global_batch_size": request.prompts,
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
        "actor_config": {**actor, "micro_batch_size": 1, "lr": 1e-6, "lr_decay_style": "constant"},
        "rl_config": {
            "actor_resource": {"num_npus": request.npus},
            "n_samples_per_prompt": request.samples,
            "mini_batch_size": request.prompts,
            "max_prompt_length": request.prompt,
            "init_kl_coef": 0.001,
            "use_remove_padding": True,
            "use_dynamic_bsz": True,
            "rule_reward": True,
            "verifier_function": ["math_verify_reward"],
            "verifier_weight": [1.0],
        },
        "generate_config": {
            "max_model_len": request.max_len,
            "max_num_batched_tokens": max(8192, request.max_len),
            "dtype": "bfloat16",
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "offload_train_optimizer": True,
            "offload_train_grad": True,
            "offload_train_param": True,
            "sampling_config": {"max_tokens": request.response, "temperature": 1.0, "top_p": 1.0, "top_k": -1},
        }
        | ({"enable_expert_parallel": True} if is_moe else {}),
    }


def fit(
    request: FitRequest, device: Device, efficiency: Efficiency | None = None, *, samples: SampleMeans | None = None
) -> list[FitResult]:
    """Search layouts that fit, the fastest first; those with the verdict "fits" before those that are "tight".

    Raises:
        ValueError: nothing fits; the message has the layout with the fewest bytes.
    """
    search = _Search(request, device, efficiency, samples)
    results = search.find_layouts(None)
    for part in (2, 4):  # the engines on half of the devices, or on all but a quarter
        if request.npus % part == 0 and request.npus >= 2 * part:
            results += search.find_layouts(request.npus // part)
    if not results:
        raise ValueError(search.explain_failure())
    results.sort(key=_rank)
    results[:_MAX_RELAXED] = (search.keep_resident(result) for result in results[:_MAX_RELAXED])
    return sorted(results, key=_rank)


def _rank(result: FitResult) -> tuple[int, int, bool, int, float]:
    """Return the sorting key: verdict, seconds, and where they are within 5 %, fp32 gradients and fewer splits of the model."""
    sizes = (result.values.get(f"actor_config.{name}_parallel_size", 1) for name in _SPLITS[:3])
    split = math.prod(int(str(size)) for size in sizes)
    verdict, seconds = MemoryPlan.VERDICTS.index(result.memory.verdict), result.time.total
    return verdict, round(math.log(seconds) / 0.05), result.values.keys() >= _HALF_GRADIENTS.keys(), split, seconds


class _Search:
    """One model on one number of devices.

    Attributes:
        smallest: the plan with the fewest bytes of those that do not fit.
        engine_problem: why the engine with the most room fits on no device; "" where one does.
    """

    def __init__(self, request: FitRequest, device: Device, efficiency: Efficiency | None, samples: SampleMeans | None) -> None:
        self._request, self._device, self._efficiency, self._samples = request, device, efficiency, samples
        self.smallest: MemoryPlan | None = None
        self.engine_problem = ""

    def find_layouts(self, trainers: int | None) -> list[FitResult]:
        """Search with all phases on all devices, or training on `trainers` of them and the engines on the others."""
        request = self._request
        tree = _build_base_tree(request)
        if "generate_config" not in tree:
            return self._find_supervised(tree) if trainers is None else []
        if trainers is not None:  # engines on dedicated devices generate for the next iteration while this one trains
            values: _Values = {
                "rl_config.use_integrated_worker": False,
                "rl_config.actor_resource.num_npus": trainers,
                "rl_config.rollout_resource": {"num_npus": request.npus - trainers},
                "rl_config.trainer_mode": "one_step_off",
                **{f"generate_config.offload_train_{part}": False for part in ("optimizer", "grad", "param")},
            }
            tree = apply_values(tree, values)
        engines = self._find_engines(tree, request.npus - (trainers or 0))
        if not engines:
            return []
        training = self._find_training(tree, trainers or request.npus, engines[0])
        pairs = itertools.product(training, engines[:4])
        results = (self._combine(tree, train, serve, trainers) for train, serve in pairs)
        return [result for result in results if result is not None]

    def _find_supervised(self, tree: dict[str, Any]) -> list[FitResult]:
        """Search the layouts of a run without rollouts."""
        results: list[FitResult] = []
        for values in self._find_training(tree, self._request.npus, {}):
            plans = self._plan(tree, values)
            assert plans is not None  # it was planned before
            results.append(FitResult(_apply_layout(tree, values), values, *plans))
        return results

    def explain_failure(self) -> str:
        """Return the reason why no layout fits."""
        request, memory = self._request, self._device.memory / GIB
        text = (
            f"--npus: {request.model} with sequences of {request.max_len} tokens does not fit on {request.npus} devices of "
            f"{memory:.0f} GiB"
        )
        if self.smallest is None and self.engine_problem:
            return f"{text}: no engine does in phase generate; {self.engine_problem}."
        if self.smallest is None:
            return f"{text}: no layout keeps the rules; another number of devices, or another batch, may."
        return f"{text}; {_describe_peak(self.smallest)}."

    def keep_resident(self, result: FitResult) -> FitResult:
        """Return the layout, with training state that stays on the device during generation where that fits and is faster."""
        tree = _build_base_tree(self._request)
        if result.trainers is not None or "generate_config" not in tree:
            return result
        limit = float(str(result.values[_FRACTION]))
        for names, fraction in itertools.product(_RESIDENT, (fraction for fraction in _FRACTIONS if fraction <= limit)):
            kept: _Values = {f"generate_config.offload_train_{name}": False for name in names}
            values = result.values | kept | {_FRACTION: fraction}
            plans = self._plan(tree, values)
            if plans is not None and plans[0].verdict == "fits" and plans[1].total < result.time.total:
                return FitResult(_apply_layout(tree, values), values, *plans)
        return result

    def _find_engines(self, tree: dict[str, Any], npus: int) -> list[_Values]:
        """Return the keys of the engines that fit on so many devices, the fastest first."""
        request = self._request
        experts = int(request.block.get("num_experts") or 0)
        # a training layout that keeps the rules on any number of devices: only the engine's phases matter here
        fixed: _Values = {
            "actor_config.tensor_model_parallel_size": 1,
            "actor_config.pipeline_model_parallel_size": 1,
            "rl_config.max_packing_token_size": request.max_len,
        }
        ranked: list[tuple[float, _Values]] = []
        for tensor in _powers(min(16, npus, self._device.devices_per_node)):
            if npus % tensor:
                continue
            replicas = npus // tensor
            for sharing in _powers(replicas) if experts else (1,):
                values: _Values = {
                    "generate_config.infer_tensor_parallel_size": tensor,
                    "generate_config.max_num_seqs": min(256, max(1, math.ceil(request.prompts * request.samples / replicas))),
                    **({"generate_config.infer_expert_parallel_size": sharing} if experts else {}),
                }
                for fraction in _FRACTIONS:
                    plans = self._plan(tree, fixed | values | {_FRACTION: fraction})
                    if plans is None:
                        continue
                    memory, time = plans
                    generate = memory.only("generate")
                    groups = tuple(group for group in generate.groups if group.name == "rollout") or generate.groups
                    if fraction == _FRACTIONS[0]:  # of the engine over the most devices
                        self.engine_problem = "; ".join(memory.problems) or _describe_peak(generate)
                    if replace(generate, groups=groups).verdict == "fits":
                        seconds = time.phases["rollout"] + time.phases["resharding_to_infer"]
                        ranked.append((seconds, values | {_FRACTION: fraction}))
                        break  # with less of the device it would only be slower
        if ranked:
            self.engine_problem = ""
        return [values for _, values in sorted(ranked, key=lambda entry: entry[0])]

    def _find_training(self, tree: dict[str, Any], npus: int, engine: _Values) -> list[_Values]:
        """Return the keys of the fastest training layouts that fit, the fastest first, one for each split of the model.

        Args:
            tree: the run file to complete.
            npus: devices that train.
            engine: keys of any engine that fits; its memory is free while the model trains.
        """
        ranked: list[_Ranked] = []
        streams = "rl_config" in tree and not tree["generate_config"]["offload_train_param"]
        request, fits = self._request, MemoryPlan.VERDICTS[0]
        for base, layers, pp in _list_splits(request, npus, self._device):
            stages: tuple[Iterable[_Values], ...] = (
                _vary_memory(base, layers, pp, request),
                _save_memory(base, request, _SAVERS, streams=streams),
                _save_memory(base, request, _ROUNDING_SAVERS, streams=streams),
            )
            for index, variants in enumerate(stages):
                # what does not fit with the least memory is not tried with more
                if index == 1 and self._rank_training(tree, _save_most(base, request, streams=streams), engine) is None:
                    break
                tried = [self._rank_training(tree, values, engine) for values in variants]
                accepted = [entry for entry in tried if entry is not None]
                ranked += accepted
                if any(MemoryPlan.VERDICTS[verdict] == fits for verdict, _, _ in accepted):
                    break
        fastest: dict[tuple[object, ...], _Values] = {}
        for _, _, values in sorted(ranked, key=lambda entry: entry[:2]):
            fastest.setdefault(tuple(values.get(f"actor_config.{name}_parallel_size") for name in _SPLITS), values)
        return list(fastest.values())[:_MAX_TRAINING_LAYOUTS]

    def _rank_training(self, tree: dict[str, Any], values: _Values, engine: _Values) -> _Ranked | None:
        """Return the rank of a training layout; None where it breaks a rule or does not fit."""
        plans = self._plan(tree, values | engine)
        if plans is None:
            return None
        memory, time = plans[0].without(("generate",)), plans[1]
        if memory.verdict not in _ACCEPTED:
            self._note(memory)
            return None
        return MemoryPlan.VERDICTS.index(memory.verdict), sum(time.phases.get(name, 0.0) for name in _TRAINING), values

    def _combine(self, tree: dict[str, Any], train: _Values, serve: _Values, trainers: int | None) -> FitResult | None:
        """Return both with the largest fraction of memory for the engine with which they fit, else are tight."""
        best: FitResult | None = None
        for fraction in _FRACTIONS:
            if fraction > float(str(serve[_FRACTION])):
                continue
            values = train | serve | {_FRACTION: fraction}
            plans = self._plan(tree, values)
            if plans is None:
                continue
            if plans[0].verdict not in _ACCEPTED:
                self._note(plans[0])
                continue
            result = FitResult(_apply_layout(tree, values), values, *plans, trainers)
            if plans[0].verdict == "fits":
                return result
            best = best or result
        return best

    def _note(self, memory: MemoryPlan) -> None:
        """Keep the plan of a layout that does not fit, where it is the nearest so far."""
        if self.smallest is None or memory.fullest.peak.total < self.smallest.fullest.peak.total:
            self.smallest = memory

    def _plan(self, tree: dict[str, Any], values: _Values) -> tuple[MemoryPlan, TimePlan] | None:
        """Plan a layout; None where the values break a rule."""
        nodes = self._request.num_nodes
        try:
            run = draft(build_run_config(_apply_layout(tree, values), config_name="fit"), nodes)
            if not is_valid(run) or unavailable(run):
                return None
            memory = plan_memory(run, self._device)
            return memory, plan_time(run, self._device, samples=self._samples, efficiency=self._efficiency)
        except ValueError:  # a ConfigError is one
            return None


def _describe_peak(memory: MemoryPlan) -> str:
    """Return the bytes of the fullest phase of the nearest layout as text."""
    peak = memory.fullest.peak
    return f"the nearest layout takes {peak.total / GIB:.0f} GiB in phase {peak.name}"


def _apply_layout(tree: dict[str, Any], values: _Values) -> dict[str, Any]:
    """Return the run file with these values; the layout of the actor is the critic's too."""
    actor = {name: value for name, value in values.items() if name.startswith("actor_config.")}
    shared = {name.replace("actor_config", "critic_config", 1): value for name, value in actor.items()}
    return apply_values(tree, values | (shared if "critic_config" in tree else {}))


# ---------------------------------------------------------------------- candidates


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]


def _list_splits(request: FitRequest, npus: int, device: Device) -> Iterator[tuple[_Values, int, int]]:
    """Yield each split of the model over so many devices, with the number of its layers and of its stages."""
    layers, experts = int(request.block["num_layers"]), int(request.block.get("num_experts") or 0)
    node = min(device.devices_per_node, 16)
    for tp, pp, cp in itertools.product(_powers(min(node, npus)), _powers(32), (1, 2, 4, 8)):
        if npus % (tp * pp * cp) or pp > layers or (cp > 1 and request.max_len / cp < 1024):
            continue
        stage = npus // pp
        for ep in _powers(min(experts, stage)) if experts else (1,):
            if experts % ep or stage % ep:
                continue
            values: _Values = {
                "actor_config.tensor_model_parallel_size": tp,
                "actor_config.pipeline_model_parallel_size": pp,
                "actor_config.context_parallel_size": cp,
            }
            if tp > 1:
                values["actor_config.sequence_parallel"] = True
            if experts:
                values |= {"actor_config.expert_model_parallel_size": ep, "actor_config.expert_tensor_parallel_size": 1}
            if layers % pp:
                counts = [layers // pp] * pp
                # the first stage and the last, which have the vocabulary, get fewer layers
                for index in range(layers % pp):
                    counts[(index + 1) % pp] += 1
                values["actor_config.num_layer_list"] = ",".join(str(count) for count in counts)
            yield values, layers, pp


_RECOMPUTED: _Values = {
    "actor_config.recompute_granularity": "full",
    "actor_config.recompute_method": "uniform",
    "actor_config.recompute_num_layers": 1,
}


def _vary_memory(base: _Values, layers: int, pp: int, request: FitRequest) -> Iterator[_Values]:
    """Yield the layout with virtual stages, recomputation and larger micro-batches, on and off."""
    chunks: list[int | None] = [None]
    if pp > 1 and layers % pp == 0 and layers // pp % 2 == 0:
        chunks.append(layers // pp // 2)
    for chunk, recompute, factor in itertools.product(chunks, ({}, _RECOMPUTED), (1, 2)):
        values = {**base, **recompute, **_size_micro_batches(request, factor)}
        if chunk is not None:
            values["actor_config.num_layers_per_virtual_pipeline_stage"] = chunk
        yield values


def _save_memory(base: _Values, request: FitRequest, savers: Sequence[_Values], *, streams: bool) -> Iterator[_Values]:
    """Yield the layout with what saves memory; where memory is that short, larger micro-batches are not a choice.

    Args:
        savers: keys of which each variant has one entry.
        streams: also with the reference in host memory, which otherwise is on the device during an update.
    """
    for recompute, saver, streamed in itertools.product(({}, _RECOMPUTED), savers, ({}, _STREAMED) if streams else ({},)):
        yield {**base, **recompute, **_size_micro_batches(request, 1), **_CHUNKED_HEAD, **saver, **streamed}


def _save_most(base: _Values, request: FitRequest, *, streams: bool) -> _Values:
    """Return the layout of `_save_memory` that needs the least memory."""
    return list(_save_memory(base, request, _ROUNDING_SAVERS[-1:], streams=streams))[-1]


def _size_micro_batches(request: FitRequest, factor: int) -> _Values:
    """Return the keys of micro-batches of so many sequences of the maximum length."""
    if request.stage.startswith("SFT"):
        return {"actor_config.micro_batch_size": factor}
    return {"rl_config.max_packing_token_size": request.max_len * factor}


# ---------------------------------------------------------------------- run files


def read_folder(folder: Path) -> dict[str, Any]:
    """Return the keys of a model block that describe the model of a folder.

    Raises:
        ValueError: its config.json is of no supported model.
    """
    _, model_config, _ = read_model(folder)
    config = MegatronConfig(num_layers=model_config.num_layers)
    filled = fill_model_keys(config, model_config, folder / "config.json", frozenset())
    defaults = MegatronConfig()
    values = {field.name: getattr(filled, field.name) for field in fields(ModelKeys)}
    return {name: value for name, value in values.items() if value is not None and value != getattr(defaults, name)}


def read_block(name: str, config_dir: str | None) -> dict[str, Any]:
    """Return the keys of a model block.

    Raises:
        ValueError: the block does not exist; the nearest name is given.
    """
    import yaml  # here, as in run_files: help and errors need no YAML

    folders = [Path(config_dir)] if config_dir is not None else [find_project_configs(), Path.cwd() / "configs", Path.cwd()]
    for folder in folders:
        path = folder / "model" / f"{name}.yaml"
        if path.is_file():
            block = yaml.safe_load(path.read_text(encoding="utf-8"))
            if not isinstance(block, dict) or not isinstance(block.get(name), dict):
                raise ValueError(f"--model: {path} has no block {name}.")
            return block[name]
    known = sorted(path.stem for folder in folders for path in (folder / "model").glob("*.yaml"))
    likely = suggest_name(name, known)
    hint = f"the nearest name is {likely}" if likely else f"known are {', '.join(known) or 'none'}"
    raise ValueError(f"--model: there is no model block {name!r}, and no folder with a config.json; {hint}.")


def format_run_file(request: FitRequest, result: FitResult) -> str:
    """Return a layout as the text of a run file; paths of data and weights are examples."""
    peak, time = result.memory.fullest.peak, result.time
    lines = [
        f"# GRPO of {request.model} on {request.npus} devices of {result.memory.device}, found by `mindspeed-rl plan fit`:",
        f"# about {peak.total / GIB:.0f} GiB a device in phase {peak.name}, {time.format_bounds(time.total)} s an iteration. "
        "Paths of data and weights are examples.",
        *(["defaults:", f"  - model: [{request.model}]"] if request.folder is None else []),
    ]
    tree = {name: dict(group) for name, group in result.tree.items() if isinstance(group, Mapping) and name != "model"}
    for group, key, value in _EXAMPLES:
        tree[group][key] = value.format(model=request.model) if isinstance(value, str) else value
    if request.folder is not None:
        tree["megatron_training"]["tokenizer_name_or_path"] = tree["actor_config"]["load"] = request.folder
    lines += ["", f"platform: {result.tree['platform']}"]
    for name, group in tree.items():
        lines += ["", f"{name}:", *_format_group(group, 1)]
    return "\n".join(lines) + "\n"


def _format_group(group: Mapping[str, object], depth: int) -> Iterator[str]:
    for name, value in group.items():
        if isinstance(value, Mapping):
            yield "  " * depth + f"{name}:"
            yield from _format_group(value, depth + 1)
        else:
            # every JSON value is YAML, except numbers like 1e-06, which YAML reads as text without a point
            text = f"{value:.1e}" if isinstance(value, float) and 0 < value < 1e-3 else json.dumps(value)
            yield "  " * depth + f"{name}: {text}"
