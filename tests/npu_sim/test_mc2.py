"""Experts' tokens exchanged by one operator each (MC2): against the sum over each token's experts, and through vllm-ascend."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

#: [tokens of the devices, those of them that take part, tokens of all devices where they differ]
STEPS: dict[int, list[Any]] = {
    2: [[[5, 5], [5, 5], 0], [[4, 4], [3, 0], 0], [[2, 7], [2, 7], 14], [[1, 1], [0, 0], 0]],
    16: [[[3] * 16, [3] * 16, 0], [[2] * 16, [2, 0] * 8, 0], [[1 + n % 4 for n in range(16)], [1] * 16, 64]],
}


@pytest.mark.parametrize(
    ("size", "version"),
    [(2, "_v2"), pytest.param(2, "", marks=pytest.mark.slow), pytest.param(16, "_v2", marks=pytest.mark.slow)],
)
def test_each_token_gets_the_sum_over_its_experts_on_whichever_device_they_are(size: int, version: str) -> None:
    experts = 2 * size if size > 2 else 6
    settings = {"experts": experts, "version": version, "steps": STEPS[size], "errors": size == 2}
    reports = run_ranks("mc2", size, settings)
    for number, (tokens, active, everywhere) in enumerate(STEPS[size]):
        steps = [report["steps"][number] for report in reports]
        assert max(step["worst"] for step in steps) < 1e-4 and all(step["left"] for step in steps)
        # a row for each choice of each token that takes part, in memory for the most that may come
        assert sum(step["arrived"] for step in steps) == 4 * sum(active)
        most = (everywhere or sum(tokens)) * min(experts // size, 4)
        assert [step["rows"] for step in steps] == [[most, 32]] * size
    if size == 2:
        for report in reports:
            assert "it was destroyed, or made anew" in report["gone"] and report["anew"] < 1e-4
            assert "need a buffer of" in report["small"] and "HCCL_BUFFSIZE" in report["small"]
            assert "_Step(operator=" in report["uneven"] and "1 to 512 tokens" in report["many"]


EXPERTS = {"model": "qwen3_moe", "dtype": "float32"}
#: of each die its prompts, and replicas of how many dies; the second has no prompt, and goes along by dummy steps
LAYOUTS: dict[str, tuple[int, int, list[list[int]]]] = {
    "two replicas": (1, 2, [[0, 1, 2], [3]]),
    "one of two replicas has no prompts": (1, 2, [[0, 1, 2, 3], []]),
    "two replicas of two dies": (2, 2, [[0, 1, 2]] * 2 + [[3]] * 2),
}
MC2 = ("npu::npu_moe_distribute_dispatch_v2", "npu::npu_moe_distribute_combine_v2")


@pytest.fixture
def a_small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")


@pytest.mark.slow
@pytest.mark.usefixtures("a_small_device")
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_exchange_that_an_a3_chooses_samples_the_tokens_of_all_gather(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_SIM_SOC", "Ascend910_9391")
    tensor, sharing, prompts = LAYOUTS[name]
    layout = EXPERTS | {"tensor_parallel": tensor, "sharing": sharing, "prompts": prompts, "rounds": 1}
    gathered = run_ranks("rollout", len(prompts), layout | {"generate": {"infer_moe_token_dispatcher_type": "allgather"}})
    exchanged = run_ranks("rollout", len(prompts), layout)
    for theirs, ours in zip(gathered, exchanged, strict=True):
        assert ours["tokens"] == theirs["tokens"] and ours["worst"] < 1e-4 and all(ours["same_greedy"])
        assert ours["equal"] == [True]  # after a sleep and a weight sync
        assert ours["calls"].get(MC2[0], 0) == ours["calls"].get(MC2[1], 0) > 0 == theirs["calls"].get(MC2[0], 0)


@pytest.mark.slow
def test_sixteen_devices_of_an_a2_sample_the_tokens_of_one_that_has_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SOC": "Ascend910B4", "DEVICES": "16", "MEMORY_GIB": "4", "TIMEOUT_S": "600"}.items():
        monkeypatch.setenv(f"NPU_SIM_{name}", value)
    experts = EXPERTS | {"model": "qwen3_moe_16", "rounds": 0}
    (alone,) = run_ranks("rollout", 1, experts)
    prompts: list[list[int]] = [[0], [1], [2], [3], *[[]] * 12]
    reports = run_ranks("rollout", 16, experts | {"sharing": 16, "prompts": prompts})
    for numbers, report in zip(prompts, reports, strict=True):
        assert report["tokens"] == [alone["tokens"][number] for number in numbers]
        assert report["worst"] < 1e-4 and report["calls"][MC2[0]] == report["calls"][MC2[1]] > 0
