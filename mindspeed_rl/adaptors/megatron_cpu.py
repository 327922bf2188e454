"""megatron-core 0.16 to 0.19 on a machine without an accelerator: what MindSpeed's adaptor does on Ascend, for the CPU.

A hook runs after each `megatron.core.*` module is executed: it points the module's global `torch` at the facade of
`torch_facade.py` and applies the named patches below. Nothing outside Megatron changes but `torch.Tensor.cuda`, which
without a GPU could only raise.

| patch | symbol | why |
|---|---|---|
| jit | jit.jit_fuser | torch.compile at import time would need a C++ compiler |
| rng | tensor_parallel.random get/set state, tracker fork | they reach into the CUDA generators |
| recomputation | tensor_parallel.random._get_share_storage (from 0.19) | it compiles C++ at its first use; a copy does it |
| type names | constructors of Float16OptimizerWithFloat16Params and DistributedOptimizer, clip_grad_by_total_norm_fp32 | \
they compare `tensor.type()` with "torch.cuda.FloatTensor": while they run, it gives this thread a GPU's names |
| scaling | clip_grads.multi_tensor_scale_impl | a copy of every gradient, which is scaled in place here |
| uneven slices | tensor_parallel.mappings._gather_along_first_dim, _reduce_scatter_along_first_dim | gloo refuses slices of \
different lengths, which experts split over ranks exchange with EP |
| exchange | param_and_grad_buffer's reduce-scatter and gathering | see `gloo_exchange.py` |
| Adam | optimizer.Adam, distrib_optimizer.Adam | torch's AdamW keeps `step` per parameter; the checkpoints need one a group |
| MoE | maybe_move_tensor_to_cpu, grouped_gemm_util.ops, moe_utils.te_general_gemm | CUDA-only conversions and kernels |
| experts | experts.GroupedMLP.forward | insists on bf16, as its CUDA kernel does; ours takes any type |
| RoPE | rope_utils._apply_rotary_pos_emb_thd, _apply_rotary_pos_emb_bshd | see `packed_rope` and `cpu_rope` |
| MLA | multi_latent_attention.HAVE_TE | true without TransformerEngine; its classes are then mocks, no types |
| writer | filesystem_async, async_utils | they fork a process that holds gloo threads, and `.to("cpu")` copies nothing |

Which releases need a patch: all, but for those in LAST_RELEASE. megatron-core 0.17 has neither GroupedMLP nor the kernels under
it, and says honestly that TransformerEngine is missing. Its writer uses threads where the writer of 0.16 forked, but asks
a process that it starts to keep their results, and a thread that fails leaves everybody waiting: ours stands in for both.
They can go when megatron-core supports a CPU device; `tests/unit/adaptors` fails for each that is no longer needed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.abc
import importlib.machinery
import queue
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mindspeed_rl.adaptors import cpu_rope, gloo_exchange, packed_rope
from mindspeed_rl.adaptors.torch_facade import facade

_SUPPORTED_VERSIONS = ("0.16", "0.17", "0.18", "0.19")
_PREFIX = "megatron.core"


# ---------------------------------------------------------------- named patches, one function a module


def _jit(module: Any) -> None:
    module.jit_fuser = lambda function: function


def _random(module: Any) -> None:
    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()  # a copy, whatever `clone` says

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    @contextlib.contextmanager
    def fork(self: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise KeyError(f"random state '{name}' was never added to the tracker")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    def copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        storage = source.untyped_storage()
        target.untyped_storage().resize_(storage.size())
        with torch.no_grad():
            target.untyped_storage().copy_(storage)

    if hasattr(module, "_get_share_storage"):
        module._get_share_storage = lambda: copy_storage
    module._get_cuda_rng_state, module._set_cuda_rng_state = get_state, set_state
    module.CudaRNGStatesTracker.fork = fork


_TYPE_NAMES = {f"torch.{kind}Tensor": f"torch.cuda.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")}


class _TypesNamedAsOnCuda(TorchFunctionMode):
    """While it is on, `tensor.type()` gives this thread the name that the tensor's type has on a GPU."""

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        return _TYPE_NAMES.get(result, result) if func is torch.Tensor.type and isinstance(result, str) else result


