"""Trains the quickstart's task by a loop of its own: sample, score, `forward_backward`, `optim_step`, after the warm start."""

import json
import random
import sys

from mindspeed_rl import Trainer

STEPS, PROMPTS, SAMPLES = int((sys.argv[1:] or ["60"])[0]), 32, 8
rows, held_out = ([json.loads(line) for line in open(f"runs/quickstart/raw/{name}.jsonl")] for name in ("train", "heldout"))

with Trainer("serve_tiny_cpu", rank=32) as trainer:

    def answer(chosen, **settings):
        groups = trainer.sample([row["instruction"] for row in chosen], max_tokens=8, **settings)
        texts = [[trainer.tokenizer.decode(s.tokens, skip_special_tokens=True).strip() for s in group] for group in groups]
        return groups, [[float(text == row["output"]) for text in group] for group, row in zip(texts, chosen)]

    def accuracy():
        return sum(rewards[0] for rewards in answer(held_out, temperature=0.0)[1]) / len(held_out)

    print(f"held-out accuracy before {accuracy():.1%}")
    for step in range(STEPS):
        chosen, batch = random.Random(step).sample(rows, PROMPTS), []
        for row, samples, rewards in zip(chosen, *answer(chosen, num_samples=SAMPLES, seed=step)):
            mean = sum(rewards) / len(rewards)
            batch += [trainer.make_datum(row["instruction"], s, (r - mean) / SAMPLES) for s, r in zip(samples, rewards)]
        trainer.forward_backward(batch, "importance_sampling")
        metrics = trainer.optim_step(learning_rate=1e-3, grad_clip_norm=1.0)
        print(step, f"gradient norm {metrics['grad_norm:mean']:.3f}")
    print(f"held-out accuracy after {accuracy():.1%}")
    trainer.save("runs/quickstart/own_loop")
