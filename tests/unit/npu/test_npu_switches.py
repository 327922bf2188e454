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


_NOT_RUN = "no command on the simulator sets it yet; it decides which passes there are, not what a kernel computes"
_SLICES = "the kernels of context parallelism in groups of fewer ranks; no run of four ranks on the simulator sets it yet"
_CUT_OFFS = "vLLM's own operations on logits; no command on the simulator sets it yet"
#: switches that no simulated run takes yet -> the reason; an entry that has a run, or that is refused, must go
OPEN: dict[str, str] = {
    "rl_config.ref_dynamic_max_batch_size: set": _NOT_RUN,
    "rl_config.actor_dynamic_max_batch_size: set": _NOT_RUN,
    "rl_config.update_dynamic_max_batch_size: set": _NOT_RUN,
    "rl_config.old_log_probs_fallback: trainer": _NOT_RUN,
    "rl_config.sync_ref_model: true": "copies of weights into the reference; no command on the simulator sets it yet",
    "rl_config.eval_greedy: false": _NOT_RUN,
    "actor_config.dynamic_context_parallel: true": _SLICES,
    "actor_config.min_dynamic_context_parallel_size: set": _SLICES,
    "actor_config.eval_top_p: set": _CUT_OFFS,
    "actor_config.eval_top_k: set": _CUT_OFFS,
    "sampling_config.presence_penalty: set": "vLLM's own operations on logits; no command on the simulator sets it yet",
    "sampling_config.frequency_penalty: set": "vLLM's own operations on logits; no command on the simulator sets it yet",
}


def test_every_switch_has_a_run_or_a_refusal() -> None:
    assert [str(switch) for switch in switches.list_open() if str(switch) not in OPEN] == []


def test_what_is_said_to_have_no_run_has_none() -> None:
    assert OPEN.keys() - {str(switch) for switch in switches.list_open()} == set()


def test_the_switches_are_read_from_the_code() -> None:
    listed = {(switch.key, switch.value) for switch in switches.list_switches()}
    # by the table of MindSpeed's keys, an attribute in the engine, an argument of vLLM, a key that only NPUs read
    assert {("swap_optimizer", "true"), ("recompute_modules", "moe_act"), ("enforce_eager", "false")} <= listed
    assert {("infer_moe_token_dispatcher_type", "allgather"), ("tensor_model_parallel_size", "set")} <= listed
    # of the features beside the algorithm: averages, recorded log-probs, engines, the service
    assert {("ema_decay", "set"), ("old_log_probs", "rollout"), ("engine", "transformers")} <= listed
    assert {("stop_token_ids", "set"), ("sync_ref_model", "true"), ("sampler_ema_decay", "set")} <= listed
    # a size of the model, a default, a number, a key of another platform, one of the host
    assert not {"hidden_size", "lr", "kv_cache_memory_gib", "deterministic", "keep_last"} & {key for key, _ in listed}
    assert ("bf16", "true") not in listed
    keys = {name for group in switches.GROUPS.values() for name in list_keys(group)}
    assert switches.ON_HOST.keys() <= keys and {key for key, _ in listed} <= keys


def test_runs_are_found_through_the_names_that_a_test_uses() -> None:
    runs = switches.list_runs()
    swapped = runs["swap_optimizer", "true"]  # a constant, an argument, an override of a command
    assert any(test.startswith("test_swapped_optimizer.py::test_a_checkpoint_goes_on") for test in swapped)
    assert "test_training.py::test_grpo_runs_as_a_command" in swapped
    assert ("swap_optimizer", "never") not in runs
    assert switches.find_runs(switches.Switch("actor_config", "no_such_key", "true")) == ()


def test_refusals_are_the_rules_own() -> None:
    assert "which the device's kernels" not in (switches.find_refusal(switches.Switch("actor_config", "bf16", "false")) or "")
    assert switches.find_refusal(switches.Switch("generate_config", "enforce_eager", "false")) is None
    for name in LEFT_OFF_FEATURES:
        refusal = switches.find_refusal(switches.Switch("actor_config", name, "true"))
        assert refusal is not None and LEFT_OFF_FEATURES[name] in refusal
