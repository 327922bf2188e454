# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""A turn that a program's request ends by a text, on the engine of a run file without stop texts; prints its tokens as JSON."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models

from mindspeed_rl.config import build_run_config
from mindspeed_rl.rollout.arguments import check_texts
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.models import plan_models, with_model_configs
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.workers.rollout_replica import build_vllm

folder = Path(sys.argv[1])
config = transformers.Qwen2Config(
    **{"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128},
    **{"num_key_value_heads": 4, "max_position_embeddings": 128},
)
torch.manual_seed(0)
transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
# of 97 tokens: the class of the model type would add one of its own as the token of the letter a
vocabulary = {"<pad>": 0, "<eos>": 1} | {chr(code): code for code in range(32, 127)}
plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
plain.decoder = decoders.Fuse()
transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>").save_pretrained(folder)
tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
keys: Any = {
    "platform": "cpu",
    "megatron_training": {
        **{"stage": "ray_grpo", "bf16": False, "global_batch_size": 1, "seq_length": 128, "micro_batch_size": 1},
        **{"train_iters": 1, "data_path": "prompts.jsonl", "tokenizer_name_or_path": str(folder)},
    },
    "actor_config": {"load": str(folder), "lr": 1e-3, "finetune": True},
    "rl_config": {
        **{"actor_resource": {"num_npus": 1}, "n_samples_per_prompt": 2, "mini_batch_size": 1, "max_prompt_length": 16},
        **{"multi_turn_enable": True, "agent": {"command": ["true"]}, "verifier_function": ["format"], "rule_reward": True},
    },
    "generate_config": {
        **{"infer_tensor_parallel_size": 1, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 512},
        **{"dtype": "float32", "sampling_config": {"max_tokens": 60, "temperature": 1.0}},
    },
}
run = plan_models(resolve(with_model_configs(build_run_config(keys)), platform="cpu"))
sampling = Sampling(1.0, 60, ())
engine: Any = build_vllm(run, sampling, tokenizer, "texts")
engine.load_weights(load_file(folder / "model.safetensors").items(), 0)
for name, stop in (("plain", ()), ("ended", ("a", "7"))):
    request = replace(sampling, stop=stop)
    engine.check_request(3, request)
    engine.add_request(name, (40, 41, 42), request, 5)
ended: dict[str, Any] = {}
while len(ended) < 2:
    ended |= {name: [completion.token_ids, completion.truncated] for name, completion in engine.step()}
try:
    with_drafts: Any = SimpleNamespace(speculative_config=object())
    check_texts(replace(sampling, stop=("a",)), with_drafts)
except ValueError as error:
    ended["refused"] = str(error)
print(json.dumps(ended))
