"""Jobs that make policy updates on the engine, one with each loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from training_jobs import Setting, all_rows, engine_of, full_weights, summary

from mindspeed_rl.algorithms.interfaces import PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.catalogue import POLICY_LOSSES
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import RLConfig
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.head_outputs import SquaredProbs
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.run.objective import build_objective

_COMMON = {
    "clip_higher_enable": True,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.28,
    "init_kl_coef": 0.1,
    "kl_clamp": False,
    "entropy_coeff": 0.01,
}
_EXTRAS: list[dict[str, Any]] = [
    {"importance_sampling_level": "sequence_token", "clip_ratio_c": 3.0},
    {"rollout_importance_sampling_mode": "sequence_truncate", "use_bias_correction_kl": True},
    {
        "rollout_importance_sampling_mode": "token_mask",
        "rollout_importance_sampling_threshold_min": 0.8,
        "off_policy_sequence_mask_delta": 0.1,
    },
]


def _objective(**keys: Any) -> Objective:
    return build_objective(RLConfig(**_COMMON | keys), "ray_grpo", max_response_length=20)


#: bounds that are not a width of a clipped ratio: an absolute cap, a difference of probabilities, a KL
_HIGH = {"cispo_cap": 5.0, "dppo_tv": 0.01, "dppo_kl": 0.002}
#: the update made in each step
UPDATES = [
    *(_objective(loss_type=name, clip_ratio_high=_HIGH.get(name, 0.28), n_samples_per_prompt=2) for name in POLICY_LOSSES),
    *(_objective(loss_type="dapo", **extra) for extra in _EXTRAS),
]
_ENTROPY_THRESHOLD = 1.0


def from_last_stage(value: Any) -> Any:
    """Return the results of the last pipeline stage on every stage."""
    from megatron.core import parallel_state

    values = [value]
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        last, group = parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
        torch.distributed.broadcast_object_list(values, src=last, group=group)
    return values[0]


def policy_rows(engine: TrainEngine, setting: Setting) -> Rows:
    """This rank's rows with everything a policy loss reads; noise around the present policy is the same under any layout."""
    from megatron.core import parallel_state

    rows = all_rows()
    generator = torch.Generator().manual_seed(5)
    lengths = rows.response_lengths
    noise = {
        name: [scale * torch.randn(length, generator=generator) for length in lengths]
        for name, scale in (("old_log_probs", 0.3), ("ref_log_probs", 0.5), ("rollout_log_probs", 0.2))
    }
    advantages = [torch.randn((), generator=generator).expand(length) for length in lengths]
    trained = [torch.rand(length, generator=generator) < 0.9 for length in lengths]
    marked = [torch.rand(length, generator=generator) < 0.3 for length in lengths]
    # pairs stay together, for the loss that compares them
    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    mine = [row for row in range(len(rows)) if row // 2 % size == rank]
    log_probs, entropies = from_last_stage(engine.forward(rows.select(mine), setting.batching))
    columns = {name: [value.cpu() + values[row] for value, row in zip(log_probs, mine)] for name, values in noise.items()}
    columns |= {"advantages": [advantages[row] for row in mine], "loss_mask": [trained[row] for row in mine]}
    columns["marked_tokens"] = [marked[row] for row in mine]
    columns |= {"entropies": entropies, "scored_mask": [torch.ones(lengths[row], dtype=torch.bool) for row in mine]}
    return Rows([rows.input_ids[row] for row in mine], [rows.prompt_lengths[row] for row in mine], columns)


def update(setting: Setting) -> dict[str, Any]:
    """Makes all UPDATES in turn and reports each one's metrics and gradient norm, and the weights at the end."""
    with engine_of(setting) as engine:
        rows = policy_rows(engine, setting)
        results = []
        for number, objective in enumerate(UPDATES):
            threshold = _ENTROPY_THRESHOLD if number % 2 else None
            loss = partial(policy_loss, objective=objective)
            batch = partial(PolicyBatch.from_inputs, entropy_threshold=threshold)
            step, batching = rows, setting.batching
            if objective.loss.compares_group:
                step = replace(rows, group_sizes=[2] * (len(rows) // 2))
                # a micro-batch size counts pairs, and a budget has to hold one
                batching = replace(batching, micro_batch_size=max(1, batching.micro_batch_size // 2))
                batching = replace(batching, token_budget=batching.token_budget and 2 * batching.token_budget)
            results.append(engine.train_step(step, batching, loss, batch))
        report = summary(results, full_weights(engine))
        result = engine.forward(rows, setting.batching, SquaredProbs())
        assert result is not None
        report["squares"] = [(ids.tolist(), values.cpu().numpy()) for ids, values in zip(rows.input_ids, result[2])]
        return report
