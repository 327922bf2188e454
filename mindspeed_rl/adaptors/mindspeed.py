"""MindSpeed core_r0.16.0 under Megatron-core 0.16.1: its fused kernels and memory features, fitted to one role's keys.

Start order in a training process (each step needs the one before):
environment -> `import torch, torch_npu` -> `apply()` (imports `mindspeed.megatron_adaptor`, before any megatron module) ->
`configure(config)` (`repatch`) -> `set_device` -> `init_process_group("hccl")` -> `initialize_model_parallel` -> model.

| patch of ours | symbol | why |
|---|---|---|
| argv | sys.argv while the adaptor is imported | it parses the command line at import and takes every `--flag` for its own |
| resume | DistributedOptimizer.load_state_dict | MindSpeed's copy lacks the form of checkpoints that the engine saves |
| packed RoPE | rope_utils._apply_rotary_pos_emb_thd | see `packed_rope` |
| rotation, optimizer | several | see `fused_steps` |
| gradients of norms and biases | DistributedDataParallel | see `vector_gradients` |
| gradients of linear weights | several | see `gradient_products` |
| tensor parallel layers | several | see `parallel_products` |
| swapped optimizer | SwapDistributedOptimizer | see `swapped_optimizer` |
| kernels of a 950 | ops.triton.utils.is_arch35 while the adaptor is imported | see `_without_missing_kernels` |
| scan | patch_utils.sys | every patch searches all modules, ten seconds of a processor in each process; lazy ones then import \
half of their package or fail |

They can go when MindSpeed's parser does not change `sys.argv`, its patches stop searching all modules and its loader knows
"fully_reshardable"; the programs of tests/npu_sim run the real one.

The gated delta rule of bfloat16 models runs on MindSpeed's Triton kernel where Triton has a device (`delta_rule_kernel`).

Traps this module closes, each of them silent (measured on the simulated NPU):
- `repatch` stores a misspelled key and goes on: keys are checked against MindSpeed's own defaults first.
- without `use_flash_attn` Megatron's unfused attention runs; without `position_embedding_type: rope` in the same call the
  fused rotary embedding fails at the first forward pass.
- `use_legacy_models` must be present once `transformer_impl` is "local".
- MindSpeed's context parallelism stays off (`context_parallel_size: 1` in its keys): its Ulysses attends to the local slice
  only unless `Attention.__init__` is wrapped, cuts sequences contiguously while Megatron's rotary embedding for packed
  sequences cuts them in zigzag, and multiplies the loss by CP. The suite's own context parallelism
  (`engine.attention` on the fused kernels of `npu_attention`) is the same on every platform.
- `repatch` checks nothing against each other: `check` does.

Not verified on NPU hardware.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl.adaptors import (
    DeltaRuleKernel,
    fused_steps,
    gradient_products,
    hccl_buffers,
    megatron_padded_states,
    megatron_recompute,
    npu_attention,
    npu_experts,
    packed_rope,
    parallel_products,
    swapped_optimizer,
    vector_gradients,
)
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import LEFT_OFF_FEATURES, NEEDED_BY_MINDSPEED, parse_group_buffers
from mindspeed_rl.registry import did_you_mean

#: keys that `repatch` takes although MindSpeed's parser does not declare them: Megatron's own arguments that it reads
_MEGATRON_KEYS = frozenset(
    "context_parallel_size expert_model_parallel_size micro_batch_size moe_grouped_gemm moe_token_dispatcher_type "
    "multi_latent_attention normalization num_attention_heads num_experts num_layers pipeline_model_parallel_size "
    "position_embedding_type recompute_granularity recompute_method recompute_num_layers reset_position_ids seq_length "
    "sequence_parallel swiglu tensor_model_parallel_size transformer_impl use_distributed_optimizer use_flash_attn "
    "use_legacy_models bf16 overlap_param_gather overlap_grad_reduce gradient_accumulation_fusion qk_layernorm".split()
)

#: run-file keys that go to MindSpeed under the same name. `npu_deterministic` does not: MindSpeed's part of it wraps
#: megatron.training's start, and the engine asks torch and HCCL for the same itself. `LEFT_OFF_FEATURES` do not, nor does
#: moe_grouped_gemm (its experts read Megatron-LM's parsed arguments: "no attribute 'fp8'"): experts run on Megatron's own
#: GroupedMLP, whose grouped product MindSpeed replaces in any case.
_PASSED_KEYS = ("moe_permutation_async_comm", "swap_optimizer", "swap_optimizer_times")

#: fields of Megatron's TransformerConfig that its fused modules look at
TRANSFORMER_SETTINGS = {"bias_activation_fusion": True}

#: packages whose modules may have imported what MindSpeed replaces; other installed libraries know neither it nor Megatron
_SEARCHED = ("torch", "torch_npu", "megatron", "mindspeed", "mindspeed_rl", "transformer_engine", "apex")
#: looks up each name in torch's own modules
_LAZY_MODULE = "torch_npu.dynamo"
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_applied = False
#: of the gated delta rule, for this device
_has_kernels = True


@functools.cache
def _is_searched(package: str) -> bool:
    """Return whether a top-level package is of those above, or a user's: neither installed nor of Python."""
    if package in _SEARCHED or package in sys.stdlib_module_names:
        return package in _SEARCHED
    spec = vars(sys.modules[package]).get("__spec__") if package in sys.modules else None
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    return bool(places) and not any(place.startswith(_LIBRARIES) for place in places)


