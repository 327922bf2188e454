# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples on a bfloat16 engine; prints, as JSON, errors of logits and log-probs given the engine's hidden states."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.engine.vocab import VocabHead, compute_vocab_log_probs
from mindspeed_rl.rollout.arguments import build_sampling_params
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import VllmEngine

folder, in_float32, tied = Path(sys.argv[1]), sys.argv[2] == "float32", sys.argv[3] == "tied"
config = transformers.Qwen2Config(
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 320},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": tied},
    initializer_range=0.8,  # logits of tens
)
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
keys = {"infer_tensor_parallel_size": 1, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 256}
settings = GenerateConfig(**keys, dtype="bfloat16", fp32_lm_head=in_float32)
engine = VllmEngine(folder, settings, Sampling(1.0, 8, ()), run_id="head", kv_bytes_per_token=2 * 2 * 2 * 32 * 2)
weights = load_file(folder / "model.safetensors")
engine.load_weights(weights.items(), 0)
weight = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
seen: list[tuple[torch.Tensor, torch.Tensor]] = []


def watch(model: Any) -> None:
    model.logits_processor.register_forward_hook(lambda module, args, output: seen.append((args[1].clone(), output.clone())))


engine._llm.apply_model(watch)
core = engine._llm.llm_engine
params = build_sampling_params(Sampling(1.0, 12, ()), 3, output_kind=RequestOutputKind.FINAL_ONLY)
core.add_request("0", {"prompt_token_ids": [9, 10, 11]}, params)
outputs = []
while not outputs:
    outputs = [output.outputs[0] for output in core.step() if output.finished]
hidden, logits = (torch.cat(parts)[:12] for parts in zip(*seen))
labels = torch.tensor(list(outputs[0].token_ids))
reported = torch.tensor([outputs[0].logprobs.logprobs[index] for index in outputs[0].logprobs.start_indices])
exact = hidden.double() @ weight.double().t()
trained, _ = compute_vocab_log_probs(hidden, weight, labels, VocabHead(in_float32=in_float32))
print(
    json.dumps(
        {
            "largest": float(exact.abs().max()),
            "logits": float((logits.double() - exact).abs().max()),
            "exact": float((reported - exact.log_softmax(-1).gather(1, labels[:, None])[:, 0]).abs().max()),
            "trainer": float((reported - trained).abs().max()),
        }
    )
)
