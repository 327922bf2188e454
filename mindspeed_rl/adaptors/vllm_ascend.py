"""vllm-ascend 0.18 to 0.30 as an in-process rollout engine whose weights are replaced after every update.

| rule | where | why |
|---|---|---|
| die of the rank | `engine_arguments` | the executor of a single process takes die 0 on every rank; the one for external launchers takes LOCAL_RANK, at tensor size 1 too |
| no NZ weights | environment and `additional_config` | weights in FRACTAL_NZ cannot be overwritten in place; 0.18 reads the environment only, 0.23 both, and wake_up refuses to run with it |
| no MLAPO | environment and `additional_config` | of latent attention the fused operator of that name reads copies in FRACTAL_NZ, made when the engine is built, and no sync replaces them. On by default, on a 950: for MXFP8 from 0.20 on, for unquantized weights of sparse attention from 0.22 on, of dense attention in 0.26 |
| no expandable segments | check before building | sleep mode's memory pool asserts on them; a colocated trainer must not export them either |
| sleep level 2 | `release` | what a weight sync replaces is not copied to the host; see `vllm_ascend_sleep` |
| expert layout | `before_load`, `after_load` | after loading, experts are transposed into new parameters without `weight_loader`; wake_up transposes them again |
| placeholder of flash_attn | `patch_libraries` | MindSpeed leaves one that has a spec; vLLM's rotary embedding then imports parts of it |
| quantized layout, reported experts | `before_load`, `after_load`, `patch_libraries` | see `vllm_ascend_quantized` |
| noise | `patch_libraries` | see `vllm_ascend_sampling` |
| experts by a map, reported experts | `patch_libraries` | see `vllm_ascend_experts` |
| head of drafts | `patch_libraries` | vllm-ascend gives prediction layers the policy's head only where both have equal bits, which dummy weights do not; no weight sync fills a head of their own |
| adapters of merged layers | `patch_libraries` | vLLM 0.23 gathers their inner columns over tensor parallel ranks, although each rank has them all: kernels that read as many columns as the ranks together have get others |
| latent attention | `after_load` | its kernel multiplies with copies of parts of kv_b_proj, which nobody but the first load makes |

Expert weights have two layouts: the checkpoint's (w13 [experts, 2 * inner, hidden], w2 [experts, hidden, inner]), which
loaders fill, and the kernels' (last two dimensions swapped). vllm-ascend guesses the present one from shapes, which is
ambiguous for some sizes, and up to 0.25 leaves the checkpoint's layout in place after wake_up, though not in the prediction
layers of drafts. The hooks read it from the strides, tensor by tensor: memory is always in the kernels' layout, so the
checkpoint's is a view of it.

Not verified on NPU hardware.
"""  # noqa: E501

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from mindspeed_rl.adaptors import vllm_ascend_experts, vllm_ascend_quantized, vllm_ascend_sampling, vllm_hybrid_texts
from mindspeed_rl.adaptors.engine_hooks import EngineHooks, refresh_latent_attention
from mindspeed_rl.adaptors.vllm_ascend_sleep import KeptMemory
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.expert_map import read_expert_map

if TYPE_CHECKING:
    from vllm import LLM

_T = TypeVar("_T")

#: first vllm-ascend release -> `additional_config` of a rollout engine from that release on, for whether a sleeping engine
#: frees more than its pool. A key that a release does not know is ignored in silence by some and an error in others, so each
#: gets only what it knows. `rl_config.enabled` implies `refresh` and weights without NZ.
_ADDITIONAL_CONFIG: dict[tuple[int, int], Callable[[bool], dict[str, Any]]] = {
    (0, 18): lambda cleans: {"refresh": True},
    (0, 23): lambda cleans: {
        "refresh": True,
        "weight_nz_mode": 0,
        "enable_mlapo": False,
        "enable_sleep_mode_extra_cleanup": cleans,
    },
    (0, 27): lambda cleans: {"enable_mlapo": False, "rl_config": {"enabled": True, "sleep_mode_extra_cleanup": cleans}},
}
_CLEANS_FROM = (0, 23)
#: the releases that were read name by name; 0.24 to 0.26 have the interface of 0.23, 0.28 to 0.30 the interface of 0.27
_KNOWN_RELEASES = ((0, 18), (0, 23), (0, 24), (0, 25), (0, 26), (0, 27), (0, 28), (0, 29), (0, 30))