class _SearchableModules:
    """`sys.modules` as MindSpeed's patcher sees it: libraries that it has nothing to do with are left out of its searches."""

    def __init__(self) -> None:
        self._modules: dict[str, types.ModuleType] = {}
        self._count = 0

    def copy(self) -> dict[str, types.ModuleType]:
        if len(sys.modules) != self._count:  # modules are added, and none is replaced while patches are applied
            self._count = len(sys.modules)
            self._modules = {
                name: module
                for name, module in list(sys.modules.items())
                if _is_searched(name.partition(".")[0]) and not name.startswith(_LAZY_MODULE)
            }
        return self._modules

    def __getitem__(self, name: str) -> types.ModuleType:
        return sys.modules[name]

    def __setitem__(self, name: str, module: types.ModuleType) -> None:
        sys.modules[name] = module


@contextlib.contextmanager
def _bare_command_line() -> Iterator[None]:
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def _misses_kernels() -> bool:
    """Return whether this is an Ascend 950 without the package that its kernels of the gated delta rule take functions of."""
    if "fla" in sys.modules or importlib.util.find_spec("fla") is not None:
        return False
    utils = importlib.import_module("mindspeed.ops.triton.utils")
    return bool(getattr(utils, "is_arch35", lambda: False)())  # core_r0.16.0 has it


@contextlib.contextmanager
def _without_missing_kernels() -> Iterator[None]:
    """Let MindSpeed's adaptor import the kernels of A2 where those of this device need the package fla, which is not there.

    The adaptor ends with an ImportError otherwise, whatever the model. Nothing calls them (`_find_delta_rule`).
    """
    global _has_kernels
    if not _misses_kernels():
        yield
        return
    _has_kernels = False
    utils: Any = importlib.import_module("mindspeed.ops.triton.utils")
    original = utils.is_arch35
    utils.is_arch35 = lambda: False
    try:
        yield
    finally:
        utils.is_arch35 = original


def apply() -> None:
    """Import MindSpeed's adaptor, which patches torch and Megatron in this process. Idempotent.

    Raises:
        RuntimeError: MindSpeed or triton is missing, or megatron.core was imported before.
    """
    global _applied
    if _applied:
        return
    for package, cure in (("mindspeed", "MindSpeed (branch core_r0.16.0)"), ("triton", "triton-ascend")):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"{cure} is not installed; envs/npu_a2/install.sh and envs/npu_a3/install.sh do it.")
    if importlib.util.find_spec("mindspeed.megatron_adaptor") is None:
        raise RuntimeError(
            "the installed package mindspeed has no megatron_adaptor: the package index has only a placeholder. "
            "Install MindSpeed (branch core_r0.16.0); envs/npu_a2/install.sh and envs/npu_a3/install.sh do it."
        )
    early = sorted(name for name in sys.modules if name.startswith("megatron.core."))
    if early:
        raise RuntimeError(
            f"megatron.core was imported before MindSpeed's adaptor ({early[0]} and {len(early) - 1} more modules)."
        )
    import mindspeed.patch_utils

    mindspeed.patch_utils.sys = types.SimpleNamespace(modules=_SearchableModules())
    with _bare_command_line(), _without_missing_kernels():
        importlib.import_module("mindspeed.megatron_adaptor")
    _applied = True


def _load_every_form(owner: Any) -> None:
    """Lets the distributed optimizer load the form of state that `engine.optimizer` saves.

    MindSpeed replaces `load_state_dict` by a copy of an earlier Megatron's. The state of parameters in the form that it does
    not know is taken out and handed to Megatron's own loader.
    """
    theirs = owner.load_state_dict
    if theirs.__module__ == __name__:
        return

    def load_state_dict(self: Any, state_dict: Mapping[str, object]) -> None:
        if state_dict.get("param_state_sharding_type") != "fully_reshardable":
            theirs(self, state_dict)
            return
        theirs(self, {name: value for name, value in state_dict.items() if name != "param_state"})
        self.load_parameter_state_from_fully_reshardable(state_dict["param_state"])

    owner.load_state_dict = load_state_dict


