"""Costs of one iteration, counted on ranks of this machine, next to plain Megatron's and a lower bound.

The ranks are processes without Ray, prepared before they import Megatron.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import cast

from mindspeed_rl import platform, registry
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import MegatronConfig, RLConfig, RunConfig
from mindspeed_rl.models.plan import ModelPlan, lay_out_model
from mindspeed_rl.planner.shapes import plan_role
from mindspeed_rl.planner.step_costs import LowerBound, compute_lower_bounds, encode_costs, format_costs
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.training_engine_rules import check_command
from mindspeed_rl.runtime.process import find_free_port, prepare_process

_DEVICE = "npu"
#: seconds that ranks have for their two iterations
_TIMEOUT_S = 1800.0
#: below any gradient's norm: clipping is part of the step, whatever the random weights give
_ALWAYS_CLIPS = 1e-12


@dataclass(frozen=True)
class CountJob:
    """The iteration that is counted.

    Attributes:
        config, plan: configuration and model plan of the actor, with the layers that are counted.
        columns: columns that the policy loss reads besides advantages, masks and the rollout's log-probs.
        temperature: logits are divided by it.
        platform: name of the device kind.
        world_size: ranks.
        rows, tokens: number of rows of an update on one rank, and the tokens of each row.
        engine_ranks, engines_sharing_experts: number of ranks of a rollout engine, and of its engines that share a model's
            experts; where the ranks that are counted do not divide by them, the largest number that divides both.
        engine_dtype: dtype of the rollout's weights.
        bucket_bytes: limit of the bytes in flight on a rank during a push.
        plain: only Megatron trains, in place of the suite's engine.
    """

    config: MegatronConfig
    plan: ModelPlan
    rl: RLConfig
    objective: Objective
    columns: tuple[str, ...]
    temperature: float
    platform: str
    world_size: int
    rows: int
    tokens: int
    engine_ranks: int
    engines_sharing_experts: int
    engine_dtype: str
    bucket_bytes: int
    plain: bool = False

    @property
    def micro_batch_rows(self) -> list[int]:
        """Rows of each micro-batch of an update, where all rows fit a token budget."""
        size = self.rows if self.rl.use_dynamic_bsz else self.config.micro_batch_size or 1
        return [min(size, self.rows - first) for first in range(0, self.rows, size)]


def count(cfg: RunConfig, name: str, layers: int, rows: int, tokens: int, *, as_json: bool) -> str:
    """Return the costs of one iteration of a rank, as a table or as one JSON object.

    Args:
        name: name of the run file.
        layers: number of layers of the model that is counted, in place of all.
        rows, tokens: number of rows of an update on one rank, and the tokens of each row.

    Raises:
        ValueError: this run file cannot be counted, or no device is usable.
        RuntimeError: a rank failed, with its message.
    """
    check_command(cfg.actor_config, "actor_config", "npu-cost")
    job = build_count_job(cfg, name, layers, rows, tokens)
    if not platform.platform_class(_DEVICE).is_available():
        raise ValueError(
            "npu-cost: no NPU is usable here; on a machine without one, count on the simulated one: "
            "bash tests/npu_sim/run.sh --run mindspeed-rl npu-cost --config-name ..."
        )
    config = job.config
    ours = _count_on_ranks(job)
    plain, bounds = None, dict[str, LowerBound]()
    if config.context_parallel_size == 1:  # MindSpeed's own context parallelism is off, so there is nothing to compare with
        plain = _count_on_ranks(replace(job, plain=True))
    if config.pipeline_model_parallel_size * config.context_parallel_size == 1:
        replicas = job.world_size // config.tensor_model_parallel_size
        micro_batches = job.micro_batch_rows
        bounds = compute_lower_bounds(job.plan, config, rows=micro_batches, tokens=tokens, replicas=replicas)
    # the first rank of the last stage: it has head and loss
    shown = job.world_size - job.world_size // config.pipeline_model_parallel_size
    records = ours[shown], None if plain is None else plain[shown]
    num_bytes = cast(int, ours[shown].pop("least_bytes_of_push"))
    bounds["push"] = LowerBound(1, 1, collective_bytes=num_bytes)  # one call writes all slices, and the proof is read
    settings = _describe_settings(job, shown)
    return (
        json.dumps(encode_costs(*records, bounds, settings), indent=2) if as_json else format_costs(*records, bounds, settings)
    )


def build_count_job(cfg: RunConfig, name: str, layers: int, rows: int, tokens: int) -> CountJob:
    """Return the iteration to count; see `count`.

    Raises:
        ValueError: the run file is of a supervised stage, or its layout does not fit so few layers.
    """
    run = draft(cfg)
    objective, cfg = run.objective, run.config
    if objective is None or cfg.rl_config is None or cfg.generate_config is None:
        raise ValueError(f"--config-name: {name} is supervised; npu-cost counts updates of a policy.")
    config, plan = _shorten(cfg.actor_config, layers)
    ep, etp = config.expert_sizes
    dense = config.tensor_model_parallel_size * config.context_parallel_size
    ranks = max(dense, ep * (etp or config.tensor_model_parallel_size) if plan.layout.num_experts else 1)
    # more than one optimizer step a rollout: the more expensive case
    columns = {
        "old_log_probs": True,
        "ref_log_probs": objective.loss_reads_ref,
        "entropies": "entropies" in objective.needs,
    }
    return CountJob(
        config=config,
        plan=plan,
        rl=cfg.rl_config,
        # teachers add work of their own, which is not counted
        objective=replace(objective, distillation=None),
        columns=tuple(column for column, is_read in columns.items() if is_read),
        temperature=cfg.generate_config.sampling_config.temperature or 1.0,
        platform=_DEVICE,
        world_size=config.pipeline_model_parallel_size * ranks,
        rows=rows,
        tokens=tokens,
        engine_ranks=cfg.generate_config.infer_tensor_parallel_size,
        engines_sharing_experts=cfg.generate_config.infer_expert_parallel_size,
        engine_dtype="bfloat16" if cfg.generate_config.dtype == "bfloat16" else "float32",
        bucket_bytes=cfg.generate_config.update_weights_bucket_mb << 20,
    )


def _shorten(config: MegatronConfig, layers: int) -> tuple[MegatronConfig, ModelPlan]:
    """Return the role with fewer layers; one of them has experts where the model has."""
    full = plan_role(config)
    model_config = full.model_config
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
    return config, lay_out_model(config, full.architecture, model_config, full.hf_config)


def _describe_settings(job: CountJob, shown: int) -> dict[str, str]:
    """Return device, model, layout and iteration in words."""
    config, model_config = job.config, job.plan.model_config
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
        "iteration": f"log-probs and one optimizer step on {job.rows} rows of {job.tokens} tokens in "
        f"{len(job.micro_batch_rows)} micro-batches; the weights pushed to an engine laid out as vLLM's over "
        f"{math.gcd(job.engine_ranks, job.world_size)} of {job.world_size} ranks; training state off the device and back",
    }


# ---------------------------------------------------------------------- ranks


def _count_on_ranks(job: CountJob) -> list[dict[str, object]]:
    """Return the result of `cost_worker.count` on every rank.

    Raises:
        RuntimeError: a rank failed, with its message, or there was no result in time.
    """
    context = multiprocessing.get_context("spawn")
    port = str(find_free_port("127.0.0.1"))
    ends: list[Connection] = []
    processes = []
    for rank in range(job.world_size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(job, rank, port, sender), daemon=True)
        process.start()
        # or the pipe would stay open here when the rank dies, and its end would go unnoticed
        sender.close()
        ends.append(receiver)
        processes.append(process)
    try:
        return _receive(ends, time.monotonic() + _TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(ends: list[Connection], deadline: float) -> list[dict[str, object]]:
    results: dict[int, dict[str, object]] = {}
    while len(results) < len(ends):
        missing = [rank for rank in range(len(ends)) if rank not in results]
        ready = wait([ends[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {missing} did not answer in time.")
        for end in ready:
            assert isinstance(end, Connection)
            rank = ends.index(end)
            try:
                result = end.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} ended without a word; its own output says why.") from None
            if isinstance(result, str):
                raise RuntimeError(f"rank {rank}: {result}")
            results[rank] = result
    return [results[rank] for rank in range(len(ends))]


def _run_rank(job: CountJob, rank: int, port: str, sender: Connection) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
    )
    os.dup2(2, 1)  # libraries print while they load, and standard output is the command's
    try:
        platform.select(job.platform)
        prepare_process(("train",), job.config)
        result = registry.load("mindspeed_rl.diagnostics.cost_worker:count", "what is counted")(job)
    except Exception as error:  # the boundary of a process: any failure is reported to its parent
        sender.send(f"{type(error).__name__}: {error}")
        raise
    sender.send(result)
    os._exit(0)  # libraries take long to leave
