"""GGUF files of small models, written here by llama.cpp's rules, become the Hugging Face folders that they were made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode

gguf = pytest.importorskip("gguf", reason="the package gguf is an extra: envs/cpu/extras.sh installs it")

from mindspeed_rl.checkpoint.gguf import find_gguf, open_gguf  # noqa: E402  (it needs the package)
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
FAMILIES = {
    "llama": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"tie_word_embeddings": True, "head_dim": 32}),
}
BLOCK = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
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


def write(path: Path, family: str, kind: str = "F32", **changes: object) -> transformers.PreTrainedModel:
    """Writes a model as a GGUF file with a byte-level tokenizer."""
    model = build_model(family)
    config = model.config
    writer = gguf.GGUFWriter(str(path), family)
    values = {
        "block_count": SIZES["num_hidden_layers"], "context_length": 128, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2,
        "attention.key_length": getattr(config, "head_dim", None) or 16,
        **changes,
    }  # fmt: skip
    for name, value in values.items():
        if isinstance(value, str):
            writer.add_string(f"{family}.{name}", value)
        else:
            writer.add_uint32(f"{family}.{name}", int(value))
    writer.add_float32(f"{family}.rope.freq_base", 10000.0)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)
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
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        if family == "llama" and ("q_proj" in name or "k_proj" in name):
            array = interleave(array, 4 if "q_proj" in name else 2)
        new = OUTER.get(name)
        if new is None:
            _, _, layer, *middle, end = name.split(".")
            new = f"blk.{layer}.{BLOCK['.'.join(middle)]}.{end}"
        if kind != "F32" and array.ndim > 1:
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
    assert tokenizer.decode(tokenizer("he hat <|im_end|>")["input_ids"]).strip() == "he hat <|im_end|>"
    assert (tokenizer.eos_token_id, json.loads((folder / "generation_config.json").read_text())["eos_token_id"]) == (259, 259)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "a"
    assert main(command) == 2  # the folder is not replaced
    assert main([*command, "--overwrite", "--params-dtype", "bf16"]) == 0
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(("kind", "dtype", "error"), [("F16", torch.float16, 5e-5), ("Q8_0", torch.bfloat16, 4e-4)])
def test_matrices_of_other_types_are_restored_to_16_bits(kind: str, dtype: torch.dtype, error: float, tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", "llama", kind)
    opened = open_gguf(find_gguf(tmp_path))
    assert opened.dtype == dtype
    for name, tensor in opened.named_tensors():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=error, rtol=0, msg=name)


def test_what_is_no_such_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    write(file, "llama", **{"rope.scaling.type": "yarn"})
    assert "rotary embedding scaled by 'yarn' is not supported" in fails(*hf)
    write(file, "llama", block_count=3)
    assert "has tensors of 2 layers, and states 3" in fails(*hf)
    (tmp_path / "other.gguf").touch()
    command = ("--load-dir", str(tmp_path), "--load-model-type", "gguf", "--save-model-type", "hf")
    assert "has 2 GGUF files; name one" in fails(*command)
    assert "does not exist" in fails(
        "--load-dir", str(tmp_path / "no"), "--load-model-type", "gguf", "--save-model-type", "hf"
    )
