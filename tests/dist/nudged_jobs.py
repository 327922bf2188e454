"""Jobs in which the rollout engine's routers are nudged, so that it sends tokens elsewhere than the trainer would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from replay_jobs import LocalPlane, add_routed
from rollout_jobs import pair_of
from torch import Tensor, nn
from training_jobs import Setting

from mindspeed_rl.dataplane.columns import pack
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine
from mindspeed_rl.run.columns import ROUTED_LENGTHS, name_routed_column
from mindspeed_rl.workers.replica import Replica, _build_rows
from mindspeed_rl.workers.responses import build_response_columns
from mindspeed_rl.workers.routing import RolloutRouting, build_routing_columns

_PROMPTS = ([5, 9, 40, 17, 22, 61, 3, 77, 30, 31] * 30, [61, 3, 77], [30, 31, 32, 33, 34, 35, 36, 37, 38])
_TOLD = [12, 90, 55]


def nudge(model: nn.Module) -> None:
    """From now on the routers of this engine choose by other logits, and weigh what they chose as ever.

    A token that is computed anew, because a later turn has it in its prompt, goes where it went before.
    """
    for module in model.modules():
        router = getattr(module, "router", None)
        if router is None or not hasattr(router, "_compute_routing"):
            continue
        count = router.top_k

        def compute(hidden: Tensor, logits: Tensor, dtype: Any, *, count: int = count, **others: Any) -> tuple[Tensor, Tensor]:
            chosen = (logits + 2.0 * torch.sin(7.0 * logits)).topk(count, -1).indices
            weights = logits.float().softmax(-1).gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
            return weights, chosen.to(dtype or torch.int32)

        router._compute_routing = compute


def _answered(engine: VllmEngine, prompts: Sequence[Sequence[int]], seed: int) -> list[Generated]:
    completions = engine.generate([GenerationRequest(list(prompt), seed + number) for number, prompt in enumerate(prompts)])
    return [
        Generated(
            tuple(completion.token_ids),
            tuple(completion.log_probs),
            (0,) * len(completion.token_ids),
            "length",
            completion.routing,
        )
        for completion in completions
    ]


def _trajectories(engine: VllmEngine) -> list[Trajectory]:
    """Two responses to each prompt, a single turn the first and two turns the second."""
    first, second = _answered(engine, _PROMPTS, 100), _answered(engine, _PROMPTS, 200)
    contexts = [[*prompt, *answer.token_ids, *_TOLD] for prompt, answer in zip(_PROMPTS, second)]
    later = _answered(engine, contexts, 300)
    trajectories = [Trajectory.from_response(prompt, answer) for prompt, answer in zip(_PROMPTS, first)]
    for prompt, answer, two in zip(_PROMPTS, second, later):
        context = Segment.from_context(_TOLD)
        segments = Segment.from_generated(answer), context, Segment.from_generated(two), context
        trajectories.append(Trajectory((TokenSequence(tuple(prompt), segments),), "stop"))
    return trajectories


def agree(setting: Setting) -> dict[str, Any]:
    """The largest difference of log-probs between trainer and nudged engine, with its routing and without."""
    with pair_of(setting, 1, routed=True) as pair:
        pair.push()
        nudge(pair.rollout.get_model())
        cached = _count_cached(pair.rollout)
        trajectories = _trajectories(pair.rollout)
        routing = build_routing_columns(pair.engine.model.plan, trajectories)
        columns = build_response_columns(trajectories)
        compared = {name: columns[name] for name in ("rollout_log_probs", "response_mask")}
        plane = LocalPlane(len(trajectories), [ROUTED_LENGTHS, name_routed_column(0), *compared])
        numbers = list(range(len(trajectories)))
        plane.put(routing | compared, numbers)
        rows = _build_rows({name: pack(values) for name, values in columns.items() if name != "trajectories"})
        own = pair.engine.forward(rows, setting.batching)
        replica = Replica(plane, 10.0, by_stage=True)  # pyrefly: ignore[bad-argument-type]
        replay = RolloutRouting(add_routed(pair.engine), pair.engine.plan, replica)
        replayed = replay.forward(pair.engine, rows, setting.batching, numbers)
        metrics = Metrics()
        replay.add_to(metrics)
        assert own is not None and replayed is not None
        return {
            "own": _differences(trajectories, own[0]),
            "replayed": _differences(trajectories, replayed[0]),
            "cached": cached,
            "metrics": metrics.results(),
            "types": {name: str(values[0].dtype) for name, values in routing.items()},
        }


def _count_cached(engine: VllmEngine) -> list[int]:
    """Gets the number of cached tokens of each request that ends."""
    results: list[int] = []
    step = engine._llm.llm_engine.step

    def counted() -> Any:
        outputs = step()
        results.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    engine._llm.llm_engine.step = counted
    return results


def _differences(trajectories: Sequence[Trajectory], log_probs: Sequence[Tensor]) -> list[float]:
    differences = []
    for trajectory, ours in zip(trajectories, log_probs):
        sampled = torch.tensor(trajectory.sampled)
        differences.append((ours - torch.tensor(trajectory.log_probs))[sampled].abs().max().item())
    return differences
