"""The plan of a model, from its config.json and a role's keys; the same on the driver and on every worker."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import BY_MODULE
from mindspeed_rl.files import read_json
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.architecture import Architecture, ExpertPacking
from mindspeed_rl.models.layout import Layout, parse_ints
from mindspeed_rl.models.model_config import HfConfig, ModelConfig, read_quantization_block
from mindspeed_rl.models.model_keys import check_model_keys
from mindspeed_rl.models.module_family import ModuleArchitecture, read_module_family

#: release of megatron-core after which `GroupedMLP` was removed (`models/specs.py`; the others need TransformerEngine), and
#: after which the layers of `multi_token_prediction.py` have other parts
_LAST_WITH_GROUPED_EXPERTS = (0, 16)


@dataclass(frozen=True)
class RouterBalancing:
    """Losses of the routers in training; all 0 for a model without experts.

    Attributes:
        coeff: weight of the loss that balances the experts.
        z_coeff: weight of the z-loss.
        per_sequence: experts are balanced over each sequence; otherwise over each micro-batch.
    """

    coeff: float = 0.0
    z_coeff: float = 0.0
    per_sequence: bool = False


@dataclass(frozen=True)
class ModelPlan:
    """Architecture, shape and layout of a model that is not built yet.

    Attributes:
        architecture, model_config: from the HF config.json, checked against the run file's model keys.
        layout: division of the model over ranks.
        hf_config: the config.json.
        balancing: losses of the routers.
    """

    architecture: Architecture
    model_config: ModelConfig
    layout: Layout
    hf_config: HfConfig
    balancing: RouterBalancing = RouterBalancing()

    def routed_layers(self, pp_rank: int) -> list[list[int]]:
        """Return the indices, from 0, of the layers with experts in each model chunk of a pipeline stage."""
        chunks = [self.layout.chunk_layers(pp_rank, stage) for stage in range(self.layout.vpp)]
        return [[layer for layer in chunk if layer is not None and layer in self.model_config.moe_layers] for chunk in chunks]


@dataclass(frozen=True)
class ModelSource:
    """Folders that the model of a role is read from; found by `checkpoint.model_source.find_model`.

    Attributes:
        hf_folder: has config.json; model config, tokenizer and the files that go next to exported weights.
        weights: folder the weights are read from.
        kind: "hf" for a Hugging Face folder, "training" for a checkpoint of ours, "megatron" for a checkpoint in another
            Megatron layout.
        iteration: which checkpoint of the folder; None for the newest.
        adapter: PEFT folder whose adapter belongs to the weights: a role with adapters trains it on, the others merge it.
        is_start: `pretrained_checkpoint` names it: a run takes only its weights, also where it has the state of a run.
    """

    hf_folder: Path
    weights: Path
    kind: Literal["hf", "training", "megatron"]
    iteration: int | None = None
    is_start: bool = False
    adapter: Path | None = None

    def is_resumed(self, config: MegatronConfig) -> bool:
        """Return True where a role with these keys resumes from the checkpoint, instead of taking only its weights."""
        return self.kind == "training" and not (config.finetune or self.is_start)


@dataclass(frozen=True)
class RoleModel:
    """The model of one role of a run, planned on the driver before any process starts.

    Attributes:
        config: the role's keys.
        iteration: checkpoint of `source` to load; None for the one that the source names.
    """

    config: MegatronConfig
    source: ModelSource
    plan: ModelPlan
    iteration: int | None = None


def plan_model(config: MegatronConfig, hf_folder: str | Path, *, head: Literal["lm", "reward"] = "lm") -> ModelPlan:
    """Read config.json and lay out its layers.

    Raises:
        ValueError: config.json is missing, a model key of the run file contradicts it, the layout does not fit, or the
            installed megatron-core lacks what the keys require.
    """
    architecture, model_config, hf_config = read_model(hf_folder, config.engine, trusts_code=config.trust_remote_code)
    if isinstance(architecture, ModuleArchitecture):
        architecture.check(config)
    _check_experts(config, model_config)
    model_config = replace(model_config, head=head)
    check_model_keys(config, model_config, Path(hf_folder, "config.json"))
    return lay_out_model(config, architecture, model_config, hf_config)


def lay_out_model(
    config: MegatronConfig, architecture: Architecture, model_config: ModelConfig, hf_config: HfConfig
) -> ModelPlan:
    """Return the plan of a model whose shape is known.

    Raises:
        ValueError: the layout does not fit it.
    """
    if config.language_model_only:
        model_config = replace(model_config, vision=None)
    model_config = _pad_vocab(config, model_config)
    _check_head_ranks(config, model_config)
    _check_indexer_loss(config, architecture, model_config)
    num_expert_ranks, expert_tp_size = config.expert_sizes
    layout = Layout(
        num_layers=model_config.num_layers,
        tp=config.tensor_model_parallel_size,
        pp=config.pipeline_model_parallel_size,
        vpp=_num_stage_chunks(config, model_config.num_layers),
        ep=num_expert_ranks,
        etp=expert_tp_size,
        num_layer_list=parse_ints(config.num_layer_list) or None,
        noop_layers=parse_ints(config.noop_layers),
        num_experts=model_config.num_moe_experts or 0,
    )
    _check_indexers(layout, model_config)
    _check_tower(config, layout, model_config)
    if config.mtp_num_layers and model_config.head == "lm":
        _check_prediction(config, architecture, model_config)
        model_config = replace(model_config, mtp_num_layers=config.mtp_num_layers)
    balancing = _plan_balancing(config, architecture, model_config)
    if config.has_dynamic_context:
        _check_dynamic_context(architecture, model_config, balancing)
    return ModelPlan(architecture, model_config, layout, hf_config, balancing)


def _pad_vocab(config: MegatronConfig, model_config: ModelConfig) -> ModelConfig:
    # every HF vocabulary size is taken as it is; only what tensor parallelism needs is padded
    model_config = model_config.pad_vocab(1, config.tensor_model_parallel_size)
    if config.padded_vocab_size is None:
        return model_config
    if config.padded_vocab_size < model_config.vocab_size:
        raise ValueError(
            f"padded_vocab_size: {config.padded_vocab_size} is below the model's vocabulary of {model_config.vocab_size}."
        )
    # to a multiple of this size, which is the size itself, as it is no less than vocab_size
    return model_config.pad_vocab(config.padded_vocab_size, 1)


def _check_head_ranks(config: MegatronConfig, model_config: ModelConfig) -> None:
    """Raise ValueError where ranks cannot share the heads of a layer."""
    heads, linear = model_config.num_attention_heads, model_config.linear_attention
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if heads % tp:
        raise ValueError(f"tensor_model_parallel_size: {tp} does not divide the model's {heads} attention heads")
    if linear is not None and linear.num_key_heads % (tp * cp):
        raise ValueError(
            f"tensor_model_parallel_size: {tp} x context_parallel_size: {cp} does not divide the {linear.num_key_heads} key "
            "heads of the model's gated delta nets (linear_num_key_heads), which are computed on one rank each."
        )
    if model_config.sparse_attention is not None and heads % (tp * cp):
        raise ValueError(
            f"tensor_model_parallel_size: {tp} x context_parallel_size: {cp} does not divide the model's {heads} attention "
            "heads; sparse attention exchanges full heads under either context_parallel_algo"
        )


def _check_dynamic_context(architecture: Architecture, model_config: ModelConfig, balancing: RouterBalancing) -> None:
    """Raise ValueError where parts of a model take the fixed context-parallel size."""
    for applies, reason in (
        (model_config.sparse_attention is not None, "sparse attention"),
        (model_config.vision is not None, "the positions of images"),
        (bool(balancing.coeff), f"the balancing loss of its experts (moe_aux_loss_coeff: {balancing.coeff:g}, which may be 0)"),
        (bool(balancing.z_coeff), f"the z-loss of its routers (moe_z_loss_coeff: {balancing.z_coeff:g}, which may be 0)"),
    ):
        if applies:
            raise ValueError(
                f"dynamic_context_parallel: true cannot be used with {architecture.name}: {reason} takes all "
                "context_parallel_size ranks in every micro-batch; set dynamic_context_parallel: false."
            )


def _check_indexer_loss(config: MegatronConfig, architecture: Architecture, model_config: ModelConfig) -> None:
    """Raise ValueError where the indexers of sparse attention cannot be trained."""
    if not config.dsa_indexer_loss_coeff:
        return
    reason = "its indexers get no adapters; leave out lora_target_modules" if config.lora_target_modules else None
    if model_config.sparse_attention is None:
        reason = f"{architecture.name} has no indexers"
    elif model_config.layers_without_indexer:
        reason = "layers that share an indexer would each pull it to their own attention, which is not built"
    if reason is not None:
        raise ValueError(f"dsa_indexer_loss_coeff: {config.dsa_indexer_loss_coeff:g}: {reason}, or set it to 0.")


def _check_tower(config: MegatronConfig, layout: Layout, model_config: ModelConfig) -> None:
    """Raise ValueError where a vision tower is trained that the model lacks, or its features go to layers of a later stage."""
    vision = model_config.vision
    if vision is None:
        trained = [key for key in ("freeze_vit", "freeze_aligner") if not getattr(config, key)]
        if trained:
            if config.language_model_only:
                raise ValueError(f"{trained[0]}: false: language_model_only: true leaves out its tower; set one of the two.")
            raise ValueError(
                f"{trained[0]}: false: the model has no vision tower to train; set the key for a role that has one."
            )
        return
    levels = len(vision.deepstack_layers)
    if missing := set(range(levels)) - set(layout.chunk_layers(*layout.first_chunk)):
        raise ValueError(
            f"pipeline_model_parallel_size: {layout.pp} leaves decoder layer {min(missing)} to another stage than the first, "
            f"and features of images are added after the first {levels} layers (deepstack_visual_indexes of config.json); use "
            "fewer stages, or num_layer_list with more layers in front."
        )


def _plan_balancing(config: MegatronConfig, architecture: Architecture, model_config: ModelConfig) -> RouterBalancing:
    """Return the losses of the routers."""
    if model_config.num_moe_experts is None:
        return RouterBalancing()
    if model_config.moe_router_biased_softmax and config.moe_z_loss_coeff:
        raise ValueError(
            f"moe_z_loss_coeff: {config.moe_z_loss_coeff} cannot be used with {architecture.name}, whose router's logits "
            "Megatron has in another form; leave it out."
        )
    coeff, kind = config.moe_aux_loss_coeff, config.moe_router_load_balancing_type
    if coeff is None:
        coeff = model_config.moe_aux_loss_coeff or 0.0
    return RouterBalancing(
        coeff=coeff if kind in ("aux_loss", "seq_aux_loss") else 0.0,
        z_coeff=config.moe_z_loss_coeff,
        per_sequence=kind == "seq_aux_loss" or config.seq_aux,
    )


def _check_indexers(layout: Layout, model_config: ModelConfig) -> None:
    """Raise ValueError where a pipeline stage begins with a layer that takes its tokens from an indexer on another one."""
    shared = model_config.layers_without_indexer
    for stage in range(layout.pp * layout.vpp):
        first = next((layer for layer in layout.chunk_layers(stage % layout.pp, stage // layout.pp) if layer is not None), None)
        if first is not None and first in shared:
            starts = [layer for layer in range(model_config.num_layers) if layer not in shared]
            raise ValueError(
                f"pipeline_model_parallel_size: {layout.pp} begins a stage at decoder layer {first}, which has no indexer and "
                f"takes its tokens from layer {max(layer for layer in starts if layer < first)}; stages can begin at layers "
                f"{', '.join(map(str, starts))} (indexer_types of config.json): set num_layer_list"
            )


def read_model(
    hf_folder: str | Path, engine: str = "megatron", *, trusts_code: bool = False
) -> tuple[Architecture, ModelConfig, HfConfig]:
    """Read a Hugging Face folder's model: its architecture, its shape, and the config.json.

    Args:
        hf_folder: has config.json.
        engine: training engine of the role that has the model.
        trusts_code: Python code of the folder may be run, where only that has the classes of the model.

    Raises:
        ValueError: config.json is missing, or it is of a model or of weights that are not supported.
    """
    found = architecture, _, hf_config = _read_model(hf_folder, engine in BY_MODULE, trusts_code)
    is_listed = hf_config.get("model_type") in architecture.model_types
    if engine in BY_MODULE and not is_listed and not architecture.module_obstacle:
        # by its class alone the model is of the table; transformers goes by the type, and may have another model of it, or none
        from mindspeed_rl.models.hf_module import read_hf_config

        read_hf_config(Path(hf_folder), f"engine: {engine}", trusts_code=trusts_code)
    return found


def _read_model(
    hf_folder: str | Path, by_module: bool, trusts_code: bool
) -> tuple[Architecture, ModelConfig, HfConfig]:
    """Read a folder's model; see `read_model`. by_module: also of a family outside the table, by its class in transformers."""
    path = Path(hf_folder, "config.json")
    if not path.is_file():
        raise ValueError(
            f"{path}: not found; the model's shape is read from the Hugging Face folder (tokenizer_name_or_path or load)."
        )
    hf_config: HfConfig = read_json(path)
    try:
        read_quantization_block(hf_config)  # raises for weights that cannot be read
        try:
            architecture = architecture_for(hf_config)
            return architecture, architecture.read_model_config(hf_config), hf_config
        except ValueError:
            if not by_module:
                raise
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    # a family outside the table, whose errors have the path
    return *read_module_family(Path(hf_folder), hf_config, trusts_code=trusts_code), hf_config


