"""Formats of rollout engines that a device, or its kind, does not have for a model."""

from __future__ import annotations

import pytest

from mindspeed_rl.planner.devices import DEVICES
from mindspeed_rl.planner.memory import plan_memory
from mindspeed_rl.run.draft import load_run


@pytest.mark.parametrize(
    ("device", "keys", "message"),
    [
        ("A3", {"quantization": "int8", "enforce_eager": True}, ""),
        ("A3", {"quantization": "mxfp8", "enforce_eager": True}, r"\(mxfp8\) is not available on A3: an Ascend 950"),
        ("950PR", {"quantization": "mxfp8", "enforce_eager": True}, r"\(mxfp8\) .*MC2 sends .* set allgather"),
        ("950PR", {"quantization": "mxfp8", "infer_moe_token_dispatcher_type": "allgather"}, ""),
        ("A3", {"quantization": "w4a8", "update_weight_mode": "delta"}, ""),
        ("A3", {"quantization": "int8", "infer_tensor_parallel_size": 2, "update_weight_mode": "delta"}, ""),
    ],
)
@pytest.mark.parametrize("platform", ["auto", "npu"])
def test_a_plan_refuses_what_an_engine_would(platform: str, device: str, keys: dict[str, object], message: str) -> None:
    values = [f"generate_config.{name}={value}".replace("True", "true") for name, value in keys.items()]
    run = load_run("grpo_qwen3_30b_a3b_A3_8dies", None, [f"platform={platform}", *values])
    if message:
        with pytest.raises(ValueError, match=message):
            plan_memory(run, DEVICES[device])
    else:
        assert plan_memory(run, DEVICES[device]).verdict == "fits"
