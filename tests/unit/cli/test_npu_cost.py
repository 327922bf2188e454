"""What `npu-cost` says before anything is counted; what it counts is held by tests/npu_sim/test_cost.py."""

import pytest

from mindspeed_rl.cli import npu_cost
from mindspeed_rl.config import load_run_config
from mindspeed_rl.diagnostics.cost_iteration import build_count_job


def test_without_a_device_one_sentence_says_what_it_needs(capsys):
    assert npu_cost.main(["--config-name", "grpo_tiny_cpu"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "no NPU is usable here" in line and "tests/npu_sim/run.sh --run mindspeed-rl npu-cost" in line


def test_a_supervised_run_file_is_refused(capsys):
    assert npu_cost.main(["--config-name", "sft_tiny_cpu"]) == 2
    assert "npu-cost counts updates of a policy" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["--layers=0", "--rows=0", "--tokens=1"])
def test_a_number_that_is_too_small_is_refused(wrong, capsys):
    assert npu_cost.main(["--config-name", "grpo_tiny_cpu", wrong]) == 2
    assert wrong.split("=")[0] in capsys.readouterr().err


def order(name, layers=2):
    return build_count_job(load_run_config(name), name, layers, rows=4, tokens=64)


def test_a_large_model_is_counted_with_few_layers_in_its_own_layout():
    result = order("grpo_qwen25_7b_A3")
    assert (result.plan.model_config.num_layers, result.plan.model_config.hidden_size) == (2, 3584)
    assert result.world_size == 4  # TP2 x PP2


def test_one_of_few_layers_has_experts_where_the_model_has():
    model_config = order("grpo_deepseek_r1_671b_A3", layers=8).plan.model_config
    assert model_config.num_layers == 8 and model_config.moe_layers == (3, 4, 5, 6, 7)