def read_any_model(hf_folder: str | Path, *, trusts_code: bool = False) -> tuple[Architecture, ModelConfig, HfConfig]:
    """Read the model of a folder of any family that a training engine has; see `read_model`.

    Raises:
        ValueError: no engine has it.
    """
    return _read_model(hf_folder, True, trusts_code)


def _check_prediction(config: MegatronConfig, architecture: Architecture, model_config: ModelConfig) -> None:
    """Raise ValueError where the multi-token-prediction layers of a model cannot be trained."""
    key = f"mtp_num_layers: {config.mtp_num_layers}"
    if architecture.read_mtp_ops is None:
        raise ValueError(f"{key}: {architecture.name} has no multi-token-prediction layers; set it to 0.")
    architecture.read_mtp_ops(model_config, config.mtp_num_layers - 1, ExpertPacking())  # raises where a family has fewer


def _read_megatron_release() -> str | None:
    """Return the release of the installed megatron-core; None for a source tree."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_experts(config: MegatronConfig, model_config: ModelConfig) -> None:
    """Raise ValueError for what experts with biases cannot do, and for groups that megatron-core would silently split up."""
    targets = [name for name in config.lora_target_modules or () if name in ("linear_fc1", "linear_fc2")]
    violations = {
        "moe_grouped_gemm: true": config.moe_grouped_gemm,
        "recompute_activation_function: true": config.recompute_activation_function,
        f"expert_tensor_parallel_size: {config.expert_sizes[1]}": config.expert_sizes[1] > 1,
        f"lora_target_modules: {' '.join(targets)}": bool(targets),
    }
    for setting in (setting for setting, is_set in violations.items() if is_set and model_config.add_bias_linear):
        raise ValueError(
            f"{setting} cannot be used with {model_config.architecture}, whose experts have biases; "
            + ("adapt linear_qkv and linear_proj" if targets else "leave it out; expert_tensor_parallel_size must be 1")
        )
    if not (config.moe_grouped_gemm and model_config.num_moe_experts):
        return
    release = _read_megatron_release()
    if release is not None and tuple(int(part) for part in release.split(".")[:2]) > _LAST_WITH_GROUPED_EXPERTS:
        last = ".".join(map(str, _LAST_WITH_GROUPED_EXPERTS))
        raise ValueError(
            f"moe_grouped_gemm: megatron-core {release} has no grouped experts without TransformerEngine ({last} was the last "
            "that had); set moe_grouped_gemm: false, which computes the experts of a device one by one."
        )


def _num_stage_chunks(config: MegatronConfig, num_layers: int) -> int:
    """Return the number of model chunks of a pipeline stage; more than 1 with virtual stages.

    Args:
        num_layers: real layers of the model, without no-op layers.

    Raises:
        ValueError: the layers of a stage do not divide.
    """
    chunk, stages = config.num_layers_per_virtual_pipeline_stage, config.pipeline_model_parallel_size
    if chunk is None or stages == 1:
        return 1
    per_stage = (num_layers + len(parse_ints(config.noop_layers))) // stages
    if per_stage % chunk:
        raise ValueError(
            f"num_layers_per_virtual_pipeline_stage: {chunk} does not divide the {per_stage} layers of a pipeline stage."
        )
    return per_stage // chunk
