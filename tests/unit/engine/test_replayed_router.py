"""A replayed router: the experts of a pass are there again when backward recomputes it, and are compared once."""

from __future__ import annotations

import pytest
import torch

from mindspeed_rl.engine.router_replay import MegatronRouter

FIRST, SECOND = torch.tensor([[0, 3], [-1, -1]]), torch.tensor([[2, 1], [3, 0]])
SCORES = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]])


def choose(scores: torch.Tensor, topk: int, *limits: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = scores.topk(topk, dim=1)
    return values, indices


def run(router: MegatronRouter) -> list[list[int]]:
    scores, experts = router.get_replay_topk(SCORES, 2, None, None, choose)
    assert torch.equal(scores, SCORES.gather(1, experts))
    return experts.tolist()


def take_counts(router: MegatronRouter) -> tuple[int, int]:
    assert router.replay.agreed is not None and router.replay.compared is not None
    return int(router.replay.agreed), int(router.replay.compared)


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_recomputed_pass_gets_its_experts_again_and_is_counted_once(recomputes: bool) -> None:
    router, results = MegatronRouter(), []
    for experts in (FIRST, SECOND):
        router.arm(experts)
        with torch.set_grad_enabled(not recomputes):
            results.append(run(router))
    # the router's own for a token without experts; it would have chosen [0, 1] and [3, 2]
    assert results == [[[0, 3], [3, 2]], [[2, 1], [3, 0]]]
    assert take_counts(router) == (1 + 2, 2 + 4)
    if recomputes:
        assert [run(router), run(router)] == results
    assert take_counts(router) == (1 + 2, 2 + 4)
    assert run(router) == [[0, 1], [3, 2]]  # nothing is left: the router chooses


def test_a_failed_pass_leaves_nothing_for_the_next() -> None:
    router = MegatronRouter()
    with torch.no_grad():
        router.arm(SECOND)
        run(router)
        router.arm(FIRST)
    router.reset()
    assert run(router) == [[0, 1], [3, 2]]
