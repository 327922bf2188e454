"""Looks at vLLM's CPU build as it is installed, without its adaptor: prints, as JSON, which patches are needed."""

from __future__ import annotations

import inspect
import json
import os
from types import SimpleNamespace

os.environ.update(RANK="0", LOCAL_RANK="0", VLLM_LOGGING_LEVEL="ERROR")

import torch
import transformers
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON, dispatcher
from vllm.v1.attention.backends.mla import amx_mla
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker import cpu_model_runner, gpu_model_runner

with set_current_vllm_config(VllmConfig()):
    rope = RotaryEmbedding(64, 64, 512, 10000, False, torch.float32)
positions, heads = torch.arange(2) + 3, torch.randn(2, 4, 64)
key = torch.zeros(8, 1, 64)[:2]  # with room behind it for what is written there
turned, _ = rope.forward_cpu(positions, heads.clone(), key)

layer = torch.nn.Linear(64, 64, bias=False)
before = layer.weight.numel()
dispatch_cpu_unquantized_gemm(layer, remove_weight=True)

alternating = SimpleNamespace(intermediate_size_per_partition=16, activation=MoEActivation.SWIGLUOAI)
last_expert = CPURouter(1, 4, e_score_correction_bias=torch.tensor([0.0, 0.0, 0.0, 9.0]))
_, chosen = last_expert._compute_routing(torch.ones(1, 8), torch.tensor([[9.0, 0.0, 0.0, 0.0]]), None)

print(
    json.dumps(
        {
            "live weights": layer.weight.numel() < before,
            "shared memory name": ExecutorWithExternalLauncher._distributed_args(None)[0] == "env://",
            "shared memory left behind": "unlink" not in inspect.getsource(_CPUSHMDistributed),
            "experts of others": inspect.getsource(CPUUnquantizedExperts.apply).count("expert_map") == 1,  # only an argument
            "bias of the choice": chosen.item() != 3,
            "padding of alternate rows": CPUUnquantizedExperts._padded_intermediate_size(alternating) == 16,
            # its products are of copies that are packed after a load
            "backend of AMX": "convert_weight_packed" in inspect.getsource(amx_mla),
            "exchange": not {"all_gatherv", "reduce_scatterv"} & set(vars(CpuCommunicator)),
            "heads of tokens": not torch.allclose(turned, rope.forward_native(positions, heads, key)[0]),
            # V1's runners do not know of them, and V2's needs Triton
            "routed experts": not HAS_TRITON
            and not any("aux_output" in inspect.getsource(module) for module in (cpu_model_runner, gpu_model_runner)),
            # a turn of the scheduler is a step of the runner, and a token's seed a call of its own
            "steps ahead": "sample_tokens" not in vars(cpu_model_runner.CPUModelRunner),
            "seeds one by one": ".item()" in inspect.getsource(TopKTopPSampler.forward_cpu),
            # for Triton's kernels, at every name of every module
            "looks everywhere": "sys.modules.values()" in inspect.getsource(dispatcher),
            "norms from Python": RMSNorm.forward_cpu is CustomOp.forward_cpu,
            "classes of MiMo and InternLM3": not {"mimo", "internlm3"} & set(transformers.CONFIG_MAPPING),
            "KV release": not current_platform.is_sleep_mode_available(),
        }
    )
)
