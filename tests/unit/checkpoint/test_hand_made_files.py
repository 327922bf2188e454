"""Checkpoints laid out by hand from the documented formats, with naive loops, are read correctly."""

from __future__ import annotations

import argparse
import enum
import json
import pickle
from pathlib import Path

import numpy
import pytest
import tiny_models
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from mindspeed_rl.checkpoint.torch_file import load_with_records
from mindspeed_rl.cli.convert import main

HEADS, GROUPS, HEAD_DIM, LAYERS = 8, 4, 8, 4


class ModelType(enum.Enum):
    """Stands for an enum of Megatron that training puts into args."""

    encoder_or_decoder = 1


ModelType.__module__ = "megatron.core.enums"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hand") / "hf"
    tiny_models.save_hf_model("qwen2", folder)
    return folder


def pack_qkv(hf: dict[str, Tensor], layer: int, kind: str) -> list[Tensor]:
    """Rows of every query group: its queries, its key, its value."""
    q, k, v = (hf[f"model.layers.{layer}.self_attn.{part}_proj.{kind}"] for part in "qkv")
    per_group = HEADS // GROUPS
    groups = []
    for g in range(GROUPS):
        queries = q[g * per_group * HEAD_DIM : (g + 1) * per_group * HEAD_DIM]
        groups.append(torch.cat([queries, k[g * HEAD_DIM : (g + 1) * HEAD_DIM], v[g * HEAD_DIM : (g + 1) * HEAD_DIM]]))
    return groups


