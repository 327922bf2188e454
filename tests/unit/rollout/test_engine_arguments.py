"""Settings of the run file arrive in vLLM's own configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_program import run_program

PROGRAM = """
import json, sys
from mindspeed_rl import adaptors, platform

platform.select("cpu")
adaptors.apply("rollout")  # before vLLM is imported
from vllm import EngineArgs

from mindspeed_rl.adaptors.vllm_ascend import VllmAscendHooks
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.rollout.arguments import build_engine_arguments

config = GenerateConfig(
    infer_tensor_parallel_size=1, max_model_len=4096, max_num_seqs=16, max_num_batched_tokens=512, enforce_eager=False,
    dtype="float32", cudagraph_capture_sizes=[1, 8], compilation_config={"compile_sizes": [4]},
)
rest = (RolloutLayout(1, 1),)
arguments = build_engine_arguments(sys.argv[1], config, adaptors.engine_hooks(), *rest, kv_bytes_per_token=1024)
ascend = build_engine_arguments(sys.argv[1], config, VllmAscendHooks((0, 23)), *rest, kv_bytes_per_token=1024)
engine = EngineArgs(**arguments).create_engine_config()
published = build_engine_arguments(sys.argv[1] + "/internlm3", config, adaptors.engine_hooks(), *rest, kv_bytes_per_token=1024)
internlm3 = EngineArgs(**published).create_engine_config().model_config
print(json.dumps({
    "tokens": [engine.scheduler_config.max_num_batched_tokens, ascend["max_num_batched_tokens"]],
    "chunked": [engine.scheduler_config.enable_chunked_prefill, ascend["enable_chunked_prefill"]],
    "arguments": arguments["compilation_config"], "compile_sizes": engine.compilation_config.compile_sizes,
    "rope": internlm3.hf_config.rope_parameters, "length": internlm3.max_model_len, "model": internlm3.architectures,
    "marked": engine.model_config.architectures,
}))
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 128,
    "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 4096,
}  # fmt: skip
#: with Python code of its own, and frequencies that change beyond its length
INTERNLM3 = LLAMA | {
    "architectures": ["InternLM3ForCausalLM"], "model_type": "internlm3", "rope_theta": 5e7,
    "rope_scaling": {"rope_type": "dynamic", "factor": 6.0},
    "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"},
}  # fmt: skip


def test_an_engine_gets_what_the_run_file_and_the_model_say(tmp_path: Path) -> None:
    # as transformers' Trainer wrote it under FSDP
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["FSDPLlamaForCausalLM"]}))
    (tmp_path / "internlm3").mkdir()
    (tmp_path / "internlm3" / "config.json").write_text(json.dumps(INTERNLM3))
    result = run_program(PROGRAM, tmp_path)
    assert result["chunked"] == [False, True]
    assert result["tokens"] == [4096, 512]  # where prompts are not split, a step takes a whole one
    assert result["arguments"] == {"compile_sizes": [4], "cudagraph_capture_sizes": [1, 8]}
    assert result["compile_sizes"] == [4]
    assert result["marked"] == ["LlamaForCausalLM"]
    assert result["rope"] == {"rope_type": "default", "rope_theta": 5e7}  # as the trainer computes them
    assert result["model"] == ["InternLM3ForCausalLM"] and result["length"] == 4096


@pytest.mark.slow
def test_a_text_that_a_program_s_request_names_ends_its_turn(tmp_path: Path) -> None:
    """The same seed samples the same tokens; the one that completes the first of the texts is the last."""
    result = run_program(Path(__file__).with_name("requested_texts.py"), tmp_path)
    (plain, _), (ended, truncated) = result["plain"], result["ended"]
    first = min(plain.index(ord(text)) for text in "a7" if ord(text) in plain)
    assert ended == plain[: first + 1] and len(plain) == 60 and not truncated
    assert "a request has stop texts" in result["refused"] and "generate_config.speculative_config" in result["refused"]
