"""Two training engines on the same rows: log-probs, loss, gradient norm, every gradient and the updates of two steps, compared.

Each engine is a witness of the other: they share batching, head, loss and schedule, and have layers, attention, sharding and
optimizer of their own. Everything is in float32 on one rank, so that a difference is a fault and not rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.checkpoint.block_fp8 import open_weights
from mindspeed_rl.checkpoint.model_source import find_model
from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.config.keys.megatron import EngineName
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.parallel import init_distributed
from mindspeed_rl.models.plan import ModelPlan, plan_model
from mindspeed_rl.platform.environment import STORE_VARIABLE
from mindspeed_rl.run.rules.training_engine_rules import check_model_form, list_common_values
from mindspeed_rl.scratch import scratch_folder
from mindspeed_rl.workers.engines import PassSettings, build_engine

#: a step of which a fault shows whatever the model: gradients are clipped to this part of their norm, and `adam_eps` is the
#: largest of them, so that the update is smooth in the gradient, and no larger in an element that is 0 but for rounding
_LR, _CLIPPED = 0.1, 0.5
#: optimizer steps: the first update depends on no beta
_STEPS = 2
#: keys of the comparison, whatever the run file has, besides those that an engine limits: one rank, float32, all weights
_KEYS: dict[str, Any] = {
    "context_parallel_size": 1,
    **dict.fromkeys("fsdp_size lora_target_modules lr_warmup_fraction lr_decay_iters padded_vocab_size".split()),
    **dict.fromkeys("sequence_parallel use_distributed_optimizer overlap_grad_reduce overlap_param_gather bf16".split(), False),
    **dict.fromkeys("swap_optimizer dynamic_context_parallel".split(), False),
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": 0.0,
    "moe_router_bias_update_rate": 0.0,
    "optimizer_offload_fraction": 0.0,
    "lr_warmup_iters": 0,
    "lr_decay_style": "constant",
    "train_iters": _STEPS,
    "optimizer": "adam",
}
#: tensors below this part of the largest gradient or update of all are compared with that part: some gradients are 0 but for
#: rounding
_FLOOR = 1e-3
#: updates below this part of the largest weight of their tensor are compared with that part: a weight after a step is rounded
_WEIGHT_FLOOR = 0.05


@dataclass(frozen=True)
class EngineResult:
    """Result of one engine.

    Attributes:
        log_probs: log-probs of the predicted tokens, row by row.
        weights: those before the first step, by HF name.
        gradients: gradients of the first step before clipping, by HF name.
        updates: what each step adds to the weights, by HF name.
    """

    log_probs: list[Tensor]
    loss: float
    grad_norm: float
    weights: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    updates: Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        quantity: its name.
        value: the difference: of log-probs absolute, of all else relative to the largest element of the tensor, but for what is
            0 up to rounding.
        place: where it is: a row or the HF name of a tensor.
    """

    quantity: str
    value: float
    place: str


@contextmanager
def single_rank_world(config: MegatronConfig) -> Iterator[None]:
    """Make this process the only rank of a training world inside the block."""
    with scratch_folder("engine-parity-") as folder:
        place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", STORE_VARIABLE: str(folder / "store")}
        before = {name: os.environ.get(name) for name in place}
        os.environ |= place
        try:
            init_distributed(config, 1)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            # the folder goes: a group of later would wait for its file
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def compare_engines(cfg: RunConfig, engines: Sequence[EngineName], num_rows: int, num_tokens: int) -> list[Difference]:
    """Compute two steps of a run's actor with each engine, and compare all others with the first; largest difference first.

    Args:
        cfg: the run.
        engines: two or more names.
        num_rows, num_tokens: random rows, and the longest of them.

    Raises:
        ValueError: the model is not there as a Hugging Face folder, an engine does not compute it, or nothing of it trains.
    """
    actor = cfg.actor_config
    source = find_model(actor, "megatron_training" if cfg.is_supervised else "actor_config")
    if source.kind != "hf":
        raise ValueError(
            f"load: {source.weights} is a checkpoint; --engines compares from a Hugging Face folder, such as its hf/latest."
        )
    config = _build_config(actor, engines)
    plan = plan_model(config, source.hf_folder)
    for name in engines:
        check_model_form(replace(config, engine=name), plan.architecture, plan.model_config)
    batches = [make_rows(num_rows, num_tokens, plan.model_config.vocab_size, seed=actor.seed + step) for step in range(_STEPS)]
    temperature = 1.0 if cfg.generate_config is None else cfg.generate_config.sampling_config.temperature or 1.0
    with single_rank_world(config):
        first, *_ = configs = [replace(config, engine=name) for name in engines]
        # clipping and eps that both get, in proportion to the gradients of this model
        probe = measure_engine(first, plan, source.weights, source.hf_folder, batches[:1], temperature)
        scale = _scale_step(probe)
        del probe
        results = [
            measure_engine(replace(config, **scale), plan, source.weights, source.hf_folder, batches, temperature)
            for config in configs
        ]
    return sorted(
        (difference for other in results[1:] for difference in compare_results(results[0], other)),
        key=lambda difference: -difference.value,
    )


