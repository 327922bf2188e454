# ruff: noqa: E402  (Megatron and vLLM must be imported after the adaptors)
"""Run by one process: vLLM answers prompts with videos and images; its tokens and log-probs are compared with the trainer's.

usage: video_rollout_program.py FOLDER VIDEO VIDEO PICTURE [int8]  (a Hugging Face folder with a processor). Prints JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import warnings
from typing import Any

warnings.filterwarnings("ignore")
os.environ.update(MINDSPEED_RL_VISION="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import torch
from rollout_jobs import TEMPERATURE, Pair  # applies the adaptors
from training_jobs import KEYS

from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.data.images import ImageReader, ImageRules, list_parts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.arguments import build_prompt
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine


def main(folder: str, first: str, second: str, picture: str, quantization: Any = None) -> None:
    """Print the number of proven parameters and the largest differences of log-probs."""
    rules, config = ImageRules.read(folder), MegatronConfig(**KEYS)
    assert rules is not None
    reader = ImageReader.build(rules, load_tokenizer(folder))
    parallel.init_process_group(parallel.RankInfo.from_env(), 120)
    plan = plan_model(config, folder)
    vision = plan.model_config.vision
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    parallel._seed_all(1)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    engine = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0, vision=vision), temperature=TEMPERATURE)
    generate = GenerateConfig(
        infer_tensor_parallel_size=1,
        max_num_seqs=4,
        max_model_len=500,
        max_num_batched_tokens=600,
        enable_prefix_caching=False,
        dtype="float32",
        kv_cache_memory_gib=0.05,
        limit_mm_video_per_prompt=2,
        quantization=quantization,
    )
    sampling = Sampling(TEMPERATURE, 12, (1,))
    rollout = VllmEngine(folder, generate, sampling, run_id="video", kv_bytes_per_token=4096, image_rules=rules)
    pair = Pair(engine, WeightStream(model, bucket_bytes=1 << 16), rollout, 1, quantization=quantization)
    pair.push()
    named = rollout.get_model().named_parameters()
    kinds = [parameter.dtype for name, parameter in named if not name.endswith("_scale")]
    report: dict[str, object] = {"proven": pair.prove(), "int8": kinds.count(torch.int8) + kinds.count(torch.uint8)}
    videos = [reader.read_video(video) for video in (first, {"video": second, "fps": 1.5})]
    start, end = rules.frame
    assert rules.video is not None
    marks = {"v": [start, rules.video.token_id, end], "i": [start, rules.token_id, end]}
    for name, media in (("v", videos[:1]), ("viv", [videos[0], picture, videos[1]]), ("iv", [picture, videos[1]]), ("", [])):
        turns = [([40, *(id_ for kind in name for id_ in [*marks[kind], 41]), 42], [])]
        ((prompt, _),), stored = reader.expand(turns, media)
        rollout.add_request(name, prompt, dataclasses.replace(sampling, images=tuple(media)), 5)
        states = rollout._llm.llm_engine.output_processor.request_states
        assert list(states[rollout._ids[name]].prompt_token_ids or ()) == prompt, name
        done = {}
        while not done:
            done.update(rollout.step())
        row = torch.tensor([*prompt, *done[name].token_ids])
        output = engine.forward(Rows([row], [len(prompt)], images=[list_parts(stored)]), MicroBatching(1))
        assert output is not None
        report[name] = float((output[0][0] - torch.tensor(done[name].log_probs)).abs().max())
        assert build_prompt(prompt, media, rules)["prompt_token_ids"] == turns[0][0]
    print(json.dumps(report), flush=True)
    os._exit(0)  # vLLM's threads would keep the process


if __name__ == "__main__":
    main(*sys.argv[1:5], *sys.argv[5:])
