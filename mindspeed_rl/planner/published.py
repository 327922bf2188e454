"""Figures that others published, and what they make of the efficiencies that matter most.

`python benchmarks/planner.py --of published` prints the table of docs/planner.md: how far a figure is from what the fit to all
other figures says (leave one out). What a source does not say is assumed alike for all of them:
responses of half the limit in the mean, and prompts of PROMPT tokens. Throughput counts tokens as MindSpeed-RL does: the
longest response and the longest prompt for GRPO and PPO, mean ones for DAPO.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.config.run_files import compose, project_configs, with_values
from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.efficiency import NPU, Efficiency
from mindspeed_rl.planner.run_shape import RunShape, read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time

#: tokens of a prompt of a mathematical data set in the mean, and of the longest
PROMPT, LONGEST_PROMPT = 150.0, 500.0


@dataclass(frozen=True)
class Figure:
    """One published run.

    Attributes:
        config: the shipped run file that is nearest to it, and `changes` to that.
        per_card: tokens a second of a card, where that is what was published; `devices` of a card.
        longest: that throughput counts the longest response.
        seconds: of phases, where they were published.
        mean_response: where it was published.
    """

    name: str
    device: str
    config: str
    changes: dict[str, Any] = field(default_factory=dict)
    per_card: float | None = None
    devices: int = 2
    longest: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    mean_response: float | None = None


def _devices(count: int) -> dict[str, Any]:
    return {"rl_config.actor_resource.num_npus": count}


def _lengths(limit: int, prompt: int) -> dict[str, Any]:
    return {
        "generate_config.sampling_config.max_tokens": limit,
        "generate_config.max_model_len": limit + prompt,
        "rl_config.max_prompt_length": prompt,
    }


_CANN = {**_devices(256), "generate_config.max_num_seqs": 64, "generate_config.enforce_eager": False}
_QWEN_235B = {
    "generate_config.enforce_eager": False,
    "megatron_training.global_batch_size": 512,
    "rl_config.mini_batch_size": 512,
    "rl_config.n_samples_per_prompt": 16,
}
_R1 = {
    **_devices(384),
    "megatron_training.global_batch_size": 384,
    "rl_config.mini_batch_size": 384,
    "rl_config.n_samples_per_prompt": 32,
    "actor_config.pipeline_model_parallel_size": 12,
    "actor_config.num_layer_list": "5,5,5,5,5,5,5,5,5,5,5,6",
}

#: the sources are in docs/planner.md. The longest response of the cann recipes is not published: about one and a half mean ones
#: are assumed, and that their engine captures graphs; random weights seldom end a response, so
#: that the mean is the limit
FIGURES: tuple[Figure, ...] = (
    Figure("GRPO Qwen2.5-7B, A3, 2k", "A3", "grpo_qwen25_7b_A3", per_card=220),
    Figure("GRPO Qwen2.5-32B, A3, 2k", "A3", "grpo_qwen25_32b_A3", per_card=220),
    Figure("GRPO Qwen2.5-32B, A2, 1k", "A2", "grpo_qwen25_32b_A2", per_card=100, groups=1),
    Figure("GRPO Qwen3-8B, A3, 8k", "A3", "grpo_qwen3_8b_A3", per_card=252),
    Figure("GRPO DeepSeek-R1, A3, 384 devices, 2k", "A3", "grpo_deepseek_r1_671b_A3", _R1, per_card=210),
    Figure("DAPO Qwen3-30B-A3B, A3, 2k", "A3", "dapo_qwen3_30b_a3b_A3", per_card=44, longest=False),
    Figure("DAPO Qwen3-32B, A3, 2k", "A3", "dapo_qwen3_32b_A3", per_card=140, longest=False),
    Figure("DAPO Qwen2.5-32B, A3, 30k", "A3", "dapo_qwen25_32b_A3_32k", per_card=108, longest=False),
    Figure("DAPO Qwen2.5-32B, A2, 20k", "A2", "dapo_qwen25_32b_A2_20k", per_card=35, groups=1, longest=False),
    Figure("PPO Qwen2.5-32B, A3, 2k", "A3", "ppo_qwen25_32b_A3", per_card=74),
    Figure(
        "DeepSeek-R1, 128 A3 cards",
        "A3",
        "grpo_deepseek_r1_671b_A3",
        {**_CANN, **_lengths(4096, 1024)},
        seconds={"rollout": 495.4, "reference_model": 116.7, "update": 495.1},
        mean_response=2553,
    ),
    Figure(
        "DeepSeek-R1, 128 A3 cards, optimised",
        "A3",
        "grpo_deepseek_r1_671b_A3",
        {**_CANN, **_lengths(3040, 1024)},
        seconds={"rollout": 318.3, "reference_model": 104.7, "update": 328.8},
        mean_response=3040,
    ),
    Figure(
        "Qwen3-235B, 64 A3 cards",
        "A3",
        "grpo_qwen3_235b_a22b_A2",
        {**_QWEN_235B, **_lengths(12288, 1024)},
        seconds={"rollout": 4066, "reference_model": 1262, "update": 2353},
        mean_response=7345,
    ),
)


@lru_cache(maxsize=64)
def _run(number: int) -> tuple[RunConfig, RunShape]:
    figure = FIGURES[number]
    tree = with_values(compose(project_configs(), figure.config, []), figure.changes)
    cfg = build_run_config(tree, config_name=figure.config)
    return cfg, read_shape(cfg, DEVICES[figure.device], 1)


def predicted(number: int, efficiency: Efficiency) -> TimePlan:
    """What an efficiency makes of a published run."""
    cfg, shape = _run(number)
    return plan_time(
        cfg,
        shape.device,
        samples=SampleMeans(FIGURES[number].mean_response, PROMPT),
        efficiency=efficiency,
        shape=shape,
    )


def observed(number: int, plan: TimePlan) -> dict[str, float]:
    """Seconds that were published, by phase, or of the whole iteration as {"all": ...}."""
    figure = FIGURES[number]
    if figure.per_card is None:
        return figure.seconds
    cfg, shape = _run(number)
    tokens = plan.lengths.mean + PROMPT
    if figure.longest:
        assert cfg.generate_config is not None
        tokens = cfg.generate_config.sampling_config.max_tokens + LONGEST_PROMPT
    return {"all": tokens * shape.sizes.rollout_samples / (plan.devices / figure.groups) / figure.per_card}


def ratios(number: int, efficiency: Efficiency) -> dict[str, float]:
    """Predicted over published seconds."""
    plan = predicted(number, efficiency)
    return {
        name: (plan.total if name == "all" else plan.phases[name]) / seconds for name, seconds in observed(number, plan).items()
    }


def _loss(numbers: Sequence[int], efficiency: Efficiency) -> float:
    """Each figure counts once, however many phases it has."""
    total = 0.0
    for number in numbers:
        # of logarithms: half as long is as wrong as twice as long
        errors = [math.log(ratio) ** 2 for ratio in ratios(number, efficiency).values()]
        total += statistics.fmean(errors)
    return total


def fitted(numbers: Sequence[int]) -> Efficiency:
    """The share of operations and the seconds of a layer, without and with graphs, at which the figures are least off."""
    best, step = NPU, 1.6
    loss = _loss(numbers, best)
    while step > 1.02:
        tried = [
            replace(
                best,
                train=best.train * train,
                prefill=best.prefill * train,
                layer_s=best.layer_s * layer,
                graph_layer_s=best.graph_layer_s * graph,
            )
            for factor in (step, 1 / step)
            for train, layer, graph in ((factor, 1, 1), (1, factor, 1), (1, 1, factor))
        ]
        lowest, candidate = min(((_loss(numbers, one), one) for one in tried), key=lambda pair: pair[0])
        if lowest < loss:
            loss, best = lowest, candidate
        else:
            step = math.sqrt(step)
    return best


@dataclass(frozen=True)
class LeftOut:
    """A figure against the fit to all others.

    Attributes:
        published, predicted: seconds by phase, or of the iteration as "all".
    """

    name: str
    published: dict[str, float]
    predicted: dict[str, float]


def leave_one_out() -> Iterator[LeftOut]:
    """Each figure in turn."""
    everyone = range(len(FIGURES))
    for number in everyone:
        efficiency = fitted([other for other in everyone if other != number])
        plan = predicted(number, efficiency)
        seconds = observed(number, plan)
        yield LeftOut(
            FIGURES[number].name, seconds, {name: plan.total if name == "all" else plan.phases[name] for name in seconds}
        )


def spread(found: Sequence[LeftOut]) -> float:
    """The factor within which two thirds of the predictions lie, by phase."""
    errors = sorted(abs(math.log(one.predicted[name] / seconds)) for one in found for name, seconds in one.published.items())
    return math.exp(errors[math.ceil(len(errors) * 2 / 3) - 1])
