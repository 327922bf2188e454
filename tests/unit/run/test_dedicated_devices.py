"""Roles with devices of their own: how many devices a run has, what contradicts, what is derived."""

from __future__ import annotations

from typing import Any

import pytest
from sample_runs import prompt_level

from mindspeed_rl.run.explain.plan_page import explain
from mindspeed_rl.run.rules.validation import unavailable, validate

R, G = "rl_config", "generate_config"
SEPARATE = {"use_integrated_worker": False}


def own(count: int) -> dict[str, int]:
    return {"num_npus": count}


def test_devices_of_all_roles_add_up_and_a_role_without_a_resource_shares_the_actors() -> None:
    run = prompt_level(
        rl_config={**SEPARATE, "rollout_resource": own(8), "reference_resource": own(4)},
        ref_config={"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1},
        generate_config={"infer_tensor_parallel_size": 2},
    )
    assert validate(run) == [] and unavailable(run) == []
    assert run.placement.num_devices == 16 + 8 + 4 and run.placement.disaggregated
    sizes = run.sizes
    assert (sizes.rollout.dp_size, sizes.ref.dp_size if sizes.ref else None, sizes.actor.dp_size) == (4, 1, 4)
    report = explain(run)["resources"]
    assert report["num_devices"] == 28
    devices = {phase["phase"]: phase["devices"] for phase in report["phases"]}
    assert devices["generate"] == "8 dedicated" and devices["ref_log_probs"] == "4 dedicated"
    assert devices["update_actor"] == "0-15"
    shared = prompt_level(rl_config=SEPARATE)
    assert validate(shared) == [] and shared.placement.num_devices == 16 and not shared.placement.disaggregated


def test_a_judge_that_the_run_serves_has_a_phase_on_its_own_devices_or_on_the_actors() -> None:
    def judge(**rl: object) -> tuple[int, dict[str, str]]:
        run = prompt_level(rl_config={"judge_model": "/models/judge", **rl})
        assert validate(run) == []
        phase = next(phase for phase in explain(run)["resources"]["phases"] if phase["phase"] == "judge")
        return run.placement.num_devices, phase

    count, phase = judge(judge_tensor_parallel_size=4)
    assert count == 16 and phase["devices"] == "0-15"
    assert phase["holds"] == (
        "4 engine(s) TP4 of the judge /models/judge, replies of up to 512 tokens, off the device in other phases"
    )
    count, phase = judge(judge_resource=own(2), judge_max_tokens=64)
    assert count == 18 and phase["devices"] == "2 dedicated"
    assert phase["holds"] == "2 engine(s) TP1 of the judge /models/judge, replies of up to 64 tokens"
    outside = prompt_level(rl_config={"judge_model": "name", "judge_url": "http://127.0.0.1/v1"})
    assert "judge" not in outside.placement.layouts


def test_a_role_on_the_actors_devices_has_the_actors_layout() -> None:
    run = prompt_level(rl_config=SEPARATE, ref_config={"tensor_model_parallel_size": 4})
    assert unavailable(run) == ["ref_config.tensor_model_parallel_size: is 4; roles share the actor's layout, 2"]


@pytest.mark.parametrize(
    ("changes", "rule", "words"),
    [
        ({R: {"rollout_resource": own(8)}}, "integrated_rollout", "must be left out while use_integrated_worker is true"),
        (
            {R: {**SEPARATE, "rollout_resource": own(6)}, G: {"infer_tensor_parallel_size": 4}},
            "rollout_devices",
            "(6) must be divisible by generate_config.infer_tensor_parallel_size (4)",
        ),
        (
            {R: {"judge_model": "/m", "judge_resource": own(3), "judge_tensor_parallel_size": 2}},
            "judge_devices",
            "rl_config.judge_resource.num_npus (3) must be divisible by rl_config.judge_tensor_parallel_size (2)",
        ),
        (
            {R: {"judge_model": "/m", "judge_tensor_parallel_size": 3}},
            "judge_devices",
            "rl_config.actor_resource.num_npus (16) must be divisible by rl_config.judge_tensor_parallel_size (3)",
        ),
        (
            {R: {"judge_model": "/m", "verifier_function": ["acc", "judge"], "verifier_weight": [1.0, 1.0]}},
            "served_judge_name",
            "a judge that the run serves is added only by judge_model",
        ),
        ({R: {"judge_panel": ["http://b/v1"]}}, "judge_panel", "judge_panel adds judges to the one at judge_url"),
        ({R: {"judge_model": "/m", "judge_repeats": 3}}, "judge_repeats", "judge_repeats (3) asks for more than one vote"),
        (
            {R: {"judge_url": "http://a/v1", "judge_panel": ["http://b/v1"], "judge_quorum": 3}},
            "judge_quorum",
            "judge_quorum (3) is more than the 2 vote(s)",
        ),
        ({R: {**SEPARATE, "rollout_resource": own(0)}}, "apart_positive", "rollout_resource.num_npus (0) must be at least 1"),
        (
            {R: {**SEPARATE, "reference_resource": own(4), "sync_ref_model": True}, "ref_config": {"lr": 1.0}},
            "reference_beside_actor",
            "rl_config.sync_ref_model needs the reference on the actor's devices",
        ),
        (
            {R: {**SEPARATE, "rollout_resource": own(4)}, G: {"vllm_server_host": "a"}},
            "one_kind_of_server",
            "exclude each other",
        ),
        ({G: {"vllm_server_host": ["a", "b", "c"], "vllm_server_port": [1, 2]}}, "server_ports", "2 entries for 3 hosts"),
        ({G: {"vllm_server_host": "a", "vllm_server_port": 70000}}, "server_port", "(70000) must lie in 1..65535"),
    ],
)
def test_contradictions_are_named(changes: dict[str, dict[str, Any]], rule: str, words: str) -> None:
    results = {violation.rule: violation.message for violation in validate(prompt_level(**changes))}
    assert rule in results and words in results[rule]


@pytest.mark.parametrize(
    ("hosts", "ports", "servers"),
    [
        ("a", 8000, [("a", 8000)]),
        (["a", "b"], 9, [("a", 9), ("b", 9)]),
        (["a", "b"], [1, 2], [("a", 1), ("b", 2)]),
        ("a", [1, 2], [("a", 1), ("a", 2)]),
    ],
)
def test_servers_are_hosts_with_their_ports(hosts: Any, ports: Any, servers: list[tuple[str, int]]) -> None:
    run = prompt_level(generate_config={"vllm_server_host": hosts, "vllm_server_port": ports})
    assert list(run.placement.servers) == servers and run.placement.disaggregated and run.placement.num_devices == 16
    assert run.sizes.rollout.dp_size == len(servers)


def test_without_blocking_a_share_is_cut_into_dispatches_of_whole_micro_batches() -> None:
    # 32 prompts x 8 responses; 4 replicas of the actor, 16 of the rollout; micro-batches of 4
    whole = prompt_level().sizes.dispatch_sizes()
    cut = prompt_level(rl_config={"blocking": False}).sizes.dispatch_sizes()
    assert (whole["ref_dispatch_size"], cut["ref_dispatch_size"]) == (64, 8)
    assert (whole["actor_rollout_dispatch_size"], cut["actor_rollout_dispatch_size"]) == (16, 8)
    assert (whole["reward_dispatch_size"], cut["reward_dispatch_size"]) == (256, 32)
    assert cut["actor_update_dispatch_size"] == whole["actor_update_dispatch_size"]
    written = prompt_level(rl_config={"blocking": False, "ref_dispatch_size": 64})
    assert written.sizes.dispatch_sizes()["ref_dispatch_size"] == 64
    # 64 / 4 replicas = 16 rows, micro-batches of 6: nothing is whole, so only the count is cut
    uneven = prompt_level(rl_config={"blocking": False, "n_samples_per_prompt": 2}, megatron_training={"micro_batch_size": 6})
    assert uneven.sizes.dispatch_sizes()["ref_dispatch_size"] == 2
