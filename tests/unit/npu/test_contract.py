"""Our code uses only what the pinned releases of the Ascend stack have; `contract.py` says how the record is made again."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import contract

from mindspeed_rl.adaptors import mindspeed, vllm_ascend, vllm_ascend_quantized
from mindspeed_rl.cli.doctor import variables as doctor_variables
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.run.rules.validation import validate

#: set by configs/envs/runtime_env.yaml or named there, and read by torch_npu itself
OF_TORCH_NPU = """
PYTORCH_NPU_ALLOC_CONF TASK_QUEUE_ENABLE CPU_AFFINITY_CONF MULTI_STREAM_MEMORY_REUSE STREAMS_PER_DEVICE COMBINED_ENABLE
NPU_ASD_ENABLE INF_NAN_MODE_ENABLE ASCEND_LAUNCH_BLOCKING HCCL_DETERMINISTIC HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT
HCCL_ASYNC_ERROR_HANDLING TORCH_HCCL_ZERO_COPY TORCH_HCCL_TRACE_BUFFER_SIZE TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC
ASCEND_GLOBAL_LOG_LEVEL
""".split()
#: kept in runtime_env.yaml for older releases of vllm-ascend, and said to be so
OLD_VARIABLES = {"VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE"}
#: variable -> first release of vllm-ascend that no longer reads it
REMOVED_VARIABLES = {
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": (0, 25),
    "VLLM_ASCEND_ENABLE_NZ": (0, 27),
    "VLLM_ASCEND_ENABLE_FUSED_MC2": (0, 27),
    "VLLM_ASCEND_ENABLE_MLAPO": (0, 27),
    "VLLM_ASCEND_BALANCE_SCHEDULING": (0, 27),
}

#: file -> releases of a package that it is imported for; something that only they have guards the import
GUARDED = {"mindspeed_rl/engine/lora_experts.py": {"megatron": {"0.16.1"}}}
#: name -> releases without it; our code looks before it uses the name, and refuses the key that asks for it
MISSING = {
    "torch_npu.npu_ring_attention_update": {"2.9.0"},
    "mindspeed.core.ssm.chunk_gated_delta_rule.chunk_gated_delta_rule": {"core_r0.17.0", "core_r0.18.0"},
}

RECORD = json.loads(contract.PINNED.read_text())
USES = contract.uses(contract.ROOT / "mindspeed_rl")


def offered(package: str) -> dict[str, dict[str, str]]:
    """Release -> names with signatures."""
    releases = RECORD[package]
    return {version: (names["names"] if package == "mindspeed" else names) for version, names in releases.items()}


def problems(uses: list[contract.Use], package: str) -> list[str]:
    results = []
    for use in uses:
        if use.name.split(".")[0] != package:
            continue
        only = GUARDED.get(use.where.rpartition(":")[0], {}).get(package)
        for version, names in offered(package).items():
            if only is not None and version not in only:
                continue
            if version in MISSING.get(use.name, ()):
                assert use.name not in names, f"{use.name} is no longer missing in {version}"
                continue
            if use.name not in names:
                results.append(f"{use.where}: {use.name} is not in the record of {package} {version}")
            elif names[use.name] and use.keywords is not None:
                wrong = contract.accepts(names[use.name], use.keywords, use.positional or 0)
                if wrong:
                    results.append(f"{use.where}: {use.name} {wrong} in {package} {version}")
    return results


@pytest.mark.parametrize("package", ["torch_npu", "mindspeed", "megatron"])
def test_every_name_and_call_of_our_code_exists_in_every_pinned_release(package: str) -> None:
    result = problems(USES, package)
    assert result == [], (
        "new names must be looked up in the pinned releases: see tests/unit/npu/contract.py (--megatron needs no download)"
    )


def test_the_record_covers_the_releases_the_suite_is_for() -> None:
    assert {"2.9.0", "2.10.0.post4", "2.13.0"} <= set(RECORD["torch_npu"])
    recorded = {vllm_ascend._parse_release(version) for version in RECORD["vllm_ascend"]}
    assert recorded == set(vllm_ascend._KNOWN_RELEASES)
    assert set(RECORD["mindspeed"]) == {"core_r0.16.0", "core_r0.17.0", "core_r0.18.0"}
    assert set(RECORD["megatron"]) == {"0.16.1", "0.17.1", "0.18.0", "0.19.2"}


def test_a_guarded_file_uses_what_only_its_releases_have_and_nothing_else_does() -> None:
    for path, packages in GUARDED.items():
        for package, releases in packages.items():
            for version, names in offered(package).items():
                named = {use.name for use in USES if use.name.split(".")[0] == package} - set(MISSING)
                missing = named - set(names)
                assert bool(missing) == (version not in releases), version
                places = {use.where.rpartition(":")[0] for use in USES if use.name in missing}
                assert places <= {path}, version


def test_our_code_imports_nothing_from_vllm_ascend_but_its_sampler_and_its_exchange() -> None:
    names = {use.name for use in USES if use.name.split(".")[0] == "vllm_ascend"}
    assert names == {"vllm_ascend.sample.sampler", "vllm_ascend.ops.fused_moe.token_dispatcher"}
    for version, record in RECORD["vllm_ascend"].items():
        assert record["sampler"] == {"random_sample": "(probs, generators)"}, version


def test_every_additional_config_key_exists_in_the_releases_that_get_it() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        release = vllm_ascend._parse_release(version)
        row = vllm_ascend._row_for(vllm_ascend._ADDITIONAL_CONFIG, release)(True)
        assert set(row) | set(vllm_ascend_quantized.FUSION) <= set(names["additional_config"]), version
        assert set(row.get("rl_config", ())) <= set(names["rl_config"]), version
        # without the variable, `rl_config.enabled` turns NZ off
        assert "VLLM_ASCEND_ENABLE_NZ" in names["environment"] or "rl_config" in row, version
        assert vllm_ascend._row_for(vllm_ascend._DRAFT_PROPOSERS, release)[1] in names["drafts"], version
        assert "ALLGATHER" in names["exchange"]["types"], version
        assert names["exchange"]["token_dispatch"] == "(token_dispatch_input)", version
        assert names["exchange"]["routing"] == ["expert_map", "log2phy"], version
        assert names["worker"]["wake_up"] == "(tags=None)" and names["worker"]["sleep"] == "(level=1)"


def test_expert_maps_and_latent_attention_are_what_the_hooks_expect() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        assert "eplb_config" in names["additional_config"] and "expert_map_path" in names["eplb_config"], version
        latent = names["latent_attention"]
        assert latent["process_weights_after_loading"] == "(act_dtype)", version
        assert set(latent["attributes"]) == {"W_UV", "W_UK_T", "kv_b_proj"}, version


@pytest.mark.parametrize(
    ("name", "tensor", "sharing", "groups"),
    [
        ("grpo_deepseek_r1_671b_A2", 4, 16, 4),
        ("grpo_deepseek_r1_671b_A3", 4, 64, 1),
        ("grpo_deepseek_r1_671b_A3_eplb", 4, 64, 1),
        ("grpo_qwen3_235b_a22b_A2", 4, 8, 4),
        ("dapo_qwen3_30b_a3b_A3", 1, 8, 2),
    ],
)
def test_every_rank_of_a_shipped_moe_run_gets_a_place_of_its_own_in_its_group(
    name: str, tensor: int, sharing: int, groups: int
) -> None:
    run = load_run(name)
    assert validate(run) == []
    world = tensor * sharing * groups
    layout = RolloutLayout.from_config(run.generate, world)
    # vLLM's documented order of ranks: independent groups x replicas of a group x tensor ranks
    order = np.arange(world).reshape(groups, sharing, tensor)
    assert layout.expert_groups() == order.reshape(groups, -1).tolist()
    assert layout.replica_groups() == order.reshape(-1, tensor).tolist()
    for (_, place, _), rank in np.ndenumerate(order):
        environment = layout.engine_environment(int(rank), ("10.0.0.1", "29500"))
        assert (environment["VLLM_DP_SIZE"], environment["VLLM_DP_RANK"]) == (str(sharing), str(place))
    without_map = dataclasses.replace(run.generate, expert_map_path=None)  # the user makes that file
    arguments = layout.engine_arguments() | vllm_ascend.VllmAscendHooks((0, 23)).engine_arguments(without_map)
    assert arguments["enable_expert_parallel"] and arguments["tensor_parallel_size"] == tensor
    # with the argument instead of the variables, RANK // tensor would be the place, which leaves the second group
    assert arguments["distributed_executor_backend"] == "external_launcher" and "data_parallel_size" not in arguments


def test_vllm_takes_a_replicas_place_from_the_variables_that_the_layout_sets() -> None:
    said = set(RolloutLayout(4, 2, 2, True).engine_environment(3, ("127.0.0.1", "1")))
    for version, names in RECORD["vllm"].items():
        assert said <= set(names["environment"]), version
        placed = {names["placed_by"][f"data_parallel_{of}"] for of in ("size", "rank", "master_ip", "master_port")}
        assert placed == said and names["keeps_replicas_in_step"], version


def test_vllm_has_a_form_of_penalties_for_any_device() -> None:
    for version, names in RECORD["vllm"].items():
        assert {"apply_repetition_penalties", "apply_repetition_penalties_torch"} <= set(names["penalties"]), version


def test_variables_of_the_environment_are_read_by_the_libraries_they_belong_to() -> None:
    names = {contract.VARIABLE + name for name in OF_TORCH_NPU}
    for version, offered_names in RECORD["torch_npu"].items():
        assert names <= set(offered_names), version
    mine = {name for name in doctor_variables._NAMES if name.startswith("VLLM_ASCEND_")} - OLD_VARIABLES
    for version, recorded in RECORD["vllm_ascend"].items():
        gone = {name for name, first in REMOVED_VARIABLES.items() if first <= vllm_ascend._parse_release(version)}
        assert mine - gone == mine & set(recorded["environment"]), version
        assert not OLD_VARIABLES & set(recorded["environment"]), version


def test_weight_transfer_exists_exactly_where_the_table_says() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        backends = vllm_ascend._row_for(vllm_ascend._WEIGHT_TRANSFER_BACKENDS, vllm_ascend._parse_release(version))
        assert bool(backends) == ("init_weight_transfer_engine" in names["worker"]), version


def test_every_key_given_to_repatch_is_registered_or_read_by_mindspeed() -> None:
    config = MegatronConfig(num_attention_heads=2, num_layers=2, seq_length=8, num_experts=2)
    keys = {*mindspeed.settings(config), *mindspeed._PASSED_KEYS, *mindspeed._MEGATRON_KEYS}
    for version, names in RECORD["mindspeed"].items():
        assert keys <= {*names["arguments"], *names["read_arguments"]}, version
        registered = set(names["arguments"])
        assert set(mindspeed._PASSED_KEYS) <= registered, version


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import torch\ntorch.npu.set_devise(0)\n", "torch_npu.npu.set_devise is not in the record"),
        ("import torch_npu\ntorch_npu.npu_fusion_attention(q, k, v, 1, 'TND', mask=m)\n", "has no argument mask"),
        ("import torch_npu\ntorch_npu.npu_fusion_attention(q, k)\n", "needs value, head_num, input_layout"),
        ("from mindspeed.megatron_adaptor import repatsch\n", "repatsch is not in the record"),
        ("from megatron.core import parallel_state as p\np.get_context_parallel_rank(1)\n", "takes 0 positional"),
    ],
)
def test_a_use_that_no_release_has_is_found(tmp_path: Path, code: str, complaint: str) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "wrong.py").write_text(code)
    name = "mindspeed" if "mindspeed" in code else "megatron" if "megatron" in code else "torch_npu"
    result = problems(contract.uses(package), name)
    assert len(result) >= 1 and complaint in result[0]


def test_calls_are_compared_with_schemas_and_python_signatures() -> None:
    schema = "(Tensor x, Tensor gamma, float epsilon=1e-06)"
    assert contract.accepts(schema, ("epsilon",), 2) is None
    assert contract.accepts(schema, ("eps",), 2) == "has no argument eps"
    assert contract.accepts("(a, *, b=[1, 2], c)", ("c",), 1) is None
    assert contract.accepts("(a, *, b=[1, 2], c)", (), 2) == "takes 1 positional arguments, 2 are given"
    assert contract.accepts("(a, **kwargs)", ("anything",), 1) is None
