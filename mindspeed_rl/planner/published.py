"""Published figures of other runs, and the efficiencies that fit them.

`python benchmarks/planner.py --of published` prints the table of docs/planner.md: the error of each figure against the fit to
all others (leave one out). Assumed alike where a source does not publish it: responses of half the limit in the mean, and
prompts of 150 tokens. Throughput counts tokens as MindSpeed-RL does: the maximum response and prompt for GRPO and PPO, mean
ones for DAPO.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, find_project_configs
from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.efficiency import NPU, Efficiency
from mindspeed_rl.planner.run_shape import RunShape, read_shape
from mindspeed_rl.planner.samples import SampleMeans
from mindspeed_rl.planner.seconds import TimePlan, plan_time
from mindspeed_rl.run.draft import draft

#: mean and maximum tokens of a prompt of a mathematical data set
_PROMPT, _MAX_PROMPT = 150.0, 500.0


@dataclass(frozen=True)
class _Figure:
    """One published run.

    Attributes:
        config: the most similar shipped run file, and `changes` to that.
        per_card: published tokens a second of a card.
        devices_per_card: NPUs of a card.
        counts_maximum: that throughput counts responses of the maximum length.
        seconds: published seconds of phases.
        mean_response: where it was published.
    """

    name: str
    device: str
    config: str
    changes: dict[str, object] = field(default_factory=dict)
    per_card: float | None = None
    devices_per_card: int = 2
    counts_maximum: bool = True
    seconds: dict[str, float] = field(default_factory=dict)
    mean_response: float | None = None


def _lengths(limit: int, prompt: int) -> dict[str, object]:
    return {
        "generate_config.sampling_config.max_tokens": limit,
        "generate_config.max_model_len": limit + prompt,
        "rl_config.max_prompt_length": prompt,
    }


_CANN: dict[str, object] = {
    "rl_config.actor_resource.num_npus": 256,
    "generate_config.max_num_seqs": 64,
    "generate_config.enforce_eager": False,
}
_QWEN_235B: dict[str, object] = {
    "generate_config.enforce_eager": False,
    "megatron_training.global_batch_size": 512,
    "rl_config.mini_batch_size": 512,
    "rl_config.n_samples_per_prompt": 16,
}
_R1: dict[str, object] = {
    "rl_config.actor_resource.num_npus": 384,
    "megatron_training.global_batch_size": 384,
    "rl_config.mini_batch_size": 384,
    "rl_config.n_samples_per_prompt": 32,
    "actor_config.pipeline_model_parallel_size": 12,
    "actor_config.num_layer_list": "5,5,5,5,5,5,5,5,5,5,5,6",
}

#: the sources are in docs/planner.md. The cann recipes publish no maximum response: about one and a half mean ones are assumed,
#: and captured graphs in the engine; random weights seldom end a response, so that the mean is the limit
_FIGURES: tuple[_Figure, ...] = (
    _Figure("GRPO Qwen2.5-7B, A3, 2k", "A3", "grpo_qwen25_7b_A3", per_card=220),
    _Figure("GRPO Qwen2.5-32B, A3, 2k", "A3", "grpo_qwen25_32b_A3", per_card=220),
    _Figure("GRPO Qwen2.5-32B, A2, 1k", "A2", "grpo_qwen25_32b_A2", per_card=100, devices_per_card=1),
    _Figure("GRPO Qwen3-8B, A3, 8k", "A3", "grpo_qwen3_8b_A3", per_card=252),
    _Figure("GRPO DeepSeek-R1, A3, 384 devices, 2k", "A3", "grpo_deepseek_r1_671b_A3", _R1, per_card=210),
    _Figure("DAPO Qwen3-30B-A3B, A3, 2k", "A3", "dapo_qwen3_30b_a3b_A3", per_card=44, counts_maximum=False),
    _Figure("DAPO Qwen3-32B, A3, 2k", "A3", "dapo_qwen3_32b_A3", per_card=140, counts_maximum=False),
    _Figure("DAPO Qwen2.5-32B, A3, 30k", "A3", "dapo_qwen25_32b_A3_32k", per_card=108, counts_maximum=False),
    _Figure("DAPO Qwen2.5-32B, A2, 20k", "A2", "dapo_qwen25_32b_A2_20k", per_card=35, devices_per_card=1, counts_maximum=False),
    _Figure("PPO Qwen2.5-32B, A3, 2k", "A3", "ppo_qwen25_32b_A3", per_card=74),
    _Figure(
        "DeepSeek-R1, 128 A3 cards",
        "A3",
        "grpo_deepseek_r1_671b_A3",
        {**_CANN, **_lengths(4096, 1024)},
        seconds={"rollout": 495.4, "reference_model": 116.7, "update": 495.1},
        mean_response=2553,
    ),
    _Figure(
        "DeepSeek-R1, 128 A3 cards, optimised",
        "A3",
        "grpo_deepseek_r1_671b_A3",
        {**_CANN, **_lengths(3040, 1024)},
        seconds={"rollout": 318.3, "reference_model": 104.7, "update": 328.8},
        mean_response=3040,
    ),
    _Figure(
        "Qwen3-235B, 64 A3 cards",
        "A3",
        "grpo_qwen3_235b_a22b_A2",
        {**_QWEN_235B, **_lengths(12288, 1024)},
        seconds={"rollout": 4066, "reference_model": 1262, "update": 2353},
        mean_response=7345,
    ),
)


@lru_cache(maxsize=64)
def _read_figure(index: int) -> RunShape:
    figure = _FIGURES[index]
    tree = apply_values(compose(find_project_configs(), figure.config, []), figure.changes)
    return read_shape(draft(build_run_config(tree, config_name=figure.config)), DEVICES[figure.device])


def _predict_figure(index: int, efficiency: Efficiency) -> TimePlan:
    """Predict a published run with an efficiency."""
    shape = _read_figure(index)
    means = SampleMeans(_FIGURES[index].mean_response, _PROMPT)
    return plan_time(shape.run, shape.device, samples=means, efficiency=efficiency, shape=shape)


def _find_published(index: int, plan: TimePlan) -> dict[str, float]:
    """Return the published seconds, by phase, or of the iteration as {"all": ...}."""
    figure = _FIGURES[index]
    if figure.per_card is None:
        return figure.seconds
    shape = _read_figure(index)
    tokens = plan.lengths.mean + _PROMPT
    if figure.counts_maximum:
        assert shape.generate is not None
        tokens = shape.generate.sampling_config.max_tokens + _MAX_PROMPT
    return {"all": tokens * shape.sizes.rollout_samples / (plan.devices / figure.devices_per_card) / figure.per_card}


def _compute_loss(indexes: Sequence[int], efficiency: Efficiency) -> float:
    """Return the squared errors of logarithms (half as long is as wrong as twice as long); each figure counts once."""
    total = 0.0
    for index in indexes:
        plan = _predict_figure(index, efficiency)
        total += statistics.fmean(
            math.log((plan.total if name == "all" else plan.phases[name]) / seconds) ** 2
            for name, seconds in _find_published(index, plan).items()
        )
    return total


def fit_efficiency(indexes: Sequence[int]) -> Efficiency:
    """Fit the fraction of operations and the seconds of a layer, without and with graphs, to these figures."""
    best, step = NPU, 1.6
    loss = _compute_loss(indexes, best)
    while step > 1.02:
        candidates = [
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
        lowest, candidate = min(
            ((_compute_loss(indexes, candidate), candidate) for candidate in candidates), key=lambda pair: pair[0]
        )
        if lowest < loss:
            loss, best = lowest, candidate
        else:
            step = math.sqrt(step)
    return best


@dataclass(frozen=True)
class _LeftOut:
    """A figure and its prediction by the fit to all others.

    Attributes:
        published, predicted: seconds by phase, or of the iteration as "all".
    """

    name: str
    published: dict[str, float]
    predicted: dict[str, float]


def _leave_one_out() -> Iterator[_LeftOut]:
    """Yield each figure with the prediction by the fit to all others."""
    for index, figure in enumerate(_FIGURES):
        plan = _predict_figure(index, fit_efficiency([other for other in range(len(_FIGURES)) if other != index]))
        seconds = _find_published(index, plan)
        predicted = {name: plan.total if name == "all" else plan.phases[name] for name in seconds}
        yield _LeftOut(figure.name, seconds, predicted)


def _compute_spread(figures: Sequence[_LeftOut]) -> float:
    """Return the factor that bounds the error of two thirds of the predictions, by phase."""
    errors = sorted(
        abs(math.log(figure.predicted[name] / seconds)) for figure in figures for name, seconds in figure.published.items()
    )
    return math.exp(errors[math.ceil(len(errors) * 2 / 3) - 1])
