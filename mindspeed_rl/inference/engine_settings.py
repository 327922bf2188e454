"""How an inference engine is built; light, so that commands can make it before vLLM is imported."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from mindspeed_rl import platform
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.config.rules.engine_limits import engine_limits
from mindspeed_rl.inference.model_files import ModelSettings

_DTYPES = {torch.float32: "float32", torch.float16: "float16"}


@dataclass(frozen=True)
class EngineSettings:
    """How the engine is built.

    Attributes:
        max_model_len: longest prompt + answer, in tokens.
        dtype: "auto" takes that of the checkpoint.
        max_num_seqs: answers that are generated at the same time; None takes 32 on the CPU, 256 on devices.
        kind: what generates: vLLM, or the Megatron model itself.
        tensor_parallel_size: devices one engine is split over.
        pipeline_parallel_size: stages of a Megatron model.
        data_parallel_size: engines that share the requests.
        most_log_probs: most entries that `next_tokens` may be asked for.
    """

    model: ModelSettings
    tokenizer: str
    max_model_len: int
    dtype: str = "auto"
    max_num_seqs: int | None = None
    kind: Literal["vllm", "megatron"] = "vllm"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_gib: float | None = None
    enforce_eager: bool = True
    trust_remote_code: bool = False
    most_log_probs: int = 20

    @property
    def num_devices(self) -> int:
        """Of all engines."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def generate_config(self, model_dtype: torch.dtype) -> GenerateConfig:
        """The same in the words of a run file."""
        default_seqs = engine_limits(platform.current().name).sequences
        return GenerateConfig(
            infer_tensor_parallel_size=self.tensor_parallel_size,
            max_num_seqs=self.max_num_seqs or default_seqs,
            max_model_len=self.max_model_len,
            # pyrefly: ignore[bad-argument-type]  # float16 too: vLLM knows it, run files do not
            dtype=_DTYPES.get(model_dtype, "bfloat16") if self.dtype == "auto" else self.dtype,
            gpu_memory_utilization=self.gpu_memory_utilization,
            kv_cache_memory_gib=self.kv_cache_memory_gib,
            enforce_eager=self.enforce_eager,
            trust_remote_code=self.trust_remote_code,
            enable_prefix_caching=True,
        )
