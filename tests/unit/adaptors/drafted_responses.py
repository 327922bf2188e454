# ruff: noqa: E402  (vLLM must be imported after the adaptors)
"""Samples the same requests without drafts and with each kind of them; prints, as JSON, what differs and what was accepted."""

from __future__ import annotations

import itertools
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch
import transformers

from mindspeed_rl import adaptors, platform

platform.select("cpu")
os.environ.update(platform.current().worker_env())
adaptors.apply("rollout")  # before vLLM is imported

from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parent))
from staggered_requests import sample_all

from mindspeed_rl.adaptors import vllm_drafts
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

folder = Path(sys.argv[1])


def save_model(name: str, layers: int, width: int) -> transformers.PreTrainedModel:
    config = transformers.Qwen2Config(
        **{"num_hidden_layers": layers, "hidden_size": width, "intermediate_size": 2 * width},
        # heads of 32 numbers: vLLM's kernel for processors with matrix units takes no smaller ones
        **{"num_attention_heads": width // 32, "num_key_value_heads": 2},
        **{"max_position_embeddings": 256, "tie_word_embeddings": True, "vocab_size": 64},
        initializer_range=0.12,  # few likely tokens, so that texts repeat
    )
    torch.manual_seed(layers)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder / name)
    return model


reference = save_model("policy", 2, 128)
save_model("draft", 1, 64)


def save_head(name: str, architecture: str, states: int) -> str:
    """A head of one layer with random weights, in the form in which EAGLE publishes them: it reads so many states."""
    width, path = 128, folder / name
    inner = transformers.LlamaConfig(
        **{"num_hidden_layers": 1, "hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 64, "architectures": [architecture]},
        **({"eagle_aux_hidden_state_layer_ids": [0, 1], "num_aux_hidden_states": 2} if states > 1 else {}),
    )
    inner.save_pretrained(path)
    layer, taken = ("layers.0", width) if states == 1 else ("midlayer", 2 * width)
    shapes = {"fc": (width, (states + (states == 1)) * width)}
    shapes |= {f"{layer}.self_attn.{part}_proj": (size, taken) for part, size in (("q", width), ("k", 64), ("v", 64))}
    shapes |= {f"{layer}.self_attn.o_proj": (width, width), f"{layer}.mlp.down_proj": (width, 2 * width)}
    shapes |= {f"{layer}.mlp.{part}_proj": (2 * width, width) for part in ("gate", "up")}
    tensors = {f"{part}.weight": 0.1 * torch.randn(shape) for part, shape in shapes.items()}
    norms = ["post_attention_layernorm"] + (["hidden_norm", "input_layernorm"] if states > 1 else [])
    tensors |= {f"{layer}.{part}.weight": torch.ones(width) for part in norms}
    if states > 1:
        tensors |= {"norm.weight": torch.ones(width), "lm_head.weight": reference.get_input_embeddings().weight.data.clone()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return str(path)


weights = load_file(folder / "policy" / "model.safetensors")
settings = GenerateConfig(
    infer_tensor_parallel_size=1, max_model_len=160, max_num_seqs=12, max_num_batched_tokens=256, dtype="float32"
)
DRAFTS: dict[str, dict[str, object] | None] = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "alone": {"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_cached_requests": 0},
    "model": {"method": "draft_model", "model": str(folder / "draft"), "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "model": save_head("eagle", "LlamaForCausalLM", 1), "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": save_head("eagle3", "LlamaForCausalLMEagle3", 2), "num_speculative_tokens": 3},
    "itself": {"method": "draft_model", "model": str(folder / "policy"), "num_speculative_tokens": 3},
}
PROMPTS = [torch.randint(8, 64, (5 + n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(3)]
SHAPES = ({}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"stop_token_ids": (7, 9)})
REQUESTS = [
    (PROMPTS[number % 3], Sampling(temperature, 60, **{"stop_token_ids": (), **shape}))
    for number, (temperature, shape) in enumerate(itertools.product((0.0, 0.3, 0.7, 1.0, 1.5), SHAPES))
]


def exact_log_probs(number: int, token_ids: list[int]) -> list[float]:
    prompt, sampling = REQUESTS[number]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    log_probs = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
    return log_probs.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


result, plain, engines = {}, {}, []  # an engine that is collected would end the process groups of the others
for kind in sys.argv[2:]:
    engine = VllmEngine(
        folder / "policy",
        replace(settings, speculative_config=DRAFTS[kind]),
        Sampling(1.0, 8, ()),
        run_id=kind,
        kv_bytes_per_token=2 * 2 * 2 * 32 * 4,
    )
    engines.append(engine)
    engine.load_weights(weights.items(), 0)
    vllm_drafts.counts.take()
    sampled = sample_all(engine, REQUESTS)
    proposed, accepted, steps = vllm_drafts.counts.take()
    plain = plain or sampled
    same = GenerationRequest(PROMPTS[0], 5)
    second = engine.generate([same], Sampling(1.0, 40, ()))[0].token_ids
    again_accepted = vllm_drafts.counts.take()[1]
    third = engine.generate([same], Sampling(1.0, 40, ()))[0].token_ids
    result[kind] = {
        "different": [name for name in plain if sampled[name][0] != plain[name][0]],
        "tokens": sum(len(tokens) for tokens, _ in sampled.values()),
        "error": max(
            abs(a - b)
            for name, (tokens, log_probs) in sampled.items()
            for a, b in zip(exact_log_probs(int(name), tokens), log_probs, strict=True)
        ),
        "proposed": proposed,
        "accepted": accepted,
        "steps": steps,
        "again": [second == third, again_accepted, vllm_drafts.counts.take()[1]],
    }
print(json.dumps(result))
