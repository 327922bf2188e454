"""LLaMA-Factory's USE_MCA: mcore_adapter, which is Megatron behind the options of transformers' Trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import Option, SourceCommand, each, no_effect, refused, same, to, with_others
from mindspeed_rl.importers.recipe import ACTOR, Layout
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.shell import is_switched_on
from mindspeed_rl.importers.writer import RECOMPUTE_LAYERS, has_experts

#: stages that it has and that are imported
_STAGES = ("pt", "sft")
#: options that only it and the bridge read, and those that only the bridge reads
_OWN = "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size context_parallel_size".split()
_OF_BRIDGE = "mixed_precision use_packed_sequences megatron_pretrained_checkpoint export_hf_on_finish extra_config".split()
#: models whose balancing loss its converter reads from config.json
_BALANCED = re.compile(r"(?i)qwen|mixtral")
_RECOMPUTATION = "recompute_granularity recompute_method recompute_num_layers recompute_modules"
_FASTER = no_effect("it changes speed or memory, not numbers")


#: its options, over those of a stage
TABLE: dict[str, Option] = {
    "use_mca": with_others("the layout of Megatron"),
    **{
        name: to(f"{ACTOR}.{name}")
        for name in (
            "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
            "expert_tensor_parallel_size sequence_parallel use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
            "moe_aux_loss_coeff"
        ).split()
    },
    "virtual_pipeline_model_parallel_size": refused(
        "chunks of a stage by their number; num_layers_per_virtual_pipeline_stage has their layers", unless=(1,)
    ),
    **each(
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split pipeline_model_parallel_layout",
        refused("stages of other sizes; num_layer_list has the layers of each"),
    ),
    **each(_RECOMPUTATION, with_others("what is computed again", off="nothing is computed again")),
    **each(
        "bias_activation_fusion apply_rope_fusion masked_softmax_fusion cross_entropy_loss_fusion moe_grouped_gemm "
        "moe_token_dispatcher_type moe_shared_expert_overlap moe_layer_recompute overlap_p2p_comm variable_seq_lengths "
        "accumulate_allreduce_grads_in_fp32 delay_grad_reduce ddp_average_in_collective ddp_bucket_size transformer_impl "
        "check_for_nan_in_loss_and_grad ckpt_format",
        _FASTER,
    ),
    "moe_router_dtype": no_effect("config.json of the model decides the router's precision"),
    "moe_expert_capacity_factor": refused("experts that drop tokens"),
    "mtp_num_layers": refused("prediction layers of USE_MCA"),
    "calculate_per_token_loss": with_others("the plan's aggregation", off="see the plan", by_nature=True),
    "optimizer": same("AdamW of Megatron", "adam"),
    "optimizer_cpu_offload": refused("states that the host updates; swap_optimizer keeps them there"),
    "sequence_packing": refused("rows that are joined while training; neat_packing joins them before"),
    "save_hf_model": to(f"{ACTOR}.save_hf"),
}


def uses_mca(options: Mapping[str, object], environment: Mapping[str, str]) -> bool:
    """Return True for a command of mcore_adapter: by its variable, or by options of a layout without one of the bridge's."""
    if is_switched_on(environment, "USE_MCA") or options.get("use_mca"):
        return True
    bridge = is_switched_on(environment, "USE_MEGATRON_BRIDGE") or options.get("use_megatron_bridge")
    bridge = bridge or any(name in options for name in _OF_BRIDGE)
    return not bridge and any(name in options for name in _OWN)


def read_layout(command: SourceCommand) -> Layout:
    """Return the split of the model.

    Raises:
        ConfigError: it does not divide the devices.
    """
    layout = Layout("megatron", *(command.count(name, 1) for name in (_OWN[0], _OWN[1], _OWN[3], _OWN[2])))
    if command.devices % layout.devices:
        sizes = f"tensor {layout.tensor} x pipeline {layout.pipeline} x context {layout.context}"
        raise ConfigError([f"{command.devices} devices are no multiple of {sizes}; write --devices N"])
    return layout


def describe_mca(run: Import, command: SourceCommand, model: str, *, adapts: bool) -> None:
    """Set what a run of mcore_adapter has besides its layout, and refuse what it has and we have not.

    Raises:
        ConfigError: the stage is not imported.
    """
    if command.program not in _STAGES:
        raise ConfigError([f"stage {command.program}: not available here with USE_MCA; {' and '.join(_STAGES)} are"])
    if adapts:
        run.refuse("finetuning_type", "adapters of USE_MCA, which trains all weights")
    if has_experts(model) and not _BALANCED.search(model):
        run.refuse("model_name_or_path", f"experts, as {model} has them: mcore_adapter's converter decides their balancing")
    run.note_given("use_mca", "see the layout", changes_nothing=False)
    run.note_given("deepspeed", "USE_MCA does not read it")
    run.note_given("calculate_per_token_loss", "see aggregation of the plan", changes_nothing=False)
    _set_recomputation(run, command)


def _set_recomputation(run: Import, command: SourceCommand) -> None:
    """Set what is computed again; full without a method is each layer."""
    kind, given = command.text("recompute_granularity"), run.list_given(_RECOMPUTATION)
    if not kind or not given:
        return
    keys: dict[str, object] = dict(RECOMPUTE_LAYERS) if kind == "full" else {f"{ACTOR}.recompute_granularity": kind}
    for name in ("recompute_method", "recompute_num_layers"):
        if command.get(name) is not None:
            keys[f"{ACTOR}.{name}"] = command.get(name)
    if command.get("recompute_modules") is not None and kind == "selective":
        keys[f"{ACTOR}.recompute_modules"] = command.text("recompute_modules").split(",")
    run.translate(given[0], keys)
    run.note_given(_RECOMPUTATION, f"see {given[0]}", changes_nothing=False)
