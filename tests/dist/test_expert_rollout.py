"""Engines that share a model's experts: the responses of one process, whoever has how many prompts, push after push."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import exchange_jobs
import pytest
import rollout_jobs as jobs
from megatron_release import GROUPED_EXPERTS
from ranks import Ranks
from slow_layouts import marked
from training_jobs import Setting

#: tensor parallel size of a replica, replicas that share experts, model
LAYOUTS = {
    "experts over TP2": (2, 1, "moe"),
    "experts over DP2": (1, 2, "moe"),
    "experts over DP2 x TP2": (2, 2, "moe"),
    "DeepSeek-V3 over TP2": (2, 1, "deepseek"),
    "DeepSeek-V3 over DP2": (1, 2, "deepseek"),
    "DeepSeek-V3 over DP2 x TP2": (2, 2, "deepseek"),
    "Mixtral over DP2": (1, 2, "mixtral"),
    "Qwen2-MoE over DP2": (1, 2, "qwen2moe"),
}
SLOW = list(LAYOUTS)[2:]
MARKED = marked(LAYOUTS, SLOW)
#: of the sixteen requests of a push, how many each replica takes: all, some, none
UNEVEN = [[16, 0], [3, 13], [0, 16]]


@pytest.fixture(scope="module")
def single_process(models: dict[str, Path]) -> Iterator[Callable[[str], dict[int, Any]]]:
    """(model) -> responses of one engine that holds all experts, of each push."""
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in known:
            group = Ranks(1, "rollout")
            setting = Setting(str(models[name]))
            cuts = [[16]] * len(UNEVEN)
            known[name] = group.run(jobs.share_out, setting=setting, infer_tp=1, sharing=None, cuts=cuts, timeout_s=300)[0]
            group.close()
        return known[name]

    yield get


@pytest.mark.parametrize(("tensor", "sharing", "name"), MARKED)
def test_engines_that_share_experts_answer_as_one_process_does(
    models: dict[str, Path], single_process: Callable[[str], Any], tensor: int, sharing: int, name: str
) -> None:
    size = tensor * sharing
    training = {"expert_model_parallel_size": 2, "moe_grouped_gemm": GROUPED_EXPERTS}
    group, setting = Ranks(size, "rollout"), Setting(str(models[name]), training)
    try:
        cuts = UNEVEN if sharing > 1 else [[16]] * len(UNEVEN)
        share = {"infer_tp": tensor, "sharing": sharing, "timeout_s": 300}
        reports = group.run(jobs.share_out, setting=setting, cuts=cuts, **share)
        for push, responses in enumerate(single_process(name)):
            for report in reports:  # every tensor rank of a replica has drawn the same
                assert report[push] == {number: responses[number] for number in report[push]}
            assert {number for report in reports for number in report[push]} == set(responses)
        for report in group.run(jobs.learn, setting=setting, **share):
            assert max(report["differences"]) < 1e-4 and len(set(report["proven"])) == 1
        for said in group.run(jobs.misplace_experts, setting=setting, infer_tp=tensor, sharing=sharing, timeout_s=300):
            assert "differ from those trained" in said["damaged"] and "w13_weight" in said["damaged"]
            assert said["mended"] == "nothing"
    finally:
        group.close()


@pytest.mark.parametrize("sizes", [[2, 3, 1], [0, 4, 1], [0, 0, 2]], ids=str)
def test_rows_reach_all_ranks_and_sums_their_owners_however_many_each_has(sizes: list[int], three: Ranks) -> None:
    everyone = [[10.0 * rank + row] * 2 for rank, size in enumerate(sizes) for row in range(size)]
    starts = [sum(sizes[:rank]) for rank in range(3)]
    for rank, (gathered, summed) in enumerate(three.run(exchange_jobs.exchange, sizes=sizes, width=2, dtype="float32")):
        assert gathered == everyone
        rows = range(starts[rank], starts[rank] + sizes[rank])
        assert summed == [[3.0 * row + 0 + 1 + 2] * 2 for row in rows]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    group = Ranks(3, "rollout")
    yield group
    group.close()
