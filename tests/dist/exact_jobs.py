"""Jobs that compare log-probs of trainer and rollout engine bit by bit, in processes that compute nothing else."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollout_jobs import Pair, _shared_number  # applies the adaptors
from training_jobs import KEYS, weighted_loss

# isort: split
import numpy as np
import tiny_hf
import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state

from mindspeed_rl import adaptors
from mindspeed_rl.checkpoint.hf import HfFolder
from mindspeed_rl.config import GenerateConfig, MegatronConfig
from mindspeed_rl.engine import parallel
from mindspeed_rl.engine.batching import MicroBatching, Rows
from mindspeed_rl.engine.build import batch_shape, build_model
from mindspeed_rl.engine.router_replay import RoutedLayers
from mindspeed_rl.engine.train_engine import TrainEngine
from mindspeed_rl.engine.weights import load_weights
from mindspeed_rl.models.plan import plan_model
from mindspeed_rl.platform.environment import EXACT_VARIABLE
from mindspeed_rl.resharding.transfer import WeightStream
from mindspeed_rl.rollout.requests import Sampling, sample_seed
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine
from mindspeed_rl.workers.rollout_replica import _build_routing_arguments

_SIZES = {
    "vocab_size": 331, "hidden_size": 128, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
_SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64}  # fmt: skip
MODELS: dict[str, transformers.PretrainedConfig] = {
    "qwen2": transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=False),
    "llama": transformers.LlamaConfig(**_SIZES, rope_parameters=_SCALED, tie_word_embeddings=False),
    "qwen3_moe": transformers.Qwen3MoeConfig(**_SIZES, head_dim=32, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
        moe_intermediate_size=48, tie_word_embeddings=False),
    "mixtral": transformers.MixtralConfig(**_SIZES, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}


def save(name: str, folder: Path, **sizes: object) -> Path:
    """Save a model with random weights, far from uniform, as a Hugging Face folder; return the folder."""
    torch.manual_seed(7)
    config = type(MODELS[name]).from_dict(MODELS[name].to_dict() | sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tiny_hf.spread(model, 2.0)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Shape:
    """A way to make micro-batches."""

    packed: bool
    shares_prefixes: bool
    batching: MicroBatching


SHAPES = (
    Shape(True, True, MicroBatching(8)),
    Shape(True, False, MicroBatching(1, token_budget=900)),
    Shape(False, False, MicroBatching(3)),
    Shape(True, False, MicroBatching(1)),
)


def _requests(count: int) -> list[GenerationRequest]:
    """So many requests, four for each prompt; prompts of 3 to 200 tokens, some of which begin alike."""
    generator = torch.Generator().manual_seed(5)
    start = torch.randint(2, 331, (150,), generator=generator).tolist()
    prompts = []
    for index in range(-(-count // 4)):
        length = int(torch.randint(3, 60, (), generator=generator))
        own = torch.randint(2, 331, (length,), generator=generator).tolist()
        prompts.append([*start[: 30 * (index % 6)], *own])
    return [GenerationRequest(prompts[i // 4], sample_seed(1, 0, i // 4, i % 4)) for i in range(count)]


def count_differences(
    folder: str,
    keys: dict[str, Any],
    num_samples: int,
    infer_tp: int = 1,
    updates: int = 1,
    temperature: float = 0.8,
    max_tokens: int = 160,
) -> list[dict[str, Any]]:
    """Compare log-probs of samples, before the first update and after each; this process computes exact ones from here on.

    All ranks have the same samples: engines that are replicas of one another make the same.

    Args:
        keys: of `MegatronConfig`.
        infer_tp: tensor-parallel ranks of the engine.

    Returns:
        Of each round the number of tokens, and for each shape of micro-batches the number of log-probs with other bits; without
        log-probs on ranks that are not of the last pipeline stage.
    """
    os.environ[EXACT_VARIABLE] = str(max(infer_tp, keys.get("tensor_model_parallel_size", 1)))
    adaptors.apply("train")
    adaptors.apply("rollout")
    config = MegatronConfig(**KEYS | {"lr": 1e-3, "lr_warmup_iters": 0, "loss_chunk_size": 100} | keys)
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    parallel.init_process_group(parallel.RankInfo.from_env(), 120)
    plan = plan_model(config, folder)
    parallel._init_model_parallel(config, plan.layout.vpp, 120)
    try:
        parallel._seed_all(1)
        model = build_model(config, plan, trainable=True)
        load_weights(model, HfFolder(folder))
        engines = {
            shape: TrainEngine(
                config,
                model,
                batch_shape(config, packed=shape.packed, pad_id=0, shares_prefixes=shape.shares_prefixes),
                temperature=temperature,
            )
            for shape in SHAPES
        }
        trainer, has_experts = engines[SHAPES[0]], plan.model_config.num_moe_experts is not None
        if has_experts:
            routed = RoutedLayers(model)
            for engine in engines.values():
                engine.add_part(routed)
        trainer.start_training(1)
        rollout = VllmEngine(
            folder,
            GenerateConfig(
                infer_tensor_parallel_size=infer_tp,
                max_model_len=512,
                max_num_seqs=24,
                max_num_batched_tokens=700,
                enable_prefix_caching=True,
                dtype="bfloat16" if config.bf16 else "float32",
                kv_cache_memory_gib=0.1,
                fp32_lm_head=bool(config.fp32_lm_head),
            ),
            Sampling(temperature, max_tokens, (1,), top_k=100),
            run_id=f"exact-{_shared_number()}",
            kv_bytes_per_token=4096,
            engine_arguments=_build_routing_arguments("router_replay.mode") if has_experts else None,
        )
        pair = Pair(trainer, WeightStream(model, bucket_bytes=1 << 16), rollout, infer_tp, dtype=dtype)
        requests, rounds = _requests(num_samples), []
        for iteration in range(updates + 1):
            pair.push()
            completions = rollout.generate(requests)
            rows = Rows(
                [torch.tensor([*r.prompt_ids, *c.token_ids]) for r, c in zip(requests, completions)],
                [len(request.prompt_ids) for request in requests],
                columns={
                    "rollout_log_probs": [torch.tensor(c.log_probs) for c in completions],
                    "weights": [torch.full((len(c.token_ids),), 1.0 - 2.0 * (i % 2)) for i, c in enumerate(completions)],
                },
            )
            sampled = torch.cat(rows.columns["rollout_log_probs"])
            if has_experts:  # the last token of a response goes to experts of the trainer's choice
                chosen = [torch.from_numpy(c.routing.astype(np.int16)) for c in completions if c.routing is not None]
                rows = replace(rows, routing=[torch.cat([routing, torch.full_like(routing[:1], -1)]) for routing in chosen])
            outputs = [engine.forward(rows, shape.batching) for shape, engine in engines.items()]
            computed = [torch.cat(output[0]) for output in outputs if output is not None]
            rounds.append(
                {
                    "tokens": len(sampled),
                    "differing": [int((log_probs != sampled).sum()) for log_probs in computed],
                    "largest": max((float((log_probs - sampled).abs().max()) for log_probs in computed), default=0.0),
                    "mean": float(sampled.mean()),
                }
            )
            if iteration < updates:
                trainer.train_step(rows, SHAPES[0].batching, weighted_loss)
        return rounds
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        gc.collect()