#: names of the weight-transfer backends of `init_weight_transfer_engine`, where a release has any
_WEIGHT_TRANSFER_BACKENDS: dict[tuple[int, int], tuple[str, ...]] = {(0, 18): (), (0, 23): ("hccl", "npu_ipc")}

#: first release -> module and class whose `_maybe_share_lm_head` joins the drafts' model to the policy's
_DRAFT_PROPOSERS: dict[tuple[int, int], tuple[str, str]] = {
    (0, 18): ("vllm_ascend.spec_decode.eagle_proposer", "SpecDecodeBaseProposer"),
    (0, 23): ("vllm_ascend.spec_decode.llm_base_proposer", "AscendSpecDecodeBaseProposer"),
}

#: looks for flash_attn by its spec when it is built
_ROTARY_EMBEDDING = "vllm.model_executor.layers.rotary_embedding.common"
_EXPERT_WEIGHTS = ("w13_weight", "w2_weight")


def _parse_release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version string.

    Raises:
        ValueError: it is not a version.
    """
    parts = version.split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        raise ValueError(f"'{version}' is not a vllm-ascend version like 0.23.0.") from None


def _row_for(table: dict[tuple[int, int], _T], release: tuple[int, int]) -> _T:
    """Return the newest row that is not newer than a release.

    Raises:
        ValueError: the release is older than every row.
    """
    rows = [first for first in table if first <= release]
    if not rows:
        oldest = ".".join(map(str, min(table)))
        raise ValueError(f"vllm-ascend {release[0]}.{release[1]} is older than {oldest}, the first one that is supported.")
    return table[max(rows)]


def _installed_release() -> tuple[int, int]:
    """Return the release of the installed vllm-ascend.

    Raises:
        ValueError: weights could not be replaced in it.
    """
    release = _parse_release(importlib.metadata.version("vllm_ascend"))
    known = ", ".join(f"{major}.{minor}" for major, minor in _KNOWN_RELEASES)
    if release not in _KNOWN_RELEASES:
        warnings.warn(
            f"vllm-ascend {release[0]}.{release[1]} was not looked at ({known} were); its keys are guessed.", stacklevel=2
        )
    return release


def _build_additional_config(config: GenerateConfig, release: tuple[int, int]) -> dict[str, Any]:
    """Return the settings of vllm-ascend that weight syncs and sleep need in a release.

    Raises:
        ValueError: the run file sets a key that the release does not have.
    """
    cleans = config.enforce_eager if config.sleep_mode_extra_cleanup is None else config.sleep_mode_extra_cleanup
    if config.sleep_mode_extra_cleanup and release < _CLEANS_FROM:
        raise ValueError(
            f"generate_config.sleep_mode_extra_cleanup (true) is not available in vllm-ascend {release[0]}.{release[1]}; "
            f"releases from {_CLEANS_FROM[0]}.{_CLEANS_FROM[1]} on have it."
        )
    return _row_for(_ADDITIONAL_CONFIG, release)(cleans)


def check_environment(environment: dict[str, str]) -> None:
    """Raise ValueError where a variable of this process makes weight updates fail later."""
    nz = environment.get("VLLM_ASCEND_ENABLE_NZ", "1")
    if nz != "0":
        raise ValueError(
            f"VLLM_ASCEND_ENABLE_NZ: {nz} (1 when unset) keeps weights in a layout that cannot be updated; set it to 0."
        )
    if environment.get("VLLM_ASCEND_ENABLE_FUSED_MC2", "0") != "0":
        raise ValueError("VLLM_ASCEND_ENABLE_FUSED_MC2: forces expert weights into the NZ layout; set it to 0.")
    if environment.get("VLLM_ASCEND_ENABLE_MLAPO", "1") != "0":
        raise ValueError(
            "VLLM_ASCEND_ENABLE_MLAPO (1 when unset) copies weights of latent attention, and no weight update reaches the "
            "copies; set it to 0."
        )


def check_allocator(environment: dict[str, str]) -> None:
    """Raise ValueError where a variable of a process that builds an engine makes sleep mode fail later.

    Not asked in the process that an asynchronous engine has for itself: vllm-ascend sets the variable there, unless it sleeps.
    """
    allocator = environment.get("PYTORCH_NPU_ALLOC_CONF", "")
    if "expandable_segments:True" in allocator.replace(" ", ""):
        raise ValueError(
            f"PYTORCH_NPU_ALLOC_CONF: '{allocator}' cannot be combined with the rollout engine's sleep mode; "
            "leave expandable_segments out for processes that hold a rollout engine."
        )


def apply() -> None:
    """Set what vllm-ascend reads from the environment before it is imported, and check the rest. Idempotent.

    Raises:
        ValueError: a variable contradicts weight updates.
    """
    os.environ.setdefault("VLLM_ASCEND_ENABLE_NZ", "0")
    os.environ.setdefault("VLLM_ASCEND_ENABLE_MLAPO", "0")
    # the hooks reach into the engine's model, so it must live in this process
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    check_environment(dict(os.environ))


def _find_real_spec(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
    """Find the spec of a module that can be imported from somewhere; None for a placeholder that is only in sys.modules."""
    spec = importlib.util.find_spec(name, package)
    placeholder = spec is not None and spec.loader is None and spec.submodule_search_locations is None
    return None if placeholder else spec


def _share_heads_of_drafts(proposer: Any) -> None:
    """Give prediction layers the policy's head, which is theirs in training too. Idempotent."""
    join = proposer._maybe_share_lm_head
    if join.__module__ == __name__:
        return

    def share(self: Any, model: Any) -> None:
        if self.method == "mtp":
            for layer in list(self.model.modules()):
                if hasattr(layer, "shared_head"):
                    layer.shared_head.head = model.lm_head
        join(self, model)

    proposer._maybe_share_lm_head = share


