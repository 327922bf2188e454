"""How ms-swift writes conversations: its chat templates, thoughts, and the tokens of an answer that train."""

from __future__ import annotations

import re
from typing import Literal

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.translators import take_template_words

#: models that think or do not, whose answers without a thought get an empty one; the text comes from our template qwen3
_QWEN_HYBRID = re.compile(r"(?i)(^|/)qwen3(\.\d)?-[\d.]+[bt](-a\d+b)?(-base)?(-fp8|-awq)?/?$")
#: of these, one family keeps all thoughts
_KEEPS_THOUGHTS = re.compile(r"(?i)(^|/)qwen3\.8-")
#: other models that think or do not, whose text only their tokenizers have
_OTHER_HYBRID = re.compile(r"(?i)(^|/)(glm-(4\.[5-9]|5)|deepseek-v(3\.[12]|4)|gemma-4)")
#: base models whose tokenizer has another system prompt than ms-swift's template of their family
_QWEN_BASE = re.compile(r"(?i)(^|/)qwen2\.5-(coder-)?[\d.]+b/?$")
#: models whose chat template has tools in the form hermes
_HERMES = re.compile(r"(?i)(^|/)qwen(2\.5|3)-[\d.]+b(-a\d+b)?(-base|-instruct|-thinking)?(-2507)?/?$")
_QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
_STRATEGIES = ("default", "last_round", "all")
#: weights that only take the empty thought out
_EMPTY_THOUGHTS = "ignore_empty_think"

Hybrid = Literal["qwen", "other", ""]


def find_hybrid(command: SourceCommand) -> Hybrid:
    """Return the family of a model that thinks or does not; empty for others."""
    model = command.text("mcore_model") or command.text("model")
    if _QWEN_HYBRID.search(model):
        return "qwen"
    return "other" if _OTHER_HYBRID.search(model) else ""


def is_of_hermes(model: str) -> bool:
    """Return True for models whose chat template writes tools in the form hermes: Qwen2.5 and Qwen3 of text."""
    return _HERMES.search(model) is not None


def read_loss_scale(command: SourceCommand, kind: str) -> tuple[str, list[str]]:
    """Return the strategy of a loss scale, and the names of its weights."""
    default = "default" if kind in ("sft", "orpo") else "all" if kind == "pt" else "last_round"
    parts = [part for part in command.text("loss_scale").split("+") if part]
    strategy = parts.pop(0) if parts and parts[0] in _STRATEGIES else "default" if parts else default
    return strategy, [name for name in parts if name != "base"]


def find_unknown_weights(command: SourceCommand, kind: str) -> str:
    """Return the weights of tokens that are not available; empty where all are."""
    strategy, names = read_loss_scale(command, kind)
    strategies = {"pt": ("all",), "sft": ("default",)}.get(kind, ("last_round", "default"))
    if strategy not in strategies or set(names) - {_EMPTY_THOUGHTS}:
        return f"the weights of tokens {command.text('loss_scale')}; available are {', '.join(strategies)}"
    turns = command.text("multi_turn_scheduler")
    is_last = kind in ("grpo", "gkd") and command.has("loss_scale") and strategy == "last_round"
    # math_tip_trick has one response, which goes on
    if is_last and turns not in ("", "math_tip_trick"):
        return f"responses of several turns of which only the last trains (--multi_turn_scheduler {turns})"
    # ms-swift adds the name itself for models that think or do not; see `note_template` for those whose text is not ours
    if names and not find_hybrid(command) and kind != "sft":
        return f"tokens of empty thoughts that do not train, of another model than Qwen3 and Qwen3.5 ({_EMPTY_THOUGHTS})"
    return ""


def name_trained_tokens(command: SourceCommand, kind: str) -> str | None:
    """Return which tokens of supervised rows train where it is not all tokens of the answers.

    Models that think or do not have a text in which the empty thought does not train; other models' have none.
    """
    leaves_out = kind == "sft" and _EMPTY_THOUGHTS in read_loss_scale(command, kind)[1]
    return "the answers without empty thoughts" if leaves_out and not find_hybrid(command) else None


def write_template(run: Import, command: SourceCommand, kind: str) -> str:
    """Return the options of preprocessing for the chat template.

    An answer of a hybrid model without a thought has an empty one there, which does not train.
    """
    if not command.has("system") and _QWEN_BASE.search(command.text("model")):
        reason = "ms-swift's template of the family has it; the tokenizer of the base model has another"
        run.add_default(f"{ACTOR}.system_prompt", _QWEN_SYSTEM, reason)
    if find_hybrid(command) != "qwen" or command.text("template_backend") == "jinja":
        return f" --prompt-type hf{take_template_words(run)}"
    run.note_given("add_non_thinking_prefix disable_ignore_empty_think", "options of preprocess", changes_nothing=False)
    keeps = read_loss_scale(command, kind)[0] != "last_round" or bool(_KEEPS_THOUGHTS.search(command.text("model")))
    keeps = command.flag("preserve_thinking", default=keeps)
    run.take(f"{ACTOR}.enable_thinking", "only generation reads it there")
    run.take(f"{ACTOR}.chat_template_kwargs", "--drop-thinking of preprocess")
    trains = " --enable-thinking true" if command.flag("disable_ignore_empty_think") else ""
    if not command.flag("add_non_thinking_prefix", default=True):
        run.refuse("--add_non_thinking_prefix", "answers of a hybrid model without the empty thought")
    return f" --prompt-type qwen3{trains} --drop-thinking {str(not keeps).lower()}{take_template_words(run)}"


def note_template(command: SourceCommand) -> str:
    """Return what to look at in the rows that preprocessing writes; empty where the text is ms-swift's."""
    family, model = find_hybrid(command), command.text("model")
    if family == "qwen":
        return "rows with tools need --prompt-type hf" if re.search(r"(?i)qwen3\.\d", model) else ""
    if family == "other":
        return "ms-swift gives an answer without a thought an empty one, which does not train: look at preprocess --show"
    return ""


def list_prompt_defaults(command: SourceCommand) -> tuple[tuple[str, object, str], ...]:
    """Return the keys of raw prompts that no option sets: the chat template, and whether the model thinks."""
    name = "hf" if command.flag("use_chat_template", default=True) else "empty"
    note = "the tokenizer's chat template; ms-swift has a template of its own for each family, whose text is not compared"
    defaults: list[tuple[str, object, str]] = [(f"{ACTOR}.prompt_type", name, note)]
    if find_hybrid(command):
        reason = "a model that can do both does not think in ms-swift without --enable_thinking true"
        defaults.append((f"{ACTOR}.enable_thinking", False, reason))
    if not command.has("system") and _QWEN_BASE.search(command.text("model")):
        reason = "ms-swift's template of the family has it; the tokenizer of the base model has another"
        defaults.append((f"{ACTOR}.system_prompt", _QWEN_SYSTEM, reason))
    return tuple(defaults)
