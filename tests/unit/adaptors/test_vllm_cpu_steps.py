"""Steps between two turns of vLLM's scheduler draw what its own steps draw; seeds in bulk are those one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from vllm_program import run_program

from mindspeed_rl.adaptors.vllm_cpu_steps import _count_at_least, take_seeds


@pytest.mark.parametrize("cache", [pytest.param("caching", marks=pytest.mark.slow), "short of memory"])
def test_responses_are_those_of_single_steps_in_fewer_turns(cache: str, tmp_path: Path) -> None:
    result = run_program(Path(__file__).with_name("steps_ahead.py"), tmp_path, cache)
    assert result["names"] and result["tokens"] and result["ends"] and result["dropped"]
    assert result["log-probs"] < 1e-5  # another batch around a request rounds differently
    assert result["exact"] < 1e-4
    # one token, up to a limit, up to a stop, and as many as the model takes
    lengths = result["lengths"]
    assert {name: lengths[name] for name in ("0", "6", "11", "14")} == {"0": 1, "6": 2, "11": 30, "14": 160 - 3 - 14 % 5}
    assert result["stopped"] >= 3
    single, ahead = result["turns"]
    assert ahead < single / 3 and result["steps"] > 3
    assert result["asked"] and all(result["asked"].values()), result["asked"]
    assert result["free blocks"] == result["blocks"]


@pytest.mark.slow
def test_a_server_steps_ahead_too(tmp_path: Path) -> None:
    result = run_program(Path(__file__).with_name("served_steps.py"), tmp_path)
    assert [sum(each) for each in result["lengths"]] == result["wanted"]
    assert max(max(each) for each in result["lengths"]) > 10  # tokens that came at once
    assert result["gap"] < 1e-4 and result["frozen"]


def test_seeds_are_those_that_a_generator_gives_one_by_one() -> None:
    generators = [torch.Generator().manual_seed(number) for number in range(3)]
    alike = [torch.Generator().manual_seed(number) for number in range(3)]
    # requests come, go and stand in another order
    for asked in [(0,), (0, 1), (2, 0, 1)] + [(1, 2)] * 50 + [(0, 2)] * 70:
        expected = [torch.randint(0, 2**31, (1,), generator=alike[number]).item() for number in asked]
        assert [take_seeds(generators[number], 1)[0] for number in asked] == expected


def test_ranks_of_tokens_count_equal_ones_and_those_without_probability() -> None:
    log_probs = torch.tensor([[-1.0, -3.0, -1.0, float("-inf")], [float("-inf"), -2.0, -1.5, -1.75]])
    ranks = _count_at_least(log_probs, log_probs[:, :1])
    assert ranks.tolist() == [2, 4] and ranks.dtype == torch.int64
