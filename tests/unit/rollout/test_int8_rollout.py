"""An engine in int8 proves the quantized weights of each push and computes with them; transformers' model is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_program import run_program

PROGRAM = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder, dtype_name = Path(sys.argv[1]), sys.argv[2]
dtype = getattr(torch, dtype_name)
config = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 3, "hidden_size": 128,
    "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 512, "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(config))
torch.manual_seed(0)
reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
for name, parameter in reference.named_parameters():
    parameter.data.copy_((parameter.data * 3 if parameter.dim() == 2 else parameter.data).to(dtype).float())
reference.save_pretrained(folder / "weights")

from safetensors.torch import load_file

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")  # before vLLM is imported

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.resharding.layouts import relative_index, full_slice
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.proof import WeightDeliveryError
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.resharding.quantization import quantize_side
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

sampling = Sampling(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, max_tokens=24, stop_token_ids=())
settings = GenerateConfig(
    infer_tensor_parallel_size=1, max_model_len=128, max_num_seqs=8, dtype=dtype_name, quantization="int8",
    kv_cache_dtype=sys.argv[3],
)
engine = VllmEngine(folder, settings, sampling, run_id="int8", kv_bytes_per_token=1 << 14)
weights = {name: value.to(dtype) for name, value in load_file(folder / "weights" / "model.safetensors").items()}
shapes = {name: tuple(value.shape) for name, value in weights.items()}


class Held:
    def views(self, name, tensor_slice):
        yield tensor_slice, self.tensors[name][relative_index(tensor_slice, full_slice(shapes[name]))]

    def read(self, name, tensor_slice, out):
        out.copy_(next(self.views(name, tensor_slice))[1])

    def forget_merged(self):
        pass


held, pushes = Held(), []


def write(model):
    if not pushes:
        holders = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
        trained = quantize_side(TrainedWeights(holders, shapes, held, torch.device("cpu"), 1 << 20))
        found = read_destinations(model, model.load_weights, trained.shapes, dtype, quantized=trained.quantized)
        pushes.append(WeightPush(trained, found, Exchange.from_world(), delta=True))
    pushes[0].write(model)


def products_in_int8(layer, inputs):
    # W8A8 by its definition, in float32
    weight, x = layer.weight.data, inputs[0]
    scales = weight.abs().amax(1, keepdim=True) / 127
    x_scales = x.abs().amax(-1, keepdim=True) / 127
    product = torch.round(x / x_scales) @ torch.round(weight / scales).t() * x_scales * scales[:, 0]
    return product if layer.bias is None else product + layer.bias


report = {"exact": [], "full": [], "bytes": []}
for push, factor in enumerate((1.0, -1.5)):
    changed = {name: (value * factor).to(dtype) if "1.mlp.up_proj" in name else value for name, value in weights.items()}
    held.tensors = changed
    engine.load_weights(write, push)
    engine.restore_memory("cache")
    report["parameters"] = pushes[0].prove(engine.get_model(), engine.hooks.unpack(engine.get_model())).num_parameters
    for name, parameter in reference.named_parameters():
        parameter.data.copy_(changed[name].float())
    requests = [GenerationRequest([5 + seed, 9, 33, 2, 77][: 2 + seed % 4], seed=seed) for seed in range(8)]
    answers = engine.generate(requests)
    for kind in ("full", "exact"):
        hooks = [
            module.register_forward_hook(lambda layer, inputs, output: products_in_int8(layer, inputs))
            for name, module in reference.named_modules() if name.endswith("_proj")
        ] if kind == "exact" else []
        for request, answer in zip(requests, answers):
            ids = torch.tensor([request.prompt_ids + answer.token_ids])
            want = reference(ids).logits.log_softmax(-1)[0, len(request.prompt_ids) - 1 : -1]
            want = want.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
            report[kind] += (torch.tensor(answer.log_probs) - want).abs().tolist()
        for hook in hooks:
            hook.remove()
model = engine.get_model()
report["dtypes"] = sorted({str(p.dtype) for n, p in model.named_parameters() if n.endswith("_proj.weight")})
model.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1
try:
    pushes[0].prove(model, engine.hooks.unpack(model))
except WeightDeliveryError as error:
    report["damaged"] = str(error)
print(json.dumps(report))
"""


def _run(folder: Path, dtype: str, cache: str = "auto") -> dict[str, list[float]]:
    return run_program(PROGRAM, folder, dtype, cache)


@pytest.mark.slow
def test_an_int8_engine_samples_from_the_proven_quantized_weights_of_each_push(tmp_path: Path) -> None:
    result = _run(tmp_path, "float32")
    assert result["dtypes"] == ["torch.int8"]
    # an element at a rounding edge of int8 may fall on either side
    assert sorted(result["exact"])[int(0.9 * len(result["exact"]))] < 1e-4 and max(result["exact"]) < 0.05
    assert "down_proj.weight" in str(result["damaged"])


@pytest.mark.slow
def test_a_cache_in_fp8_changes_log_probs_and_nothing_else(tmp_path: Path) -> None:
    result = _run(tmp_path, "bfloat16", "fp8_e4m3")
    assert 0 < sum(result["full"]) / len(result["full"]) < 0.2
