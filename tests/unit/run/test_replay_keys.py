"""What verl and slime call router replay says the same here."""

from __future__ import annotations

from typing import Any

import pytest
from sample_runs import prompt_level

from mindspeed_rl.run.rules.validation import validate


@pytest.mark.parametrize(
    ("keys", "mode"),
    [
        ({}, "disabled"),
        ({"router_replay": {"mode": "R2"}}, "R2"),
        ({"use_routing_replay": True}, "R2"),
        ({"use_rollout_routing_replay": True}, "R3"),
        ({"use_routing_replay": True, "use_rollout_routing_replay": True}, "R3"),
        ({"router_replay": {"mode": "R3"}, "enable_rollout_routing_replay": True}, "R3"),
        ({"enable_rollout_routing_replay": False}, "disabled"),
    ],
)
def test_second_spellings_are_the_mode(keys: dict[str, Any], mode: str) -> None:
    experts = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "sequence_parallel": True}
    run = prompt_level(megatron_training=experts, rl_config={"mini_batch_size": 8, **keys})
    assert run.rl.router_replay.mode == mode
    assert validate(run) == []
