"""What vllm-ascend takes the simulated device for, and the exchange that it chooses between experts on it."""

from __future__ import annotations

import os
from types import SimpleNamespace as Config

from ranks import rank_settings, report


def main() -> None:
    """Settings: steps, each (devices that share experts, tokens of the step); capacity of MC2 in tokens, experts of a token."""
    settings = rank_settings()
    import torch

    from mindspeed_rl import adaptors, platform
    from mindspeed_rl.platform.environment import EXPERTS_EXCHANGE_VARIABLE

    if exchange := settings.get("infer_moe_token_dispatcher_type"):  # as the driver sets it for workers
        os.environ[EXPERTS_EXCHANGE_VARIABLE] = exchange
    platform.select("npu").set_device(0)
    adaptors.apply("rollout")
    from vllm_ascend import ascend_forward_context as context
    from vllm_ascend.utils import check_ascend_device_type, get_ascend_device_type

    check_ascend_device_type()  # the wheel's kind and the device's number agree
    context._mc2_tokens_capacity = settings["capacity"]
    context.is_moe_model = lambda config: config.experts
    context.get_ascend_config = lambda: Config(enable_fused_mc2=0)
    chosen = []
    for devices, tokens in settings["steps"]:
        context.get_ep_group = lambda devices=devices: Config(world_size=devices)
        text = Config(num_experts_per_tok=settings["top_k"])
        model = Config(hf_text_config=text, get_num_experts=lambda: 64)
        parallel = Config(enable_expert_parallel=True, world_size_across_dp=devices, pipeline_parallel_size=1)
        config = Config(model_config=model, parallel_config=parallel, experts=True)
        chosen.append(context.select_moe_comm_method(tokens, config).name)
    dense = context.select_moe_comm_method(8, Config(experts=False))
    report([torch.npu.get_soc_version(), get_ascend_device_type().name, chosen, dense])


if __name__ == "__main__":
    main()
