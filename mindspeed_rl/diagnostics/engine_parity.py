"""Two training engines on the same rows: log-probs, loss, gradient norm, every gradient and the first update, compared.

Each engine is a witness of the other: they share batching, head, loss and schedule, and have layers, attention, sharding and
optimizer of their own. Everything is in float32 on one rank, so that a difference is a fault and not rounding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
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

#: a step that shows wrong weights, and in which rounding stays small: its largest elements move by a part of the rate, and
#: an update is smooth in the gradient, whose norm is at most that of `clip_grad`
_LR, _EPS_OF_CLIP = 0.1, 0.1
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
    "train_iters": 1,
    "optimizer": "adam",
}
#: tensors below this part of the largest gradient of all, or of the rate, are compared with that part: some gradients are 0
#: but for rounding
_FLOOR = 1e-3


@dataclass(frozen=True)
class EngineResult:
    """Result of one engine.

    Attributes:
        log_probs: log-probs of the predicted tokens, row by row.
        gradients, weights: by HF name; the weights are those after one step.
    """

    log_probs: list[Tensor]
    loss: float
    grad_norm: float
    gradients: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity.

    Attributes:
        quantity: its name.
        value: the difference: of log-probs absolute, of all else relative to the largest element of the tensor.
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
    """Compute one step of a run's actor with each engine, and compare all others with the first; largest difference first.

    Args:
        cfg: the run.
        engines: two or more names.
        num_rows, num_tokens: random rows, and the longest of them.

    Raises:
        ValueError: the model is not there as a Hugging Face folder, or an engine does not compute it.
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
    rows = make_rows(num_rows, num_tokens, plan.model_config.vocab_size, seed=actor.seed)
    temperature = 1.0 if cfg.generate_config is None else cfg.generate_config.sampling_config.temperature or 1.0
    with single_rank_world(config):
        results = [
            measure_engine(replace(config, engine=name), plan, source.weights, source.hf_folder, rows, temperature)
            for name in engines
        ]
    return sorted(
        (difference for other in results[1:] for difference in compare_results(results[0], other)),
        key=lambda difference: -difference.value,
    )


def _build_config(actor: MegatronConfig, engines: Iterable[EngineName]) -> MegatronConfig:
    """Return the keys of the comparison: those of the actor, but for what is not a part of it."""
    clip = actor.clip_grad or 1.0
    step: dict[str, Any] = {"lr": _LR, "min_lr": 0.0, "clip_grad": clip, "adam_eps": _EPS_OF_CLIP * clip}
    if actor.lr:  # tower and projector keep their part of the rate
        rates = {name: getattr(actor, name) for name in ("vit_lr", "aligner_lr")}
        step |= {name: rate * _LR / actor.lr for name, rate in rates.items() if rate is not None}
    return replace(actor, **list_common_values(engines) | _KEYS | step)


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
    config: MegatronConfig, plan: ModelPlan, weights: Path, hf_folder: Path, rows: Rows, temperature: float
) -> EngineResult:
    """Compute log-probs and one step of the engine that the keys name, in a world of one rank.

    Args:
        config: keys of the role.
        plan: plan of its model.
        weights: folder of its tensors.
        hf_folder: has config.json.
        rows: what it computes, with the column weights.
        temperature: logits are divided by it.
    """
    built = build_engine(config, plan, hf_folder, PassSettings(packed=True, pad_id=0, temperature=temperature), trains=True)
    engine, batching = built.engine, MicroBatching(2)
    engine.load(open_weights(weights))
    engine.start_training(1)
    outputs = engine.forward(rows, batching)
    assert outputs is not None  # the only rank returns results
    gradients: dict[str, Tensor] = {}
    engine.on_gradients.append(lambda: gradients.update(built.read_gradients()))
    result = engine.train_step(rows, batching, _weighted_loss)
    loss = sum(float(loss.loss_sum) for loss in result.losses) / sum(int(loss.count) for loss in result.losses)
    trained = {name: tensor.cpu().clone() for name, tensor in built.build_stream().named_tensors()}
    return EngineResult(outputs[0], loss, result.grad_norm, gradients, trained)


def compare_results(first: EngineResult, other: EngineResult) -> list[Difference]:
    """Return the largest difference of each quantity and of each gradient."""
    gaps = [float((ours - theirs).abs().max()) for ours, theirs in zip(first.log_probs, other.log_probs, strict=True)]
    worst_row = max(range(len(gaps)), key=gaps.__getitem__)
    differences = [
        Difference("log-probs", gaps[worst_row], f"row {worst_row}"),
        Difference("loss", abs(other.loss / first.loss - 1.0), ""),
        Difference("gradient norm", abs(other.grad_norm / first.grad_norm - 1.0), ""),
    ]
    floor = _FLOOR * max(float(gradient.abs().max()) for gradient in first.gradients.values())
    for name in sorted(first.gradients.keys() | other.gradients.keys()):
        differences.append(Difference("gradient", _compare(name, first.gradients, other.gradients, floor), name))
    for name in sorted(first.weights.keys() | other.weights.keys()):
        differences.append(Difference("first update", _compare(name, first.weights, other.weights, _FLOOR * _LR), name))
    return differences


def _compare(name: str, first: Mapping[str, Tensor], other: Mapping[str, Tensor], floor: float) -> float:
    """Return the largest difference relative to the largest element, infinite where one has no such tensor."""
    if name not in first or name not in other or first[name].shape != other[name].shape:
        return float("inf")
    size = max(float(first[name].abs().max()), floor)
    gap = float((first[name] - other[name]).abs().max())
    return gap / size if gap else 0.0

