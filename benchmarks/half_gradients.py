"""Effect of bfloat16 gradients on the weights: an update by each sum of gradients, for many steps.

    python benchmarks/half_gradients.py [--steps 50] [--micro-batches 1 8 32]

A small Qwen2 trains on random text, a fixed batch in each step, from the same weights with gradients that are summed in float32
(`grad_reduce_in_fp32: true`), in bfloat16 with sums rounded by chance (false), and in bfloat16 rounded to nearest, as Megatron
adds them. Columns: relative distance of the float32 main weights' update to float32 gradients', |dW - dW32| / |dW32|,
and its cosine with it, after the first step and after all; the last loss.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl import adaptors, platform
from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput
from mindspeed_rl.config import MegatronConfig

_WAYS = ("float32", "bfloat16 by chance", "bfloat16 to nearest")
_ROWS, _LENGTH = 32, 32


def _negative_log_prob(inputs: LossInputs) -> LossOutput:
    return LossOutput(-(inputs.outputs[0] * inputs.mask).sum(), inputs.mask.sum())


def _train(make: Callable[[str], object], way: str, steps: int, micro_batches: int) -> tuple[list[Tensor], float]:
    """Return the main weights before, after the first and after the last step, and the last mean loss."""
    from mindspeed_rl.engine.batching import MicroBatching, Rows
    from mindspeed_rl.engine.train_engine import TrainEngine

    engine = make(way)
    assert isinstance(engine, TrainEngine) and engine.optimizer is not None
    generator = torch.Generator().manual_seed(7)
    # words that follow from the one before, with noise: something to learn
    ids = torch.randint(2, 500, (_ROWS, 1), generator=generator)
    for _ in range(_LENGTH - 1):
        noise = torch.randint(0, 7, (_ROWS, 1), generator=generator)
        ids = torch.cat([ids, (ids[:, -1:] * 31 + noise) % 498 + 2], dim=1)
    rows = Rows(list(ids), [1] * _ROWS)

    def read() -> Tensor:
        assert engine.optimizer is not None
        return torch.cat([value.detach().flatten().clone() for value in engine.optimizer.get_parameters()])

    found, result = [read()], None
    for step in range(steps):
        result = engine.train_step(rows, MicroBatching(_ROWS // micro_batches), _negative_log_prob)
        if step in (0, steps - 1):
            found.append(read())
    assert result is not None
    losses = result.losses
    return found, float(sum(loss.loss_sum for loss in losses) / sum(loss.count for loss in losses))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8, 32])
    arguments = parser.parse_args()
    platform.select("cpu")
    adaptors.apply("train")
    from mindspeed_rl.checkpoint.hf import HfFolder
    from mindspeed_rl.engine import gradient_sums, parallel
    from mindspeed_rl.engine.build import batch_shape, build_model
    from mindspeed_rl.engine.train_engine import TrainEngine
    from mindspeed_rl.engine.weights import load_weights
    from mindspeed_rl.models.plan import plan_model

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29571"}
    parallel.init_process_group(parallel.RankInfo(0, 1, 0), 60)
    parallel._init_model_parallel(MegatronConfig(), 1, 60)
    add_rounded = gradient_sums.add_rounded
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        shape = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
        Qwen2ForCausalLM(Qwen2Config(**shape, **heads)).save_pretrained(folder)
        keys = MegatronConfig(lr=1e-3, train_iters=1000, lr_decay_style="constant", weight_decay=0.1, adam_beta2=0.95)

        def make(way: str) -> TrainEngine:
            config = replace(keys, grad_reduce_in_fp32=way == "float32")
            nearest = way == "bfloat16 to nearest"
            gradient_sums.add_rounded = (lambda total, gradient, _: total.add_(gradient)) if nearest else add_rounded
            parallel._seed_all(1)
            model = build_model(config, plan_model(config, folder), trainable=True)
            load_weights(model, HfFolder(folder))
            engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0))
            engine.start_training(1)
            return engine

        print("| micro-batches | gradients | 1st update: distance | cosine | all updates: distance | cosine | last loss |")
        print("|---|---|---|---|---|---|---|")
        for micro_batches in arguments.micro_batches:
            exact: list[Tensor] = []
            for way in _WAYS:
                found, loss = _train(make, way, arguments.steps, micro_batches)
                exact = exact or found
                cells = []
                for moment in (1, 2):
                    ours, theirs = found[moment] - found[0], exact[moment] - exact[0]
                    cosine = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=0)
                    cells += [f"{(ours - theirs).norm() / theirs.norm():.4f}", f"{cosine:.5f}"]
                print(f"| {micro_batches} | {way} | {' | '.join(cells)} | {loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
