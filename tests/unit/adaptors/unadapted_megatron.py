# ruff: noqa: E402  (warnings are silenced first)
"""Looks at megatron-core as it is installed, without the CPU adaptor: prints, as JSON, which patches are needed.

One entry for each patched symbol: True while the original cannot work on a machine without an accelerator.
"""

from __future__ import annotations

import importlib
import inspect
import json
import types
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

warnings.filterwarnings("ignore")

import torch


def module(name: str) -> types.ModuleType:
    return importlib.import_module(f"megatron.core.{name}")


def raises(call: Callable[[], object]) -> bool:
    """True when the call fails for want of a device or a library."""
    try:
        call()
    except (RuntimeError, AssertionError, NameError, NotImplementedError):
        return True
    return False


def names_cuda_types(function: object) -> bool:
    code = getattr(function, "__func__", function).__code__
    return any("torch.cuda." in str(constant) and "Tensor" in str(constant) for constant in code.co_consts)


def compiles() -> bool:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    return module("jit").jit_fuser(function) is not function


def does_not_copy() -> bool:
    """The writer's copy for a background save shares memory with a weight that training goes on to change."""
    tensor = torch.ones(2)
    writer = module("dist_checkpointing.strategies.filesystem_async").FileSystemWriterAsync
    buckets = writer.preload_tensors([("path", "key", ([], [("item", tensor)]))], non_blocking=False)
    tensor.zero_()
    return not buckets[0][2][1][0][1].any()


def asks_the_tracker() -> bool:
    tracker = module("tensor_parallel.random").CudaRNGStatesTracker()
    tracker.states_["x"] = torch.get_rng_state()
    return raises(lambda: tracker.fork("x").__enter__())


def steps_for_each_sequence() -> bool:
    """The positions of packed sequences are looked up in as many Python calls as there are sequences."""
    rope, calls = module("models.common.embeddings.rope_utils"), []
    original = rope._get_thd_freqs_on_this_cp_rank
    rope._get_thd_freqs_on_this_cp_rank = lambda *args: calls.append(1) or original(*args)
    alone = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    ends = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    rope._apply_rotary_pos_emb_thd(torch.ones(6, 1, 4), ends, torch.ones(3, 1, 1, 4), cp_group=alone)
    return len(calls) == 3


def allocates(call: Callable[[], object]) -> int:
    """Bytes that a call allocates, whether or not it frees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = profiler.profiler.kineto_results.events()
    return sum(max(0, event.nbytes()) for event in events if event.name() == "[memory]")


def copies_what_is_exchanged() -> bool:
    """A reduce-scatter over gloo takes as much memory as it reduces."""
    exchange = module("distributed.param_and_grad_buffer").dist_reduce_scatter_func
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    buffer = torch.ones(1 << 16)
    taken = allocates(lambda: exchange(buffer, buffer, group=torch.distributed.group.WORLD))
    torch.distributed.destroy_process_group()
    return taken >= buffer.nbytes


def gathers_equal_slices_alone() -> bool:
    """Gloo refuses slices of different lengths; it compares them before it sends anything."""
    store = torch.distributed.HashStore()
    gloo, limit = torch.distributed.ProcessGroupGloo, timedelta(seconds=30)
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: gloo(store, rank, 2, limit), range(2)))
    return raises(lambda: groups[0].allgather([[torch.zeros(1), torch.zeros(2)]], [torch.zeros(1)]))


def copies_what_is_scaled() -> bool:
    """Clipping takes as much memory as a gradient has."""
    clips, gradients = module("optimizer.clip_grads"), [torch.ones(1 << 16)]
    taken = allocates(lambda: clips.multi_tensor_applier(clips.multi_tensor_scale_impl, None, [gradients, gradients], 0.5))
    return taken >= gradients[0].nbytes


optimizer, distributed = module("optimizer"), module("optimizer.distrib_optimizer")
rng, experts = module("tensor_parallel.random"), module("transformer.moe.moe_utils")
files, calls = module("dist_checkpointing.strategies.filesystem_async"), module("dist_checkpointing.strategies.async_utils")
latent = module("transformer.multi_latent_attention")
grouped = getattr(module("transformer.moe.experts"), "GroupedMLP", None)
mixed = module("optimizer.optimizer").Float16OptimizerWithFloat16Params

print(
    json.dumps(
        {
            "facade": raises(lambda: torch.zeros(1, device=torch.cuda.current_device())),
            "Tensor.cuda": raises(lambda: torch.zeros(1).cuda()),
            "jit": compiles(),
            "tensor_parallel.random state": raises(lambda: rng._get_cuda_rng_state()),
            "tensor_parallel.random fork": asks_the_tracker(),
            "tensor_parallel.mappings": gathers_equal_slices_alone(),
            "optimizer": optimizer.Adam in (torch.optim.Adam, torch.optim.AdamW),
            "optimizer.optimizer": any(names_cuda_types(f) for f in vars(mixed).values() if isinstance(f, types.FunctionType)),
            "optimizer.distrib_optimizer types": any(
                names_cuda_types(f)
                for f in vars(distributed.DistributedOptimizer).values()
                if isinstance(getattr(f, "__func__", f), types.FunctionType)
            ),
            "optimizer.distrib_optimizer Adam": not distributed.USING_APEX_OPTIMIZER,
            "optimizer.clip_grads": names_cuda_types(module("optimizer.clip_grads").clip_grad_by_total_norm_fp32),
            "optimizer.clip_grads scaling": copies_what_is_scaled(),
            "distributed.param_and_grad_buffer": copies_what_is_exchanged(),
            "models.common.embeddings.rope_utils": steps_for_each_sequence(),
            "transformer.multi_latent_attention": latent.HAVE_TE and not isinstance(latent.TELinear, type),
            "transformer.moe.experts": grouped is not None
            and any("bf16" in str(constant) for constant in grouped.forward.__code__.co_consts),
            "transformer.moe.token_dispatcher": torch.is_tensor(experts.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True)),
            "transformer.moe.moe_utils": torch.is_tensor(experts.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True))
            or "te_general_gemm" not in vars(experts),
            "transformer.moe.grouped_gemm_util": grouped is not None
            and module("transformer.moe.grouped_gemm_util").grouped_gemm is None,
            "dist_checkpointing.strategies.filesystem_async copy": does_not_copy(),
            "dist_checkpointing.strategies.filesystem_async process": "fork" in inspect.getsource(files.FileSystemWriterAsync)
            or "Manager()" in inspect.getsource(files.get_write_results_queue),
            "dist_checkpointing.strategies.async_utils": "fork" in inspect.getsource(calls.TemporalAsyncCaller),
        }
    )
)
