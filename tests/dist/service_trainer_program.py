"""A loop of a program with `mindspeed_rl.Trainer`: it learns to write digits, averages its weights, and is loaded by peft.

usage: service_trainer_program.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "quickstart"))

STEPS, DECAY = 12, 0.5
PROMPTS = [f"{a}+{b}=" for a in range(10, 14) for b in range(20, 22)]
HELD_OUT = [f"{a}-{b}=" for a in range(50, 58) for b in range(3, 5)]


def count_digits(text: str) -> float:
    return sum(character.isdigit() for character in text) / max(1, len(text))


def by_peft(base: Path, adapter: Path, merged: Path) -> tuple[float, float]:
    """Digits of greedy responses to held-out prompts, by transformers and peft; gap of their logits to the merged folder's."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    scores = []
    for prompt in HELD_OUT:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**ids, max_new_tokens=6, do_sample=False)
        scores.append(count_digits(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)))
    ids = tokenizer(PROMPTS[0], return_tensors="pt", return_token_type_ids=False)
    plain = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    return float(np.mean(scores)), float((plain(**ids).logits - model(**ids).logits).abs().max())


def main(folder: Path) -> None:
    from make_task import make_model, make_tokenizer

    from mindspeed_rl import Trainer

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    make_model(tokenizer).save_pretrained(folder / "model")
    path = str(folder / "model")
    values = {
        "megatron_training.tokenizer_name_or_path": path,
        "actor_config.load": path,
        "serve_config.sampler_ema_decay": DECAY,
        "serve_config.num_models": 1,
    }
    result: dict[str, Any] = {"rewards": []}
    with Trainer("serve_tiny_cpu", values, rank=16) as trainer:
        matrices = lambda: trainer._do(  # noqa: E731
            lambda tenants: {k: v.detach().clone() for k, v in tenants._models["model"].matrices.items()}
        )

        def score(prompts: list[str], **settings: Any) -> tuple[list[Any], list[list[float]]]:
            groups = trainer.sample(prompts, max_tokens=6, ends_at_eos=False, **settings)
            return groups, [[count_digits(trainer.tokenizer.decode(s.tokens)) for s in group] for group in groups]

        result["before"] = float(np.mean(score(HELD_OUT, temperature=0.0)[1]))
        expected: Any = None
        for step in range(STEPS):
            batch = []
            for prompt, samples, rewards in zip(PROMPTS, *score(PROMPTS, num_samples=8, seed=step)):
                mean = float(np.mean(rewards))
                result["rewards"].append(mean)
                batch += [trainer.make_datum(prompt, s, r - mean) for s, r in zip(samples, rewards)]
            trainer.forward_backward(batch, "importance_sampling")
            trainer.optim_step(learning_rate=1e-2, grad_clip_norm=1.0)
            now = matrices()
            expected = now if expected is None else {k: DECAY * expected[k] + (1 - DECAY) * now[k] for k in now}
        averages = trainer._do(lambda tenants: tenants._models["model"].averages)
        result["average"] = max(float((averages[k] - expected[k]).abs().max()) for k in expected)
        result["after"] = float(np.mean(score(HELD_OUT, temperature=0.0)[1]))
        trainer.save(folder / "saved")
        trainer.save_merged(folder / "merged")
        before = score(PROMPTS, num_samples=2, seed=99)[0]
        trainer.forward_backward(batch, "importance_sampling")
        trainer.optim_step(learning_rate=1e-2)
        trainer.load(folder / "saved")
        result["returns"] = score(PROMPTS, num_samples=2, seed=99)[0] == before
    result["by_peft"], result["merged_gap"] = by_peft(folder / "model", folder / "saved" / "adapter", folder / "merged")
    print(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # vLLM's engine does not end cleanly inside a training process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
