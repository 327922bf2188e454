"""vLLM's CPU build (0.32; looked up 0.18 to 0.32) as an in-process rollout engine whose weights can be replaced.

- live weights: see `vllm_cpu_linear`;
- expert packing (quant_method.moe_kernel.fused_experts): experts are packed once; after a load they are packed again;
- shared memory (ExecutorWithExternalLauncher._distributed_args, _CPUSHMDistributed._init_cpu_shm): all jobs of a host share one
  segment name, and a killed job leaves it behind;
- rotary embedding of latent attention (RotaryEmbedding.forward_cpu): the compiled kernel takes a row for each token; given
  parts of heads, it takes each for a token: wrong angles, and keys written beyond their end;
- latent attention (CpuPlatform.check_and_update_config): on a processor with AMX vLLM chooses a backend that computes in
  bfloat16 only and multiplies by packed copies of the loaded weights: float32 fails at the load, bfloat16 at the first weight
  sync. `CPU_MLA`, which it chooses elsewhere, reads the weights themselves;
- KV release (the storage behind `kv_caches`): sleep mode does not exist on the CPU.

They can go when vLLM's CPU worker reloads weights in place; the rollout tests compare log-probs after each push, and
`tests/unit/adaptors` fails for a patch that is no longer needed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mindspeed_rl.adaptors import vllm_cpu_block_formats, vllm_cpu_linear
from mindspeed_rl.adaptors.engine_hooks import UNQUANTIZED_LAYERS, EngineHooks
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.quantized_formats import QUANTIZED_FORMATS
from mindspeed_rl.importing import without

if TYPE_CHECKING:
    from vllm import LLM

_applied = False
#: model types with latent attention of their own, of which vLLM has one backend
_OTHER_LATENT_MODELS = ("deepseek_v4",)


def apply() -> None:
    """Keep the weights of vLLM's linear layers live in this process, and rotate heads correctly. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    _import_without_compiler()
    vllm_cpu_linear.apply()
    _rotate_full_tokens()
    _choose_latent_attention()
    _applied = True


def _import_without_compiler() -> None:
    """Import vLLM; where nothing is compiled, without the part of inductor that it loads to patch: a second of processor time.

    vLLM does without it where it cannot be imported. A release that does not is imported with it.
    """
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        with contextlib.suppress(ImportError), without("torch._inductor.lowering"):
            import vllm

            return
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
    import vllm  # noqa: F401


def _rotate_full_tokens() -> None:
    """Heads of a token that are given apart are put into one row before they are rotated."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rotate: Any = RotaryEmbedding.forward_cpu

    def forward(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        def rows(heads: Tensor) -> Tensor:
            return heads.reshape(positions.numel(), -1) if heads.dim() > 2 else heads

        turned = rotate(self, positions, rows(query), None if key is None else rows(key))
        return turned[0].view(query.shape), None if key is None else turned[1].view(key.shape)

    replaced: Any = RotaryEmbedding
    replaced.forward_cpu = forward


def _choose_latent_attention() -> None:
    """Engines with latent attention have the backend whose weights may be replaced, on every processor."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backends = AttentionBackendEnum.__members__
    if not {"CPU_MLA", "AMX_MLA"} <= set(backends):  # releases that have no other
        return
    update = CpuPlatform.check_and_update_config

    def choose(cls: Any, vllm_config: Any) -> None:
        model, attention = vllm_config.model_config, vllm_config.attention_config
        if model is not None and model.use_mla and model.hf_config.model_type not in _OTHER_LATENT_MODELS:
            if attention.backend == backends["AMX_MLA"]:
                raise ValueError(
                    "generate_config.engine_kwargs: the attention backend AMX_MLA multiplies by packed copies of the weights, "
                    "which no weight sync replaces; leave it out, and CPU_MLA is used."
                )
            attention.backend = backends["CPU_MLA"]
        update(vllm_config)

    replaced: Any = CpuPlatform
    replaced.check_and_update_config = classmethod(choose)