def settings(config: MegatronConfig) -> dict[str, Any]:
    """Return the `repatch` keys of a role; features that are asked for and left off are warned of."""
    keys: dict[str, Any] = {
        "use_flash_attn": True,
        "use_fused_rmsnorm": True,
        "use_fused_swiglu": True,
        "use_fused_rotary_pos_emb": True,
        "position_embedding_type": "rope",
        "swiglu": True,
        "normalization": "RMSNorm",
        "transformer_impl": "local",
        "use_legacy_models": False,
        "attention_mask_type": "causal",
        "reset_position_ids": False,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "expert_model_parallel_size": config.expert_model_parallel_size,
        "sequence_parallel": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "use_distributed_optimizer": config.use_distributed_optimizer,
        "micro_batch_size": config.micro_batch_size or 1,
    }
    for name in ("num_attention_heads", "num_layers", "seq_length", "num_experts"):
        if getattr(config, name) is not None:
            keys[name] = getattr(config, name)
    if not config.computes_by_module:  # other engines swap by themselves
        keys |= {name: getattr(config, name) for name in _PASSED_KEYS if getattr(config, name) not in (None, False)}
    for name, reason in LEFT_OFF_FEATURES.items():
        if getattr(config, name):
            warnings.warn(f"{name}: left off: {reason}.", stacklevel=3)
    return keys


def check(config: MegatronConfig) -> None:
    """Raise ValueError where keys contradict each other in a way that MindSpeed would not notice after `repatch`."""
    size, heads = config.context_parallel_size, config.num_attention_heads
    if size > 1 and config.context_parallel_algo == "ulysses_cp_algo" and heads is not None:
        parts = size * config.tensor_model_parallel_size
        if heads % parts:
            raise ValueError(
                f"context_parallel_size: {heads} attention heads cannot be split over {size} context x "
                f"{config.tensor_model_parallel_size} tensor parallel ranks; use context_parallel_algo: megatron_cp_algo."
            )
    if config.computes_by_module:
        return
    for name, other, value, reason in NEEDED_BY_MINDSPEED:
        if getattr(config, name) and getattr(config, other) != value:
            raise ValueError(f"{name}: needs {other}: {str(value).lower()}: {reason}.")


def _check_keys(keys: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Raise ValueError for a `repatch` key that neither MindSpeed nor Megatron has; `repatch` itself would keep it.

    Args:
        known: MindSpeed's arguments with their defaults (`get_mindspeed_args(get_defaults=True)`).
    """
    names = [*known, *_MEGATRON_KEYS]
    for key in keys:
        if key not in names:
            raise ValueError(f"MindSpeed has no argument '{key}'{did_you_mean(key, names) or '.'}")


def configure(config: MegatronConfig) -> dict[str, Any]:
    """Fits MindSpeed's patches to a role and returns the keys that were set.

    Must run after `apply`, before `initialize_model_parallel` and before any TransformerConfig is made.

    Raises:
        ValueError: keys of the run file contradict each other, or one is unknown to the installed MindSpeed.
    """
    # first, so that a wrong key is found before anything is patched
    buffers = parse_group_buffers(config.hccl_group_buffer)
    apply()
    check(config)
    keys = settings(config)
    from mindspeed.args_utils import get_mindspeed_args
    from mindspeed.megatron_adaptor import repatch

    _check_keys(keys, vars(get_mindspeed_args(get_defaults=True)))
    repatch(keys)
    packed_rope.adapt(importlib.import_module("megatron.core.models.common.embeddings.rope_utils"))
    fused_steps.apply()
    vector_gradients.apply()
    gradient_products.apply()
    parallel_products.apply(asked=config.use_ascend_mc2)
    megatron_recompute.apply()
    megatron_padded_states.apply()
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    swapped_optimizer.adapt(optimizer)
    _load_every_form(optimizer)
    npu_attention.configure(fuse_ring_update=config.use_fused_ring_attention_update)
    dispatcher = config.moe_token_dispatcher_type or "alltoall"
    fuses = config.use_fused_moe_token_permute_and_unpermute
    npu_experts.apply(fuse_permutation=dispatcher != "allgather" if fuses is None else fuses)
    if buffers:
        hccl_buffers.apply(buffers)
    return keys


@functools.cache
def _find_delta_rule() -> Any | None:
    """Return MindSpeed's kernel of the gated delta rule; None where a branch or device lacks it, or Triton finds no device."""
    if not _applied or not _has_kernels or importlib.util.find_spec("mindspeed.core.ssm.chunk_gated_delta_rule") is None:
        return None
    from mindspeed.ops.triton.utils import get_available_device

    with warnings.catch_warnings():  # on the simulated NPU it warns that Triton has none
        warnings.simplefilter("ignore")
        if get_available_device() != "npu":
            return None
    from mindspeed.core.ssm.chunk_gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


def delta_rule_kernel(dtype: torch.dtype) -> DeltaRuleKernel | None:
    """Return the kernel for values of this type; it takes no float32, and no state that sequences start from.

    Products are of 16-bit numbers with sums in float32, and the state between chunks is in float32. Under Triton's interpreter
    it was compared with the rule by torch's operators, forward and backward, packed (tests/npu_sim/test_gated_delta.py).
    """
    rule = None if dtype == torch.float32 else _find_delta_rule()
    return None if rule is None else functools.partial(_run_delta_rule, rule)


def _run_delta_rule(
    rule: Callable[..., tuple[Tensor, object]], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, bounds: Tensor
) -> Tensor:
    rows = (x.unsqueeze(0) for x in (q, k, v, g.float(), beta.float()))
    # queries are scaled already
    return rule(*rows, scale=1.0, cu_seqlens=bounds)[0].squeeze(0)
