# ruff: noqa: E402  (Megatron must be imported after the adaptor)
"""Run by two processes: HF models against Megatron models loaded from converted checkpoints; rank 0 writes the differences.

usage: compare_logits.py RANK FOLDER PORT MODEL...
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path

warnings.filterwarnings("ignore")

import tiny_models
import torch
import torch.distributed as dist
import transformers

from mindspeed_rl import adaptors

adaptors.apply("train")
torch.serialization.add_safe_globals([argparse.Namespace])  # Megatron stores its args beside the weights

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from safetensors.torch import load_file

from mindspeed_rl.checkpoint.source import ModelOptions, open_hf
from mindspeed_rl.cli.convert import main as convert
from mindspeed_rl.engine.attention import CoreAttention
from mindspeed_rl.engine.gated_delta import GatedDeltaNet
from mindspeed_rl.engine.sparse_attention import SparseCoreAttention
from mindspeed_rl.models.builder import build_gpt_model, layer_spec, transformer_config
from mindspeed_rl.models.layers import RMSNorm
from mindspeed_rl.models.layout import Layout
from mindspeed_rl.models.model_config import ModelConfig

TOKENS = 24

TENSOR_PARALLEL = {name: {"tp": 2, "sequence_parallel": name != "gemma2"} for name in tiny_models.CONFIGS}
TENSOR_PARALLEL["gpt-oss"] |= {"etp": 1}  # its experts have biases, which are not divided
OTHERS: dict[str, dict] = {
    "gpt-oss": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "mixtral": {"ep": 2},
    "qwen2-moe": {"ep": 2},
    "qwen3-moe": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "deepseek2-lite": {"ep": 2},
    "deepseek3": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "deepseek32": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "glm5": {"pp": 2, "num_layer_list": (2, 2)},
    "qwen2-tied": {"pp": 2, "noop_layers": (0, 3, 4, 5)},
    "qwen3": {"pp": 2, "num_layer_list": (1, 3)},
    "qwen3-next": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "qwen3.5": {"pp": 2, "num_layer_list": (1, 3)},
    "glm4-moe": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "ernie4.5-moe": {"ep": 2},
    "minimax-m2": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "hunyuan-moe": {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": True},
    "hy3": {"ep": 2},
    "olmo3": {"pp": 2, "num_layer_list": (1, 3)},
    "gemma3": {"pp": 2},
    "hunyuan": {"pp": 2, "num_layer_list": (1, 3)},
}
NEW = ("gpt-oss", "glm4-moe", "ernie4.5-moe", "minimax-m2", "phi3", "olmo3", "gemma3", "hunyuan", "deepseek32", "glm5")
DISTRIBUTED = ("qwen2-tied", "qwen3-moe", "deepseek3", "glm4", "qwen2-moe", "qwen3-next", "qwen3.5", *NEW)
REWARD = ("llama", "qwen3")


def flags(layout: Layout) -> list[str]:
    """The converter's flags of a layout."""
    words = [
        *("--target-tensor-parallel-size", str(layout.tp), "--target-pipeline-parallel-size", str(layout.pp)),
        *("--target-expert-parallel-size", str(layout.ep)),
    ]
    if layout.etp is not None:
        words += ["--expert-tensor-parallel-size", str(layout.etp)]
    if layout.num_layer_list:
        words += ["--num-layer-list", ",".join(map(str, layout.num_layer_list))]
    if layout.noop_layers:
        words += ["--noop-layers", ",".join(map(str, layout.noop_layers))]
    return words


def init_groups(layout: Layout) -> None:
    """Megatron's process groups of a layout."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp_size,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(7)


def build(model_config: ModelConfig, layout: Layout, sequence_parallel: bool) -> GPTModel:
    """This rank's chunk with random weights."""
    config = transformer_config(
        model_config,
        layout=layout,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        sequence_parallel=sequence_parallel,
    )
    core = CoreAttention if model_config.sparse_attention is None else SparseCoreAttention
    parts = {"norm": RMSNorm, "core_attention": core, "linear_attention": GatedDeltaNet}
    spec = layer_spec(model_config, config, **parts, layout=layout)
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    model = build_gpt_model(model_config, config, spec, pre_process=first, post_process=last, parallel_output=False)
    return model.eval()


