"""Steps of a platform around vLLM's own calls: before it is built, around a weight load, around idle phases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mindspeed_rl.config import GenerateConfig

if TYPE_CHECKING:
    from vllm import LLM

#: ends of the names of parameters that vLLM computes from other ones: no checkpoint has them
DERIVED = (".W_UV", ".W_UK_T", ".weight_offset", ".w13_weight_offset", ".w2_weight_offset", ".w13_scale_bias", ".w2_scale_bias")
#: vLLM's switch of forms that are compiled in threads
_COMPILES_LATER = "_use_async_grammar_compilation"
#: pattern of the names of layers that keep `dtype` in a quantized engine, as of `models.quantized_names`
UNQUANTIZED_LAYERS = r"\.(gate|shared_expert_gate|kv_b_proj|in_proj_(ba|b|a))$|\bvisual\."


def refresh_latent_attention(model: nn.Module) -> None:
    """Compute the matrices that latent attention folds out of `kv_b_proj` from its present weight.

    vLLM computes W_UV and W_UK_T once, after its own load of the checkpoint. Where they are copies (vllm-ascend's kernel
    objects hold such) and not views, `load_weights` by itself leaves the old ones in use, and every token is decoded with a
    mixture of old and new weights. They are computed into the memory that they already have.
    """
    layers: Iterator[Any] = model.modules()
    for module in layers:
        kernel = getattr(module, "impl", None)
        holder: Any = kernel if hasattr(kernel, "W_UV") else module
        if hasattr(holder, "W_UV"):
            holder.process_weights_after_loading(module.kv_b_proj.weight.dtype)


def unlink_message_buffers() -> None:
    """Remove the names of vLLM's message buffers from /dev/shm; the ranks of this engine have mapped them by now.

    vLLM unlinks them in `__del__`, which a worker process that is ended does not reach. Looked up in 0.18 to 0.32.
    """
    from vllm.distributed import parallel_state

    for group in parallel_state._groups.values():
        queue = getattr(group(), "mq_broadcaster", None)
        buffer = getattr(queue, "buffer", None)
        if buffer is not None and buffer.is_creator:
            buffer.shared_memory.unlink()
            # or its `__del__` would unlink a name that is gone, or another engine's
            buffer.is_creator = False


def compile_forms_at_once(llm: LLM) -> None:
    """Compile the form of a request (`structured_output`) when it is added, in the process of the engine.

    vLLM compiles forms in threads, and a request waits outside of the batch until its own is ready: with one process per engine
    the time decides which requests share a step, and so the last bits of their log-probs. With tensor parallelism
    (external_launcher) vLLM compiles at once by itself. Servers (`AsyncLLM`) compile in threads: which of their requests share
    a step depends on the time anyway. Looked up in 0.23 and 0.32. It can go once vLLM has an argument for it, or compiles
    before it adds a request.

    Raises:
        RuntimeError: this vLLM has no such switch.
    """
    core: Any = llm.llm_engine.engine_core
    manager = core.engine_core.structured_output_manager
    if not hasattr(manager, _COMPILES_LATER):
        raise RuntimeError(
            f"structured_output: this vLLM has no StructuredOutputManager.{_COMPILES_LATER}, without which requests with a "
            "form do not repeat bit for bit; 0.23 and 0.32 have it"
        )
    setattr(manager, _COMPILES_LATER, False)


class EngineHooks:
    """The plain case: vLLM needs nothing but its own calls (sleep and wake_up).

    Attributes:
        sleeps: True when the engine must be built with `enable_sleep_mode`.
    """

    sleeps = True

    def patch_libraries(self) -> None:
        """Patch vLLM's libraries in the process that is about to build a model, the engine's own or a worker's. Idempotent."""

    def before_build(self, run_id: str) -> None:
        """Prepare a rank for its `LLM(...)`; `run_id` is equal in all ranks of a run and unique to the run."""

    def engine_arguments(self, config: GenerateConfig) -> dict[str, Any]:
        """Return extra keyword arguments of `LLM(...)` for a run's rollout keys."""
        return {}

    def check_arguments(self, config: GenerateConfig, arguments: Mapping[str, Any]) -> None:
        """Check that the installed release serves the arguments of `LLM(...)`.

        Raises:
            ValueError: it does not.
        """

    def override_config(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a model's config.json that the engine must read otherwise than they are."""
        del hf_config
        return {}

    def quantization_config(self, quantization: str, list_names: Callable[[], Mapping[str, bool]]) -> dict[str, Any]:
        """Return vLLM's description of a model with quantized matrices, as a published model has it in its config.json.

        Scales of weights are loaded, scales of a token are computed with each product.

        Args:
            quantization: `generate_config.quantization`.
            list_names: returns the HF names of the weights -> True for those that are quantized; reads the model.

        Raises:
            ValueError: this engine does not have the format.
        """
        del list_names
        if quantization != "int8":
            raise ValueError(f"generate_config.quantization ({quantization}) is not available in this engine; int8 is")
        form = {"num_bits": 8, "type": "int", "symmetric": True}
        return {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": form | {"strategy": "channel", "dynamic": False},
                    "input_activations": form | {"strategy": "token", "dynamic": True},
                }
            },
            "ignore": ["lm_head", f"re:.*({UNQUANTIZED_LAYERS})"],
        }

    def before_load(self, model: nn.Module) -> None:
        """Put the weights of vLLM's model, as they are, into the layout that `model.load_weights` expects.

        A load may write a part of them: the others stay as they were.
        """

    def after_load(self, model: nn.Module) -> None:
        """Put the weights into the layout that the kernels expect, once all of them were loaded."""

    def unpack(self, model: nn.Module) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return for parameters that `after_load` lays out anew: a function from a matrix of it to that which was loaded.

        Elements that were not loaded come after the others, in rows or columns of their own.
        """
        return {}

    def packed_bytes(self, model: nn.Module) -> int:
        """Return the bytes of copies of weights that kernels have next to the model's parameters."""
        return 0

    def release(self, llm: LLM, replaced: Sequence[Tensor] = ()) -> None:
        """Free the engine's device memory; no request may be running.

        Args:
            replaced: tensors of the weights, dense in memory, that the next weight sync writes: their content need not be kept.
        """
        llm.sleep(level=1)

    def restore_weights(self, llm: LLM) -> None:
        """Make the engine's weights writable again after `release`."""
        llm.wake_up(tags=["weights"])

    def restore_cache(self, llm: LLM) -> None:
        """Make the engine's KV cache usable again after `release`."""
        llm.wake_up(tags=["kv_cache"])
