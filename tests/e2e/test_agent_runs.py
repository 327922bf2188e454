"""Samples of several turns in whole runs: what is drawn trains, what is told does not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rl_world import World

TURNS = [
    "rl_config.multi_turn_enable=true",
    "rl_config.max_total_response_length=24",
    "generate_config.sampling_config.max_tokens=6",
    "rl_config.use_remove_padding=true",
]


def test_an_environment_gives_turns_and_rewards(world: World) -> None:
    run = world.run(
        "grpo_tiny_cpu",
        *TURNS,
        "rl_config.environment=agent_plugins:TwoQuestions",
        "rl_config.rule_reward=false",
        "rl_config.verifier_function=[]",
        "rl_config.verifier_weight=[]",
        iterations=2,
    )
    columns = ("prompt_ids", "input_ids", "responses", "response_mask", "rollout_log_probs", "weight_versions", "loss_mask")
    prompts, inputs, responses, masks, log_probs, versions, losses = run.rows(*columns)
    facts, rewards, lengths = run.rows("trajectories", "rewards", "sequence_lengths")
    two_turns = 0
    for row in range(len(prompts)):
        assert inputs[row].tolist() == prompts[row].tolist() + responses[row].tolist()
        assert lengths[row].tolist() == [len(prompts[row]), len(responses[row])]
        mask = masks[row]
        assert not log_probs[row][~mask].any() and bool((log_probs[row][mask] < 0).all())
        assert versions[row].tolist() == [1 if drawn else -1 for drawn in mask.tolist()]
        assert not losses[row][~mask].any()
        told = "".join(map(chr, responses[row][~mask].tolist()))
        if told:
            two_turns += 1
            digits = "".join(map(chr, prompts[row].tolist()))[:2]
            assert told == f"{digits[::-1]}="
            # an end token stands before what is told
            assert int(responses[row][int((~mask).nonzero()[0]) - 1]) == 1
        assert float(rewards[row]) == sum(value or 0.0 for value in facts[row]["turn_rewards"])
    assert two_turns
    assert run.column("turns/max")[-1] == 2.0
    assert run.column("actor/grad_norm")[-1] > 0
    assert torch.isfinite(torch.tensor(run.column("actor/pg_loss"))).all()
