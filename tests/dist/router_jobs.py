"""Jobs in which only the routers' losses have a gradient."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from prefix_jobs import grouped_rows
from training_jobs import Setting, all_rows, engine_of, full_weights, my_rows

from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.algorithms.preference_losses import PreferenceBatch, SimPOSettings, simpo_loss
from mindspeed_rl.config import RLConfig
from mindspeed_rl.engine.batching import Rows
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.run.objective import build_objective

ROWS: dict[str, Callable[[], Rows]] = {"different": all_rows, "grouped": grouped_rows}


def _token_loss(inputs: LossInputs) -> LossOutput:
    return LossOutput(inputs.outputs[0].sum() * 0.0, inputs.mask.sum())


def _pair_loss(inputs: LossInputs) -> LossOutput:
    sums, lengths = torch.where(inputs.mask, inputs.outputs[0] * 0.0, 0.0).sum(1), inputs.mask.sum(1)
    return simpo_loss(PreferenceBatch(sums[0::2], sums[1::2], lengths[0::2], lengths[1::2]), SimPOSettings())


def _rows_of(loss: str, kind: str) -> Rows:
    rows = ROWS[kind]()
    if loss in ("tokens", "pairs"):
        return rows
    lengths = rows.response_lengths
    zeros, trues = [torch.zeros(n) for n in lengths], [torch.ones(n, dtype=torch.bool) for n in lengths]
    # without advantages a policy loss has no gradient
    columns = {"advantages": zeros, "old_log_probs": zeros, "loss_mask": trues, "scored_mask": trues}
    return Rows(rows.input_ids, rows.prompt_lengths, columns)


def gradient(setting: Setting, loss: str = "tokens", rows: str = "different") -> dict[str, Any]:
    """Gradients of one step by Hugging Face name, before clipping.

    Args:
        loss: "tokens" or "pairs", or a loss_type; its gradient is 0, its count differs.
        rows: a key of ROWS.
    """
    with engine_of(setting) as engine:
        results: dict[str, Any] = {}
        engine.on_gradients.append(lambda: results.update(collect_gradients(engine)))
        mine = my_rows(_rows_of(loss, rows))
        if loss == "tokens":
            engine.train_step(mine, setting.batching, _token_loss)
        elif loss == "pairs":
            mine = Rows(mine.input_ids, mine.prompt_lengths, group_sizes=[2] * (len(mine) // 2))
            engine.train_step(mine, setting.batching, _pair_loss)
        else:
            keys = RLConfig(loss_type=loss, init_kl_coef=0.0)
            objective = build_objective(keys, "ray_grpo", max_response_length=1000)
            engine.train_step(mine, setting.batching, partial(policy_loss, objective=objective), PolicyBatch.from_inputs)
        return results


def collect_gradients(engine: TrainEngine) -> dict[str, Any]:
    """The gradients, exported as if they were weights."""
    parameters = [parameter for chunk in engine.chunks for parameter in chunk.parameters()]
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradients = {name: tensor.float().numpy() for name, tensor in full_weights(engine).items()}
    for parameter, data in zip(parameters, kept):
        parameter.data.copy_(data)
    return gradients


def counted_tokens(setting: Setting) -> list[list[float]]:
    """Tokens that each expert of a router with a bias has got in one step, by layer, before the bias is updated."""
    with engine_of(setting) as engine:
        results: list[list[float]] = []
        routers = [m for model in engine.model.models for n, m in model.named_modules() if n.endswith("mlp.router")]
        finalize = engine.model.transformer_config.finalize_model_grads_func

        def record(*args: Any, **kwargs: Any) -> None:
            results.extend(router.local_tokens_per_expert.tolist() for router in routers)
            assert finalize is not None
            finalize(*args, **kwargs)

        engine.model.transformer_config.finalize_model_grads_func = record
        engine.train_step(my_rows(grouped_rows()), setting.batching, _token_loss)
        return results
