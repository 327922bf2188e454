"""Trainer against rollout engine on prompts of a run: evidence from the outputs of the ranks."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config import RunConfig
from mindspeed_rl.dumps.causes import (
    ActivationGap,
    Cause,
    EngineOutputs,
    Evidence,
    TrainerOutputs,
    WeightFinding,
)
from mindspeed_rl.run import Run
from mindspeed_rl.run.models import plan_models, with_model_configs
from mindspeed_rl.run.paths import with_absolute_paths
from mindspeed_rl.run.phases import Phase, Phases
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.training_engine_rules import check_command
from mindspeed_rl.runtime.cluster import connect_cluster
from mindspeed_rl.runtime.fork_server import RL, fork_server
from mindspeed_rl.trainers.prompt_loader import load_prompts
from mindspeed_rl.workers.remote_group import WorkerKind, start_group

#: temperatures that are tried
_COLDEST, _HOTTEST = 0.02, 50.0

COMPARISON = WorkerKind(
    "mindspeed_rl.diagnostics.comparison_worker:ComparisonWorker",
    ("train", "rollout"),
    title="comparison worker",
    log_name="comparison",
)


def compare_run(
    cfg: RunConfig, num_nodes: int, folder: Path, prompts: int | Sequence[Sequence[int]], num_tokens: int
) -> tuple[Evidence, Cause | None, list[str]]:
    """Compare trainer and engine on prompts of a run, by workers that are laid out as the run's.

    Args:
        folder: takes the logs.
        prompts: tokens of prompts, or the number of first prompts of the run's data.

    Returns:
        The evidence, the cause, and lines for the console.

    Raises:
        ValueError: a key or file is wrong, or the run generates on servers or not at all.
        WorkerError: a worker died or raised.
    """
    if cfg.is_supervised:
        raise ValueError(f"megatron_training.stage: {cfg.stage} has no rollout to compare the trainer with")
    check_command(cfg.actor_config, "actor_config", "diff")
    cfg = with_model_configs(cfg)
    run = resolve(cfg, num_nodes, platform=platform.resolve_name(cfg.platform), folder=folder)
    if run.placement.disaggregated:
        raise ValueError(
            "diff builds the rollout engine beside the trainer, as run files without servers do: add the overrides "
            "rl_config.use_integrated_worker=true rl_config.rollout_resource=null generate_config.vllm_server_host=null"
        )
    run = with_absolute_paths(plan_models(run))
    actor = run.models["actor"]
    chosen = _choose_prompts(run, prompts)
    logs = run.folder / "logs" / "ray"
    with fork_server(run.platform, RL), connect_cluster(run.plan.world_size, run.platform, logs=logs):
        workers = start_group(COMPARISON, run, run.config.actor_config, run.plan.world_size)
        try:
            workers.start_workers(run, uuid.uuid4().hex[:12])
            evidence = Comparison(workers).gather_evidence(run, chosen, num_tokens, actor.plan.model_config.moe_layers)
        finally:
            workers.close()
    cause = evidence.name_cause()
    return evidence, cause, list(evidence.describe(cause))


def _choose_prompts(run: Run, prompts: int | Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the tokens of the prompts to compare.

    Raises:
        ValueError: a given one is not of this model, or leaves the engine no room for a token.
    """
    actor = run.models["actor"]
    if isinstance(prompts, int):
        rows, _ = load_prompts(run, load_tokenizer_of(actor.config, actor.source))
        return [list(rows[index]["prompt_ids"]) for index in range(min(prompts, len(rows)))]
    size, limit = actor.plan.model_config.vocab_size, run.generate.max_model_len
    for prompt in prompts:
        if not all(0 <= token < size for token in prompt):
            raise ValueError(f"a recorded row has the token {max(prompt)}, and the model a vocabulary of {size}.")
        if len(prompt) >= limit:
            raise ValueError(f"a recorded row has {len(prompt)} tokens; generate_config.max_model_len is {limit}.")
    return [list(prompt) for prompt in prompts]


class ComparisonWorkers(Protocol):
    """Workers of a comparison; see `ComparisonWorker` for the methods."""

    def call(self, phase: Phase, *arguments: Any) -> list[Any]:
        """Return the result of each rank."""
        ...


