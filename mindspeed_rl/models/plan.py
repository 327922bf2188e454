"""What is to be built of a model, from its config.json and a role's keys; computed alike on the driver and on every worker."""

from __future__ import annotations

import importlib.metadata
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import Architecture
from mindspeed_rl.models.layout import Layout, layer_list, noop_layers
from mindspeed_rl.models.model_config import ModelConfig, read_quantization_block
from mindspeed_rl.models.model_keys import check_model_keys

#: release of megatron-core after which `GroupedMLP` was removed (`models/specs.py`); what is left needs TransformerEngine
LAST_WITH_GROUPED_EXPERTS = (0, 16)


@dataclass(frozen=True)
class ModelPlan:
    """What is to be built, before anything is.

    Attributes:
        architecture, model_config: from the HF config.json, checked against the run file's network keys.
        layout: how the model is cut.
        hf_config: the config.json.
    """

    architecture: Architecture
    model_config: ModelConfig
    layout: Layout
    hf_config: dict[str, Any]

    def routed_layers(self, pp_rank: int) -> list[list[int]]:
        """Numbers, from 0, of the layers with experts in each model chunk of a pipeline stage."""
        chunks = [self.layout.chunk_layers(pp_rank, stage) for stage in range(self.layout.vpp)]
        return [[layer for layer in chunk if layer is not None and self.model_config.is_moe_layer(layer)] for chunk in chunks]


def plan_model(config: MegatronConfig, hf_folder: str | Path, *, head: Literal["lm", "reward"] = "lm") -> ModelPlan:
    """Reads config.json and places its layers.

    Raises:
        ValueError: there is no config.json, a network key of the run file contradicts it, the layout does not fit, or the
            installed megatron-core has not what the keys ask for.
    """
    architecture, model_config, hf_config = read_model(hf_folder)
    _check_grouped_experts(config, model_config)
    model_config = model_config.with_head(head)
    check_model_keys(config, model_config, Path(hf_folder, "config.json"))
    return placed(config, architecture, model_config, hf_config)


def placed(
    config: MegatronConfig, architecture: Architecture, model_config: ModelConfig, hf_config: dict[str, Any]
) -> ModelPlan:
    """The plan of a network whose shape is known.

    Raises:
        ValueError: the layout does not fit it.
    """
    # every HF vocabulary size is taken as it is; only what tensor parallelism needs is padded
    model_config = model_config.padded(1, config.tensor_model_parallel_size)
    if config.padded_vocab_size is not None:
        if config.padded_vocab_size < model_config.vocab_size:
            raise ValueError(
                f"padded_vocab_size: {config.padded_vocab_size} is below the model's vocabulary of {model_config.vocab_size}."
            )
        # to a multiple of this size, which is the size itself, as it is no less than vocab_size
        model_config = model_config.padded(config.padded_vocab_size, 1)
    layout = Layout(
        num_layers=model_config.num_layers,
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=num_stage_chunks(config, model_config.num_layers),
        ep=expert_sizes(config)[0],
        etp=expert_sizes(config)[1],
        num_layer_list=layer_list(config),
        noop_layers=noop_layers(config),
        num_experts=model_config.num_moe_experts or 0,
    )
    return ModelPlan(architecture, model_config, layout, hf_config)


def read_model(hf_folder: str | Path) -> tuple[Architecture, ModelConfig, dict[str, Any]]:
    """Return what a Hugging Face folder says of its model: architecture, shape, and the config.json itself.

    Raises:
        ValueError: there is no config.json, or it is of a model or of weights that are not supported.
    """
    path = Path(hf_folder, "config.json")
    if not path.is_file():
        raise ValueError(
            f"{path}: not found; the model's shape is read from the Hugging Face folder (tokenizer_name_or_path or load)."
        )
    hf_config = json.loads(path.read_text())
    read_quantization_block(hf_config)  # raises for weights that cannot be read
    architecture = architecture_for(hf_config)
    return architecture, architecture.read_model_config(hf_config), hf_config


def _check_grouped_experts(config: MegatronConfig, model_config: ModelConfig) -> None:
    """Raises ValueError for grouped experts where the installed megatron-core would silently build single ones."""
    if not (config.moe_grouped_gemm and model_config.num_moe_experts):
        return
    try:
        release = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:  # a source tree
        return
    if tuple(int(part) for part in release.split(".")[:2]) > LAST_WITH_GROUPED_EXPERTS:
        last = ".".join(map(str, LAST_WITH_GROUPED_EXPERTS))
        raise ValueError(
            f"moe_grouped_gemm: megatron-core {release} has no grouped experts without TransformerEngine ({last} was the last "
            "that had); set moe_grouped_gemm: false, which computes the experts of a device one by one."
        )


def num_stage_chunks(config: MegatronConfig, num_layers: int) -> int:
    """Model chunks a pipeline stage holds; more than 1 with virtual stages.

    Args:
        num_layers: real layers of the model, without no-op layers.

    Raises:
        ValueError: the layers of a stage do not divide.
    """
    chunk, stages = config.num_layers_per_virtual_pipeline_stage, config.pipeline_model_parallel_size
    if chunk is None or stages == 1:
        return 1
    per_stage = (num_layers + len(noop_layers(config))) // stages
    if per_stage % chunk:
        raise ValueError(
            f"num_layers_per_virtual_pipeline_stage: {chunk} does not divide the {per_stage} layers of a pipeline stage."
        )
    return per_stage // chunk


def expert_sizes(config: MegatronConfig) -> tuple[int, int | None]:
    """Expert parallel and expert tensor parallel size as Megatron takes them.

    `moe_tp_extend_ep` spreads whole experts over EP x TP ranks: in Megatron's words EP x TP with an expert tensor size of 1.
    """
    if config.moe_tp_extend_ep:
        return config.expert_model_parallel_size * config.tensor_model_parallel_size, 1
    return config.expert_model_parallel_size, config.expert_tensor_parallel_size