def _with_cuda_type_names(function: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        with _TypesNamedAsOnCuda():
            return function(*args, **kwargs)

    return call


class AdamW(torch.optim.Optimizer):
    """torch's AdamW with one step count a parameter group, as Apex's and TransformerEngine's FusedAdam keep it.

    Megatron's DistributedOptimizer can only checkpoint that form. Updates are bit-equal to `torch.optim.AdamW(fused=True)`.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **unused: object,  # of FusedAdam's, such as adam_w_mode
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]  (torch has overloads)
        """Make one update from the gradients in `param.grad`."""
        from torch.optim.adamw import adamw

        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param]["exp_avg"] = torch.zeros_like(param)
                    self.state[param]["exp_avg_sq"] = torch.zeros_like(param)
            adamw(
                params,
                [param.grad for param in params],
                [self.state[param]["exp_avg"] for param in params],
                [self.state[param]["exp_avg_sq"] for param in params],
                [],
                # adamw adds 1 to its counts before it uses them; these copies are then dropped
                [torch.tensor(float(group["step"] - 1)) for _ in params],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
        return loss


def _optimizer_package(module: Any) -> None:
    # the branch of FusedAdam: the other one takes torch's classes by name, past `Adam`
    module.Adam, module.USING_PYTORCH_OPTIMIZER = AdamW, False


def _optimizer(module: Any) -> None:
    owner = module.Float16OptimizerWithFloat16Params
    owner.__init__ = _with_cuda_type_names(owner.__init__)


def _distributed_optimizer(module: Any) -> None:
    owner = module.DistributedOptimizer
    owner.__init__ = _with_cuda_type_names(owner.__init__)
    # as with Apex: checkpoints then read and write one `step` a parameter group
    module.Adam, module.HAVE_APEX_OR_TE, module.USING_APEX_OPTIMIZER = AdamW, True, True


def _scale_in_place(chunk_size: int, no_op: torch.Tensor, tensors: list[list[torch.Tensor]], scale: float) -> None:
    for gradient in tensors[0]:  # the second list is the same one
        gradient.mul_(scale)


def _clip_grads(module: Any) -> None:
    module.clip_grad_by_total_norm_fp32 = _with_cuda_type_names(module.clip_grad_by_total_norm_fp32)
    module.multi_tensor_scale_impl = _scale_in_place


def _mappings(module: Any) -> None:
    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_slices(value: Tensor, group: Any, lengths: list[int] | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if lengths is None or len(set(lengths)) == 1 or group.size() == 1:
            return gather(value, group, lengths, *args, **kwargs)
        padded = value.new_zeros(max(lengths), *value.shape[1:])
        padded[: len(value)] = value
        slices = [torch.empty_like(padded) for _ in lengths]
        torch.distributed.all_gather(slices, padded, group=group)
        return torch.cat([padded[:length] for padded, length in zip(slices, lengths)])

    def sum_slices(value: Tensor, group: Any, lengths: list[int] | None = None, *args: Any, **kwargs: Any) -> Tensor:
        if lengths is None or len(set(lengths)) == 1 or group.size() == 1:
            return reduce_scatter(value, group, lengths, *args, **kwargs)
        total = value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(lengths)[group.rank()].contiguous()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_slices, sum_slices


def _moe_to_cpu(tensor: object, as_numpy: bool = False, record_stream: bool = False) -> object:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _token_dispatcher(module: Any) -> None:
    module.maybe_move_tensor_to_cpu = _moe_to_cpu


def _moe_utils(module: Any) -> None:
    module.maybe_move_tensor_to_cpu = _moe_to_cpu
    # without TransformerEngine the name is not defined at all, though the router asks whether it is None
    if "te_general_gemm" not in vars(module):
        module.te_general_gemm = None


def _grouped_gemm(module: Any) -> None:
    def gmm(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        weights = b.transpose(1, 2) if trans_b else b
        return torch.cat([rows @ weights[expert] for expert, rows in enumerate(a.split(batch_sizes.tolist()))])

    if module.grouped_gemm is None:
        module.ops = types.SimpleNamespace(gmm=gmm)
        module.grouped_gemm = types.SimpleNamespace(ops=module.ops)


def _experts(module: Any) -> None:
    original = module.GroupedMLP.forward

    def forward(self: Any, *args: object, **kwargs: object) -> object:
        config = self.config
        # a copy, because all layers share the config
        self.config = copy.copy(config)
        self.config.bf16 = True  # read by the original's assertion only
        try:
            return original(self, *args, **kwargs)
        finally:
            self.config = config

    module.GroupedMLP.forward = forward


def _writer(module: Any) -> None:
    writer = module.FileSystemWriterAsync
    results: queue.Queue[object] = queue.Queue()

    def preload_tensors(write_buckets: list[Any], non_blocking: bool = True) -> list[Any]:
        return [
            # training changes the tensors while they are written
            (path, key, (blobs, [(item, tensor.detach().clone()) for item, tensor in tensors]))
            for path, key, (blobs, tensors) in write_buckets
        ]

    def write(transforms: list[object], use_msc: bool, rank: int, write_buckets: list[Any], out: queue.Queue[object]) -> None:
        written: dict[int, object] = {}
        failed: Exception | None = None
        for index, bucket in enumerate(write_buckets):
            done: queue.Queue[Any] = queue.Queue()
            count: queue.Queue[int] = queue.Queue()
            # write_preloaded_data takes one entry off when it is done
            count.put(index)
            writer.write_preloaded_data(transforms, index, bucket, done, count, True, use_msc=use_msc)
            result = done.get()[1]
            if isinstance(result, Exception):
                failed = result
                break
            written[index] = result
        out.put(written if failed is None else failed)

    writer.preload_tensors = staticmethod(preload_tensors)
    if hasattr(module, "get_write_results_queue"):  # from 0.17 on
        module.get_write_results_queue = lambda mp_mode="spawn": results
        writer.write_preloaded_data_multithread = staticmethod(write)
    else:
        module._get_write_results_queue = lambda: results
        writer.write_preloaded_data_multiproc = staticmethod(write)


def _latent_attention(module: Any) -> None:
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False


def _async_calls(module: Any) -> None:
    def schedule_async_call(self: Any, request: Any) -> None:
        if request.async_fn is None:
            return
        args = list(request.async_fn_args)
        if request.preload_fn:
            # in the caller's thread: training changes the tensors as soon as this returns
            args[1] = request.preload_fn()
        # Megatron subtracts it in a debug message when the call is over
        self.start_time = 0.0
        self.process = threading.Thread(target=request.async_fn, args=args, kwargs=request.async_fn_kwargs or {})
        self.process.start()

    module.TemporalAsyncCaller.schedule_async_call = schedule_async_call


def _rotary_embedding(module: Any) -> None:
    cpu_rope.adapt(module)
    packed_rope.adapt(module)


_PATCHES: dict[str, Callable[[Any], None]] = {
    "jit": _jit,
    "distributed.param_and_grad_buffer": gloo_exchange.adapt,
    "tensor_parallel.random": _random,
    "tensor_parallel.mappings": _mappings,
    "optimizer": _optimizer_package,
    "optimizer.optimizer": _optimizer,
    "optimizer.distrib_optimizer": _distributed_optimizer,
    "optimizer.clip_grads": _clip_grads,
    "models.common.embeddings.rope_utils": _rotary_embedding,
    "transformer.multi_latent_attention": _latent_attention,
    "transformer.moe.experts": _experts,
    "transformer.moe.token_dispatcher": _token_dispatcher,
    "transformer.moe.moe_utils": _moe_utils,
    "transformer.moe.grouped_gemm_util": _grouped_gemm,
    "dist_checkpointing.strategies.filesystem_async": _writer,
    "dist_checkpointing.strategies.async_utils": _async_calls,
}

#: patch -> last release that has what it patches
LAST_RELEASE = {
    "transformer.multi_latent_attention": "0.16",
    "transformer.moe.experts": "0.16",
    "transformer.moe.grouped_gemm_util": "0.16",
}


def _patches_for(version: str) -> dict[str, Callable[[Any], None]]:
    """Return module -> patch, for the patches that a release of megatron-core needs."""
    release = _SUPPORTED_VERSIONS.index(".".join(version.split(".")[:2]))
    return {
        name: patch
        for name, patch in _PATCHES.items()
        if name not in LAST_RELEASE or release <= _SUPPORTED_VERSIONS.index(LAST_RELEASE[name])
    }


# ---------------------------------------------------------------- the hook


def _adapt(module: Any, patches: Mapping[str, Callable[[Any], None]]) -> None:
    if vars(module).get("torch") is torch:
        module.torch = facade
    patch = patches.get(module.__name__.removeprefix(_PREFIX + "."))
    if patch is not None:
        patch(module)


class _AdaptingLoader(importlib.abc.Loader):
    """Runner of the module's own loader, then adapts the module."""

    def __init__(self, loader: importlib.abc.Loader, patches: Mapping[str, Callable[[Any], None]]) -> None:
        self._loader, self._patches = loader, patches

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _adapt(module, self._patches)

    def __getattr__(self, name: str) -> Any:
        # inspect and importlib.resources get sources and files from the loader
        return getattr(self._loader, name)


class _MegatronFinder(importlib.abc.MetaPathFinder):
    """Finder of megatron.core modules that adapts them once they have run."""

    def __init__(self, patches: Mapping[str, Callable[[Any], None]]) -> None:
        self._patches = patches

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(_PREFIX + "."):
            return None
        # not by all finders of sys.meta_path, of which this one is the first
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _AdaptingLoader(spec.loader, self._patches)
        return spec


_applied = False


def apply() -> None:
    """Make megatron-core usable on the CPU in this process. Must run before megatron.core is imported.

    Raises:
        RuntimeError: megatron.core modules were already imported, or the installed version is another one.
    """
    global _applied
    if _applied:
        return
    early = sorted(name for name in sys.modules if name.startswith(_PREFIX + "."))
    if early:
        raise RuntimeError(f"megatron.core was imported before its CPU adaptor ({early[0]} and {len(early) - 1} more modules).")
    import importlib.metadata

    version = importlib.metadata.version("megatron-core")
    if not version.startswith(tuple(f"{release}." for release in _SUPPORTED_VERSIONS)):
        raise RuntimeError(f"megatron-core {version} is installed; the CPU adaptor is for {', '.join(_SUPPORTED_VERSIONS)}.x.")
    # modules of Megatron warn that packages for GPUs are missing
    warnings.filterwarnings("ignore", message=".*(Apex|Transformer Engine|transformer_engine|TransformerEngine|apex).*")
    sys.meta_path.insert(0, _MegatronFinder(_patches_for(version)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # pyrefly: ignore[method-assign]  (what this file is for)
    _applied = True
