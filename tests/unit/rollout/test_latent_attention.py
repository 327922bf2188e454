"""A rollout engine with latent attention proves and uses the weights that were pushed last; transformers is the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_program import run_program

# kv_lora_rank and qk_rope_head_dim are those that vLLM's kernel for the CPU is built for
PROGRAM = """
import json, sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM

folder = Path(sys.argv[1])
config = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64,
    "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "q_lora_rank": 32,
    "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "v_head_dim": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "max_position_embeddings": 512, "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(config))
torch.manual_seed(0)
reference = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float().eval()
reference.save_pretrained(folder / "weights")

from safetensors.torch import load_file

from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")  # before vLLM is imported
if "amx" in sys.argv:
    torch.cpu._is_amx_tile_supported = lambda: True

from mindspeed_rl.adaptors.engine_hooks import DERIVED
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.resharding.layouts import relative_index, full_slice
from mindspeed_rl.resharding.destinations import read_destinations
from mindspeed_rl.resharding.exchange import Exchange
from mindspeed_rl.resharding.push import WeightPush
from mindspeed_rl.resharding.trained_weights import TrainedWeights
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

sampling = Sampling(temperature=1.0, top_k=-1, top_p=1.0, min_p=0.0, max_tokens=6, stop_token_ids=())
settings = GenerateConfig(infer_tensor_parallel_size=1, max_model_len=128, max_num_seqs=4, dtype="float32")
engine = VllmEngine(folder, settings, sampling, run_id="latent", kv_bytes_per_token=1 << 14)
weights = load_file(folder / "weights" / "model.safetensors")
shapes = {name: tuple(value.shape) for name, value in weights.items()}


class Held:
    # tensors that are trained in one chunk
    def views(self, name, tensor_slice):
        yield tensor_slice, self.tensors[name][relative_index(tensor_slice, full_slice(shapes[name]))]

    def read(self, name, tensor_slice, out, copies=None):
        out.copy_(next(self.views(name, tensor_slice))[1])

    def forget_merged(self):
        pass


held, pushes = Held(), []


def write(model):
    if not pushes:
        found = read_destinations(model, model.load_weights, shapes, torch.float32, skip=DERIVED)
        holders = {name: {full_slice(shape): [0]} for name, shape in shapes.items()}
        trained = TrainedWeights(holders, shapes, held, torch.device("cpu"), 1 << 20)
        pushes.append(WeightPush(trained, found, Exchange.from_world(), derived=DERIVED))
    pushes[0].write(model)


worst = []
for push, factor in enumerate((1.0, -2.0)):
    changed = {name: value * factor if "kv_b_proj" in name else value for name, value in weights.items()}
    held.tensors = changed
    engine.load_weights(write, push)
    assert pushes[0].prove(engine.get_model(), engine.hooks.unpack(engine.get_model())).num_tensors == len(weights)
    for name, parameter in reference.named_parameters():
        if "kv_b_proj" in name:
            parameter.data.copy_(changed[name])
    prompt = [5, 9, 33, 2, 77]
    (answer,) = engine.generate([GenerationRequest(prompt, seed=push)])
    ids = torch.tensor([prompt + answer.token_ids])
    want = reference(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
    want = want.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
    worst.append((torch.tensor(answer.log_probs) - want).abs().max().item())
print(json.dumps(worst))
"""


@pytest.mark.parametrize("processor", ["this", "amx"])
@pytest.mark.slow
def test_latent_attention_samples_from_the_weights_of_the_last_push(tmp_path: Path, processor: str) -> None:
    assert max(run_program(PROGRAM, tmp_path, processor)) < 1e-4


CHOICE = """
import json, sys
from types import SimpleNamespace
import torch
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

torch.cpu._is_amx_tile_supported = lambda: True


def choose(requested, use_mla=True, model_type="deepseek_v3"):
    config = VllmConfig()
    config.attention_config.backend = requested and AttentionBackendEnum[requested]
    hf_config = SimpleNamespace(model_type=model_type)
    config.model_config = SimpleNamespace(use_mla=use_mla, hf_config=hf_config, max_model_len=64, is_hybrid=False)
    try:
        CpuPlatform.check_and_update_config(config)
    except ValueError as error:
        return str(error)
    selected = SimpleNamespace(use_sparse=False, use_mla=use_mla)
    path = CpuPlatform.get_attn_backend_cls(config.attention_config.backend, selected)
    return [path.rpartition(".")[2], config.cache_config.block_size, config.cache_config.enable_prefix_caching]


print(json.dumps([choose(None), choose("CPU_MLA"), choose("FLASHMLA"), choose("AMX_MLA"), choose(None, False)]))
"""


def test_on_a_processor_with_amx_engines_have_the_backend_of_latent_attention_that_reads_the_weights() -> None:
    *latent, refused, other = run_program(CHOICE)
    # blocks of 16 keys and no cached prefixes are what vLLM sets for this backend
    assert latent == [["CPUMLABackend", 16, False]] * 3
    assert "AMX_MLA multiplies by packed copies of the weights" in refused and "leave it out" in refused
    assert other[0] == "CPUAttentionBackend" and other[1] != 16