class Comparison:
    """Trainer and rollout engine on the same tokens."""

    def __init__(self, workers: ComparisonWorkers) -> None:
        self._workers = workers

    def gather_evidence(
        self, run: Run, prompts: Sequence[list[int]], num_tokens: int, expert_layers: Sequence[int]
    ) -> Evidence:
        """Push weights, generate a response to each prompt, and compute the same tokens in the trainer.

        Args:
            num_tokens: maximum of a response.
            expert_layers: indexes of the layers with routed experts.
        """
        self._workers.call(Phase("push_twice"))
        # all responses first: `check_weights` leaves nothing of use in the engine
        engine = self._generate(prompts, num_tokens)
        weights, notes = self._check_weights()
        temperature: float = self._workers.call(Phase("temperatures"))[0][0]
        gaps: list[Tensor] = []
        activations: dict[str, list[tuple[Tensor, Tensor]]] = {}
        other: tuple[int, int, int] | None = None
        for prompt, output in zip(prompts, engine, strict=True):
            response = list(output.response)
            ranks: list[TrainerOutputs] = self._workers.call(Phase("forward"), prompt, response)
            log_probs = next(rank.log_probs for rank in ranks if rank.log_probs is not None)
            gaps.append((log_probs - torch.tensor(output.log_probs)).abs())
            # the engine never reads the last token
            pairs = enumerate(zip([*prompt, *response], output.read))
            other = other or next(((position, a, b) for position, (a, b) in pairs if b >= 0 and a != b), None)
            # the last token of the prompt predicts the first one of the response
            first = len(prompt) - 1
            for name, ours in _join_ranks(ranks).items():
                # after a token that differs everything does
                if name in output.activations and not other:
                    pair = ours[first : first + len(response)], output.activations[name]
                    activations.setdefault(name, []).append(pair)
        gap = torch.cat(gaps)
        if not activations and not other:
            notes.append("activations were not compared: the trainer has slices of the sequences (context parallel)")
        return Evidence(
            num_tokens=gap.numel(),
            largest_gap=float(gap.max()),
            mean_gap=float(gap.mean()),
            trainer_type="bfloat16" if run.config.actor_config.bf16 else "float32",
            engine_type=run.generate.quantization or run.generate.dtype,
            first_other_token=other,
            weights=tuple(weights),
            places=tuple(_measure_gap(name, activations[name]) for name in sorted(activations, key=_forward_order)),
            expert_layers=tuple(expert_layers),
            temperature=temperature,
            fitted_temperature=_fit_temperature(engine),
            notes=tuple(notes),
        )

    def _generate(self, prompts: Sequence[list[int]], num_tokens: int) -> list[EngineOutputs]:
        """Return a response to each prompt."""
        engine: list[EngineOutputs] = []
        for index, prompt in enumerate(prompts):
            outputs = self._workers.call(Phases.GENERATE, prompt, num_tokens, index)
            engine += [output for output in outputs if output is not None]  # of one rank
        return engine

    def _check_weights(self) -> tuple[list[WeightFinding], list[str]]:
        """Return one finding for each parameter of the engine, and the notes of all ranks."""
        checked: list[tuple[list[WeightFinding], list[str]]] = self._workers.call(Phase("check_weights"))
        weights = {finding.parameter: finding for findings, _ in checked for finding in findings}
        return [*weights.values()], list(dict.fromkeys(note for _, notes in checked for note in notes))


def _join_ranks(ranks: Sequence[TrainerOutputs]) -> dict[str, Tensor]:
    """Return the trainer's activations by module, [tokens, hidden], from the parts of the ranks."""
    parts: dict[str, dict[int, Tensor]] = {}
    for rank in ranks:
        for name, (tensor, cut) in rank.activations.items():
            parts.setdefault(name, {})[cut.shard if cut else 0] = tensor
    return {
        name: torch.cat([shards[shard].flatten(0, -2) for shard in sorted(shards)])
        for name, shards in parts.items()
        if not name.startswith(("loss", "gradients"))
    }


def _measure_gap(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> ActivationGap:
    ours, engine = (torch.cat([pair[side].to(torch.float64) for pair in pairs]) for side in (0, 1))
    gaps = (ours - engine).abs().amax(1)
    scale = max(float(ours.abs().max()), 1e-30)  # of only zeros
    largest = float(gaps.max())
    return ActivationGap(name, largest / scale, float((gaps > 0.1 * largest).double().mean()) if largest else 0.0)


def _forward_order(name: str) -> tuple[int, int]:
    """Return a key by which modules are in the order of the forward pass."""
    if name == "embedding":
        return -1, 0
    if name == "final_norm":
        return 1 << 30, 0
    _, layer, part = name.split(".")
    return int(layer), ("attention", "mlp", "output").index(part)


def _fit_temperature(engine: Sequence[EngineOutputs]) -> tuple[float, float] | None:
    """Return the temperature that turns the engine's logits into the reported log-probs, and the largest difference left."""
    logits = torch.cat([outputs.logits.to(torch.float64) for outputs in engine])
    tokens = torch.tensor([token for outputs in engine for token in outputs.response])
    reported = torch.tensor([value for outputs in engine for value in outputs.log_probs], dtype=torch.float64)
    if not torch.isfinite(reported).all():
        return None

    def left(log_temperature: float) -> float:
        log_probs = (logits / math.exp(log_temperature)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return float((log_probs - reported).abs().max())

    # temperatures are factors: even steps of the logarithm
    grid = torch.linspace(math.log(_COLDEST), math.log(_HOTTEST), 161).tolist()
    best = min(range(len(grid)), key=lambda index: left(grid[index]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(60):  # thirds: the difference has one minimum between the neighbours of the best one
        third = (high - low) / 3
        low, high = (low, high - third) if left(low + third) < left(high - third) else (low + third, high)
    middle = (low + high) / 2
    return math.exp(middle), left(middle)
