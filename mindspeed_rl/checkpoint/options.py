"""Options of a conversion and receiver of its progress; no torch, so that a command line can be read without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SourceForm = Literal["hf", "mg"]
ResultForm = Literal["mg", "hf", "megatron", "legacy"]
CheckpointFormat = Literal["torch", "torch_dist"]
ParamsDtype = Literal["fp16", "bf16", "fp32"]
TransformerImpl = Literal["local", "transformer_engine"]
MlaLayout = Literal["megatron", "mindspeed"]


class Progress:
    """Receiver of the work's progress; this one shows nothing."""

    def start(self, what: str, total_bytes: int, done_bytes: int) -> None:
        """Begin a phase of this many bytes."""

    def advance(self, num_bytes: int) -> None:
        """Count bytes as done."""

    def finish(self) -> None:
        """End the phase."""

    def warn(self, text: str) -> None:
        """Report to the user what a conversion has found in the weights."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """The flags of `mindspeed-rl convert`, under their names; its `--help` explains them.

    Attributes:
        load_model_type: None goes by what lies at `load_dir`.
        num_layer_list, noop_layers, max_shard_size: as written, still to be read.
        lora_r, lora_alpha, lora_target_modules: checked against the adapter.
    """

    # from and to
    load_model_type: SourceForm | None
    save_model_type: ResultForm
    load_dir: Path
    save_dir: Path
    hf_cfg_dir: Path | None
    load_iteration: int | None
    load_from_legacy: bool
    save_to_legacy: bool
    ckpt_format: CheckpointFormat
    # model
    model_type_hf: str | None
    add_qkv_bias: bool
    post_norm: bool
    params_dtype: ParamsDtype | None
    orm: bool
    mtp_num_layers: int | None
    num_layers: int | None
    first_k_dense_replace: int | None
    make_vocab_size_divisible_by: int
    load_checkpoint_loosely: bool
    # split of the result
    target_tensor_parallel_size: int
    target_pipeline_parallel_size: int
    target_expert_parallel_size: int
    expert_tensor_parallel_size: int | None
    num_layer_list: Sequence[str] | None
    num_layers_per_virtual_pipeline_stage: int | None
    noop_layers: str | None
    schedules_method: Literal["dualpipev"] | None
    moe_grouped_gemm: bool
    moe_tp_extend_ep: bool
    transformer_impl: TransformerImpl
    mla_layout: MlaLayout
    # LoRA
    lora_load: Path | None
    lora_r: int | None
    lora_alpha: float | None
    lora_target_modules: Sequence[str]
    # running
    overwrite: bool
    max_shard_size: str | None