def _name_segments_uniquely(run_id: str) -> None:
    """Name shared-memory segments after the run, and unlink them as soon as every rank has mapped them.

    Only valid once torch.distributed is initialised: the init method string that carries the name is then unused.
    """
    from vllm.distributed.device_communicators import cpu_communicator
    from vllm.v1.executor import uniproc_executor

    def distributed_args(self: Any) -> tuple[str, int, int]:
        return f"env://:{run_id}", int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])

    executor: Any = uniproc_executor.ExecutorWithExternalLauncher
    executor._distributed_args = distributed_args
    channel: Any = cpu_communicator._CPUSHMDistributed
    if hasattr(channel, "_join_segments"):
        return
    channel._join_segments = channel._init_cpu_shm

    def init_and_unlink(self: Any) -> object:
        handle = self._join_segments()  # ends with a barrier: every rank has mapped every segment
        Path("/dev/shm", f"{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    channel._init_cpu_shm = init_and_unlink


def _experts(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the modules that hold experts in packed form, each with the kernel that computes them; in int8 none is packed."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight") and module.w13_weight.is_floating_point():
            yield module, kernel.fused_experts


#: values that every type of weights represents exactly
_DIGITS = 128


@dataclass(frozen=True)
class _Packing:
    """Layout of an expert's matrix for the kernel: blocks of consecutive elements, with rows and columns of zeros added.

    Attributes:
        block: rows and columns of a block.
        rows, columns: loaded rows and columns, then the added ones; None where none was added.
    """

    block: tuple[int, int]
    rows: Tensor | None
    columns: Tensor | None

    def __call__(self, packed: Tensor) -> Tensor:
        """Return the matrix as it was loaded, from the kernel's."""
        (height, width), (num_rows, num_columns) = self.block, packed.shape
        blocks = packed.reshape(num_rows // height, num_columns // width, height, width)
        matrix = blocks.permute(0, 2, 1, 3).reshape(num_rows, num_columns)
        for dim, order in enumerate((self.rows, self.columns)):
            matrix = matrix if order is None else matrix.index_select(dim, order)
        return matrix


def _read_packings(kernel: Any, hidden: int, intermediate: int, dtype: torch.dtype) -> list[_Packing]:
    """Return how the kernel packs both matrices of an expert: it packs indexes of elements, digit by digit.

    Raises:
        RuntimeError: not in blocks.
    """
    shapes = {"w13_weight": (2 * intermediate, hidden), "w2_weight": (hidden, intermediate)}
    positions: dict[str, Tensor] = {}
    factor = 1
    while factor < 2 * intermediate * hidden:
        layer = nn.Module()
        for name, (rows, columns) in shapes.items():
            digits = torch.arange(rows * columns).view(1, rows, columns) // factor % _DIGITS
            layer.register_parameter(name, nn.Parameter((digits + 1).to(dtype), requires_grad=False))
        kernel.process_weights_after_loading(layer)
        for name in shapes:
            digits = layer.get_parameter(name).data[0].long() - 1  # negative in what was added
            positions[name] = positions.get(name, 0) + digits * factor
        factor *= _DIGITS
    packings = []
    for name, (rows, columns) in shapes.items():
        flat = positions[name].flatten()
        num_rows, num_columns = positions[name].shape
        # the second row of a block's elements follows the first; the next columns are in the next block
        width = min(num_columns, int((flat == columns).nonzero()))
        height = num_rows if width == num_columns else int((flat == width).nonzero()) // width
        matrix = _Packing((height, width), None, None)(positions[name])
        orders = []
        for added in ((matrix < 0).all(1), (matrix < 0).all(0)):
            orders.append(torch.cat([(~added).nonzero(), added.nonzero()]).flatten() if bool(added.any()) else None)
        packings.append(_Packing((height, width), orders[0], orders[1]))
        if not torch.equal(packings[-1](positions[name])[:rows, :columns].flatten(), torch.arange(rows * columns)):
            raise RuntimeError(
                f"weight push: this release of vLLM packs {name} of experts in a layout that cannot be read back."
            )
    return packings


def _runner(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class VllmCpuHooks(EngineHooks):
    """Live weights, packed anew after each load; KV memory given back by shrinking its storage."""

    sleeps = False

    def __init__(self) -> None:
        self._kv_bytes = 0
        self._packings: dict[tuple[int, int, torch.dtype], Sequence[_Packing]] = {}
        #: experts in the loader's layout; all others are in the kernel's
        self._open: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def engine_arguments(self, config: GenerateConfig) -> dict[str, Any]:
        # A prompt cut over two engine steps is sampled once too often, and vLLM then rewinds the request's generator,
        # which a CPU generator cannot do ("CPU Generator does not use offset").
        return {"enable_chunked_prefill": False}

    def quantization_config(self, quantization: str, list_names: Callable[[], Mapping[str, bool]]) -> dict[str, Any]:
        if QUANTIZED_FORMATS[quantization].is_emulated:
            method = vllm_cpu_block_formats.METHOD
            return {"quant_method": method, "format": quantization, "ignore": UNQUANTIZED_LAYERS}
        return super().quantization_config(quantization, list_names)

    def before_build(self, run_id: str) -> None:
        if torch.distributed.is_initialized():
            _name_segments_uniquely(run_id)

    def before_load(self, model: nn.Module) -> None:
        vllm_cpu_linear.forget_packed(model)
        for module, kernel in _experts(model):
            if module in self._open:  # by a load that failed
                continue
            up, down = module.w13_weight, module.w2_weight
            size, packings = kernel.moe_config.intermediate_size_per_partition, self._find_packings(module, kernel)
            for weight, packing, rows, columns in zip((up, down), packings, (2 * size, down.size(1)), (up.size(2), size)):
                weight.data = torch.stack([packing(matrix)[:rows, :columns] for matrix in weight.data])
            if hasattr(module, "w13_bias") and packings[0].rows is not None:
                module.w13_bias.data = module.w13_bias.data.index_select(1, packings[0].rows[: 2 * size])
            self._open.add(module)

    def after_load(self, model: nn.Module) -> None:
        for module, kernel in _experts(model):
            kernel.process_weights_after_loading(module)
            self._open.discard(module)

    def unpack(self, model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        packings: dict[str, Callable[[Tensor], Tensor]] = {}
        for module, kernel in _experts(model):
            weights = names[id(module.w13_weight)], names[id(module.w2_weight)]
            packings |= dict(zip(weights, self._find_packings(module, kernel)))
        return packings

    def _find_packings(self, module: Any, kernel: Any) -> Sequence[_Packing]:
        shapes = module.w13_weight.size(2), kernel.moe_config.intermediate_size_per_partition, module.w13_weight.dtype
        if shapes not in self._packings:
            self._packings[shapes] = _read_packings(kernel, *shapes)
        return self._packings[shapes]

    def packed_bytes(self, model: nn.Module) -> int:
        return sum(layer.packed_bytes for layer in vllm_cpu_linear.live_layers(model))

    def release(self, llm: LLM, replaced: Sequence[Tensor] = ()) -> None:
        vllm_cpu_linear.forget_packed(_runner(llm).model)
        storage = _runner(llm).kv_caches[0].untyped_storage()
        if storage.size():
            self._kv_bytes = storage.size()
            storage.resize_(0)

    def restore_weights(self, llm: LLM) -> None:
        """Weights stay where they are: host memory is not what a CPU run is short of."""

    def restore_cache(self, llm: LLM) -> None:
        storage = _runner(llm).kv_caches[0].untyped_storage()
        if self._kv_bytes and not storage.size():
            storage.resize_(self._kv_bytes)
            # recycled memory may hold NaN, and a slot that attention masks out still enters the sum, as 0 * NaN
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()
