"""Raw data to token files, and the datasets that training reads. The handlers' registry is here; it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mindspeed_rl import registry

if TYPE_CHECKING:
    from mindspeed_rl.data.handlers.base import Handler

_HANDLERS = "mindspeed_rl.data.handlers"

# --handler-name -> where the class is. A user's own class is given as "module:Class".
HANDLERS: dict[str, str] = {
    "GeneralPretrainHandler": f"{_HANDLERS}.pretrain:GeneralPretrainHandler",
    "ImageTextPretrainHandler": f"{_HANDLERS}.pretrain:ImageTextPretrainHandler",
    "AlpacaPretrainHandler": f"{_HANDLERS}.pretrain:AlpacaPretrainHandler",
    "SharegptPretrainHandler": f"{_HANDLERS}.pretrain:SharegptPretrainHandler",
    "AlpacaStyleInstructionHandler": f"{_HANDLERS}.instruction:AlpacaStyleInstructionHandler",
    "SharegptStyleInstructionHandler": f"{_HANDLERS}.instruction:SharegptStyleInstructionHandler",
    "OpenAIInstructionHandler": f"{_HANDLERS}.instruction:OpenAIInstructionHandler",
    "HunyuanInstructionHandler": f"{_HANDLERS}.instruction:HunyuanInstructionHandler",
    "LlamaFactoryInstructionHandler": f"{_HANDLERS}.llamafactory:LlamaFactoryInstructionHandler",
    "GeneralInstructionHandler": f"{_HANDLERS}.published:GeneralInstructionHandler",
    "BelleMultiTurnInstructionHandler": f"{_HANDLERS}.published:BelleMultiTurnInstructionHandler",
    "MOSSInstructionHandler": f"{_HANDLERS}.published:MOSSInstructionHandler",
    "MOSSMultiTurnHandler": f"{_HANDLERS}.published:MOSSMultiTurnHandler",
    "LeetcodePythonInstructionHandler": f"{_HANDLERS}.published:LeetcodePythonInstructionHandler",
    "StackOverflowPythonPretrainHandler": f"{_HANDLERS}.published:StackOverflowPythonPretrainHandler",
    "AlpacaStylePairwiseHandler": f"{_HANDLERS}.pairwise:AlpacaStylePairwiseHandler",
    "SharegptStylePairwiseHandler": f"{_HANDLERS}.pairwise:SharegptStylePairwiseHandler",
    "AlpacaStyleUnpairedHandler": f"{_HANDLERS}.pairwise:AlpacaStyleUnpairedHandler",
    "SharegptStyleUnpairedHandler": f"{_HANDLERS}.pairwise:SharegptStyleUnpairedHandler",
    "PPOAlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:PPOAlpacaStyleInstructionHandler",
    "R1AlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:R1AlpacaStyleInstructionHandler",
    "R1SharegptStyleInstructionHandler": f"{_HANDLERS}.prompt:R1SharegptStyleInstructionHandler",
    "Math17kAlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:Math17kAlpacaStyleInstructionHandler",
    "AlpacaStyleProcessRewardHandler": f"{_HANDLERS}.process_reward:AlpacaStyleProcessRewardHandler",
}


def handler_class(name: str) -> type[Handler]:
    """Import and return the handler class that `--handler-name` names.

    Raises:
        ValueError: unknown name, or a module:Class that cannot be imported or is not a handler.
    """
    subject = f"handler_name={name!r}"
    return registry.load_class(registry.target_of(HANDLERS, name, subject), subject, f"{_HANDLERS}.base:Handler")
