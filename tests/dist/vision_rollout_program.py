# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""Run by one process: weights of a model with a tower go to vLLM, are proven, and both compute the same log-probs.

usage: vision_rollout_program.py FOLDER PICTURE  (a Hugging Face folder with a processor; a PNG). Prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings

warnings.filterwarnings("ignore")
os.environ.update(MINDSPEED_RL_VISION="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import torch
from rollout_jobs import TEMPERATURE, Pair  # applies the adaptors
from training_jobs import KEYS

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.data.images import ImageRules, prepare_images
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine


def main(folder: str, picture: str) -> None:
    """Print the number of proven parameters and the largest differences of log-probs."""
    rules, config = ImageRules.read(folder), MegatronConfig(**KEYS)
    assert rules is not None
    parallel.init_process_group(parallel.RankInfo.from_env(), 120)
    plan = plan_model(config, folder)
    vision = plan.model_config.vision
    assert vision is not None
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0, vision=vision), temperature=TEMPERATURE)
    generate = GenerateConfig(
        infer_tensor_parallel_size=1,
        max_num_seqs=4,
        max_model_len=160,
        max_num_batched_tokens=320,
        enable_prefix_caching=False,
        dtype="float32",
        kv_cache_memory_gib=0.05,
    )
    sampling = Sampling(TEMPERATURE, 8, (1,))
    rollout = VllmEngine(folder, generate, sampling, run_id="vision", kv_bytes_per_token=4096, image_rules=rules)
    pair = Pair(engine, WeightStream(model, bucket_bytes=1 << 16), rollout, 1)
    pair.push()
    report: dict[str, object] = {"proven": pair.prove()}
    (image,) = prepare_images(rules, [picture])
    start, end = rules.frame
    for name, images in (("image", (image,)), ("text", ())):
        prompt = (
            [40, start, *[vision.image_token_id] * vision.count_tokens(image.grid), end, 41, 42] if images else [40, 41, 42]
        )
        rollout.add_request(name, prompt, dataclasses.replace(sampling, images=(picture,) if images else ()), 5)
        done = {}
        while not done:
            done.update(rollout.step())
        row = torch.tensor([*prompt, *done[name].token_ids])
        output = engine.forward(Rows([row], [len(prompt)], images=[images]), MicroBatching(1))
        assert output is not None
        report[name] = float((output[0][0] - torch.tensor(done[name].log_probs)).abs().max())
    print(json.dumps(report), flush=True)
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:])
