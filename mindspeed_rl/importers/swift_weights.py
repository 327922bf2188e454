"""What commands of ms-swift say of weights: their formats, the start of adapters, the reach of rotary positions, templates."""

from __future__ import annotations

import re

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.result import Import

#: options of the optimizer's parts, which are float32 here
_PARTS = ("main_params_dtype", "main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
_FLOAT32 = ("fp32", "float32", None)
#: starts of adapters that leave the function of the model as it is, besides the one that is available
_STARTS = re.compile(r"gaussian|olora|lora-ga|orthogonal|pissa(_niter_\d+)?")
_RANDOM = (True, "true", "True", None)
#: chat template -> models whose template of ms-swift it is
_TEMPLATES = {
    "qwen": r"(^|/)qwen(1\.5|2)?-[\d.]+b(-chat|-instruct)?/?$",
    "qwen2_5": r"(^|/)qwen2\.5-(coder-)?[\d.]+b(-instruct)?(-1m)?/?$",
    "qwen3": r"(^|/)qwen3-[\d.]+b(-a\d+b)?(-base)?/?$",
    "qwen3_nothinking": r"(^|/)qwen3-[\d.]+b(-a\d+b)?-instruct-2507/?$",
    "qwen3_thinking": r"(^|/)qwen3-[\d.]+b(-a\d+b)?-thinking-2507/?$",
    "qwen2_5_vl": r"(^|/)qwen2\.5-vl-[\d.]+b(-instruct)?/?$",
    "qwen3_vl": r"(^|/)qwen3-vl-[\d.]+b(-a\d+b)?-(instruct|thinking)/?$",
    "qwen3_5": r"(^|/)qwen3\.5-[\d.]+b(-a\d+b)?(-base)?/?$",
}


def name_formats(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return the formats of weights, products and optimizer state where they differ from bf16 training; None otherwise."""
    parts = []
    for name in ("fp8", "fp4"):
        if command.get(f"{name}_format"):
            kept = ", weights too" if command.flag(f"{name}_param_gather") else ""
            parts.append(f"products in {name} ({command.text(f'{name}_format')}{kept})")
    parts += [f"{name} {command.text(name)}" for name in _PARTS if command.get(name) not in _FLOAT32]
    if command.get("quant_bits") or command.get("quant_method"):
        bits, method = command.text("quant_bits", "fewer"), command.text("quant_method", "bnb")
        parts.append(f"frozen ones in {bits} bits ({method})")
        if not adapts:
            run.refuse("--quant_bits", "quantized weights that train")
    names = "fp8_format fp8_param_gather fp4_format fp4_param_gather quant_method quant_bits bnb_4bit_compute_dtype"
    run.note_given(f"{names} {' '.join(_PARTS)}", "see weights of the plan" if parts else "off", changes_nothing=False)
    run.note_given("linear_decoupled_in_proj", "the same projections, in one matrix or two", changes_nothing=False)
    return "; ".join(parts) or None


def name_adapter_start(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return the start of fresh adapters where it is not the one of PEFT's default, which is ours; None for that one."""
    start = command.get("init_weights")
    is_default = not adapts or start in _RANDOM
    if not is_default and _STARTS.fullmatch(str(start)) is None:
        run.refuse("--init_weights", f"{start}: a start of the adapters that changes what the model computes")
    reason = "A by chance, B of zeros" if is_default else "see adapter_start of the plan"
    run.note_given("init_weights", reason if adapts else "there are no adapters", changes_nothing=False)
    return None if is_default else f"{start}, by which the model computes the same"


def name_adapter_form(run: Import, command: SourceCommand, *, adapts: bool) -> str | None:
    """Return what adapters are where they are not LoRA's products for each layer; None for those and without adapters."""
    parts = ["DoRA"] if command.flag("use_dora") else []
    if command.flag("linear_decoupled_in_proj"):
        parts.append("LoRA of each half of the input projection of linear attention")
    run.note_given("use_dora", "see adapter_form of the plan" if parts and adapts else "off", changes_nothing=False)
    return ", ".join(parts) if parts and adapts else None


def name_tower(run: Import, command: SourceCommand) -> str | None:
    """Return what trains of a tower next to adapters of only the language model; None for other tuners."""
    if command.text("tuner_type") != "lora_llm":
        return None
    run.note_given("tuner_type", "see tower of the plan", changes_nothing=False)
    return "all its weights"


def name_optimizer_state(run: Import, command: SourceCommand) -> str | None:
    """Return what moments are of where gradients are projected; None where they are of the gradients."""
    if not command.flag("use_galore"):
        return None
    run.note_given("use_galore", "see optimizer_state of the plan", changes_nothing=False)
    rounded = ", quantized" if command.flag("galore_quantization") else ""
    return f"of gradients that GaLore projects to rank {int(command.number('galore_rank', 128))}{rounded}"


def name_embedding_noise(run: Import, command: SourceCommand) -> str | None:
    """Return NEFTune's noise; None without it."""
    if not (alpha := command.number("neftune_noise_alpha", 0.0)):
        return None
    run.note_given("neftune_noise_alpha", "see embedding_noise of the plan", changes_nothing=False)
    return f"uniform, {alpha:g} / sqrt(tokens x width)"


def name_positions(run: Import, command: SourceCommand) -> str | None:
    """Return rotary positions that a command stretches; None where config.json of the model decides, as it does here."""
    scaling = command.get("rope_scaling")
    length = command.get("max_model_len")
    run.note_given("rope_scaling", "see layers of the plan: write it into config.json of a copy" if scaling else "off")
    reach = f" up to {length} tokens" if length else ""
    return f"rope_scaling {scaling}{reach}" if scaling else None


def note_chat_template(run: Import, command: SourceCommand) -> None:
    """Note the template that ms-swift has for the model anyway; another one is refused."""
    name, model = command.text("template"), command.text("model")
    if name and re.search(_TEMPLATES.get(name, "(?!)"), model, re.IGNORECASE):
        run.note_given("template", "the one that ms-swift has for this model", changes_nothing=False)
    elif name:
        form = f"{name}: the text of another family's chat template; prompt_type and prompt_type_path name ours"
        run.refuse("--template", form)