def _build_config(actor: MegatronConfig, engines: Sequence[EngineName]) -> MegatronConfig:
    """Return the actor's keys for the comparison, with `_KEYS`, the rate and the engines' limits set."""
    step: dict[str, Any] = {"lr": _LR, "min_lr": 0.0}
    if actor.lr:  # tower and projector keep their part of the rate
        rates = {name: getattr(actor, name) for name in ("vit_lr", "aligner_lr")}
        step |= {name: rate * _LR / actor.lr for name, rate in rates.items() if rate is not None}
    return replace(actor, **list_common_values(engines) | _KEYS | step)


def _scale_step(probe: EngineResult) -> dict[str, Any]:
    """Return the keys of a step that clips the gradients of a result, and whose largest elements move by half the rate."""
    largest = max((float(gradient.abs().max()) for gradient in probe.gradients.values()), default=0.0)
    if not largest:
        raise ValueError("all gradients are 0: no weight of the model trains, so there is no update to compare.")
    return {"clip_grad": _CLIPPED * probe.grad_norm, "adam_eps": _CLIPPED * largest}


def make_rows(count: int, longest: int, vocab_size: int, *, seed: int) -> Rows:
    """Return random rows of different lengths, with a weight around 2 for every predicted token."""
    generator = torch.Generator().manual_seed(seed)
    totals = torch.linspace(2, max(longest, 2), count).int().tolist()
    prompts = [1 + int(torch.randint(0, total - 1, (), generator=generator)) for total in totals]
    return Rows(
        input_ids=[torch.randint(0, vocab_size, (total,), generator=generator) for total in totals],
        prompt_lengths=prompts,
        # all of one sign: a loss whose terms cancel would show nothing but rounding
        columns={"weights": [2.0 + torch.rand(total - prompt, generator=generator) for total, prompt in zip(totals, prompts)]},
    )


def _weighted_loss(inputs: LossInputs) -> LossOutput:
    """Return -(w log p + 0.1 H) over predicted tokens, which shows tokens that are shifted, doubled or lost."""
    log_probs, entropy = inputs.outputs
    per_token = -(log_probs * inputs.columns["weights"] + 0.1 * entropy)
    return LossOutput((per_token * inputs.mask).sum(), inputs.mask.sum())


def measure_engine(
    config: MegatronConfig, plan: ModelPlan, weights: Path, hf_folder: Path, batches: Sequence[Rows], temperature: float
) -> EngineResult:
    """Compute log-probs and some steps of the engine that the keys name, in a world of one rank.

    Args:
        config: keys of the role.
        plan: plan of its model.
        weights: folder of its tensors.
        hf_folder: has config.json.
        batches: rows of each step, with the column weights; log-probs, loss and gradients are of the first.
        temperature: logits are divided by it.
    """
    built = build_engine(config, plan, hf_folder, PassSettings(packed=True, pad_id=0, temperature=temperature), trains=True)
    engine, batching = built.engine, MicroBatching(2)
    engine.load(open_weights(weights))
    engine.start_training(1)
    outputs = engine.forward(batches[0], batching)
    assert outputs is not None  # the only rank returns results
    gradients: dict[str, Tensor] = {}

    def keep_first() -> None:
        if not gradients:
            gradients.update(built.read_gradients())

    def read_weights() -> dict[str, Tensor]:
        return {name: tensor.cpu().clone() for name, tensor in built.build_stream().named_tensors()}

    engine.on_gradients.append(keep_first)
    before = loaded = read_weights()
    results, updates = [], []
    for rows in batches:
        results.append(engine.train_step(rows, batching, _weighted_loss))
        after = read_weights()
        updates.append({name: tensor - before[name] for name, tensor in after.items()})
        before = after
    losses = results[0].losses
    loss = sum(float(loss.loss_sum) for loss in losses) / sum(int(loss.count) for loss in losses)
    return EngineResult(outputs[0], loss, results[0].grad_norm, loaded, gradients, updates)


def compare_results(first: EngineResult, other: EngineResult) -> list[Difference]:
    """Return the largest difference of each quantity, and of each gradient and update."""
    gaps = [float((ours - theirs).abs().max()) for ours, theirs in zip(first.log_probs, other.log_probs, strict=True)]
    worst_row = max(range(len(gaps)), key=gaps.__getitem__)
    differences = [
        Difference("log-probs", gaps[worst_row], f"row {worst_row}"),
        Difference("loss", abs(other.loss / first.loss - 1.0), ""),
        Difference("gradient norm", abs(other.grad_norm / first.grad_norm - 1.0), ""),
    ]
    for quantity, ours, theirs in (
        ("weight", first.weights, other.weights),
        ("gradient", first.gradients, other.gradients),
        ("first update", first.updates[0], other.updates[0]),
        ("second update", first.updates[1], other.updates[1]),
    ):
        floor = _FLOOR * max(float(tensor.abs().max()) for tensor in ours.values())
        for name in sorted(ours.keys() | theirs.keys()):
            rounded = 0.0
            if "update" in quantity and name in first.weights:
                rounded = _WEIGHT_FLOOR * float(first.weights[name].abs().max())
            differences.append(Difference(quantity, _compare(name, ours, theirs, max(floor, rounded)), name))
    return differences


def _compare(name: str, first: Mapping[str, Tensor], other: Mapping[str, Tensor], floor: float) -> float:
    """Return the largest difference relative to the largest element, infinite where one has no such tensor."""
    if name not in first or name not in other or first[name].shape != other[name].shape:
        return float("inf")
    size = max(float(first[name].abs().max()), floor)
    gap = float((first[name] - other[name]).abs().max())
    return gap / size if gap else 0.0
