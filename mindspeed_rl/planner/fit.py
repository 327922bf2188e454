"""Layouts of a model on a number of devices: those that fit, the fastest first, and the best one as a run file.

Training layouts and rollout layouts are searched one after the other, since they share a device in time and not in space; the
fastest few of each that fit are combined and planned together.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_rl.catalogue import CRITIC_ESTIMATOR
from mindspeed_rl.config.device_limits import HEAD_ROWS
from mindspeed_rl.config.keys.megatron import EngineName
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.planner.devices import GIB, Device, list_device_obstacles
from mindspeed_rl.planner.efficiency import Efficiency
from mindspeed_rl.planner.memory import MemoryPlan
from mindspeed_rl.planner.run_shape import read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan
from mindspeed_rl.planner.splits import ACCEPTED, SIZES, SoundRun, list_splits, plan_sound_memory, rank_plans
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.engine_limits import can_cache_prefixes
from mindspeed_rl.run.rules.validation import unavailable, validate

_MAX_TRAINING_LAYOUTS = 10
#: layouts of which training state is left on the device where there is room
_MAX_RELAXED = 5
#: layouts that break a rule, whose sentences are compared where all layouts do
_MAX_EXPLAINED = 8
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
_HOST_GRADIENTS: dict[str, object] = {"actor_config.offload_gradients": True}
#: the same of an engine of shards, whose gradients may be in host memory too
_SHARD_SAVERS: tuple[dict[str, object], ...] = ({"actor_config.swap_optimizer": True}, *_SAVERS[1:])


@dataclass(frozen=True)
class _EngineSavers:
    """Settings that save memory with a training engine; a layout gets one of them, and the last one saves most.

    Attributes:
        exact: without rounding.
        rounding: tried where these are not enough.
        streams: a reference can stay in host memory, from where its layers come in each of its passes.
    """

    exact: tuple[dict[str, object], ...]
    rounding: tuple[dict[str, object], ...] = ()
    streams: bool = False


#: training engine -> what saves memory with it
_ENGINE_SAVERS: dict[EngineName, _EngineSavers] = {
    "megatron": _EngineSavers(_SAVERS, _ROUNDING_SAVERS, streams=True),
    "fsdp": _EngineSavers((*_SHARD_SAVERS, _HOST_GRADIENTS, *(saver | _HOST_GRADIENTS for saver in _SHARD_SAVERS))),
}
#: platform of the run files that a search writes
_PLATFORM = "npu"
_STREAMED: dict[str, object] = {"actor_config.stream_ref_weights": True}
#: parts of the training state that may stay on the device while the engine generates, the most first
_RESIDENT = (("optimizer", "grad", "param"), ("grad", "param"), ("param",))
#: fractions of the device's memory that an engine may take
_FRACTIONS = (0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
_FRACTION = "generate_config.gpu_memory_utilization"
#: most tokens of an engine's step, whose activations it keeps room for; longer prompts take several
_MAX_STEP = 32768
#: largest context-parallel size, and the fewest tokens of a sequence that a device has
_MAX_CONTEXT, _MIN_SLICE = 8, 1024
_TRAINING = ("reference_model", "old_log_p", "update", "offload")
#: keys of a role that a search chooses, which a run file's own values leave to it
_SEARCHED = frozenset(
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size sequence_parallel num_layer_list num_layers_per_virtual_pipeline_stage "
    "recompute_granularity recompute_method recompute_num_layers recompute_modules swap_optimizer swap_optimizer_times "
    "optimizer_offload_fraction offload_gradients stream_ref_weights micro_batch_size".split()
)
#: roles that have the actor's layout where they are on its devices
_FOLLOWING = ("critic", "ref", "reward", "teacher")

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
        named: the model as a run file names it; None for the folder.
        engine: training engine.
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
    named: str | None = None
    engine: EngineName = "megatron"

    @property
    def max_len(self) -> int:
        """Maximum tokens of a sequence."""
        return self.prompt + self.response


@dataclass(frozen=True)
class _Space:
    """The run file that a search completes, and what it may choose in it.

    Attributes:
        tree: the run file without the keys of a layout.
        micro_batches: keys of the sizes of micro-batches, the smallest first.
        rooms: keys of the memory of an engine, the most first.
        trainers: devices that train where the run file gives the engines others; None where it does not.
        engines: devices of the engines then.
        sizes_engines: `max_num_seqs` follows the batch.
        keeps_resident: training state may stay on the device while the engine generates.
        following: groups of roles that have the actor's layout.
    """

    tree: dict[str, Any]
    micro_batches: tuple[_Values, ...]
    rooms: tuple[_Values, ...]
    trainers: int | None = None
    engines: int = 0
    sizes_engines: bool = True
    keeps_resident: bool = True
    following: tuple[str, ...] = ()


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


def _build_space(request: FitRequest) -> _Space:
    """Return the space of a run of the request's stage, with every feature that costs nothing."""
    tree = STAGES[request.stage](build_grpo_tree(request))
    return _Space(
        tree,
        micro_batches=tuple(_size_micro_batches(request, factor) for factor in (1, 2)),
        rooms=tuple({_FRACTION: fraction} for fraction in _FRACTIONS),
        following=tuple(group for group in ("critic_config",) if group in tree),
    )


