"""Trainer against rollout engine on prompts of a run: what was measured, from what the ranks computed."""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from mindspeed_rl import platform
from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config import Run, RunConfig, resolve
from mindspeed_rl.config.phases import GENERATE, Phase
from mindspeed_rl.dumps.causes import Cause, Evidence, Place, WeightFinding, name_cause, report
from mindspeed_rl.dumps.record import Cut
from mindspeed_rl.dumps.sides import EngineSide, TrainerSide
from mindspeed_rl.runtime.cluster import cluster
from mindspeed_rl.runtime.fork_server import RL, fork_server
from mindspeed_rl.trainers.model_plans import plan_models, with_model_configs
from mindspeed_rl.trainers.prompt_loader import load_prompts
from mindspeed_rl.trainers.run_folder import make_paths_absolute
from mindspeed_rl.workers.remote_group import WorkerKind, start_group

#: temperatures that are tried
_COLDEST, _HOTTEST = 0.02, 50.0


class Sides(Protocol):
    """The two, on whatever ranks; see `ComparisonWorker` for the methods. Each returns a list with an item for each rank."""

    def push_twice(self) -> Sequence[None]: ...

    def check_weights(self) -> Sequence[tuple[list[WeightFinding], list[str]]]: ...

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, number: int) -> Sequence[EngineSide | None]: ...

    def forward(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sequence[TrainerSide]: ...

    def temperatures(self) -> Sequence[tuple[float, float]]: ...


COMPARISON = WorkerKind(
    "mindspeed_rl.diagnostics.comparison_worker:ComparisonWorker",
    ("train", "rollout"),
    title="comparison worker",
    log_name="comparison",
)


class ComparisonGroup:
    """The workers of a comparison, laid out as those of the run; see `Sides`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._workers = start_group(COMPARISON, run, run.config.actor_config, run.plan.world_size)
        self.close = self._workers.close

    def set_up(self) -> None:
        """Build actor and engine of each device."""
        self._workers.start_workers(self._run, uuid.uuid4().hex[:12])

    def push_twice(self) -> Sequence[None]:
        return self._workers.call(Phase("push_twice"))

    def check_weights(self) -> Sequence[tuple[list[WeightFinding], list[str]]]:
        return self._workers.call(Phase("check_weights"))

    def generate(self, prompt_ids: Sequence[int], num_tokens: int, number: int) -> Sequence[EngineSide | None]:
        return self._workers.call(GENERATE, prompt_ids, num_tokens, number)

    def forward(self, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Sequence[TrainerSide]:
        return self._workers.call(Phase("forward"), prompt_ids, response_ids)

    def temperatures(self) -> Sequence[tuple[float, float]]:
        return self._workers.call(Phase("temperatures"))


def compare_run(
    cfg: RunConfig, num_nodes: int, folder: Path, num_prompts: int, num_tokens: int
) -> tuple[Evidence, Cause | None, list[str]]:
    """The evidence on the first prompts of a run's data, by workers that are laid out as the run's; the cause, and what to say.

    Args:
        folder: takes the logs.

    Raises:
        ValueError: a key or file is wrong, or the run generates on servers or not at all.
        WorkerError: a worker died or raised.
    """
    if cfg.is_supervised:
        raise ValueError(f"megatron_training.stage: {cfg.stage} has no rollout to compare the trainer with")
    cfg = with_model_configs(cfg)
    run = resolve(cfg, num_nodes, platform=platform.named(cfg.platform))
    run = replace(run, folder=folder)
    if run.placement.disaggregated:
        raise ValueError(
            "diff builds the rollout engine beside the trainer, as run files without servers do: add the overrides "
            "rl_config.use_integrated_worker=true rl_config.rollout_resource=null generate_config.vllm_server_host=null"
        )
    run, _ = plan_models(run)
    actor = run.models["actor"]
    prompts, _ = load_prompts(run, load_tokenizer_of(actor.config, actor.source))
    chosen = [list(prompts[number]["prompt_ids"]) for number in range(min(num_prompts, len(prompts)))]
    make_paths_absolute(run.config, run.models)
    logs = run.folder / "logs" / "ray"
    with fork_server(run.platform, RL), cluster(run.plan.world_size, run.platform, logs=logs):
        group = ComparisonGroup(run)
        try:
            group.set_up()
            found = gather_evidence(run, group, chosen, num_tokens, actor.plan.model_config.moe_layers)
        finally:
            group.close()
    cause = name_cause(found)
    return found, cause, list(report(found, cause))


def gather_evidence(
    run: Run, sides: Sides, prompts: Sequence[list[int]], num_tokens: int, expert_layers: Sequence[int]
) -> Evidence:
    """Pushes weights, generates a response to each prompt, and computes the same tokens in the trainer.

    Args:
        num_tokens: most tokens of a response.
        expert_layers: numbers of the layers with routed experts.
    """
    sides.push_twice()
    # all responses first: `check_weights` leaves nothing of use in the engine
    engine = [_only(sides.generate(prompt, num_tokens, number)) for number, prompt in enumerate(prompts)]
    weights, notes = _weights(sides.check_weights())
    temperature = sides.temperatures()[0][0]
    gaps: list[Tensor] = []
    places: dict[str, list[tuple[Tensor, Tensor]]] = {}
    other: tuple[int, int, int] | None = None
    for prompt, side in zip(prompts, engine):
        response = list(side.response)
        ranks = sides.forward(prompt, response)
        log_probs = next(rank.log_probs for rank in ranks if rank.log_probs is not None)
        gaps.append((log_probs - torch.tensor(side.log_probs)).abs())
        other = other or _first_other([*prompt, *response], side.read)
        # the last token of the prompt is where the first one of the response is predicted
        first = len(prompt) - 1
        for name, ours in _joined(ranks).items():
            # behind a token that differs everything does
            if name in side.activations and not other:
                places.setdefault(name, []).append((ours[first : first + len(response)], side.activations[name]))
    gap = torch.cat(gaps)
    if not places and not other:
        notes.append("activations were not compared: the trainer has slices of the sequences (context parallel)")
    return Evidence(
        num_tokens=gap.numel(),
        largest_gap=float(gap.max()),
        mean_gap=float(gap.mean()),
        trainer_type="bfloat16" if run.config.actor_config.bf16 else "float32",
        engine_type=run.generate.dtype,
        first_other_token=other,
        weights=tuple(weights),
        places=tuple(_place(name, pairs) for name, pairs in sorted(places.items(), key=lambda item: _order(item[0]))),
        expert_layers=tuple(expert_layers),
        temperature=temperature,
        fitted_temperature=_fitted(engine),
        notes=tuple(notes),
    )


def _only(answers: Sequence[EngineSide | None]) -> EngineSide:
    (found,) = [answer for answer in answers if answer is not None]
    return found


def _weights(answers: Sequence[tuple[list[WeightFinding], list[str]]]) -> tuple[list[WeightFinding], list[str]]:
    """What any rank found, each parameter once."""
    found = {weight.parameter: weight for weights, _ in answers for weight in weights}
    return list(found.values()), list(dict.fromkeys(note for _, notes in answers for note in notes))


def _first_other(ours: Sequence[int], engine: Sequence[int]) -> tuple[int, int, int] | None:
    """The first place where the engine read another token; it never reads the last one."""
    pairs = enumerate(zip(ours, engine))
    return next(((place, a, b) for place, (a, b) in pairs if b >= 0 and a != b), None)


def _joined(ranks: Sequence[TrainerSide]) -> dict[str, Tensor]:
    """The trainer's activations by place, [tokens, hidden], from the parts of the ranks."""
    parts: dict[str, dict[int, tuple[Tensor, Cut | None]]] = {}
    for rank in ranks:
        for name, (tensor, cut) in rank.activations.items():
            parts.setdefault(name, {})[cut.shard if cut else 0] = tensor, cut
    return {
        name: torch.cat([shards[number][0].flatten(0, -2) for number in sorted(shards)])
        for name, shards in parts.items()
        if not name.startswith(("loss", "gradients"))
    }


def _place(name: str, pairs: Sequence[tuple[Tensor, Tensor]]) -> Place:
    ours, engine = (torch.cat([pair[side].to(torch.float64) for pair in pairs]) for side in (0, 1))
    apart = (ours - engine).abs().amax(1)
    scale = max(float(ours.abs().max()), 1e-30)  # of zeros alone
    largest = float(apart.max())
    return Place(name, largest / scale, float((apart > 0.1 * largest).double().mean()) if largest else 0.0)


def _order(name: str) -> tuple[int, int]:
    """By which places are in the order of the forward pass."""
    if name == "embedding":
        return -1, 0
    if name == "final_norm":
        return 1 << 30, 0
    _, number, part = name.split(".")
    return int(number), ("attention", "mlp", "output").index(part)


def _fitted(engine: Sequence[EngineSide]) -> tuple[float, float] | None:
    """The temperature that turns the engine's logits into what it reported, and the largest log-prob difference left over."""
    logits = torch.cat([side.logits.to(torch.float64) for side in engine])
    tokens = torch.tensor([token for side in engine for token in side.response])
    reported = torch.tensor([value for side in engine for value in side.log_probs], dtype=torch.float64)
    if not torch.isfinite(reported).all():
        return None

    def left(log_temperature: float) -> float:
        log_probs = (logits / math.exp(log_temperature)).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        return float((log_probs - reported).abs().max())

    # temperatures are factors: even steps of the logarithm
    grid = torch.linspace(math.log(_COLDEST), math.log(_HOTTEST), 161).tolist()
    best = min(range(len(grid)), key=lambda number: left(grid[number]))
    low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    for _ in range(60):  # thirds: the difference has one minimum between the neighbours of the best one
        third = (high - low) / 3
        low, high = (low, high - third) if left(low + third) < left(high - third) else (low + third, high)
    middle = (low + high) / 2
    return math.exp(middle), left(middle)