def rank_tensors(hf: dict[str, Tensor], tp: int, rank: int, layers: list[int], first: bool, last: bool) -> dict[str, Tensor]:
    """One rank's parameters under their mcore names."""

    def rows(tensor: Tensor) -> Tensor:
        size = tensor.shape[0] // tp
        return tensor[rank * size : (rank + 1) * size].clone()

    def columns(tensor: Tensor) -> Tensor:
        size = tensor.shape[1] // tp
        return tensor[:, rank * size : (rank + 1) * size].clone()

    out: dict[str, Tensor] = {}
    if first:
        out["embedding.word_embeddings.weight"] = rows(hf["model.embed_tokens.weight"])
    for local, layer in enumerate(layers):
        prefix, source = f"decoder.layers.{local}", f"model.layers.{layer}"
        per_rank = GROUPS // tp
        for kind in ("weight", "bias"):
            groups = pack_qkv(hf, layer, kind)[rank * per_rank : (rank + 1) * per_rank]
            out[f"{prefix}.self_attention.linear_qkv.{kind}"] = torch.cat(groups)
        out[f"{prefix}.self_attention.linear_proj.weight"] = columns(hf[f"{source}.self_attn.o_proj.weight"])
        gate, up = (rows(hf[f"{source}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        out[f"{prefix}.mlp.linear_fc1.weight"] = torch.cat([gate, up])
        out[f"{prefix}.mlp.linear_fc2.weight"] = columns(hf[f"{source}.mlp.down_proj.weight"])
        out[f"{prefix}.input_layernorm.weight"] = hf[f"{source}.input_layernorm.weight"]
        out[f"{prefix}.pre_mlp_layernorm.weight"] = hf[f"{source}.post_attention_layernorm.weight"]
    if last:
        out["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        out["output_layer.weight"] = rows(hf["lm_head.weight"])
    return out


def write(folder: Path, name: str, content: dict, protocol: int = 4) -> None:
    path = folder / "iter_0000001" / name
    path.mkdir(parents=True)
    torch.save(content, path / "model_optim_rng.pt", pickle_protocol=protocol)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def assert_converts_to(folder: Path, hf: Path, result: Path, *words: str) -> None:
    command = ["--load-model-type", "mg", "--save-model-type", "hf", "--load-dir", folder, "--save-dir", result]
    assert main([str(word) for word in (*command, "--hf-cfg-dir", hf, *words)]) == 0
    expected, actual = load_file(hf / "model.safetensors"), load_file(result / "model.safetensors")
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_training_checkpoint_of_upstream_with_optimizer_and_enums_is_read(hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    settings = argparse.Namespace(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, num_layers=4, params_dtype=torch.float32, noop_layers=None
    )
    settings.model_type = ModelType.encoder_or_decoder
    import sys
    import types

    module = types.ModuleType("megatron.core.enums")
    module.ModelType = ModelType
    saved = sys.modules.get("megatron.core.enums")
    sys.modules["megatron.core.enums"] = module  # pickle looks the class up where it says it lives
    try:
        for pp, layers in enumerate(([0, 1], [2, 3])):
            for tp in range(2):
                model = rank_tensors(tensors, 2, tp, layers, pp == 0, pp == 1)
                model["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
                optimizer = {"optimizer": {"state": {0: {"exp_avg": torch.randn(3)}}}, "step": 7}
                content = {"args": settings, "checkpoint_version": 3.0, "iteration": 1, "model": model, "optimizer": optimizer}
                write(
                    tmp_path / "mg", f"mp_rank_{tp:02d}_{pp:03d}", {**content, "rng_state": [{"np": numpy.random.get_state()}]}
                )
    finally:
        if saved is None:
            del sys.modules["megatron.core.enums"]
        else:
            sys.modules["megatron.core.enums"] = saved
    assert_converts_to(tmp_path / "mg", hf, tmp_path / "back", "--verify")


def test_virtual_stages_and_the_layer_list_are_found_without_args(hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    for pp, chunks in enumerate((([0], [2]), ([1], [3]))):
        models = {
            f"model{v}": rank_tensors(tensors, 1, 0, layers, (pp, v) == (0, 0), (pp, v) == (1, 1))
            for v, layers in enumerate(chunks)
        }
        write(tmp_path / "vpp", f"mp_rank_00_{pp:03d}", {"checkpoint_version": 3.0, "iteration": 1, **models}, protocol=2)
    assert_converts_to(tmp_path / "vpp", hf, tmp_path / "vpp-back")
    settings = argparse.Namespace(num_layer_list="1,3", pipeline_model_parallel_size=2, tensor_model_parallel_size=1)
    for pp, layers in enumerate(([0], [1, 2, 3])):
        model = rank_tensors(tensors, 1, 0, layers, pp == 0, pp == 1)
        write(tmp_path / "list", f"mp_rank_00_{pp:03d}", {"args": settings, "model": model})
    assert_converts_to(tmp_path / "list", hf, tmp_path / "list-back")


def legacy_state(model: dict[str, Tensor], norm: str) -> dict:
    """mcore names moved into the nested dicts of Megatron's legacy GPT model; ``norm`` is "norm" or "layernorm"."""
    encoder: dict[str, Tensor] = {}
    nested: dict = {"language_model": {"encoder": encoder}}
    for name, tensor in model.items():
        if name == "embedding.word_embeddings.weight":
            nested["language_model"]["embedding"] = {"word_embeddings": {"weight": tensor}}
        elif name == "output_layer.weight":
            nested["language_model"]["output_layer"] = {"weight": tensor}
        elif name == "decoder.final_layernorm.weight":
            encoder[f"final_{norm}.weight"] = tensor
        else:
            _, _, layer, rest = name.split(".", 3)
            rest = {
                "self_attention.linear_qkv.weight": "self_attention.query_key_value.weight",
                "self_attention.linear_qkv.bias": "self_attention.query_key_value.bias",
                "self_attention.linear_proj.weight": "self_attention.dense.weight",
                "mlp.linear_fc1.weight": "mlp.dense_h_to_4h.weight",
                "mlp.linear_fc2.weight": "mlp.dense_4h_to_h.weight",
                "input_layernorm.weight": f"input_{norm}.weight",
                "pre_mlp_layernorm.weight": f"post_attention_{norm}.weight",
            }[rest]
            encoder[f"layers.{layer}.{rest}"] = tensor
    return nested


@pytest.mark.parametrize("norm", ["norm", "layernorm"])
def test_the_legacy_layout_is_read_under_the_names_of_old_and_new_releases(norm: str, hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    for tp in range(2):
        model = legacy_state(rank_tensors(tensors, 2, tp, [0, 1, 2, 3], True, True), norm)
        write(tmp_path / "legacy", f"mp_rank_{tp:02d}", {"checkpoint_version": 3.0, "iteration": 1, "model": model})
    assert_converts_to(tmp_path / "legacy", hf, tmp_path / "back", "--load-from-legacy")


def test_our_legacy_files_have_the_documented_keys(hf: Path, tmp_path: Path) -> None:
    words = ["--load-dir", hf, "--save-dir", tmp_path / "legacy", "--save-to-legacy", "--target-tensor-parallel-size", 2]
    assert main([str(word) for word in words]) == 0
    tensors = load_file(hf / "model.safetensors")
    for tp in range(2):
        file = tmp_path / f"legacy/iter_0000001/mp_rank_{tp:02d}/model_optim_rng.pt"
        result = torch.load(file, weights_only=False)["model"]["language_model"]
        expected = legacy_state(rank_tensors(tensors, 2, tp, [0, 1, 2, 3], True, True), "norm")["language_model"]
        assert result["encoder"].keys() == expected["encoder"].keys()
        assert all(torch.equal(result["encoder"][name], tensor) for name, tensor in expected["encoder"].items())
        for part in ("embedding", "output_layer"):
            inner = (
                (lambda entry: entry["word_embeddings"]["weight"]) if part == "embedding" else (lambda entry: entry["weight"])
            )
            assert torch.equal(inner(result[part]), inner(expected[part]))


def test_our_rank_files_hold_what_the_naive_loops_give(hf: Path, tmp_path: Path) -> None:
    words = [
        "--load-dir",
        hf,
        "--save-dir",
        tmp_path / "mg",
        "--target-tensor-parallel-size",
        4,
        "--target-pipeline-parallel-size",
        2,
    ]
    assert main([str(word) for word in words]) == 0
    tensors = load_file(hf / "model.safetensors")
    for pp, layers in enumerate(([0, 1], [2, 3])):
        for tp in range(4):
            file = tmp_path / f"mg/iter_0000001/mp_rank_{tp:02d}_{pp:03d}/model_optim_rng.pt"
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(file, weights_only=True)
            expected = rank_tensors(tensors, 4, tp, layers, pp == 0, pp == 1)
            assert content["model"].keys() == expected.keys()
            assert all(torch.equal(content["model"][name], tensor) for name, tensor in expected.items())
            assert content["checkpoint_version"] == 3.0 and content["iteration"] == 1
            assert content["args"].tensor_model_parallel_size == 4 and content["args"].add_qkv_bias
    assert (tmp_path / "mg/latest_checkpointed_iteration.txt").read_text() == "1"


@pytest.mark.parametrize("with_args", [True, False])
def test_expert_rank_files_are_read_and_named_as_documented(with_args: bool, tmp_path: Path) -> None:
    """PP = 1 and EP = 2 give mp_rank_TT_EEE; expert e of rank r is the global expert 2 r + e."""
    tiny_models.save_hf_model("mixtral", tmp_path / "hf")
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    settings = argparse.Namespace(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=2, moe_grouped_gemm=True
    )
    for ep in range(2):
        model = {
            "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
            "decoder.final_layernorm.weight": hf["model.norm.weight"],
            "output_layer.weight": hf["lm_head.weight"],
        }
        for layer in range(LAYERS):
            prefix, source = f"decoder.layers.{layer}", f"model.layers.{layer}"
            q, k, v = (hf[f"{source}.self_attn.{part}_proj.weight"] for part in "qkv")
            split = [tensor.reshape(GROUPS, -1, 64) for tensor in (q, k, v)]
            model[f"{prefix}.self_attention.linear_qkv.weight"] = torch.cat(split, dim=1).reshape(-1, 64)
            model[f"{prefix}.self_attention.linear_proj.weight"] = hf[f"{source}.self_attn.o_proj.weight"]
            model[f"{prefix}.input_layernorm.weight"] = hf[f"{source}.input_layernorm.weight"]
            model[f"{prefix}.pre_mlp_layernorm.weight"] = hf[f"{source}.post_attention_layernorm.weight"]
            model[f"{prefix}.mlp.router.weight"] = hf[f"{source}.block_sparse_moe.gate.weight"]
            w1, w2 = [], []
            for expert in (2 * ep, 2 * ep + 1):
                gate, down, up = (hf[f"{source}.block_sparse_moe.experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
                w1.append(torch.cat([gate, up]).t())
                w2.append(down.t())
            model[f"{prefix}.mlp.experts.weight1"] = torch.stack(w1).reshape(64, -1)
            model[f"{prefix}.mlp.experts.weight2"] = torch.stack(w2).reshape(-1, 64)
        write(tmp_path / "mg", f"mp_rank_00_{ep:03d}", {"model": model, **({"args": settings} if with_args else {})})
    assert_converts_to(tmp_path / "mg", tmp_path / "hf", tmp_path / "back", "--verify")


def test_mindspeed_s_own_latent_attention_is_read_under_both_generations_of_names(tmp_path: Path) -> None:
    tiny_models.save_hf_model("deepseek3", tmp_path / "hf")
    words = ["--load-dir", tmp_path / "hf", "--save-dir", tmp_path / "mg"]
    assert main([str(word) for word in words]) == 0
    (tmp_path / "mg/iter_0000001/checksums.json").unlink()  # as other writers' files, which have none
    hf = load_file(tmp_path / "hf" / "model.safetensors")
    file = tmp_path / "mg/iter_0000001/mp_rank_00/model_optim_rng.pt"
    content = torch.load(file, weights_only=False)
    model = content["model"]
    for layer in range(LAYERS):
        attention, source = f"decoder.layers.{layer}.self_attention", f"model.layers.{layer}.self_attn"
        del model[f"{attention}.linear_q_down_proj.weight"], model[f"{attention}.linear_kv_down_proj.weight"]
        packed = [hf[f"{source}.q_a_proj.weight"], hf[f"{source}.kv_a_proj_with_mqa.weight"]]
        model[f"{attention}.linear_qkv.weight"] = torch.cat(packed)
    torch.save(content, file)
    assert_converts_to(tmp_path / "mg", tmp_path / "hf", tmp_path / "new-names")
    for layer in range(LAYERS):
        attention = f"decoder.layers.{layer}.self_attention"
        model[f"{attention}.linear_qb.weight"] = model.pop(f"{attention}.linear_q_up_proj.weight")
        model[f"{attention}.linear_kvb.weight"] = model.pop(f"{attention}.linear_kv_up_proj.weight")
        model[f"{attention}.k_layernorm.weight"] = model.pop(f"{attention}.kv_layernorm.weight")
    torch.save(content, file)
    assert_converts_to(tmp_path / "mg", tmp_path / "hf", tmp_path / "old-names")


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "exploded",))

    torch.save({"model": {}, "args": Bomb()}, tmp_path / "bomb.pt", pickle_protocol=4)
    with pytest.raises(ValueError, match="refusing to load"):
        load_with_records(tmp_path / "bomb.pt")
    assert not (tmp_path / "exploded").exists()


def test_attributes_are_taken_of_nothing_real(tmp_path: Path) -> None:
    class Reach:
        def __reduce__(self) -> tuple:
            return (getattr, (torch.Tensor, "backward"))

    torch.save({"model": {}, "args": Reach()}, tmp_path / "reach.pt", pickle_protocol=4)
    with pytest.raises(ValueError, match="refusing to take 'backward'"):
        load_with_records(tmp_path / "reach.pt")


def test_a_poisoned_torch_dist_index_is_refused(hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--load-dir", hf, "--save-dir", tmp_path / "dist", "--ckpt-format", "torch_dist"]
    assert main([str(word) for word in words]) == 0
    (tmp_path / "dist/iter_0000001/checksums.json").unlink()
    (tmp_path / "dist/iter_0000001/.metadata").write_bytes(pickle.dumps(json.loads))
    command = [
        "--load-model-type",
        "mg",
        "--save-model-type",
        "hf",
        "--load-dir",
        tmp_path / "dist",
        "--save-dir",
        tmp_path / "x",
    ]
    assert main([str(word) for word in command]) == 2
    assert "refusing to load json.loads" in capsys.readouterr().err


def test_a_torch_dist_checkpoint_is_read_in_chunks_of_many_layers_and_a_poisoned_checkpoint_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--load-dir", hf, "--save-dir", tmp_path / "dist", "--ckpt-format", "torch_dist"]
    assert main([str(word) for word in words]) == 0
    folder = tmp_path / "dist/iter_0000001"
    (folder / "checksums.json").unlink()
    metadata = FileSystemReader(folder).read_metadata()
    name = "decoder.layers.mlp.linear_fc1.weight"
    stored = metadata.state_dict_metadata[name]
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    load({name: whole}, checkpoint_id=folder, no_dist=True)
    # as Megatron cuts it: two layers and half of the rows a piece
    rows = stored.size[1] // 2
    chunks = {(layer, row, 0): whole[layer : layer + 2, row : row + rows].clone() for layer in (0, 2) for row in (0, rows)}
    stored.chunks[:] = [ChunkStorageMetadata(torch.Size(at), chunk.shape) for at, chunk in chunks.items()]
    for index in [index for index in metadata.storage_data if index.fqn == name]:
        del metadata.storage_data[index]
    with (folder / "pieces.distcp").open("wb") as file:
        for number, (at, chunk) in enumerate(chunks.items()):
            start = file.tell()
            torch.save(chunk, file)
            place = _StorageInfo("pieces.distcp", start, file.tell() - start)
            metadata.storage_data[MetadataIndex(name, torch.Size(at), number)] = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert_converts_to(tmp_path / "dist", hf, tmp_path / "back")
    content = (folder / "pieces.distcp").read_bytes()
    (folder / "pieces.distcp").write_bytes(content.replace(b"_rebuild_tensor_v2", b"_rebuild_tensor_v9", 1))
    words = [
        "--load-model-type",
        "mg",
        "--save-model-type",
        "hf",
        "--load-dir",
        tmp_path / "dist",
        "--save-dir",
        tmp_path / "x",
    ]
    assert main([str(word) for word in words]) == 2
    assert "pieces.distcp: refusing to load torch._utils._rebuild_tensor_v9" in capsys.readouterr().err
    (folder / "pieces.distcp").write_bytes(content[:-100])
    assert main([str(word) for word in words]) == 2
    assert "pieces.distcp is truncated" in capsys.readouterr().err
