"""GGUF files of small models, written here by llama.cpp's rules, become the Hugging Face folders that they were made from."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="the package gguf: bash envs/cpu/install.sh")

from mindspeed_rl.checkpoint.gguf import find_gguf, open_gguf  # noqa: E402  (it needs the package)
from mindspeed_rl.checkpoint.gguf_file import GgufFile  # noqa: E402
from mindspeed_rl.cli.main import main  # noqa: E402

SIZES = {
    "vocab_size": 262,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
    **{"decoder_sparse_step": 1, "mlp_only_layers": []},
}
TWO_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
    "qwen2moe": (transformers.Qwen2MoeConfig, EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3moe": (transformers.Qwen3MoeConfig, EXPERTS | {"head_dim": 32, "norm_topk_prob": True}),
    "gemma2": (transformers.Gemma2Config, {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 3}),
    "gemma3": (
        transformers.Gemma3TextConfig,
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 3, "rope_parameters": TWO_ROPES},
    ),
}
#: names of Gemma 2 and 3, whose layers have four norms
FOUR_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: keys of the file beside those that all have
KEYS: dict[str, dict[str, int | float | str]] = {
    "qwen2moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
    | {"expert_shared_feed_forward_length": 48},
    "qwen3moe": {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 3},
    "gemma3": {"attention.sliding_window": 3, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
}
BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip


def build_model(family: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    kind, changes = FAMILIES[family]
    return transformers.AutoModelForCausalLM.from_config(kind(**SIZES, **changes), dtype=torch.float32).eval()


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head in pairs: row i of the first half, row i of the second, as llama.cpp stores query and key of Llama."""
    width = len(weight) // heads
    order = [head * width + half * width // 2 + i for head in range(heads) for i in range(width // 2) for half in (0, 1)]
    return weight[order]


def split_experts(state: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Tensors of a model, with gate and up of the experts of a layer in two, as llama.cpp stores them."""
    tensors: list[tuple[str, torch.Tensor]] = []
    for name, tensor in state.items():
        prefix = name.partition("mlp.experts.")[0]
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate", "up"), tensor.chunk(2, dim=1))
            tensors += [(f"{prefix}ffn_{part}_exps.weight", half.contiguous()) for part, half in halves]
        elif name.endswith("experts.down_proj"):
            tensors.append((f"{prefix}ffn_down_exps.weight", tensor))
        else:
            tensors.append((name, tensor))
    return tensors


def add_merges(writer: gguf.GGUFWriter) -> None:
    """A byte-level tokenizer."""
    alphabet = sorted(bytes_to_unicode().values())
    tokens = [*alphabet, "he", "<pad>", "<|im_start|>", "<|im_end|>", "<unused1>", "<unused2>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3] * 5)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(257)


def add_pieces(writer: gguf.GGUFWriter) -> None:
    """A tokenizer of pieces with scores, and of bytes, as Gemma's."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "h", "e"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 4 + [0.0] * 258)
    writer.add_token_types([3, 3, 3, 2] + [6] * 256 + [1, 1])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)


def write(path: Path, family: str, kind: str = "F32", **changes: object) -> transformers.PreTrainedModel:
    """Writes a model as a GGUF file with a byte-level tokenizer."""
    model = build_model(family)
    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    values = {
        "block_count": SIZES["num_hidden_layers"], "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": getattr(config, "head_dim", None) or 16,
        **KEYS.get(family, {}), **changes,
    }  # fmt: skip
    for name, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{family}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{family}.{name}", value)
        else:
            writer.add_uint32(f"{family}.{name}", int(value))
    writer.add_float32(f"{family}.rope.freq_base", 10000.0)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
    add_pieces(writer) if family.startswith("gemma") else add_merges(writer)
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, tensor in split_experts(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if family.startswith("gemma") and name.endswith("norm.weight"):
            array = array + 1.0
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, 4 if "q_proj" in name else 2)
        new = OUTER.get(name)
        if new is None:
            _, _, layer, *middle, end = name.split(".")
            names = BLOCK | (FOUR_NORMS if family in ("gemma2", "gemma3") else {})
            new = f"blk.{layer}.{names.get(middle := '.'.join(middle), middle)}.{end}"
        if kind != "F32" and array.ndim > 1 and not array.shape[-1] % gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]:
            quantized = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(new, gguf.quantize(array, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(new, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_becomes_the_folder_that_it_was_made_from(family: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", family)
    folder = tmp_path / "hf"
    command = ["convert", "--load-dir", str(tmp_path / "model.gguf"), "--save-model-type", "hf", "--save-dir", str(folder)]
    assert main([*command, "--max-shard-size", "60KB"]) == 0
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    ids = torch.tensor([[5, 40, 17, 200, 33]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if family.startswith("gemma"):
        assert (tokenizer.decode(tokenizer("he", add_special_tokens=False)["input_ids"]), tokenizer.eos_token_id) == ("he", 1)
        return
    assert tokenizer.decode(tokenizer("he hat <|im_end|>")["input_ids"]).strip() == "he hat <|im_end|>"
    assert (tokenizer.eos_token_id, json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == (259, 259)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    assert main(command) == 2  # the folder is not replaced
    assert main([*command, "--overwrite", "--params-dtype", "bf16"]) == 0
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


_QUANTS = gguf.GGMLQuantizationType
KINDS = ["Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "TQ1_0"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3moe"])
def test_every_kind_of_block_has_the_numbers_of_the_package(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "hidden_size", 256)  # blocks of the K kinds have 256 numbers
    monkeypatch.setitem(SIZES, "intermediate_size", 256)
    code = _QUANTS[kind]
    block, num_bytes = gguf.GGML_QUANT_SIZES[code]
    generator = np.random.default_rng(5)

    def fill(array: np.ndarray, quantized: object) -> np.ndarray:
        """Random blocks whose scales are finite, which stand for some matrix."""
        return generator.integers(0, 60, (*array.shape[:-1], array.shape[-1] // block * num_bytes), dtype=np.uint8)

    monkeypatch.setattr(gguf, "quantize", fill)
    write(tmp_path / "model.gguf", family, kind, embedding_length=256, feed_forward_length=256)
    opened = open_gguf(tmp_path / "model.gguf")
    expected = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in read_tensors(opened.path)}
    values = dict(opened.named_tensors())
    compared = 0
    for file_name, name in opened.names.items():
        if expected[file_name].ndim < 2 or "norm" in name:
            continue
        stacked = expected[file_name]
        for index in range(len(stacked) if "*" in name else 1):
            part = stacked[index] if "*" in name else stacked
            np.testing.assert_array_equal(values[name.replace("*", str(index))].numpy(), part, err_msg=name)
            compared += 1
    assert compared > 14 and opened.dtype == torch.bfloat16


def read_tensors(path: Path) -> list[gguf.ReaderTensor]:
    """The tensors as the package's own reader has them."""
    return list(gguf.GGUFReader(str(path)).tensors)


@pytest.mark.parametrize(("kind", "dtype", "error"), [("F16", torch.float16, 5e-5), ("Q8_0", torch.bfloat16, 4e-4)])
def test_matrices_of_other_types_are_restored_to_16_bits(kind: str, dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", "llama", kind)
    opened = open_gguf(find_gguf(tmp_path))
    assert opened.dtype == dtype
    for name, tensor in opened.named_tensors():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=error, rtol=0, msg=name)


def find_place(content: bytes, name: str) -> tuple[int, int]:
    """Where the record of a matrix begins behind its name (dimensions, sizes, type, offset), and its offset."""
    text = struct.pack("<Q", len(name)) + name.encode()
    start = content.index(text) + len(text)
    return start, struct.unpack("<Q", content[start + 24 : start + 32])[0]


def test_what_is_no_such_model_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill(array: np.ndarray, quantized: gguf.GGMLQuantizationType) -> np.ndarray:
        block, num_bytes = gguf.GGML_QUANT_SIZES[quantized]
        return np.zeros((*array.shape[:-1], array.shape[-1] // block * num_bytes), np.uint8)

    monkeypatch.setattr(gguf, "quantize", fill)

    def fails(*words: str) -> str:
        assert main(["convert", "--save-dir", str(tmp_path / "out"), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "out").exists()
        return line

    file = tmp_path / "model.gguf"
    write(file, "llama")
    hf = ["--load-dir", str(file), "--save-model-type", "hf"]
    assert "give --save-model-type hf" in fails("--load-dir", str(file))
    assert "--workers: it does not apply to a GGUF file" in fails(*hf, "--workers", "2")
    file.write_bytes(file.read_bytes()[:2000])
    assert "is not a GGUF file, or damaged" in fails(*hf)
    write(file, "llama")
    content = file.read_bytes()
    for place, value, problem in (
        (20, struct.pack("<I", 1), "blk.0.attn_k.weight' is at byte"),  # 16-bit numbers, of which there are half the bytes
        (20, struct.pack("<I", 99), "blk.0.attn_q.weight' has the unknown type 99"),
        (4, struct.pack("<QQ", 64, 128), "blk.0.attn_k.weight' is at byte"),  # two times the rows
        (24, struct.pack("<Q", find_place(content, "blk.1.attn_q.weight")[1]), "blk.0.attn_q.weight' is at byte"),
    ):
        start = find_place(content, "blk.0.attn_q.weight")[0] + place
        file.write_bytes(content[:start] + value + content[start + len(value) :])
        assert problem in fails(*hf)
    last = max(read_tensors(file), key=lambda tensor: tensor.data_offset)
    start = find_place(content, last.name)[0] + 4 + 8 * len(last.shape)  # behind its dimensions and sizes
    for changed, rest in (
        (content[:start] + struct.pack("<I", 1) + content[start + 4 :], last.n_bytes // 2),  # 16-bit numbers
        (content + bytes(1000), 1000),
    ):
        file.write_bytes(changed)
        assert f"and {rest} bytes follow: the type or the shape of the last one is wrong" in fails(*hf)
    file.write_bytes(content[:16] + struct.pack("<Q", 2**60) + content[24:])
    assert f"it states {2**60} keys" in fails(*hf)
    write(file, "llama", **{"rope.scaling.type": "yarn"})
    assert "rotary embedding scaled by 'yarn' is not supported" in fails(*hf)
    write(file, "llama", block_count=3)
    assert "has tensors of 2 layers, and states 3" in fails(*hf)
    write(file, "qwen3", "Q8_1")
    assert "tensors of the format Q8_1 are not supported" in fails(*hf)
    write(file, "gemma3", **{"rope.scaling.type": "yarn"})
    assert "rotary embedding scaled by 'yarn' is not supported" in fails(*hf)
    file.write_bytes(file.read_bytes().replace(b"\x06\0\0\0\0\0\0\0gemma3", b"\x06\0\0\0\0\0\0\0mambaX"))
    assert "of the family 'mambaX'; supported are llama, qwen2, qwen3, qwen2moe, qwen3moe, gemma2, gemma3" in fails(*hf)
    (tmp_path / "other.gguf").touch()
    command = ("--load-dir", str(tmp_path), "--load-model-type", "gguf", "--save-model-type", "hf")
    assert "has 2 GGUF files; name one" in fails(*command)
    assert "does not exist" in fails("--load-dir", str(tmp_path / "no"), "--load-model-type", "gguf", "--save-model-type", "hf")


@pytest.mark.parametrize("padding", [0, 31])
def test_the_last_tensor_may_end_without_padding(padding: int, tmp_path: Path) -> None:
    file, writer = tmp_path / "model.gguf", gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_tensor("a", np.arange(8, dtype=np.float32))
    writer.add_tensor("b", np.arange(1, 2, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = file.read_bytes()
    end = content.rindex(struct.pack("<f", 1.0)) + 4
    file.write_bytes(content[:end] + bytes(padding))
    assert [tensor.data.view(np.float32).tolist() for tensor in GgufFile.open(file).tensors] == [list(range(8)), [1.0]]
