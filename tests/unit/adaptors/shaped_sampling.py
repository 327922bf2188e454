# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples responses that a text ends, or that must have a form; prints, as JSON, the texts and how far log-probs are off."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file
from vllm.v1.structured_output import StructuredOutputManager

from mindspeed_rl.config import GenerateConfig, SamplingConfig
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

PROMPT, TEXT = [1, 2, 3], "abcdefghijklmnopqrstuvwxyz0123456789.<"
folder = Path(sys.argv[1])
tokenizer = Tokenizer(models.WordLevel({"</s>": 0} | {letter: index for index, letter in enumerate(TEXT, 1)}, unk_token="</s>"))
tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
fast.save_pretrained(folder)
config = transformers.Qwen2Config(
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": len(fast)},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True, "eos_token_id": 0},
    initializer_range=0.1,
)
torch.manual_seed(0)
reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
reference.save_pretrained(folder)
keys = {"infer_tensor_parallel_size": 1, "max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 1024}
generate = GenerateConfig(**keys, dtype="float32", sampling_config=SamplingConfig(stop=["ab"]))
engine = VllmEngine(folder, generate, Sampling(1.0, 8, ()), run_id="shaped", kv_bytes_per_token=2 * 2 * 2 * 32 * 4)
engine.load_weights(load_file(folder / "model.safetensors").items(), 0)

requests = [GenerationRequest(tuple(PROMPT), seed) for seed in range(12)]
forms = {
    "stop": Sampling(0.7, 100, (0,), stop=("a", "7")),
    "regex": Sampling(0.7, 20, (0,), structured_output=json.dumps({"regex": "[0-9]{3}\\.[0-9]"})),
    "choice": Sampling(0.7, 20, (0,), structured_output=json.dumps({"choice": ["yes", "no"]})),
}
result: dict[str, dict[str, object]] = {}
for name, sampling in forms.items():
    completions = engine.generate(requests, sampling)
    errors = []
    for completion in completions:
        ids = torch.tensor(PROMPT + completion.token_ids)
        with torch.no_grad():
            logits = reference(ids[None]).logits[0, len(PROMPT) - 1 : -1].double()
        exact = (logits / 0.7).log_softmax(-1).gather(1, ids[len(PROMPT) :, None])[:, 0]
        errors.append(float((torch.tensor(completion.log_probs) - exact).abs().max()))
    texts = [fast.decode(completion.token_ids) for completion in completions]
    result[name] = {"texts": texts, "truncated": [completion.truncated for completion in completions], "error": max(errors)}

# forms are compiled where requests are added: which requests share the next step depends on no other thread
compile_form, compiled_by = StructuredOutputManager._create_grammar, list[threading.Thread]()


def compile_noted(self: StructuredOutputManager, request: object) -> object:
    compiled_by.append(threading.current_thread())
    return compile_form(self, request)


StructuredOutputManager._create_grammar = compile_noted
for seed in range(4):
    engine.add_request(str(seed), PROMPT, Sampling(0.7, 20, (0,), structured_output=json.dumps({"regex": "[a-c]{4}"})), seed)
is_here = [thread is threading.main_thread() for thread in compiled_by]
ends: list[int] = []
while sum(ends) < 4:
    ends.append(len(engine.step()))
result["together"] = {"compiled here": is_here, "ends": ends, "error": 0.0}
print(json.dumps(result))
