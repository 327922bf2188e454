"""What commands of LLaMA-Factory say of weights: their formats, the start and form of adapters, the optimizer's state."""

from __future__ import annotations

import re

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.translators import set_model
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
    "use_adam_mini": "one second moment for each block of a weight (Adam-mini)",
}
_RANKS = {"use_galore": "galore_rank", "use_apollo": "apollo_rank"}


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
    run.note_given(_FORMATS, "see weights of the plan" if parts else "off", changes_nothing=False)
    return "; ".join(parts) or None


def name_adapter_start(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return the start of fresh adapters where it is PiSSA's; None for PEFT's default, which is ours."""
    if not command.flag("pissa_init") or not adapts:
        return None
    run.note_given("pissa_init pissa_iter", "see adapter_start of the plan", changes_nothing=False)
    return "pissa, by which the model computes the same"


def name_adapter_form(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return what adapters are where they are not LoRA's products; None for those and without adapters."""
    if not command.flag("use_dora") or not adapts:
        return None
    run.note_given("use_dora", "see adapter_form of the plan", changes_nothing=False)
    return "DoRA"


def name_optimizer_state(run: Import, command: SourceCommand) -> str | None:
    """Return what moments are of where they are not those of the gradients; None where they are.

    GaLore and APOLLO have a rank of 16 unless the command says otherwise.
    """
    for option, text in _STATES.items():
        if command.flag(option):
            run.note_given(option, "see optimizer_state of the plan", changes_nothing=False)
            return text.format(command.number(_RANKS.get(option, ""), 16))
    return None
