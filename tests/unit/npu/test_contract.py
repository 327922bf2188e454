"""Our code uses only what the pinned releases of the Ascend stack have; `contract.py` says how the record is made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import contract

from mindspeed_rl.adaptors import mindspeed, vllm_ascend
from mindspeed_rl.cli.doctor import variables as doctor_variables
from mindspeed_rl.config import MegatronConfig

#: set by configs/envs/runtime_env.yaml or named there, and read by torch_npu itself
OF_TORCH_NPU = """
PYTORCH_NPU_ALLOC_CONF TASK_QUEUE_ENABLE CPU_AFFINITY_CONF MULTI_STREAM_MEMORY_REUSE STREAMS_PER_DEVICE COMBINED_ENABLE
NPU_ASD_ENABLE INF_NAN_MODE_ENABLE ASCEND_LAUNCH_BLOCKING HCCL_DETERMINISTIC HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT
HCCL_ASYNC_ERROR_HANDLING TORCH_HCCL_ZERO_COPY TORCH_HCCL_TRACE_BUFFER_SIZE TORCH_HCCL_HEARTBEAT_TIMEOUT_SEC
ASCEND_GLOBAL_LOG_LEVEL
""".split()
#: kept in runtime_env.yaml for older releases of vllm-ascend, and said to be so
OLD_VARIABLES = {"VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE"}

RECORD = json.loads(contract.PINNED.read_text())
USES = contract.uses(contract.ROOT / "mindspeed_rl")


def offered(package: str) -> dict[str, dict[str, str]]:
    """Release -> names with signatures."""
    releases = RECORD[package]
    return {version: (names["names"] if package == "mindspeed" else names) for version, names in releases.items()}


def problems(uses: list[contract.Use], package: str) -> list[str]:
    found = []
    for use in uses:
        if use.name.split(".")[0] != package:
            continue
        for version, names in offered(package).items():
            if use.name not in names:
                found.append(f"{use.where}: {use.name} is not in the record of {package} {version}")
            elif names[use.name] and use.keywords is not None:
                wrong = contract.accepts(names[use.name], use.keywords, use.positional or 0)
                if wrong:
                    found.append(f"{use.where}: {use.name} {wrong} in {package} {version}")
    return found


@pytest.mark.parametrize("package", ["torch_npu", "mindspeed", "megatron"])
def test_every_name_and_call_of_our_code_exists_in_every_pinned_release(package: str) -> None:
    found = problems(USES, package)
    assert found == [], (
        "new names must be looked up in the pinned releases: see tests/unit/npu/contract.py (--megatron needs no download)"
    )


def test_the_record_covers_the_releases_the_suite_is_for() -> None:
    assert {"2.9.0", "2.10.0.post4", "2.13.0"} <= set(RECORD["torch_npu"])
    assert {"0.18.0", "0.23.0"} <= set(RECORD["vllm_ascend"])
    assert set(RECORD["mindspeed"]) == {"core_r0.16.0"} and set(RECORD["megatron"]) == {"0.16.1"}


def test_our_code_imports_nothing_from_vllm_ascend() -> None:
    assert [use.where for use in USES if use.name.split(".")[0] == "vllm_ascend"] == []


def test_every_additional_config_key_exists_in_the_releases_that_get_it() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        row = vllm_ascend.row_for(vllm_ascend.ADDITIONAL_CONFIG, vllm_ascend.parse_release(version))
        assert set(row) <= set(names["additional_config"]), version
        assert "VLLM_ASCEND_ENABLE_NZ" in names["environment"]
        assert names["worker"]["wake_up"] == "(tags=None)" and names["worker"]["sleep"] == "(level=1)"


def test_expert_maps_and_latent_attention_are_what_the_hooks_expect() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        assert "eplb_config" in names["additional_config"] and "expert_map_path" in names["eplb_config"], version
        latent = names["latent_attention"]
        assert latent["process_weights_after_loading"] == "(act_dtype)", version
        assert set(latent["attributes"]) == {"W_UV", "W_UK_T", "kv_b_proj"}, version


def test_variables_of_the_environment_are_read_by_the_libraries_they_belong_to() -> None:
    names = {contract.VARIABLE + name for name in OF_TORCH_NPU}
    for version, offered_names in RECORD["torch_npu"].items():
        assert names <= set(offered_names), version
    mine = {name for name in doctor_variables.NAMES if name.startswith("VLLM_ASCEND_")} - OLD_VARIABLES
    for version, recorded in RECORD["vllm_ascend"].items():
        assert mine <= set(recorded["environment"]), version
        assert not OLD_VARIABLES & set(recorded["environment"]), version


def test_weight_transfer_exists_exactly_where_the_table_says() -> None:
    for version, names in RECORD["vllm_ascend"].items():
        backends = vllm_ascend.row_for(vllm_ascend.WEIGHT_TRANSFER_BACKENDS, vllm_ascend.parse_release(version))
        assert bool(backends) == ("init_weight_transfer_engine" in names["worker"]), version


def test_every_key_given_to_repatch_is_registered_or_read_by_mindspeed() -> None:
    config = MegatronConfig(num_attention_heads=2, num_layers=2, seq_length=8, num_experts=2)
    keys = {*mindspeed.settings(config), *mindspeed.PASSED_KEYS, *mindspeed.MEGATRON_KEYS}
    for version, names in RECORD["mindspeed"].items():
        assert keys <= {*names["arguments"], *names["read_arguments"]}, version
        registered = set(names["arguments"])
        assert set(mindspeed.PASSED_KEYS) <= registered, version


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
    found = problems(contract.uses(package), name)
    assert len(found) >= 1 and complaint in found[0]


def test_calls_are_compared_with_schemas_and_python_signatures() -> None:
    schema = "(Tensor x, Tensor gamma, float epsilon=1e-06)"
    assert contract.accepts(schema, ("epsilon",), 2) is None
    assert contract.accepts(schema, ("eps",), 2) == "has no argument eps"
    assert contract.accepts("(a, *, b=[1, 2], c)", ("c",), 1) is None
    assert contract.accepts("(a, *, b=[1, 2], c)", (), 2) == "takes 1 positional arguments, 2 are given"
    assert contract.accepts("(a, **kwargs)", ("anything",), 1) is None
