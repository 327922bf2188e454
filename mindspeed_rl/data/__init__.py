"""Raw data to token files, and the datasets that training reads. The handlers' registry is here; it imports nothing heavy."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module

_HANDLERS = "mindspeed_rl.data.handlers"

# --handler-name -> where the class is. A user's own class is given as "module:Class".
HANDLERS: dict[str, str] = {
    "GeneralPretrainHandler": f"{_HANDLERS}.pretrain:GeneralPretrainHandler",
    "AlpacaPretrainHandler": f"{_HANDLERS}.pretrain:AlpacaPretrainHandler",
    "SharegptPretrainHandler": f"{_HANDLERS}.pretrain:SharegptPretrainHandler",
    "AlpacaStyleInstructionHandler": f"{_HANDLERS}.instruction:AlpacaStyleInstructionHandler",
    "SharegptStyleInstructionHandler": f"{_HANDLERS}.instruction:SharegptStyleInstructionHandler",
    "OpenAIInstructionHandler": f"{_HANDLERS}.instruction:OpenAIInstructionHandler",
    "HunyuanInstructionHandler": f"{_HANDLERS}.instruction:HunyuanInstructionHandler",
    "LlamaFactoryInstructionHandler": f"{_HANDLERS}.llamafactory:LlamaFactoryInstructionHandler",
    "AlpacaStylePairwiseHandler": f"{_HANDLERS}.pairwise:AlpacaStylePairwiseHandler",
    "SharegptStylePairwiseHandler": f"{_HANDLERS}.pairwise:SharegptStylePairwiseHandler",
    "PPOAlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:PPOAlpacaStyleInstructionHandler",
    "R1AlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:R1AlpacaStyleInstructionHandler",
    "Math17kAlpacaStyleInstructionHandler": f"{_HANDLERS}.prompt:Math17kAlpacaStyleInstructionHandler",
    "AlpacaStyleProcessRewardHandler": f"{_HANDLERS}.process_reward:AlpacaStyleProcessRewardHandler",
}


def handler_class(name: str) -> type:
    """Import and return the handler class that `--handler-name` names.

    Raises:
        ValueError: unknown name, or a module:Class that cannot be imported.
    """
    target = HANDLERS.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon:
        near = get_close_matches(name, HANDLERS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"handler_name={name!r} is unknown{hint} There are {', '.join(HANDLERS)}, or module:Class of your own")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"handler_name={name!r} cannot be imported: {error}") from error
