"""The training engine of an imported run: a source that divides all weights keeps doing so where our engine can.

FSDP and DeepSpeed's ZeRO-3 divide every weight over all devices, as `engine: fsdp` does (docs/engines.md). What that engine
does not compute, or has not run yet, becomes a layout of Megatron, whose numbers are the same. Whether it does is asked of the
engine's own rules where the run file is complete (`keep_fsdp`), and of the command's options before (`choose_engine`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rl.config.keys import MegatronConfig
from mindspeed_rl.config.loader import build_run_config
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.writer import has_experts
from mindspeed_rl.models.plan import read_model
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.rules.training_engine_rules import adapts_experts, check_model_form
from mindspeed_rl.run.rules.validation import validate

#: stages that have run on the engine
_STAGES = ("ray_grpo", "pretrain", "sft", "dpo", "simpo", "orpo", "cpo", "kto", "orm", "prm")
_REASON = "{} divides every weight over all devices, as this engine does; megatron is the other one"
_FSDP = {f"{ACTOR}.engine": "fsdp"}
#: form of a model that the engine does not compute -> names of published models that have it
_FORMS = {
    "images of another kind than Qwen's": r"(?<!qwen2\.5[-_])(?<!qwen2_5[-_])(?<!qwen3[-_])(?<![a-z])vl\d*(?![a-z])"
    r"|vision|omni|llava|internvl|minicpm|gemma-?[34]-",
}
#: the same where the tokens of a row are divided over devices
_WHOLE_ROWS = {"layers that compute whole rows only": r"qwen3-?next|qwen3\.[5-9]|deepseek-v3\.2|glm-?5"}


@dataclass(frozen=True)
class Split:
    """What of a run its model must allow.

    Attributes:
        targets: layers that have adapters.
        context: devices that divide the tokens of a row.
    """

    targets: Sequence[str] = ()
    context: int = 1


def keep_fsdp(run: Import, obstacles: list[str]) -> str:
    """Set `engine: fsdp` where that engine supports model, stage and keys of the run file.

    Args:
        run: complete but for the engine.
        obstacles: what the source's layout has and the engine has not.

    Returns:
        Why the run is Megatron's; empty where it has the engine.
    """
    resolved = draft(build_run_config(apply_values(run.tree, _FSDP)))
    reasons = [*obstacles, *(item.message for item in validate(resolved) if item.rule == "training_engine")]
    model = str(run.get(f"{ACTOR}.base_model") or run.get(f"{ACTOR}.load"))
    targets, context = (run.get(f"{ACTOR}.{name}") for name in ("lora_target_modules", "context_parallel_size"))
    layout = Split(targets if isinstance(targets, list) else (), context if isinstance(context, int) else 1)
    if not reasons and (form := _find_form(model, layout)):
        reasons.append(form)
    if reasons:
        return "; ".join(reasons)
    for path, value in _FSDP.items():
        run.set(path, value)
    return ""


def choose_engine(
    run: Import,
    options: str,
    divides: str,
    *,
    stage: str,
    model: str,
    layout: Split,
    obstacles: Mapping[str, bool],
    otherwise: str,
) -> tuple[tuple[tuple[str, object, str], ...], str]:
    """Return the defaults that choose the engine, and why it is Megatron's although the source divides weights.

    Args:
        options: names of the options that divide weights, for which the choice is noted.
        divides: what divides all weights there, such as "ZeRO-3"; empty where nothing does.
        layout: what of the run its model must allow.
        obstacles: what stands against the engine -> True where the command has it.
        otherwise: note where nothing divides all weights.
    """
    defaults, reason = _list_engine(divides, stage, model, layout, obstacles)
    run.note_given(options, reason or ("see engine" if defaults else otherwise), changes_nothing=not defaults)
    return defaults, reason


def _list_engine(
    divides: str, stage: str, model: str, layout: Split, obstacles: Mapping[str, bool]
) -> tuple[tuple[tuple[str, object, str], ...], str]:
    if not divides:
        return (), ""
    found = [text for text, holds in obstacles.items() if holds]
    if stage not in _STAGES:
        found.insert(0, f"stage {stage}, which has not run on engine fsdp")
    elif not found and (form := _find_form(model, layout)):
        found.append(form)
    if found:
        return (), f"a layout of Megatron, because of {found[0]}"
    return ((f"{ACTOR}.engine", "fsdp", _REASON.format(divides)),), ""


def _find_form(model: str, layout: Split) -> str:
    """Return why the engine does not compute a model, by its config.json where it is here, else by its name."""
    if adapts_experts(layout.targets) and has_experts(model):
        return f"{model} has experts, whose layers are among those that get adapters"
    if not Path(model, "config.json").expanduser().is_file():
        forms = _FORMS | (_WHOLE_ROWS if layout.context > 1 else {})
        name = model.lower()
        return next((f"by its name {model} has {form}" for form, names in forms.items() if re.search(names, name)), "")
    try:
        architecture, shape, _ = read_model(Path(model).expanduser())
        config = MegatronConfig(engine="fsdp", bf16=True, context_parallel_size=layout.context)
        check_model_form(config, architecture, shape)
    except ValueError as error:
        return str(error)
    return ""
