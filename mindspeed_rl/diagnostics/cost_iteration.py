"""One iteration of a run file counted on ranks of this machine, beside plain Megatron's and the least it could be."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

from mindspeed_rl import platform
from mindspeed_rl.config import MegatronConfig, RunConfig
from mindspeed_rl.diagnostics.cost_ranks import CountOrder, count_on_ranks, micro_batch_rows
from mindspeed_rl.models.plan import ModelPlan, lay_out_model
from mindspeed_rl.planner.cost_text import cost_json, cost_text
from mindspeed_rl.planner.shapes import plan_role
from mindspeed_rl.planner.step_bound import LowerBound, compute_lower_bounds

_DEVICE = "npu"
#: seconds that ranks have for their two iterations
_TIMEOUT_S = 1800.0
#: below any gradient's norm: clipping is part of the step, whatever the random weights give
_ALWAYS_CLIPS = 1e-12


def count(cfg: RunConfig, name: str, layers: int, rows: int, tokens: int, *, as_json: bool) -> str:
    """What one iteration of a rank costs, as a table or as one JSON object.

    Args:
        name: of the run file.
        layers: of the model that is counted, in place of all.
        rows, tokens: of an update on one rank, and of each row.

    Raises:
        ValueError: this run file cannot be counted, or no device is usable.
        RuntimeError: a rank failed, with its words.
    """
    order = count_order(cfg, name, layers, rows, tokens)
    if not platform.platform_class(_DEVICE).is_available():
        raise ValueError(
            "npu-cost: no NPU is usable here; on a machine without one, count on the simulated one: "
            "bash tests/npu_sim/run.sh --run mindspeed-rl npu-cost --config-name ..."
        )
    return _counted(order, as_json=as_json)


def count_order(cfg: RunConfig, name: str, layers: int, rows: int, tokens: int) -> CountOrder:
    """What is counted; see `count`.

    Raises:
        ValueError: the run file is of a supervised stage, or its layout does not fit so few layers.
    """
    objective = cfg.objective
    if objective is None or cfg.rl_config is None or cfg.generate_config is None:
        raise ValueError(f"--config-name: {name} is supervised; npu-cost counts updates of a policy.")
    config, plan = _shortened(cfg.actor_config, layers)
    ep, etp = config.expert_sizes
    across = config.pipeline_model_parallel_size
    dense = config.tensor_model_parallel_size * config.context_parallel_size
    return CountOrder(
        config=config,
        plan=plan,
        rl=cfg.rl_config,
        objective=objective,
        # more than one optimizer step a rollout: the dearer case
        columns=tuple(
            column
            for column, is_read in (
                ("old_log_probs", True),
                ("ref_log_probs", objective.loss_reads_reference),
                ("entropies", "entropies" in objective.needs),
            )
            if is_read
        ),
        temperature=cfg.generate_config.sampling_config.temperature or 1.0,
        platform=_DEVICE,
        world_size=across * max(dense, ep * (etp or config.tensor_model_parallel_size) if plan.layout.num_experts else 1),
        rows=rows,
        tokens=tokens,
    )


def _shortened(config: MegatronConfig, layers: int) -> tuple[MegatronConfig, ModelPlan]:
    """The role with fewer layers; one of them has experts where the model has."""
    whole = plan_role(config)
    model_config = whole.model_config
    with_experts = tuple(layer for layer in model_config.moe_layers if layer < layers)
    model_config = replace(
        model_config,
        num_layers=layers,
        moe_layers=with_experts or ((layers - 1,) if model_config.moe_layers else ()),
        sliding_window_layers=tuple(layer for layer in model_config.sliding_window_layers if layer < layers),
    )
    config = replace(
        config,
        num_layers=layers,
        num_layer_list=None,
        noop_layers=None,
        lr=config.lr or 1e-6,
        clip_grad=_ALWAYS_CLIPS if config.clip_grad else config.clip_grad,
        train_iters=1,
        lr_decay_iters=None,
        lr_warmup_iters=0,
        lr_warmup_fraction=None,
    )
    return config, lay_out_model(config, whole.architecture, model_config, whole.hf_config)


def _counted(order: CountOrder, *, as_json: bool) -> str:
    config = order.config
    ours = count_on_ranks(order, timeout_s=_TIMEOUT_S)
    plain, least = None, dict[str, LowerBound]()
    if config.context_parallel_size == 1:  # MindSpeed's own context parallelism is off, so there is nothing to compare with
        plain = count_on_ranks(replace(order, plain=True), timeout_s=_TIMEOUT_S)
    rows = micro_batch_rows(order)
    if config.pipeline_model_parallel_size * config.context_parallel_size == 1:
        replicas = order.world_size // config.tensor_model_parallel_size
        least = compute_lower_bounds(order.plan, config, rows=rows, tokens=order.tokens, replicas=replicas)
    # the first rank of the last stage: it has head and loss
    shown = order.world_size - order.world_size // config.pipeline_model_parallel_size
    text = cost_json if as_json else cost_text
    found: Any = text(ours[shown], None if plain is None else plain[shown], least, _said(order, rows, shown))
    return json.dumps(found, indent=2) if as_json else found


def _said(order: CountOrder, rows: list[int], shown: int) -> dict[str, str]:
    """What was counted on what."""
    config, model_config = order.config, order.plan.model_config
    simulated = "NPU_SIM_DEVICES" in os.environ
    sizes = {
        "TP": config.tensor_model_parallel_size,
        "PP": config.pipeline_model_parallel_size,
        "CP": config.context_parallel_size,
        "EP": config.expert_model_parallel_size,
    }
    layout = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
    return {
        "counted on": "a simulated NPU: calls, bytes and waits, not seconds" if simulated else "an NPU; not verified on NPU",
        "model": f"{model_config.architecture}, {model_config.num_layers} layers, hidden size {model_config.hidden_size}, "
        f"vocabulary {model_config.vocab_size}",
        "layout": f"{layout}{', sequence parallel' if config.sequence_parallel and sizes['TP'] > 1 else ''}; rank {shown}",
        "iteration": f"log-probs and one optimizer step on {order.rows} rows of {order.tokens} tokens in {len(rows)} "
        "micro-batches; training state off the device and back",
    }