def build_grpo_tree(request: FitRequest) -> dict[str, Any]:
    """Return the run file of GRPO of a request's model, with every feature that costs nothing and no layout."""
    is_moe = bool(request.block.get("num_experts"))
    named = {"model": request.model} if request.folder is None else {}
    actor = named if request.folder is None else {"load": request.folder}
    return {
        **({"model": {request.model: request.block}} if request.folder is None else {}),
        "platform": _PLATFORM,
        "megatron_training": {
            "stage": "ray_grpo",
            **named,
            "engine": request.engine,
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
            "max_num_batched_tokens": max(8192, min(request.max_len, _MAX_STEP)),
            "dtype": "bfloat16",
            "enable_prefix_caching": can_cache_prefixes(_PLATFORM, is_linear="linear_attention_freq" in request.block),
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
    search = _Search(request, _build_space(request), device, efficiency, samples)
    results = search.find_layouts(None)
    for part in (2, 4):  # the engines on half of the devices, or on all but a quarter
        if request.npus % part == 0 and request.npus >= 2 * part:
            results += search.find_layouts(request.npus // part)
    if not results:
        raise ValueError(f"--npus: {search.explain_failure()}")
    return search.relax(results)


def fit_run(
    tree: Mapping[str, Any],
    run: Run,
    device: Device,
    efficiency: Efficiency | None = None,
    *,
    samples: SampleMeans | None = None,
) -> list[FitResult]:
    """Search layouts of a run on the devices that it has, the fastest first: everything else in its run file stays.

    Args:
        tree: its run file as `compose` gives it.
        run: its draft.

    Raises:
        ValueError: the run cannot be planned, or nothing fits.
    """
    cfg, shape = run.config, read_shape(run, device)
    rl, generate, model_config = cfg.rl_config, cfg.generate_config, shape.actor.plan.model_config
    is_rl = generate is not None and rl is not None and not cfg.is_supervised
    dedicated, npus = run.placement.disaggregated, shape.actor.devices
    request = FitRequest(
        cfg.config_name,
        {"num_layers": model_config.num_layers, "num_experts": model_config.num_moe_experts},
        npus,
        rl.max_prompt_length if rl is not None and is_rl else 0,
        shape.max_len - (rl.max_prompt_length if rl is not None and is_rl else 0),
        num_nodes=run.num_nodes,
        stage="GRPO" if is_rl else "SFT",
        engine=cfg.actor_config.engine,
    )
    limited = generate is not None and (generate.kv_cache_memory_gib is not None or not device.sleeps)
    dedicated_roles = run.placement.dedicated
    following = tuple(
        f"{role}_config" for role in _FOLLOWING if not dedicated_roles.get(role) and tree.get(f"{role}_config") is not None
    )
    space = _Space(
        _strip_layout(tree, following),
        micro_batches=_vary_micro_batches(run),
        rooms=({},) if limited or not is_rl else tuple({_FRACTION: fraction} for fraction in _FRACTIONS),
        trainers=npus if dedicated else None,
        engines=run.placement.num_devices - npus if dedicated else npus,
        sizes_engines=False,
        keeps_resident=device.sleeps,
        following=following,
    )
    search = _Search(request, space, device, efficiency, samples)
    results = search.find_layouts(space.trainers)
    if not results:
        raise ValueError(search.explain_failure())
    return search.relax(results)


def _strip_layout(tree: Mapping[str, Any], following: Iterable[str]) -> dict[str, Any]:
    """Return a run file without the keys that a search chooses; roles on dedicated devices keep theirs."""
    stripped = apply_values(tree, {})
    for group in ("megatron_training", "actor_config", *following):
        if stripped.get(group) is not None:
            stripped[group] = {name: value for name, value in stripped[group].items() if name not in _SEARCHED}
    return stripped


def _vary_micro_batches(run: Run) -> tuple[_Values, ...]:
    """Return the sizes of the micro-batches of a run, half of them and twice, the smallest first."""
    cfg = run.config
    rl, size = cfg.rl_config, cfg.actor_config.micro_batch_size or 1
    if rl is not None and not cfg.is_supervised and rl.use_dynamic_bsz:
        tokens = rl.max_packing_token_size
        return tuple({"rl_config.max_packing_token_size": count} for count in (tokens, 2 * tokens))
    return tuple({"actor_config.micro_batch_size": count} for count in sorted({max(1, size // 2), size, 2 * size}))


def _rank(result: FitResult) -> tuple[float, ...]:
    """Return the sorting key: verdict, seconds, and where they are within 5 %, fp32 gradients and fewer splits of the model."""
    sizes = (result.values.get(f"actor_config.{name}", 1) for name in SIZES[:3])
    split = math.prod(int(str(size)) for size in sizes)
    return rank_plans(result.memory, result.time, result.values.keys() >= _HALF_GRADIENTS.keys(), split)


class _Search:
    """One model on one number of devices.

    Attributes:
        smallest: the plan with the fewest bytes of those that do not fit.
        engine_problem: why the engine with the most room fits on no device; "" where one does.
    """

    def __init__(
        self,
        request: FitRequest,
        space: _Space,
        device: Device,
        efficiency: Efficiency | None,
        samples: SampleMeans | None,
    ) -> None:
        self._request, self._space, self._device = request, space, device
        self._efficiency, self._samples = efficiency, samples
        self.smallest: MemoryPlan | None = None
        self.engine_problem = ""
        self._violations: list[set[str]] = []  # of the first layouts that break a rule

    def find_layouts(self, trainers: int | None) -> list[FitResult]:
        """Search with all phases on all devices, or training on `trainers` of them and the engines on the others."""
        request, space = self._request, self._space
        tree = space.tree
        if request.stage.startswith("SFT"):
            return self._find_supervised(tree) if trainers is None else []
        # engines on dedicated devices generate for the next iteration while this one trains
        if trainers is not None and space.trainers is None:
            values: _Values = {
                "rl_config.use_integrated_worker": False,
                "rl_config.actor_resource.num_npus": trainers,
                "rl_config.rollout_resource": {"num_npus": request.npus - trainers},
                "rl_config.trainer_mode": "one_step_off",
                **{f"generate_config.offload_train_{part}": False for part in ("optimizer", "grad", "param")},
            }
            tree = apply_values(tree, values)
        engines = self._find_engines(tree, space.engines or request.npus - (trainers or 0))
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
            results.append(FitResult(self._apply(tree, values), values, *plans))
        return results

    def explain_failure(self) -> str:
        """Return the reason why no layout fits."""
        request, memory = self._request, self._device.memory / GIB
        text = (
            f"{request.model} with sequences of {request.max_len} tokens does not fit on {request.npus} devices of "
            f"{memory:.0f} GiB"
        )
        if self.smallest is None and self.engine_problem:
            return f"{text}: no engine does in phase generate; {self.engine_problem}."
        if self.smallest is None:
            # what all of them break is no matter of the layout
            common = set.intersection(*self._violations) if self._violations else set()
            reason = min(common) if common else "another number of devices, or another batch, may."
            return f"{text}: no layout keeps the rules; {reason}"
        return f"{text}; {_describe_peak(self.smallest)}."

    def relax(self, results: list[FitResult]) -> list[FitResult]:
        """Return layouts, the fastest first, of which the fastest leave training state on the device where it fits."""
        results.sort(key=_rank)
        if self._space.keeps_resident:
            results[:_MAX_RELAXED] = (self._keep_resident(result) for result in results[:_MAX_RELAXED])
        return sorted(results, key=_rank)

    def _keep_resident(self, result: FitResult) -> FitResult:
        """Return the layout, with training state that stays on the device during generation where that fits and is faster."""
        tree = self._space.tree
        if result.trainers is not None or self._request.stage.startswith("SFT"):
            return result
        for names, room in itertools.product(_RESIDENT, self._list_rooms(result.values)):
            kept: _Values = {f"generate_config.offload_train_{name}": False for name in names}
            values = result.values | kept | room
            plans = self._plan(tree, values)
            if plans is not None and plans[0].verdict == "fits" and plans[1].total < result.time.total:
                return FitResult(self._apply(tree, values), values, *plans)
        return result

    def _list_rooms(self, values: _Values) -> Iterator[_Values]:
        """Yield the memory of an engine that has these keys, and less."""
        rooms = self._space.rooms
        yield from rooms[next(index for index, room in enumerate(rooms) if room.items() <= values.items()) :]

    def _find_engines(self, tree: dict[str, Any], npus: int) -> list[_Values]:
        """Return the keys of the engines that fit on so many devices, the fastest first."""
        request = self._request
        experts = int(request.block.get("num_experts") or 0)
        # a training layout that keeps the rules on any number of devices: only the engine's phases matter here
        fixed: _Values = {
            "actor_config.tensor_model_parallel_size": 1,
            "actor_config.pipeline_model_parallel_size": 1,
            **self._space.micro_batches[0],
        }
        ranked: list[tuple[float, _Values]] = []
        for tensor in _powers(min(16, npus, self._device.devices_per_node)):
            if npus % tensor:
                continue
            replicas = npus // tensor
            for sharing in _powers(replicas) if experts else (1,):
                values: _Values = {
                    "generate_config.infer_tensor_parallel_size": tensor,
                    **({"generate_config.infer_expert_parallel_size": sharing} if experts else {}),
                }
                if self._space.sizes_engines:
                    count = math.ceil(request.prompts * request.samples / replicas)
                    values["generate_config.max_num_seqs"] = min(256, max(1, count))
                for room in self._space.rooms:
                    plans = self._plan(tree, fixed | values | room)
                    if plans is None:
                        continue
                    memory, time = plans
                    generate = memory.only("generate")
                    groups = tuple(group for group in generate.groups if group.name == "rollout") or generate.groups
                    if room == self._space.rooms[0]:  # of the engine over the most devices
                        self.engine_problem = "; ".join(memory.problems) or _describe_peak(generate)
                    if replace(generate, groups=groups).verdict == "fits":
                        seconds = time.phases["rollout"] + time.phases["resharding_to_infer"]
                        ranked.append((seconds, values | room))
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
        request, fits, sizes = self._request, MemoryPlan.VERDICTS[0], self._space.micro_batches
        offloads = tree.get("generate_config") or {"offload_train_param": True}
        known = _ENGINE_SAVERS[request.engine]
        savers, rounding = known.exact, known.rounding
        streams = known.streams and not offloads.get("offload_train_param")
        for base, layers, pp in _list_splits(request, npus, self._device):
            stages: tuple[Iterable[_Values], ...] = (
                _vary_memory(base, layers, pp, sizes),
                _save_memory(base, sizes[0], savers, streams=streams),
                _save_memory(base, sizes[0], rounding, streams=streams),
            )
            # what does not fit with the least memory is not tried with more
            least = self._plan_leanest(tree, base, (*savers, *rounding), engine, streams=streams)
            if least is not None and least.memory.verdict not in ACCEPTED:
                continue
            for index, variants in enumerate(stages):
                if index == 1 and least is None:  # every saver breaks a rule
                    break
                tried = [self._rank_training(tree, values, engine) for values in variants]
                accepted = [entry for entry in tried if entry is not None]
                ranked += accepted
                if any(MemoryPlan.VERDICTS[verdict] == fits for verdict, _, _ in accepted):
                    break
        fastest: dict[tuple[object, ...], _Values] = {}
        for _, _, values in sorted(ranked, key=lambda entry: entry[:2]):
            fastest.setdefault(tuple(values.get(f"actor_config.{name}") for name in SIZES), values)
        return list(fastest.values())[:_MAX_TRAINING_LAYOUTS]

    def _plan_leanest(
        self, tree: dict[str, Any], base: _Values, savers: Sequence[_Values], engine: _Values, *, streams: bool
    ) -> SoundRun | None:
        """Plan a training layout with the last of the savers that breaks no rule; None where each breaks one."""
        for saver in reversed(savers):
            *_, leanest = _save_memory(base, self._space.micro_batches[0], (saver,), streams=streams)
            if (sound := self._plan_training(tree, leanest, engine)) is not None:
                return sound
        return None

    def _rank_training(self, tree: dict[str, Any], values: _Values, engine: _Values) -> _Ranked | None:
        """Return the rank of a training layout; None where it breaks a rule or does not fit."""
        sound = self._plan_training(tree, values, engine)
        if sound is None or sound.memory.verdict not in ACCEPTED:
            return None
        if (time := sound.plan_time(self._efficiency, self._samples)) is None:
            return None
        seconds = sum(time.phases.get(name, 0.0) for name in _TRAINING)
        return MemoryPlan.VERDICTS.index(sound.memory.verdict), seconds, values

    def _plan_training(self, tree: dict[str, Any], values: _Values, engine: _Values) -> SoundRun | None:
        """Plan the bytes of a training layout, without those of the rollout; None where it breaks a rule."""
        sound = self._plan_memory(tree, values | engine)
        if sound is None:
            return None
        sound = replace(sound, memory=sound.memory.without(("generate",)))
        if sound.memory.verdict not in ACCEPTED:
            self._note(sound.memory)
        return sound

    def _combine(self, tree: dict[str, Any], train: _Values, serve: _Values, trainers: int | None) -> FitResult | None:
        """Return both with the largest fraction of memory for the engine with which they fit, else are tight."""
        best: FitResult | None = None
        for room in self._list_rooms(serve):
            values = train | serve | room
            plans = self._plan(tree, values)
            if plans is None:
                continue
            if plans[0].verdict not in ACCEPTED:
                self._note(plans[0])
                continue
            result = FitResult(self._apply(tree, values), values, *plans, trainers)
            if plans[0].verdict == "fits":
                return result
            best = best or result
        return best

    def _note(self, memory: MemoryPlan) -> None:
        """Keep the plan of a layout that does not fit, where it is the nearest so far."""
        if self.smallest is None or memory.fullest.peak.total < self.smallest.fullest.peak.total:
            self.smallest = memory

    def _apply(self, tree: dict[str, Any], values: _Values) -> dict[str, Any]:
        return _apply_layout(tree, values, self._space.following)

    def _plan_memory(self, tree: dict[str, Any], values: _Values) -> SoundRun | None:
        """Plan the bytes of a layout; None where the values break a rule."""
        try:
            run = draft(build_run_config(self._apply(tree, values), config_name="fit"), self._request.num_nodes)
        except ValueError as error:  # a ConfigError is one
            self._record(str(error))
            return None
        sound = plan_sound_memory(run, self._device)
        if sound is None and len(self._violations) < _MAX_EXPLAINED:
            self._record(*map(str, (*validate(run), *unavailable(run))), *list_device_obstacles(run, self._device))
        return sound

    def _plan(self, tree: dict[str, Any], values: _Values) -> tuple[MemoryPlan, TimePlan] | None:
        """Plan a layout; None where the values break a rule."""
        sound = self._plan_memory(tree, values)
        time = None if sound is None else sound.plan_time(self._efficiency, self._samples)
        return None if sound is None or time is None else (sound.memory, time)

    def _record(self, *sentences: str) -> None:
        """Keep what a layout breaks, of the first ones."""
        if sentences and len(self._violations) < _MAX_EXPLAINED:
            self._violations.append(set(sentences))


def _describe_peak(memory: MemoryPlan) -> str:
    """Return the bytes of the fullest phase of the nearest layout as text."""
    peak = memory.fullest.peak
    return f"the nearest layout takes {peak.total / GIB:.0f} GiB in phase {peak.name}"


def _apply_layout(tree: dict[str, Any], values: _Values, following: Iterable[str]) -> dict[str, Any]:
    """Return the run file with these values; groups that follow the actor get its layout, too."""
    actor = {name: value for name, value in values.items() if name.startswith("actor_config.")}
    for group in following:
        values = values | {name.replace("actor_config", group, 1): value for name, value in actor.items()}
    return apply_values(tree, values)


# ---------------------------------------------------------------------- candidates


def _powers(limit: int) -> list[int]:
    return [1 << exponent for exponent in range(limit.bit_length()) if 1 << exponent <= limit]


def _list_splits(request: FitRequest, npus: int, device: Device) -> Iterator[tuple[_Values, int, int]]:
    """Yield each split of the model over so many devices, with the number of its layers and of its stages."""
    layers, experts = int(request.block["num_layers"]), int(request.block.get("num_experts") or 0)
    node = min(device.devices_per_node, 16)
    for split in list_splits(
        npus,
        layers=layers,
        experts=experts,
        tensors=_powers(min(node, npus)),
        pipelines=_powers(32),
        contexts=[size for size in _powers(_MAX_CONTEXT) if size == 1 or request.max_len / size >= _MIN_SLICE],
        expert_sizes=_powers(experts),
    ):
        sizes = split.sizes if experts else dict(list(split.sizes.items())[:3])
        values: _Values = {f"actor_config.{name}": size for name, size in sizes.items()}
        if split.tensor > 1:
            values["actor_config.sequence_parallel"] = True
        if experts:
            values["actor_config.expert_tensor_parallel_size"] = 1
        if split.layers is not None:
            values["actor_config.num_layer_list"] = split.layers
        yield values, layers, split.pipeline


_RECOMPUTED: _Values = {
    "actor_config.recompute_granularity": "full",
    "actor_config.recompute_method": "uniform",
    "actor_config.recompute_num_layers": 1,
}


def _vary_memory(base: _Values, layers: int, pp: int, micro_batches: Sequence[_Values]) -> Iterator[_Values]:
    """Yield the layout with virtual stages and recomputation, on and off, and each size of micro-batches."""
    chunks: list[int | None] = [None]
    if pp > 1 and layers % pp == 0 and layers // pp % 2 == 0:
        chunks.append(layers // pp // 2)
    for chunk, recompute, size in itertools.product(chunks, ({}, _RECOMPUTED), micro_batches):
        values = {**base, **recompute, **size}
        if chunk is not None:
            values["actor_config.num_layers_per_virtual_pipeline_stage"] = chunk
        yield values


def _save_memory(base: _Values, size: _Values, savers: Sequence[_Values], *, streams: bool) -> Iterator[_Values]:
    """Yield the layout with what saves memory; where memory is that short, larger micro-batches are not a choice.

    Args:
        size: keys of the smallest micro-batches.
        savers: keys of which each variant has one entry.
        streams: also with the reference in host memory, which otherwise is on the device during an update.
    """
    for recompute, saver, streamed in itertools.product(({}, _RECOMPUTED), savers, ({}, _STREAMED) if streams else ({},)):
        yield {**base, **recompute, **size, **_CHUNKED_HEAD, **saver, **streamed}


def _size_micro_batches(request: FitRequest, factor: int) -> _Values:
    """Return the keys of micro-batches of so many sequences of the maximum length."""
    if request.stage.startswith("SFT"):
        return {"actor_config.micro_batch_size": factor}
    return {"rl_config.max_packing_token_size": request.max_len * factor}
