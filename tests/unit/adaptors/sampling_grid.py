# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples a response under each of many settings on a real engine; prints, as JSON, how far its log-probs are off."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

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

PROMPT = [9, 10, 11, 12]
CUTS = ({}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.01})
#: no key of a run file sets logit_bias; clients of a server do
PENALTIES = ({}, {"repetition_penalty": 1.5}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}, {"logit_bias": {7: 4.0}})
GRID = list(itertools.product((0.0, 0.2, 0.6, 1.0, 1.7, 2.0), CUTS, PENALTIES))

folder = Path(sys.argv[1])
config = transformers.Qwen2Config(
    **{"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "vocab_size": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True},
    initializer_range=0.1,
)
torch.manual_seed(0)
reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
reference.save_pretrained(folder)
keys = {"infer_tensor_parallel_size": 1, "max_model_len": 64, "max_num_seqs": len(GRID), "max_num_batched_tokens": 1024}
# of two layers with two heads of 32 numbers
engine = VllmEngine(
    folder, GenerateConfig(**keys, dtype="float32"), Sampling(1.0, 8, ()), run_id="grid", kv_bytes_per_token=2 * 2 * 2 * 32 * 4
)
engine.load_weights(load_file(folder / "model.safetensors").items(), 0)
core = engine._llm.llm_engine

for number, (temperature, cut, penalties) in enumerate(GRID):
    bias = penalties.get("logit_bias")
    sampling = Sampling(temperature, 16, (), **cut, **({} if bias else penalties))
    params = build_sampling_params(sampling, number, output_kind=RequestOutputKind.FINAL_ONLY)
    params.logit_bias = bias
    core.add_request(str(number), {"prompt_token_ids": PROMPT}, params)
outputs = {}
while len(outputs) < len(GRID):
    outputs.update((output.request_id, output.outputs[0]) for output in core.step() if output.finished)

differences, trained, mean_at_one = {}, {}, []
for number, setting in enumerate(GRID):
    result = outputs[str(number)]
    ids = torch.tensor(PROMPT + list(result.token_ids))
    labels, temperature = ids[len(PROMPT) :], setting[0] or 1.0
    reported = torch.tensor([result.logprobs.logprobs[index] for index in result.logprobs.start_indices])
    with torch.no_grad():
        hidden = reference.model(ids[None]).last_hidden_state[0, len(PROMPT) - 1 : -1]
        logits = (hidden @ reference.lm_head.weight.t()).double()
        ours, _ = compute_vocab_log_probs(hidden, reference.lm_head.weight, labels, VocabHead(temperature))
    exact = (logits / temperature).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    # rounding of a logit is divided by the temperature as well
    scale = min(temperature, 1.0)
    differences[str(setting)] = float((reported - exact).abs().max()) * scale
    trained[str(setting)] = float((reported - ours).abs().max()) * scale
    if temperature != 1.0:
        mean_at_one.append(float((reported - logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]).abs().mean()))
print(json.dumps({"exact": differences, "trainer": trained, "at temperature 1": min(mean_at_one)}))
