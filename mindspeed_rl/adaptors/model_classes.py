"""Config classes of published models that transformers (looked up 4.57 to 5.19) and vLLM lack: MiMo and InternLM3.

vLLM has both models, and asks transformers for the class of their config.json, which their folders have as Python code of their
own (`trust_remote_code`). Their keys are named as in Qwen2 and Llama. A class goes when transformers knows its model type;
`tests/unit/adaptors` fails then. Frequencies that InternLM3 changes beyond its length are plain ones: `rollout/arguments.py`.
"""

from __future__ import annotations

#: model type -> class of transformers whose keys it has
_CLASSES = {"mimo": "Qwen2Config", "internlm3": "LlamaConfig"}


def apply() -> None:
    """Let engines and tokenizers of this process open these models. Imports transformers' configs; idempotent."""
    import transformers

    for model_type, name in _CLASSES.items():
        if model_type not in transformers.CONFIG_MAPPING:
            config_class = type(f"{model_type}_config", (getattr(transformers, name),), {"model_type": model_type})
            transformers.AutoConfig.register(model_type, config_class)