def load_rank_file(model: GPTModel, folder: Path, layout: Layout) -> None:
    """Load this rank's file as Megatron does, strictly."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    state = torch.load(folder / "iter_0000001" / name / "model_optim_rng.pt", weights_only=True)["model"]
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if not key.endswith("_extra_state")]
    assert not missing and not unexpected, (missing, unexpected)


def load_distributed(model: GPTModel, folder: Path) -> None:
    """Load a torch_dist checkpoint with Megatron's own loader."""
    state = dist_checkpointing.load(model.sharded_state_dict(), str(folder / "iter_0000001"))
    weights = {key: value for key, value in state.items() if key not in ("args", "checkpoint_version", "iteration")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not [key for key in missing if not key.endswith("_extra_state")] and not unexpected, (missing, unexpected)


def saved_by_megatron(model: GPTModel, folder: Path, hf: Path) -> float:
    """Save with Megatron's own writer, convert that to HF, and compare; 0 if every tensor is bit-equal."""
    if dist.get_rank() == 0:
        (folder / "iter_0000001").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "iter_0000001"))
    dist.barrier()
    if dist.get_rank():
        return 0.0
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    words = ["--load-model-type", "mg", "--save-model-type", "hf", "--hf-cfg-dir", str(hf)]
    assert convert([*words, "--load-dir", str(folder), "--save-dir", f"{folder}-hf"]) == 0
    expected, result = load_file(hf / "model.safetensors"), load_file(f"{folder}-hf/model.safetensors")
    same = expected.keys() == result.keys() and all(torch.equal(result[name], expected[name]) for name in expected)
    return 0.0 if same else 1.0


@torch.no_grad()
def forward(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor | None:
    """Output of the last pipeline stage; None on the others."""
    positions = torch.arange(tokens.size(1)).expand_as(tokens)
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return model(tokens, positions, None)
    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), model.config)
    shape = (tokens.size(1), tokens.size(0), model.config.hidden_size)
    if parallel_state.is_pipeline_first_stage():
        communicator.send_forward(model(tokens, positions, None), False)
        return None
    model.set_input_tensor(communicator.recv_forward(shape, False))
    return model(tokens, positions, None)


def case(folder: Path, name: str, title: str, expected: torch.Tensor, tokens: torch.Tensor, **options) -> dict[str, float]:
    """Convert, load and compare one model under one layout; {title: largest difference}."""
    kind = options.pop("kind", "torch")
    reward = options.pop("reward", False)
    sequence_parallel = options.pop("sequence_parallel", False)
    source = open_hf(folder / name, ModelOptions(reward_head=reward))
    model_config = source.model_config
    layout = Layout(num_layers=model_config.num_layers, num_experts=model_config.num_moe_experts or 0, **options)
    result = folder / f"{name}-{title}".replace("/", "_")
    if dist.get_rank() == 0:
        words = ["--load-dir", str(folder / name), "--save-dir", str(result), *(["--orm"] if reward else [])]
        words += ["--ckpt-format", "torch_dist"] if kind == "torch_dist" else flags(layout)
        assert convert(words) == 0, words
    dist.barrier()
    init_groups(layout)
    model = build(model_config, layout, sequence_parallel)
    if kind == "torch_dist":
        load_distributed(model, result)
        resaved = {f"{name}/saved_by_megatron": saved_by_megatron(model, folder / f"{name}-resaved", folder / name)}
    else:
        load_rank_file(model, result, layout)
        resaved = {}
    output = forward(model, tokens)
    difference = torch.zeros(1)
    if output is not None:
        output = output[:, -1] if reward else output
        difference[0] = (output - expected).abs().max()
    dist.all_reduce(difference, op=dist.ReduceOp.MAX)
    return {f"{name}/{title}": difference.item(), **resaved}


def run(folder: Path, models: list[str]) -> dict[str, float]:
    """Every case of some models; {model/case: largest absolute difference}."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 128, (2, TOKENS), generator=generator)
    results: dict[str, float] = {}
    for name in models:
        hf = tiny_models.make_hf_model(name)
        if rank == 0:
            tiny_models.write_hf_model(hf, folder / name)
        dist.barrier()
        with torch.no_grad():
            expected = hf(tokens).logits
        results |= case(folder, name, "tp1", expected, tokens)
        results |= case(folder, name, "tp2", expected, tokens, **TENSOR_PARALLEL[name])
        if name in OTHERS:
            results |= case(folder, name, "other", expected, tokens, **OTHERS[name])
        if name in DISTRIBUTED:
            etp = TENSOR_PARALLEL[name].get("etp")
            results |= case(folder, name, "torch_dist", expected, tokens, kind="torch_dist", tp=2, etp=etp)
        if name in REWARD:
            torch.manual_seed(5)
            config = transformers.AutoConfig.from_pretrained(folder / name, num_labels=1, pad_token_id=0)
            reward = transformers.AutoModelForSequenceClassification.from_config(config).float().eval()
            if rank == 0:
                reward.save_pretrained(folder / f"{name}-reward")
            dist.barrier()
            with torch.no_grad():
                scores = reward(tokens).logits
            for title, options in (("tp1", {}), ("tp2", {"tp": 2, "sequence_parallel": True})):
                results |= case(folder, f"{name}-reward", title, scores, tokens, reward=True, **options)
    return results


if __name__ == "__main__":
    rank, folder, port = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    compared = run(folder, sys.argv[4:])
    if rank == 0:
        (folder / "differences.json").write_text(json.dumps(compared, indent=1))
    dist.barrier()
    os._exit(0)
