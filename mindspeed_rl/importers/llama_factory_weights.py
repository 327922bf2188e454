"""What commands of LLaMA-Factory say of weights: their formats, the start and form of adapters, the optimizer's state."""

from __future__ import annotations

import re
from pathlib import Path

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.translators import read_mapping, set_model
from mindspeed_rl.importers.trl import set_optimizer

#: names of models whose weights are quantized
_QUANTIZED = re.compile(r"(?i)[-_](awq|gptq|aqlm|hqq|bnb|eetq|4bit|8bit|int4|int8|w8a8|fp8)(?![a-z])")
#: variable that names the model that quantized weights are from
_BASE = "BASE_MODEL"
#: options that `name_formats` reads
_FORMATS = (
    "quantization_bit quantization_method quantization_type double_quantization pure_bf16 fp8 fp8_backend "
    "fp8_enable_fsdp_float8_all_gather"
)
#: optimizers of transformers that are AdamW with moments of 8 bits
_ADAM_8BIT = re.compile(r"(paged_)?adamw_(bnb_)?8bit|adamw_torch_8bit")
#: optimizer of LLaMA-Factory -> what its state is of
_STATES = {
    "use_galore": "of gradients that GaLore projects to rank {:g}",
    "use_apollo": "of gradients that APOLLO projects to rank {:g}, which scale the whole ones",
    "use_badam": "of one block of layers at a time, and only its weights move (BAdam)",
    "use_adam_mini": "one second moment for each block of a weight (Adam-mini)",
    "use_muon": "of gate_proj and up_proj each by itself, which are one matrix of Muon here",
}
_RANKS = {"use_galore": "galore_rank", "use_apollo": "apollo_rank"}
#: keys of the Muon of LLaMA-Factory: the update of a matrix has 0.2 x sqrt(largest side) times the rate
_MUON = {"optimizer": "muon", "muon_use_nesterov": True, "muon_scale_mode": "spectral", "muon_extra_scale_factor": 0.2}


def find_base(run: Import, model: str) -> str:
    """Return the model that the run starts from: of quantized weights the one that they are from, which the user names."""
    if _QUANTIZED.search(model) is None:
        return model
    base = run.settings.variables.get(_BASE)
    if base is None:
        form = f"quantized base weights; write --set {_BASE}=FOLDER with the model that they are from"
        run.refuse(f"model_name_or_path {model}", form)
    return base or model


def set_base(run: Import, option: str, value: object) -> None:
    """Set the model and its tokenizer."""
    set_model(run, option, find_base(run, str(value)))


def set_adam(run: Import, option: str, value: object) -> None:
    """Set the optimizer, of which moments in 8 bits are a number of the plan."""
    set_optimizer(run, option, "adamw_torch" if _ADAM_8BIT.fullmatch(str(value)) else value)


def name_formats(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return the formats of weights, products and optimizer state where they differ from bf16 training; None otherwise."""
    parts, model, bits = list[str](), command.text("model_name_or_path"), command.get("quantization_bit")
    if _QUANTIZED.search(model):
        parts.append(f"frozen ones as {model} has them")
    if bits is not None:
        parts.append(f"frozen ones in {bits} bits ({command.text('quantization_method', 'bnb')})")
    if parts and not adapts:
        run.refuse("quantization_bit" if bits is not None else "finetuning_type", "quantized weights that train")
    if command.flag("fp8"):
        parts.append(f"products in fp8 ({command.text('fp8_backend', 'auto')})")
    if command.flag("pure_bf16"):
        parts.append("bfloat16, moments too")
    if _ADAM_8BIT.fullmatch(command.text("optim")):
        parts.append("moments in 8 bits")
    parts += _name_host_experts(run, command, adapts=adapts)
    run.note_given(_FORMATS, "see weights of the plan" if parts else "off", changes_nothing=False)
    return "; ".join(parts) or None


def _name_host_experts(run: Import, command: SourceCommand, *, adapts: bool) -> list[str]:
    """Return the format of experts that KTransformers keeps on the host, where it is not bfloat16."""
    if not command.flag("use_kt"):
        return []
    if not adapts:
        run.refuse("use_kt", "experts on the host whose weights train")
    named = read_mapping("kt_config", command.get("kt_config")).get("kt_expert_weight_format")
    run.note_given("use_kt kt_weight_path kt_config", "experts are computed on the devices", changes_nothing=False)
    if named == "bf16" and not command.get("kt_weight_path"):
        return []
    place = command.get("kt_weight_path") or "as the file of accelerate says"
    return [f"frozen ones of experts in {named}" if named else f"frozen ones of experts {place}"]


def set_tokenized(run: Import, option: str, value: object) -> None:
    """Leave tokens to preprocess; those that LLaMA-Factory has written are none of ours."""
    if Path(str(value)).expanduser().is_dir():
        run.refuse(option, f"the tokens of {value}, which LLaMA-Factory wrote; leave it out, and preprocess writes them")
    else:
        run.note(option, "there the command only writes these tokens; here preprocess writes them", changes_nothing=False)


def list_muon_keys(run: Import, command: SourceCommand, *, adapts: bool) -> dict[str, object]:
    """Return the keys of Muon, and refuse it for adapters; none without it."""
    if not command.flag("use_muon") or find_optimizer(command) != "use_muon":
        return {}
    if adapts:
        run.refuse("use_muon", "Muon of adapters")
    return dict(_MUON)


def find_optimizer(command: SourceCommand) -> str:
    """Return the option of the optimizer that trains, the first of several as there; empty for AdamW."""
    order = ("use_galore", "use_apollo", "loraplus_lr_ratio", "use_badam", "use_adam_mini", "use_muon")
    return next((name for name in order if command.get(name) not in (None, False, "false", "False")), "")


def name_adapter_start(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return the start of fresh adapters where it is PiSSA's; None for PEFT's default, which is ours."""
    if not command.flag("pissa_init") or not adapts:
        return None
    run.note_given("pissa_init pissa_iter", "see adapter_start of the plan", changes_nothing=False)
    return "pissa, by which the model computes the same"


def name_adapter_form(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return what adapters are where they are not LoRA's products; None for those and without adapters."""
    form = "DoRA" if command.flag("use_dora") and adapts else ""
    if adapts and find_optimizer(command) == "loraplus_lr_ratio":
        form = f"{form or 'LoRA'}, whose B has {command.number('loraplus_lr_ratio', 1):g} times the rate (LoRA+)"
    if form:
        run.note_given("use_dora loraplus_lr_ratio", "see adapter_form of the plan", changes_nothing=False)
    return form or None


def name_optimizer_state(run: Import, command: SourceCommand) -> str | None:
    """Return what moments are of where they are not those of the gradients; None where they are.

    GaLore and APOLLO have a rank of 16 unless the command says otherwise.
    """
    option = find_optimizer(command)
    if option not in _STATES:
        return None
    run.note_given(option, "see optimizer_state of the plan", changes_nothing=False)
    run.note_given(" ".join(_STATES), f"{option} is read instead")
    return _STATES[option].format(command.number(_RANKS.get(option, ""), 16))
