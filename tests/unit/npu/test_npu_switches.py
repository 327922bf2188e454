"""Every switch of an NPU has a simulated run or a refusal; `tests/npu_sim/switches.py` finds all three."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from mindspeed_rl.config.keys.megatron import LEFT_OFF_FEATURES
from mindspeed_rl.config.keys.schema import list_keys

ROOT = Path(__file__).parents[3]
SPEC = importlib.util.spec_from_file_location("npu_switches", ROOT / "tests" / "npu_sim" / "switches.py")
switches = sys.modules["npu_switches"] = importlib.util.module_from_spec(SPEC)  # dataclasses look their module up
SPEC.loader.exec_module(switches)


def test_every_switch_has_a_run_or_a_refusal() -> None:
    assert not [str(switch) for switch in switches.list_open()]


def test_the_switches_are_read_from_the_code() -> None:
    listed = {(switch.key, switch.value) for switch in switches.list_switches()}
    # by the table of MindSpeed's keys, an attribute in the engine, an argument of vLLM, a key that only NPUs read
    assert {("swap_optimizer", "true"), ("recompute_modules", "moe_act"), ("enforce_eager", "false")} <= listed
    assert {("infer_moe_token_dispatcher_type", "allgather"), ("tensor_model_parallel_size", "set")} <= listed
    # of the features beside the algorithm: averages, recorded log-probs, engines, the service
    assert {("ema_decay", "set"), ("old_log_probs", "rollout"), ("engine", "transformers")} <= listed
    assert {("stop_token_ids", "set"), ("sync_ref_model", "true"), ("sampler_ema_decay", "set")} <= listed
    # what leaves nothing out by default, what a property of the group reads, what servers and responses read
    assert {("top_k", "set"), ("top_p", "set"), ("repetition_penalty", "set"), ("ignore_eos", "true")} <= listed
    assert {("structured_output", "set"), ("agent_loop", "set"), ("moe_tp_extend_ep", "true"), ("engine", "fsdp")} <= listed
    # which process has which device
    assert {("trainer_mode", "async"), ("elastic_rollout", "true"), ("elastic_training_devices", "set")} <= listed
    assert {("critic_resource", "set"), ("vllm_server_host", "set"), ("infer_expert_parallel_size", "set")} <= listed
    # a size of the model, a default, a number, a key of another platform, one of the host
    assert not {"hidden_size", "lr", "kv_cache_memory_gib", "deterministic", "keep_last"} & {key for key, _ in listed}
    assert ("bf16", "true") not in listed
    keys = {name for group in switches.GROUPS.values() for name in list_keys(group)}
    assert {name.rpartition(".")[2] for name in switches.ON_HOST} <= keys and {key for key, _ in listed} <= keys


def test_runs_are_found_through_the_names_that_a_test_uses() -> None:
    runs = switches.list_runs()
    swapped = runs["swap_optimizer", "true"]  # a constant, an argument, an override of a command
    assert any(test.startswith("test_swapped_optimizer.py::test_a_checkpoint_goes_on") for test in swapped)
    assert "test_training.py::test_grpo_runs_as_a_command" in swapped
    assert ("swap_optimizer", "never") not in runs
    assert switches.find_runs(switches.Switch("actor_config", "no_such_key", "true")) == ()


def test_a_refusal_is_of_the_value_and_not_of_the_run_file_around_it() -> None:
    taken = [("actor_config", "engine", "fsdp"), ("rl_config", "trainer_mode", "async")]
    taken += [("rl_config", "router_replay", "mode=R2"), ("sampling_config", "structured_output", "set")]
    taken += [("generate_config", name, "set") for name in ("engine_kwargs", "additional_config")]
    assert [name for name in taken if switches.find_refusal(switches.Switch(*name)) is not None] == []


def test_refusals_are_the_rules_own() -> None:
    assert "which the device's kernels" not in (switches.find_refusal(switches.Switch("actor_config", "bf16", "false")) or "")
    assert switches.find_refusal(switches.Switch("generate_config", "enforce_eager", "false")) is None
    for name in LEFT_OFF_FEATURES:
        refusal = switches.find_refusal(switches.Switch("actor_config", name, "true"))
        assert refusal is not None and LEFT_OFF_FEATURES[name] in refusal
