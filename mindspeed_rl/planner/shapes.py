"""Elements that a rank holds of a model, counted from the table of its weights (`Architecture.weight_ops`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.model_metadata import HF_FILES
from mindspeed_rl.config.placement import PACKED_ELEMENTS
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import check_model_keys, infer_model_config
from mindspeed_rl.models.plan import ModelPlan, lay_out_model, read_model
from mindspeed_rl.models.weights import WeightOp

#: rows of the vocabulary that the rollout engine pads to
_ENGINE_VOCAB = 64


@dataclass(frozen=True)
class Elements:
    """Elements of one rank.

    Attributes:
        dense: parameters that are the same on all data-parallel ranks.
        expert: parameters of experts, the same on all expert-data-parallel ranks.
        buffers: elements that do not train and stay float32.
        dense_adapters, expert_adapters: parameters of low-rank adapters.
    """

    dense: int = 0
    expert: int = 0
    buffers: int = 0
    dense_adapters: int = 0
    expert_adapters: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))

    @property
    def parameters(self) -> int:
        """Parameters, adapters not included."""
        return self.dense + self.expert


def plan_role(config: MegatronConfig, *, is_scored: bool = False) -> ModelPlan:
    """Plan a role's model: from config.json where its folder is on this machine, else from the role's model keys.

    Args:
        is_scored: the model ends in one score a token (critic, reward model).

    Raises:
        ValueError: neither gives the shape, they contradict each other, or the layout does not fit.
    """
    hf_config = {}
    folder = find_model_folder(config.load, config.pretrained_checkpoint, config.tokenizer_name_or_path)
    if folder is not None:
        architecture, model_config, hf_config = read_model(folder)
        check_model_keys(config, model_config, folder / "config.json")
    else:
        architecture, model_config = infer_model_config(config)
    model_config = model_config.with_head("reward" if is_scored else model_config.head)
    plan = lay_out_model(config, architecture, model_config, hf_config)
    if message := _find_indivisible(plan.architecture, plan.model_config, plan.layout.tp, plan.layout.expert_tp_size):
        raise ValueError(message)
    return plan


@lru_cache(maxsize=256)
def _find_indivisible(architecture: Architecture, model_config: ModelConfig, tp: int, etp: int) -> str | None:
    """Return the error of the first weight that cannot be sharded over so many ranks."""
    try:
        for op in _ops(architecture, model_config):
            op.check_divisible(etp if op.axis == "etp" else tp)
    except ValueError as error:
        return str(error)
    return None


def find_model_folder(*names: str | None) -> Path | None:
    """Return the first of these folders that has a config.json on this machine."""
    for name in names:
        for folder in (Path(name).expanduser(), Path(name).expanduser() / HF_FILES) if name else ():
            if (folder / "config.json").is_file():
                return folder
    return None


@lru_cache(maxsize=64)
def _ops(architecture: Architecture, model_config: ModelConfig) -> tuple[WeightOp, ...]:
    """Return the table with all experts of a layer in one row, which the expert ranks share equally."""
    return tuple(architecture.weight_ops(model_config, ExpertPacking("grouped", 1)))


@lru_cache(maxsize=4096)
def _count_by_section(
    architecture: Architecture, model_config: ModelConfig, tp: int, etp: int, groups: int, rank: int, targets: tuple[str, ...]
) -> dict[str | int, Elements]:
    """Count the elements of a rank by section: "pre", "post", "tied" (a head that repeats the embedding), or layer index."""
    sections: dict[str | int, Elements] = {}
    for op in _ops(architecture, model_config):
        # prediction layers are on the last stage, with the head
        section: str | int = "tied" if op.copy_of_tied else "post" if op.section == "mtp" else op.section
        if op.section == "layer":
            assert op.layer is not None
            section = op.layer
        sections[section] = sections.get(section, Elements()) + _count_op(op, tp, etp, groups, rank, targets)
    return sections


def _count_op(op: WeightOp, tp: int, etp: int, groups: int, rank: int, targets: tuple[str, ...]) -> Elements:
    adapted = rank if any(f".{target}." in op.mcore for target in targets) else 0
    if op.axis == "tp":
        shape = op.shard_shape(tp)
        if op.buffer:
            return Elements(buffers=math.prod(shape))
        return Elements(dense=math.prod(shape), dense_adapters=adapted * sum(shape) if len(shape) == 2 else 0)
    experts = len(op.experts) // groups
    adapters = 0
    if ("linear_fc1" if "weight1" in op.mcore else "linear_fc2") in targets:
        rows, columns = op.shapes[0]
        fused = len(op.hf) // len(op.experts)
        outer, inner = (fused * rows // etp, columns) if fused > 1 else (rows, columns // etp)
        adapters = experts * rank * (outer + inner)
    return Elements(expert=math.prod(op.shard_shape(etp)) // groups, expert_adapters=adapters)


def count_stage_elements(plan: ModelPlan, config: MegatronConfig) -> list[Elements]:
    """Count the elements of a rank of each pipeline stage; all ranks of a stage have as many."""
    layout = plan.layout
    targets = tuple(config.lora_target_modules or ())
    sections = _count_by_section(
        plan.architecture,
        plan.model_config,
        layout.tp,
        layout.expert_tp_size,
        layout.num_expert_groups if layout.num_experts else 1,
        config.lora_r,
        targets,
    )
    none = Elements()
    stages = []
    for stage in range(layout.pp):
        total = Elements()
        for chunk in range(layout.vpp):
            for layer in layout.chunk_layers(stage, chunk):
                total += none if layer is None else sections[layer]
        if stage == layout.first_chunk[0]:
            total += sections["pre"]
        if stage == layout.last_chunk[0]:
            total += sections["post"]
            # the head of a tied model is the embedding itself where one stage has both
            total += sections.get("tied", none) if stage != layout.first_chunk[0] else none
        stages.append(total)
    return stages


def _count_parameters(architecture: Architecture, model_config: ModelConfig) -> int:
    """Count the parameters of a model, tied ones once, without padding."""
    model_config = model_config.pad_vocab(1, 1)
    ops = _ops(architecture, model_config)
    return sum(math.prod(op.shard_shape()) for op in ops if not op.copy_of_tied and not op.buffer)


@lru_cache(maxsize=256)
def count_rollout_elements(architecture: Architecture, model_config: ModelConfig, tensor: int, expert_ranks: int) -> int:
    """Count the weights of one rank of the rollout engine, under the engine's rules of sharding.

    Query, key and value are sharded by heads (a rank has one key/value head at least), the low-rank down projections of latent
    attention are replicated, and experts are spread over `expert_ranks` where those are above 1.
    """
    total = 0
    for op in _ops(architecture, model_config.pad_vocab(1, 1)):
        # the engine has one matrix for a tied head, and loads no prediction layers
        if op.copy_of_tied or op.section == "mtp":
            continue
        if op.axis == "etp" and expert_ranks > 1:
            total += math.prod(op.shard_shape()) // expert_ranks
        else:
            total += _on_engine_rank(op, model_config, tensor)
    return total


def _on_engine_rank(op: WeightOp, model_config: ModelConfig, tensor: int) -> int:
    """Count the elements of one row of the table on a rank of the engine, experts sharded over the tensor ranks."""
    vocab = -(-model_config.vocab_size // _ENGINE_VOCAB) * _ENGINE_VOCAB
    total = 0
    for shape, split in zip(op.shapes, op.splits):
        size = math.prod(shape)
        if split.dim is None or "_down_proj" in op.mcore:
            total += size
        elif shape[0] == model_config.vocab_size:
            total += size // shape[0] * (vocab // tensor)
        else:
            # query heads may be on another rank than their key/value head
            unit = split.unit if split.unit % model_config.kv_channels else model_config.kv_channels
            units = shape[split.dim] // unit
            total += size // units * -(-units // tensor)
    return total


@lru_cache(maxsize=256)
def count_packed_elements(architecture: Architecture, model_config: ModelConfig, tensor: int) -> int:
    """Count the elements that a rank of the CPU's engine also holds packed: of large linear layers and the head.

    Matrices that the engine has as one (query, key and value; gate and up) count as one here too.
    """
    total = 0
    ops = _ops(architecture, model_config.pad_vocab(1, 1))
    tied = any(op.copy_of_tied for op in ops)
    for op in ops:
        is_lookup = op.section == "pre" and not tied
        if op.copy_of_tied or op.section == "mtp" or op.axis == "etp" or is_lookup or any(len(s) != 2 for s in op.shapes):
            continue
        size = _on_engine_rank(op, model_config, tensor)
        total += size if size >= PACKED_ELEMENTS else 0
    return total


@lru_cache(maxsize=64)
def count_rollout_adapters(architecture: Architecture, model_config: ModelConfig, tensor: int, rank: int) -> int:
    """Count the elements of adapters that a rank of the rollout engine has room for.

    They are A and B of every linear layer, whatever trains. The input of A is sharded where the layer's input is, the output
    of B where its output is.
    """
    total = 0
    for op in _ops(architecture, model_config.pad_vocab(1, 1)):
        if op.section != "layer" or op.axis != "tp" or op.buffer:
            continue
        for shape, split in zip(op.shapes, op.splits):
            if len(shape) == 2:
                outputs, inputs = (size // tensor if split.dim == dim else size for dim, size in enumerate(shape))
                total += rank * (outputs + inputs)
    return total


def count_trained_adapters(plan: ModelPlan, config: MegatronConfig) -> int:
    """Count the elements of all adapters that train, not sharded."""
    targets = tuple(config.lora_target_modules or ())
    sections = _count_by_section(plan.architecture, plan.model_config, 1, 1, 1, config.lora_r, targets)
    return sum(elements.dense_adapters + elements.expert_adapters for elements in sections.values())
