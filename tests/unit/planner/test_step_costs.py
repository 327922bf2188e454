"""The least of a step, worked out by hand, and how counts are put into phases."""

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.planner.shapes import plan_role
from mindspeed_rl.planner.step_costs import _group_by_phase, compute_lower_bounds, encode_costs, format_costs


@pytest.fixture(scope="module")
def actor():
    """Four layers of width 128, three of them counted here as they are: dense, with biases at query, key and value."""
    return load_run_config("grpo_tiny_cpu", overrides=["megatron_training.bf16=true", "actor_config.sequence_parallel=true"])


def test_kernels_of_a_dense_model_are_those_of_its_parts(actor):
    least = compute_lower_bounds(plan_role(actor.actor_config), actor.actor_config, rows=[2, 2], tokens=64, replicas=1)
    # two norms, four products, two rotations, attention, activation, two residual sums; four layers, embedding and last norm
    assert least["update / forward"].kernels == 2 * (4 * 12 + 2)
    assert least["update / backward"].kernels == 2 * (4 * 16 + 2)
    # and head with loss in either direction, the optimizer and the norm of its gradients
    assert least["update"].kernels == 2 * (4 * 28 + 4 + 5) + 2
    assert least["log-probs"].kernels == 2 * (4 * 12 + 2 + 2)


def test_bytes_between_tensor_ranks_are_activations_in_and_out_of_each_block(actor):
    least = compute_lower_bounds(plan_role(actor.actor_config), actor.actor_config, rows=[2, 2], tokens=64, replicas=1)
    activations = 2 * 2 * 64 * 128 * 2
    # a gather and a scattered sum for attention and MLP of four layers, embedding and head
    assert least["update / forward"].collective_bytes == activations * 2 * (2 * 4 + 2)
    assert least["update"].collective_bytes == 2 * least["update / forward"].collective_bytes


RECORD = {
    "kernels": [["update / forward", "aten::mm", 3], ["update", "aten::add", 2], ["log-probs", "aten::mm", 1]],
    "collectives": [["update / forward", "allreduce", "TP (2)", 2, 3 << 20]],
    "copies": [["update", "to the device, queued", 1, 64]],
    "waits": [["update / forward", "_local_scalar_dense", "mindspeed_rl/engine/vocab.py:96", 4]],
    "peak_bytes": {"outside": 1 << 30, "update": 2 << 20, "update / forward": 1 << 20},
}


def test_an_outer_phase_has_what_is_counted_inside_it():
    result = _group_by_phase(RECORD)
    assert list(result) == ["log-probs", "update", "update / forward"]
    assert result["update"] == {"kernels": 5, "waits": 4, "copies": 1, "collective_mib": 3.0, "peak_mib": 2.0}
    assert result["update / forward"]["kernels"] == 3 and result["update / forward"]["peak_mib"] == 1.0


def test_the_text_names_the_line_that_a_wait_comes_from(actor):
    text = format_costs(RECORD, None, {}, {"counted on": "a simulated NPU"})
    assert "4  update / forward: _local_scalar_dense, mindspeed_rl/engine/vocab.py:96" in text
    assert "5 / - / -" in text and text.startswith("counted on: a simulated NPU")
    assert encode_costs(RECORD, RECORD, {}, {"model": "m"})["phases"]["plain"] == _group_by_phase(RECORD)