def _keep_inner_columns(layers: Any) -> None:
    """Let merged layers (gate and up) multiply with adapters as other layers do, unless adapters are divided. Idempotent."""
    owner = layers.MergedColumnParallelLinearWithLoRA
    gathering = vars(owner).get("apply")
    if gathering is None or "_mcp_apply" not in gathering.__code__.co_names:
        return  # of another release

    def apply(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.tp_size == 1 or self.lora_config.fully_sharded_loras:
            return gathering(self, x, bias)
        return layers.BaseLinearLayerWithLoRA.apply(self, x, bias)

    owner.apply = apply


def _expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules of experts in these two layouts, which experts in MXFP8 and int4 do not have, by name."""
    for name, module in model.named_modules():
        weights = [module._parameters.get(weight) for weight in _EXPERT_WEIGHTS]
        if all(weight is not None and weight.dtype not in vllm_ascend_quantized.BLOCK_TYPES for weight in weights):
            yield name, module


def _is_checkpoint_layout(parameter: Tensor) -> bool:
    """Return True for a tensor of experts in the checkpoint's layout, which is a view of the kernels'."""
    return not parameter.is_contiguous()


class VllmAscendHooks(EngineHooks):
    """Sleep mode for memory, expert weights in the layout that each step needs."""

    sleeps = True

    def __init__(self, release: tuple[int, int] | None = None) -> None:
        """Create the hooks of one engine.

        Args:
            release: release of vllm-ascend; None is the installed one.
        """
        self._release = release
        self._asleep: set[str] = set()
        self._kept: KeptMemory | None = None

    def patch_libraries(self) -> None:
        module: Any = importlib.import_module(_ROTARY_EMBEDDING)
        # only the name in this module: importlib's own stays as it is
        module.find_spec = _find_real_spec
        vllm_ascend_sampling.apply()
        vllm_ascend_experts.look_up_places()
        vllm_ascend_experts.report_own_tokens()
        vllm_ascend_quantized.keep_plain_format()
        vllm_ascend_quantized.report_experts()
        vllm_ascend_quantized.weigh_shared_experts()
        _keep_inner_columns(importlib.import_module("vllm.lora.layers.column_parallel_linear"))
        proposers, name = _row_for(_DRAFT_PROPOSERS, self._release or _installed_release())
        _share_heads_of_drafts(getattr(importlib.import_module(proposers), name))

    def engine_arguments(self, config: GenerateConfig) -> dict[str, Any]:
        check_allocator(dict(os.environ))
        own = _build_additional_config(config, self._release or _installed_release())
        additional: dict[str, Any] = dict(config.additional_config or {}) | own
        if config.quantization in vllm_ascend_quantized.UNFUSED:
            for key, settings in vllm_ascend_quantized.FUSION.items():
                additional[key] = dict(additional.get(key) or {}) | settings
        if config.expert_map_path is not None:
            read_expert_map(Path(config.expert_map_path))
            additional["eplb_config"] = {"expert_map_path": config.expert_map_path}
        return {"additional_config": additional, "distributed_executor_backend": "external_launcher"}

    def check_arguments(self, config: GenerateConfig, arguments: Mapping[str, Any]) -> None:
        reports = bool(arguments.get("enable_return_routed_experts"))
        if config.quantization is not None:
            vllm_ascend_quantized.check_release(
                config.quantization, self._release or _installed_release(), reports_experts=reports
            )

    def override_config(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        return vllm_hybrid_texts.override_config(hf_config)

    def quantization_config(self, quantization: str, list_names: Callable[[], Mapping[str, bool]]) -> dict[str, Any]:
        return vllm_ascend_quantized.describe_model(quantization, list_names())

    def before_load(self, model: nn.Module) -> None:
        """Put expert parameters into the checkpoint's layout, each with the loader that vLLM looks for."""
        for _, module in _expert_modules(model):
            for weight in _EXPERT_WEIGHTS:
                parameter = module._parameters[weight]
                if not _is_checkpoint_layout(parameter):
                    parameter = nn.Parameter(parameter.data.transpose(1, 2), requires_grad=False)
                    module.register_parameter(weight, parameter)
                parameter.weight_loader = module.weight_loader
        # views: the memory is the pool's that sleeps
        vllm_ascend_quantized.before_load(model)

    def after_load(self, model: nn.Module) -> None:
        """Put experts into the kernels' layout and computes latent attention's matrices from the new weights.

        No byte of an expert moves, because the loaded tensors were views of the kernels' layout.
        """
        for name, module in _expert_modules(model):
            for weight in _EXPERT_WEIGHTS:
                data = module._parameters[weight].data.transpose(1, 2)
                if not data.is_contiguous():
                    raise RuntimeError(
                        f"weight push: {name}.{weight} was not a view of the kernels' layout; this vllm-ascend release lays "
                        "expert weights out differently from 0.18 and 0.23."
                    )
                module.register_parameter(weight, nn.Parameter(data, requires_grad=False))
        vllm_ascend_quantized.after_load(model)
        refresh_latent_attention(model)

    def unpack(self, model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
        unpacks: dict[str, Callable[[Tensor], Tensor]] = {
            f"{name}.{weight}": Tensor.t
            for name, module in _expert_modules(model)
            for weight in _EXPERT_WEIGHTS
            if not _is_checkpoint_layout(module._parameters[weight])
        }
        return unpacks | dict(vllm_ascend_quantized.list_unpacks(model))

    def release(self, llm: LLM, replaced: Sequence[Tensor] = ()) -> None:
        if self._awaits_experts(llm):
            raise RuntimeError("the rollout engine was woken up and sent back to sleep without a weight push between.")
        self._kept = KeptMemory.save(replaced) if replaced else None
        llm.sleep(level=2 if replaced else 1)
        self._asleep = {"weights", "kv_cache"}

    def restore_weights(self, llm: LLM) -> None:
        """Wake the weights up. Up to 0.25 experts are then in the checkpoint's layout: a weight push must follow.

        An engine that is awake (the first push comes to one) stays as it is: vLLM does not pass the call on then.
        """
        if "weights" in self._asleep:
            llm.wake_up(tags=["weights"])
            if self._kept is not None:
                self._kept.restore()
                self._kept = None
            self._asleep.remove("weights")

    def restore_cache(self, llm: LLM) -> None:
        if self._awaits_experts(llm):
            raise RuntimeError("the rollout engine has experts that were not loaded again after wake_up; push weights first.")
        if "kv_cache" in self._asleep:
            llm.wake_up(tags=["kv_cache"])
            self._asleep.remove("kv_cache")

    def _awaits_experts(self, llm: LLM) -> bool:
        """Return True where experts are in the layout in which a weight push fills them."""
        return any(llm.apply_model(_has_loadable_experts))


def _has_loadable_experts(model: nn.Module) -> bool:
    return any(
        _is_checkpoint_layout(module._parameters[weight]) for _, module in _expert_modules(model) for weight in _EXPERT_WEIGHTS
    )
