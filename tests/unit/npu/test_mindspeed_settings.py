"""The keys that MindSpeed gets, without MindSpeed: it is tested on the simulated NPU (tests/npu_sim)."""

from __future__ import annotations

import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

from mindspeed_rl.adaptors import mindspeed
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import _PROCESS_GROUPS, LEFT_OFF_FEATURES, parse_group_buffers
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.explain.effects import find_warnings


def test_fused_kernels_are_always_on_and_complete() -> None:
    keys = mindspeed.settings(MegatronConfig())
    assert all(keys[f"use_{name}"] for name in ("flash_attn", "fused_rmsnorm", "fused_swiglu", "fused_rotary_pos_emb"))
    assert keys["position_embedding_type"] == "rope"  # without it the fused rotary embedding fails at the first forward
    assert keys["transformer_impl"] == "local" and keys["use_legacy_models"] is False


def test_mindspeeds_own_context_parallelism_stays_off() -> None:
    assert mindspeed.settings(MegatronConfig(context_parallel_size=4))["context_parallel_size"] == 1


def test_memory_features_of_the_run_file_are_passed_on() -> None:
    config = MegatronConfig(swap_optimizer=True, use_distributed_optimizer=True)
    keys = mindspeed.settings(config)
    assert keys["swap_optimizer"] and keys["use_distributed_optimizer"]
    assert "reuse_fp32_param" not in keys


def test_an_engine_that_swaps_by_itself_needs_nothing_of_mindspeeds_optimizer() -> None:
    config = MegatronConfig(engine="fsdp", swap_optimizer=True, use_distributed_optimizer=False)
    mindspeed.check(config)
    assert "swap_optimizer" not in mindspeed.settings(config)


def test_a_misspelled_key_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="no argument 'use_fused_rmsnrom'; did you mean 'use_fused_rmsnorm'"):
        mindspeed._check_keys({"use_fused_rmsnrom": True}, {"use_fused_rmsnorm": False})


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            MegatronConfig(swap_optimizer=True, reuse_fp32_param=True, use_distributed_optimizer=True),
            "swap_optimizer: needs reuse_fp32_param: false",
        ),
        (MegatronConfig(swap_optimizer=True), "use_distributed_optimizer"),
        (MegatronConfig(num_attention_heads=6, context_parallel_size=4), "6 attention heads cannot be split"),
    ],
)
def test_keys_that_exclude_each_other_are_refused(config: MegatronConfig, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        mindspeed.check(config)


def test_ring_attention_does_not_need_divisible_heads() -> None:
    mindspeed.check(MegatronConfig(num_attention_heads=6, context_parallel_size=4, context_parallel_algo="megatron_cp_algo"))


def test_grouped_experts_are_megatrons_own() -> None:
    assert "moe_grouped_gemm" not in mindspeed.settings(MegatronConfig(moe_grouped_gemm=True))


def test_hccl_buffers_are_given_by_group() -> None:
    assert parse_group_buffers("tp:256; dp:64") == parse_group_buffers("tp:256,dp:64") == {"tp": 256, "dp": 64}
    assert parse_group_buffers(None) == {}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tp:big", "'tp:big' is not a group with its MiB"),
        ("tp", "'tp' is not"),
        ("exp:64", "'exp' is not one of Megatron's groups cp, dp"),
    ],
)
def test_hccl_buffers_of_unknown_groups_or_sizes_are_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_group_buffers(text)


def test_the_groups_are_those_that_megatron_asks_options_for() -> None:
    core = Path(importlib.util.find_spec("megatron.core").submodule_search_locations[0])
    asked = re.findall(r"get_nccl_options\(\s*\"(\w+)\"", (core / "parallel_state.py").read_text())
    assert set(_PROCESS_GROUPS) == set(asked)


@pytest.mark.parametrize("key", LEFT_OFF_FEATURES)
def test_a_feature_that_is_left_off_is_warned_of_and_explained(key: str) -> None:
    with pytest.warns(UserWarning, match=f"^{key}: left off: "):
        keys = mindspeed.settings(MegatronConfig(**{key: True}))
    assert key not in keys and not any(name.startswith("coc_") for name in keys)
    plain = load_run("grpo_qwen25_7b_A3")
    asked = load_run("grpo_qwen25_7b_A3", overrides=[f"actor_config.{key}=true"])
    (added,) = set(find_warnings(asked)) - set(find_warnings(plain))
    assert added.startswith(f"actor_config.{key}: left off where MindSpeed trains")
    on_cpu = load_run("grpo_qwen25_7b_A3", overrides=[f"actor_config.{key}=true", "platform=cpu"])
    assert not any("left off" in text for text in find_warnings(on_cpu))


def test_determinism_is_the_engines_own_and_not_asked_of_mindspeed() -> None:
    assert "npu_deterministic" not in mindspeed.settings(MegatronConfig(npu_deterministic=True))


class _Optimizer:
    """Megatron's distributed optimizer after MindSpeed's patch: a form that it does not know is an error."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def load_state_dict(self, state_dict: dict) -> None:
        if "param_state" in state_dict and state_dict["param_state_sharding_type"] != "dp_reshardable":
            raise NotImplementedError("Unknown sharding_type")
        self.seen.append(sorted(state_dict))

    def load_parameter_state_from_fully_reshardable(self, param_state: object) -> None:
        self.seen.append(param_state)


def test_the_saved_form_of_the_optimizer_is_loaded_by_megatrons_own_function() -> None:
    for _ in range(2):  # every role of a process configures MindSpeed
        mindspeed._load_every_form(_Optimizer)
    whole, other = _Optimizer(), _Optimizer()
    whole.load_state_dict({"optimizer": 1, "param_state_sharding_type": "fully_reshardable", "param_state": "tensors"})
    other.load_state_dict({"optimizer": 1, "param_state_sharding_type": "dp_reshardable", "param_state": "tensors"})
    assert whole.seen == [["optimizer", "param_state_sharding_type"], "tensors"]
    assert other.seen == [["optimizer", "param_state", "param_state_sharding_type"]]


@pytest.mark.parametrize(("missing", "named"), [("mindspeed", "MindSpeed"), ("triton", "triton-ascend")])
def test_an_installation_without_mindspeed_or_triton_is_told_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, missing: str, named: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else object())
    with pytest.raises(RuntimeError, match=f"{named}.* is not installed; envs/npu_a2/install.sh"):
        mindspeed.apply()


def test_mindspeed_behind_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "megatron.core.a_module", types.ModuleType("megatron.core.a_module"))
    with pytest.raises(RuntimeError, match=r"megatron.core was imported before MindSpeed's adaptor \(megatron\.core\."):
        mindspeed.apply()
