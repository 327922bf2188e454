"""Commands without a run file check model and tokenizer as `train` does: in one sentence, before weights are loaded."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import pytest
import transformers
from byte_tokenizer import build_tokenizer

from mindspeed_rl.cli.inference_options import add_model_options, add_prompt_options, open_session
from mindspeed_rl.cli.main import main
from mindspeed_rl.cli.new.tiny_model import save_tiny_model
from mindspeed_rl.config import GenerateConfig, MegatronConfig, load_run_config
from mindspeed_rl.config.model_metadata import EngineShape, read_model_metadata
from mindspeed_rl.data.conversation import Conversation, user
from mindspeed_rl.data.tokenizer import read_tokenizer
from mindspeed_rl.inference.model_files import ModelSettings, open_model
from mindspeed_rl.inference.session import _read_shape
from mindspeed_rl.run.rules.engine_limits import EngineRequest, check_engine
from mindspeed_rl.service.opening import open_tenants
from mindspeed_rl.serving.standalone import _check_model, _explain_format

NEEDED = {
    "generate": ["--load", "{}", "--prompt", "p"],
    "chat": ["--load", "{}"],
    "evaluate": ["--load", "{}", "--task", "gsm8k", "--task-data-path", __file__],
    "rollout": ["--model", "{}", "--platform", "cpu", "--port", "0", "--max-model-len", "64"],
}


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A model that reads 128 tokens, with the tokenizer of another one, which has a token for each byte."""
    save_tiny_model(tmp_path, "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    build_tokenizer(eos_token="<|im_end|>").save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", NEEDED)
def test_the_tokenizer_of_another_model_is_refused(command: str, broken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, *(word.format(broken) for word in NEEDED[command])]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ") and "but the model's vocabulary has 128" in error and str(broken) in error


def test_a_service_refuses_the_tokenizer_of_another_model(broken: Path) -> None:
    keys = ("actor_config.load", "megatron_training.tokenizer_name_or_path")
    cfg = load_run_config("serve_tiny_cpu", None, [f"{key}={broken}" for key in keys])
    with pytest.raises(ValueError, match="but the model's vocabulary has 128"):
        open_tenants(cfg)


def test_the_state_of_a_delta_net_is_compared_with_the_cache_of_the_engine(tmp_path: Path) -> None:
    # of 4 value heads x 64 x 32 numbers in float32, and 2 key/value heads x 64 x 128 tokens in bfloat16
    sizes = {
        "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 64, "linear_value_head_dim": 32,
    }  # fmt: skip
    config = transformers.Qwen3_5TextConfig(**sizes)
    transformers.Qwen3_5ForCausalLM(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())

    def check(platform: str) -> None:
        shape = _read_shape(open_model(ModelSettings(load=tmp_path)), "vllm")
        metadata = read_model_metadata(MegatronConfig(load=str(tmp_path)))
        itemsize = 4 if "float32" in (tmp_path / "config.json").read_text().partition("mamba_ssm_dtype")[2] else 2
        assert metadata is not None and metadata.shape.linear_state == shape.linear_state == 4 * 64 * 32 * itemsize
        check_engine(shape, EngineRequest(1, 64, "--tensor-parallel-size", "--max-length", dtype="bfloat16"), platform)

    (tmp_path / "config.json").write_text(json.dumps(content | {"mamba_ssm_dtype": "bfloat16"}))
    check("cuda")
    with pytest.raises(ValueError, match="has 16384 bytes with --tensor-parallel-size .1., which must be a multiple of 32768"):
        check("npu")
    (tmp_path / "config.json").write_text(json.dumps(content | {"mamba_ssm_dtype": "float32"}))
    check("npu")


@pytest.fixture
def padded(tmp_path: Path) -> Path:
    """A model that reads all tokens of its tokenizer but the one for padding, as old folders of Llama 2."""
    tokenizer = build_tokenizer(eos_token="<|im_end|>")
    size = len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "<padding>"})
    assert tokenizer.pad_token_id == size
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_padding_token_that_the_model_lacks_is_a_warning_where_nothing_is_padded(padded: Path) -> None:
    parser = argparse.ArgumentParser()
    add_model_options(parser)
    add_prompt_options(parser)
    session = open_session(parser.parse_args(["--load", str(padded), "--platform", "cpu"]))
    assert "it lacks 1 added tokens" in session.warnings[0] and "'<padding>'" in session.warnings[0]
    texts = [Conversation([user(text)]) for text in ("a", "a<padding>")]
    assert len(session.prompt_format.encode(texts[:1])) == 1
    size = len(session.tokenizer) - 1
    with pytest.raises(ValueError, match=rf"prompt 2 has token {size} \('<padding>'\), and the model's vocabulary has {size}"):
        session.prompt_format.encode(texts)
    keys = ("actor_config.load", "megatron_training.tokenizer_name_or_path")
    with pytest.raises(ValueError, match="its pad_token is token"):  # clients of a service train
        open_tenants(load_run_config("serve_tiny_cpu", None, [f"{key}={padded}" for key in keys]))


def test_a_server_takes_a_tokenizer_without_an_end_token(padded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = padded / "tokenizer_config.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "eos_token"}))
    assert read_tokenizer(padded).eos_token_id is None
    metadata = read_model_metadata(MegatronConfig(load=str(padded)))
    assert metadata is not None
    generate = GenerateConfig(infer_tensor_parallel_size=1, max_model_len=64, dtype="float32")
    _check_model(padded, generate, metadata.shape, "cpu")
    assert "it lacks 1 added tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("experts", "quantization", "said"),
    [(None, "w4a8", "a model without experts"), (4, "w4a8", ""), (None, "int8", ""), (None, "mxfp8", ""), (None, None, "")],
)
def test_a_server_says_of_its_model_s_shape_which_formats_npus_lack(
    experts: int | None, quantization: str | None, said: str
) -> None:
    reason = _explain_format(GenerateConfig(quantization=quantization), EngineShape(source="model", num_experts=experts))
    assert said in reason and bool(reason) == bool(said)


def test_a_server_refuses_drafts_over_gated_delta_nets_as_a_run_does(tmp_path: Path) -> None:
    shape = EngineShape(source="model", linear_heads=4)
    for platform, method, refused in (("cpu", "suffix", False), ("cpu", "draft_model", True), ("npu", "suffix", True)):
        generate = GenerateConfig(infer_tensor_parallel_size=1, speculative_config={"method": method})
        with pytest.raises(ValueError, match="--speculative-config") if refused else contextlib.nullcontext():
            _check_model(tmp_path, generate, shape, platform)
