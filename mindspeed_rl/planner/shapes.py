"""Elements that a rank holds of a model, counted from the table of its weights (`Architecture.weight_ops`)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.model_metadata import list_config_folders
from mindspeed_rl.hub import parse_hub_name
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.model_config import ModelConfig
from mindspeed_rl.models.model_keys import check_model_keys, infer_model_config
from mindspeed_rl.models.plan import ModelPlan, lay_out_model, read_model
from mindspeed_rl.models.vision import TOWER, get_tower_part, is_adapted
from mindspeed_rl.models.weights import WeightOp
from mindspeed_rl.run.hub_models import will_write_load


@dataclass(frozen=True)
class Elements:
    """Elements of one rank.

    Attributes:
        dense: parameters that are the same on all data-parallel ranks.
        expert: parameters of experts, the same on all expert-data-parallel ranks.
        buffers: elements that do not train and stay float32.
        dense_adapters, expert_adapters: parameters of low-rank adapters.
        frozen: parameters of a vision tower that do not train.
        matrices: matrices among dense and expert that Muon updates.
    """

    dense: int = 0
    expert: int = 0
    buffers: int = 0
    dense_adapters: int = 0
    expert_adapters: int = 0
    frozen: int = 0
    matrices: int = 0

    def __add__(self, other: Elements) -> Elements:
        return Elements(*(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values())))

    @property
    def parameters(self) -> int:
        """Parameters, adapters not included."""
        return self.dense + self.expert + self.frozen


def plan_role(config: MegatronConfig, *, is_scored: bool = False) -> ModelPlan:
    """Plan a role's model: from config.json where its folder is on this machine, else from the role's model keys.

    Args:
        is_scored: the model ends in one score a token (critic, reward model).

    Raises:
        ValueError: neither gives the shape, they contradict each other, or the layout does not fit.
    """
    hf_config = {}
    names = (config.load, config.pretrained_checkpoint, config.tokenizer_name_or_path)
    folder = find_model_folder(*names, base_model=config.base_model)
    if folder is not None:
        architecture, model_config, hf_config = read_model(folder, config.engine, trusts_code=config.trust_remote_code)
        check_model_keys(config, model_config, folder / "config.json")
    else:
        architecture, model_config = _infer_model_config(config, names[1:] if will_write_load(config) else names)
    model_config = replace(model_config, head="reward" if is_scored else model_config.head)
    plan = lay_out_model(config, architecture, model_config, hf_config)
    if message := _find_indivisible(plan.architecture, plan.model_config, plan.layout.tp, plan.layout.expert_tp_size):
        raise ValueError(message)
    return plan


@lru_cache(maxsize=256)
def _find_indivisible(architecture: Architecture, model_config: ModelConfig, tp: int, etp: int) -> str | None:
    """Return the error of the first weight that cannot be sharded over so many ranks."""
    try:
        for op in list_grouped_ops(architecture, model_config):
            op.check_divisible(etp if op.axis == "etp" else tp)
    except ValueError as error:
        return str(error)
    return None


def _infer_model_config(config: MegatronConfig, names: Iterable[str | None]) -> tuple[Architecture, ModelConfig]:
    """Return what the model keys say of a model whose folder is not on this machine.

    Raises:
        ValueError: they do not say enough; the message says how to get its config.json where it is named as on a hub.
    """
    try:
        return infer_model_config(config)
    except ValueError as error:
        if (name := next(filter(None, map(parse_hub_name, names)), None)) is None:
            raise
        command = f"mindspeed-rl download {name} --without-weights"
        raise ValueError(f"{str(error).rstrip('.')}; {command} fetches its config.json.") from None


def find_model_folder(*names: str | None, base_model: str | None = None) -> Path | None:
    """Return the first folder that has a config.json on this machine, of the models that these keys name.

    They name folders, or models on a hub, which are in its cache. An adapter has the config.json of its base.
    """
    for name in filter(None, names):
        for folder in list_config_folders(name, base_model):
            if (folder / "config.json").is_file():
                return folder
    return None


@lru_cache(maxsize=64)
def list_grouped_ops(architecture: Architecture, model_config: ModelConfig) -> tuple[WeightOp, ...]:
    """Return the table with all experts of a layer in one row, which the expert ranks share equally."""
    return tuple(architecture.weight_ops(model_config, ExpertPacking("grouped", 1)))


@lru_cache(maxsize=4096)
def _count_by_section(
    architecture: Architecture, model_config: ModelConfig, tp: int, etp: int, groups: int, rank: int, targets: tuple[str, ...]
) -> dict[str | int, Elements]:
    """Count the elements of a rank by section.

    These are "pre", "post", "tied" (a head that repeats the embedding), "tower" and "projector" of images, or a layer's index.
    """
    sections: dict[str | int, Elements] = {}
    for op in list_grouped_ops(architecture, model_config):
        # prediction layers are on the last stage, with the head
        section: str | int = "tied" if op.copy_of_tied else "post" if op.section == "mtp" else op.section
        if op.section == "layer":
            assert op.layer is not None
            section = op.layer
        elif op.mcore.startswith(TOWER):
            section = get_tower_part(op.mcore)
        sections[section] = sections.get(section, Elements()) + _count_op(op, tp, etp, groups, rank, targets)
    return sections


def _count_op(op: WeightOp, tp: int, etp: int, groups: int, rank: int, targets: tuple[str, ...]) -> Elements:
    adapted = rank if is_adapted(op.mcore, targets) else 0
    if op.axis == "tp":
        shape = op.shard_shape(tp)
        if op.buffer:
            return Elements(buffers=math.prod(shape))
        is_matrix = len(shape) == 2 and min(shape) > 1 and op.section in ("layer", "mtp") and not op.mcore.startswith(TOWER)
        return Elements(
            dense=math.prod(shape),
            dense_adapters=adapted * sum(shape) if len(shape) == 2 else 0,
            matrices=math.prod(shape) if is_matrix else 0,
        )
    experts = len(op.experts) // groups
    adapters = 0
    if ("linear_fc1" if "weight1" in op.mcore else "linear_fc2") in targets:
        rows, columns = op.shapes[0]
        fused = len(op.hf) // len(op.experts)
        outer, inner = (fused * rows // etp, columns) if fused > 1 else (rows, columns // etp)
        adapters = experts * rank * (outer + inner)
    count = math.prod(op.shard_shape(etp)) // groups
    return Elements(expert=count, expert_adapters=adapters, matrices=count)


def _list_sections(plan: ModelPlan, config: MegatronConfig) -> dict[str | int, Elements]:
    """Return the elements of a rank by section; see `_count_by_section`."""
    layout = plan.layout
    return _count_by_section(
        plan.architecture,
        plan.model_config,
        layout.tp,
        layout.expert_tp_size,
        layout.num_expert_groups if layout.num_experts else 1,
        config.lora_r,
        config.adapted_parts,
    )


def count_stage_elements(plan: ModelPlan, config: MegatronConfig) -> list[Elements]:
    """Count the elements of a rank of each pipeline stage; all ranks of a stage have as many."""
    layout, sections = plan.layout, _list_sections(plan, config)
    stages = []
    for stage in range(layout.pp):
        total = _count_ends(plan, config, stage)
        for chunk in range(layout.vpp):
            for layer in layout.chunk_layers(stage, chunk):
                total += Elements() if layer is None else sections[layer]
        stages.append(total)
    return stages


def _count_ends(plan: ModelPlan, config: MegatronConfig, stage: int) -> Elements:
    """Count the elements of a rank of a pipeline stage that are in no layer: embedding, tower, last norm, head."""
    layout, sections, none = plan.layout, _list_sections(plan, config), Elements()
    total = none
    if stage == layout.first_chunk[0]:
        total += sections["pre"]
        for part, is_frozen in (("tower", config.freeze_vit), ("projector", config.freeze_aligner)):
            elements = sections.get(part, none)
            total += replace(elements, dense=0, frozen=elements.dense) if is_frozen else elements
    if stage == layout.last_chunk[0]:
        total += sections["post"]
        # prediction layers share the embedding, of which their stage then has a copy
        copies = plan.model_config.mtp_num_layers > 0 and stage != layout.first_chunk[0]
        total += sections["pre"] if copies else none
        # the head of a tied model is the embedding itself where one stage has both
        total += sections.get("tied", none) if stage != layout.first_chunk[0] and not copies else none
    return total


def count_streamed_elements(plan: ModelPlan, config: MegatronConfig) -> list[Elements]:
    """Count the most elements that a rank of each pipeline stage has at a time where a pass brings layer by layer.

    These are what is in no layer, the layer that computes and the one after it.
    """
    layout, sections = plan.layout, _list_sections(plan, config)
    stages = []
    for stage in range(layout.pp):
        pairs = [Elements()]
        for chunk in range(layout.vpp):
            layers = [sections[layer] for layer in layout.chunk_layers(stage, chunk) if layer is not None]
            pairs += [sum(layers[index : index + 2], Elements()) for index in range(len(layers))]
        stages.append(_count_ends(plan, config, stage) + max(pairs, key=lambda pair: pair.parameters))
    return stages


def count_reduced_elements(plan: ModelPlan, config: MegatronConfig) -> tuple[Elements, Elements, Elements]:
    """Count the elements whose gradients an engine of shards reduces together.

    Returns:
        Those of the largest layer, of what is in no layer, and what of these has gradients while layers are reduced: the head.
    """
    sections = _list_sections(plan, config)
    layers = [elements for name, elements in sections.items() if isinstance(name, int)]
    head = sections["post"] + (sections["pre"] if "tied" in sections else Elements())
    return max(layers, key=lambda layer: layer.parameters), _count_ends(plan, config, 0), head


def count_all_elements(plan: ModelPlan, config: MegatronConfig) -> Elements:
    """Count the elements of a model, not sharded; parts of a vision tower count as if they trained."""
    sections = _count_by_section(plan.architecture, plan.model_config, 1, 1, 1, config.lora_r, config.adapted_parts)
    return sum((elements for name, elements in sections.items() if name != "tied"), Elements())


def find_largest_parameters(plan: ModelPlan, config: MegatronConfig, stage: int) -> tuple[int, int]:
    """Return the elements of the largest dense parameter of a rank of a pipeline stage, and of its largest expert parameter.

    Adapters do not count. Grouped experts of a layer are one parameter.
    """
    layout = plan.layout
    sections = ["layer"] + ["pre"] * (stage == layout.first_chunk[0]) + ["post", "mtp"] * (stage == layout.last_chunk[0])
    groups = layout.num_expert_groups if layout.num_experts and config.moe_grouped_gemm else 0
    return _find_largest(
        plan.architecture, plan.model_config, layout.tp, layout.expert_tp_size, groups, frozenset[str](sections)
    )


@lru_cache(maxsize=4096)
def _find_largest(
    architecture: Architecture, model_config: ModelConfig, tp: int, etp: int, groups: int, sections: frozenset[str]
) -> tuple[int, int]:
    """Find the largest parameters of these sections; without groups each expert is a parameter."""
    dense = expert = 0
    for op in list_grouped_ops(architecture, model_config):
        if op.buffer or op.copy_of_tied or op.section not in sections:
            continue
        if op.axis == "tp":
            dense = max(dense, math.prod(op.shard_shape(tp)))
        else:
            expert = max(expert, math.prod(op.shard_shape(etp)) // (groups or len(op.experts)))
    return dense, expert


def count_trained_adapters(plan: ModelPlan, config: MegatronConfig) -> int:
    """Count the elements of all adapters that train, not sharded."""
    elements = count_all_elements(plan, config)
    return elements.dense_adapters + elements.expert_adapters
