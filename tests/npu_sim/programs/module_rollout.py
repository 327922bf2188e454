"""The module of transformers as the rollout engine, on the simulated NPU or on the CPU: the same requests and weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from engine import MODELS
from ranks import rank_settings, report

NEW_TOKENS = 24
#: a third of the vocabulary ends a response
ENDS = tuple(range(86, 128))
PROMPTS = ([11, 12, 13, 14, 15], [40, 41], [7] * 20, [40, 41])


def main() -> None:
    """Settings: platform, model (of `engine.MODELS`)."""
    settings = rank_settings()
    from mindspeed_rl import platform

    platform.select(settings["platform"])
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from mindspeed_rl.config import GenerateConfig
    from mindspeed_rl.rollout.module_engine import ModuleEngine
    from mindspeed_rl.rollout.requests import Sampling

    folder = Path(os.environ["NPU_SIM_REPORT_DIR"], "model")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[settings["model"]]))
    torch.manual_seed(5)
    reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    config = GenerateConfig(engine="transformers", dtype="float32", max_model_len=64, max_num_seqs=3)
    engine = ModuleEngine(folder, config, Sampling(1.0, NEW_TOKENS, ENDS))
    reference.save_pretrained(folder / "weights")
    named = load_file(folder / "weights" / "model.safetensors")
    # far from uniform
    engine.load_weights(((name, weight if weight.dim() == 1 else 2 * weight) for name, weight in named.items()), 0)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, engine.sampling, 7 + index)
    done = {}
    while engine.has_unfinished():
        done |= dict(engine.step())
    responses = [done[str(index)] for index in range(len(PROMPTS))]
    tokens, log_probs = ([getattr(response, name) for response in responses] for name in ("token_ids", "log_probs"))
    report({"tokens": tokens, "log_probs": log_probs, "truncated": [response.truncated for response in responses]})


if __name__ == "__main__":
    main()
