"""A run on the devices that are left of its own has the fastest layout that keeps its rules; batch sizes stay."""

from __future__ import annotations

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.planner import shrink
from mindspeed_rl.planner.shrink import Shrinker, find_layout
from mindspeed_rl.planner.splits import divide_layers
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.models import resolve_run
from mindspeed_rl.run.rules.validation import validate


def load(name: str, num_nodes: int, *changes: str) -> Run:
    return draft(load_run_config(name, None, changes), num_nodes)


def test_the_layout_for_fewer_devices_keeps_the_rules_and_the_batch() -> None:
    run = load("grpo_qwen25_7b_A3", 2)
    values, nodes = find_layout(run, num_devices=8, num_nodes=1)
    assert nodes == 1
    changed = load("grpo_qwen25_7b_A3", 1, *(f"{key}={'null' if value is None else value}" for key, value in values.items()))
    assert validate(changed) == [] and changed.placement.num_devices == 8
    before, after = run.plan, changed.plan
    assert (before.num_prompts, before.num_samples, before.mini_batch_size) == (
        after.num_prompts,
        after.num_samples,
        after.mini_batch_size,
    )
    kinds = {key.partition(".")[2].removesuffix("_parallel_size") for key in values}
    assert kinds <= {"tensor_model", "pipeline_model", "context", "expert_model", "sequence_parallel", "num_layer_list",
                     "actor_resource.num_npus", "infer_tensor_model", "infer_tensor"}  # fmt: skip


def test_groups_of_copies_that_no_longer_fit_become_one() -> None:
    changes = "engine=fsdp tensor_model_parallel_size=1 pipeline_model_parallel_size=1 recompute_granularity=full fsdp_size=16"
    keys = [f"++actor_config.{text}" for text in changes.split()]
    run = load("grpo_qwen25_7b_A3", 2, *keys, "++rl_config.use_prefix_grouper=false")
    values, _ = find_layout(run, num_devices=8, num_nodes=1)
    assert values["actor_config.fsdp_size"] is None and values["rl_config.actor_resource.num_npus"] == 8


def test_devices_that_no_layout_divides_stay_idle() -> None:
    # 7 devices: 28 heads, 28 layers and batches of powers of two leave 4 of them
    run = load("grpo_qwen25_7b_A3", 1, "rl_config.actor_resource.num_npus=8")
    values, _ = find_layout(run, num_devices=5, num_nodes=1)
    assert values["rl_config.actor_resource.num_npus"] == 4


def test_nodes_whose_devices_no_layout_divides_stay_idle() -> None:
    # 24 devices on 3 nodes: 512 responses cannot be shared by 3, 6, 12 or 24 replicas, nor 28 heads or layers by 3
    run = load("grpo_qwen25_7b_A3", 4, "rl_config.actor_resource.num_npus=32", "actor_config.micro_batch_size=1")
    values, nodes = find_layout(run, num_devices=24, num_nodes=3)
    assert (values["rl_config.actor_resource.num_npus"], nodes) == (16, 2)


def test_dedicated_devices_stay_with_their_roles() -> None:
    servers = ["rl_config.use_integrated_worker=false", "rl_config.trainer_mode=async"]
    servers.append("rl_config.rollout_resource={num_npus: 8}")
    run = load("grpo_qwen25_7b_A3", 3, *servers)
    values, _ = find_layout(run, num_devices=16, num_nodes=2)
    assert values["rl_config.actor_resource.num_npus"] == 8
    assert "generate_config.infer_tensor_parallel_size" not in values
    with pytest.raises(ValueError, match="8 devices on 1 node.s. are left, of which other roles have 8"):
        find_layout(run, num_devices=8, num_nodes=1)


@pytest.mark.parametrize(("num_devices", "num_nodes", "counts"), [
    (24, 3, [(24, 3), (16, 2), (8, 1), (4, 1), (2, 1), (1, 1)]), (5, 1, [(5, 1), (4, 1), (2, 1), (1, 1)]), (1, 1, [(1, 1)]),
    (6, 2, [(6, 2), (3, 1), (2, 1), (1, 1)]), (0, 1, []),
])  # fmt: skip
def test_whole_nodes_are_tried_before_parts_of_one(num_devices: int, num_nodes: int, counts: list[tuple[int, int]]) -> None:
    assert shrink._list_counts(num_devices, num_nodes) == counts


def test_stages_in_the_middle_have_the_layers_that_are_left_over() -> None:
    assert [divide_layers(28, 8), divide_layers(7, 3), divide_layers(9, 4)] == ["3,3,4,4,4,4,3,3", "2,3,2", "2,3,2,2"]


def test_the_run_is_the_one_that_its_keys_make_by_hand(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("run")
    changes = ["rl_config.actor_resource.num_npus=4", f"run_dir={folder}", "model.tiny_qwen25.num_layers=4"]
    changes.append("actor_config.load=null")
    run = load("grpo_tiny_cpu", 2, *changes)
    shrunk, keys = Shrinker(run, "grpo_tiny_cpu", None, changes, resolve_run)(2, 1)
    by_hand = load("grpo_tiny_cpu", 1, *changes, *keys)
    assert shrunk.folder == run.folder and shrunk.num_nodes == 1 and shrunk.placement == by_hand.placement
    assert shrunk.plan == by_hand.plan and shrunk.config.actor_config == by_hand.config.actor_config
