"""A standalone rollout server is one replica, whose engines may share experts; several are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.cli.rollout import _check_replicas, main
from mindspeed_rl.config import GenerateConfig


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--vllm-data-parallel-size", "--vllm_data_parallel_size"])
def test_several_replicas_on_the_command_line_are_refused(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["--model", str(tmp_path), flag, "2"]) == 2
    text = capsys.readouterr().err
    assert "--data-parallel-size 2: a server is one replica" in text and "generate_config.vllm_server_host" in text


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("generate_config.infer_expert_parallel_size=4", "infer_expert_parallel_size (4): a server is one replica"),
        ("+generate_config.engine_kwargs.data_parallel_size=2", "generate_config.engine_kwargs.data_parallel_size (2)"),
        ("+generate_config.engine_kwargs.data_parallel_rank=1", "generate_config.engine_kwargs.data_parallel_rank (1)"),
    ],
)
def test_several_replicas_in_the_run_file_of_a_server_are_refused(
    override: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = ["--model", str(tmp_path), "--config-name", "grpo_tiny_cpu", override]
    assert main(words) == 2
    assert named in capsys.readouterr().err


def test_engines_of_a_server_share_experts() -> None:
    keys = GenerateConfig(infer_tensor_parallel_size=1, enable_expert_parallel=True, infer_expert_parallel_size=2)
    assert _check_replicas(keys, None) == keys
    assert _check_replicas(keys, 4).infer_expert_parallel_size == 4
