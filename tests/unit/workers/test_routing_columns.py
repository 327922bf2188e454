"""The experts of a sample on their way to the trainer: turn after turn, and to each pipeline stage its layers' experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models.plan import ModelPlan, plan_model
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory
from mindspeed_rl.workers.routing import build_routing_columns

MODELS = Path(__file__).parents[2] / "data" / "models"


def plan_of(name: str, folder: Path, **keys: object) -> ModelPlan:
    (folder / "config.json").write_text((MODELS / f"{name}.json").read_text())
    return plan_model(MegatronConfig(**keys), folder)  # pyrefly: ignore[bad-argument-type]


def routing(tokens: int, layers: int, k: int, first: int = 0) -> np.ndarray:
    """Numbers that tell the places apart."""
    return (np.arange(tokens * layers * k).reshape(tokens, layers, k) + first) % 128


def make_generated(count: int, experts: np.ndarray | None) -> Generated:
    return Generated((7,) * count, (-1.0,) * count, (0,) * count, "stop", experts)


def test_each_stage_gets_its_layers_one_byte_an_expert(tmp_path: Path) -> None:
    plan = plan_of("Qwen3-30B-A3B", tmp_path, pipeline_model_parallel_size=2)  # 48 layers, 8 of 128 experts
    experts = routing(5, 48, 8)
    columns = build_routing_columns(plan, [Trajectory.from_response((1, 2), make_generated(4, experts))])
    assert [lengths.tolist() for lengths in columns["routed_lengths"]] == [[5]]
    for stage, layers in ((0, slice(0, 24)), (1, slice(24, 48))):
        (result,) = columns[f"routed_experts_{stage}"]
        assert result.dtype == torch.uint8
        assert result.tolist() == experts[:, layers].flatten().tolist()


def test_layers_without_experts_have_no_place(tmp_path: Path) -> None:
    plan = plan_of("DeepSeek-R1", tmp_path)  # 61 layers, the first three without experts, 8 of 256
    experts = routing(3, 61, 8)
    (result,) = build_routing_columns(plan, [Trajectory.from_response((1,), make_generated(3, experts))])["routed_experts_0"]
    assert result.tolist() == experts[:, 3:].flatten().tolist()


def test_tokens_keep_the_experts_of_the_turn_that_computed_them_first(tmp_path: Path) -> None:
    plan = plan_of("Qwen3-30B-A3B", tmp_path)
    # prompt of 2, a turn of 3, two tokens told, a turn of 2, one told: 4 tokens are known after the first turn, 8 at the end
    first, second = routing(4, 48, 8), routing(8, 48, 8, first=50)
    segments = (
        Segment.from_generated(make_generated(3, first)),
        Segment.from_context((4, 4)),
        Segment.from_generated(make_generated(2, second)),
        Segment.from_context((4,)),
    )
    rewritten = TokenSequence((1, 1, 1), (Segment.from_generated(make_generated(1, routing(3, 48, 8, first=9))),))
    sample = Trajectory((TokenSequence((1, 2), segments), rewritten), "stop")
    columns = build_routing_columns(plan, [sample])
    assert columns["routed_lengths"][0].tolist() == [8, 3]
    expected = np.concatenate([first, second[4:], routing(3, 48, 8, first=9)])
    assert columns["routed_experts_0"][0].tolist() == expected.flatten().tolist()
    assert all(segment.routing is None for segment in sample.drop_routing().segments)


def test_an_engine_without_experts_is_an_error(tmp_path: Path) -> None:
    plan = plan_of("Qwen3-30B-A3B", tmp_path)
    with pytest.raises(RuntimeError, match="router_replay: the rollout engine did not report"):
        build_routing_columns(plan, [Trajectory.from_response((1,), make_generated(2, None))])
