"""`mindspeed-rl train platform=npu` as a user starts it: Ray, MindSpeed, HCCL and vllm-ascend, all on simulated dies.

Rollout and trainer compute every drawn token's log-prob on two different paths, and every push is proven; what the two
libraries compute is compared with the CPU in test_rollout.py and test_mindspeed.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from grpo_command import Command, finished
from scripts import load_script

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.usefixtures("small_devices"),
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]

#: log-probs of two libraries in bf16; the CPU's two differ by as much
BF16 = 0.15
ITERATIONS = 3
#: a minute on two idle cores
LIMIT_S = 900.0
COMMON = (
    "platform=npu",
    f"rl_config.runtime_env_path={Path(__file__).parent / 'runtime_env.yaml'}",
    f"megatron_training.train_iters={ITERATIONS}",
    "megatron_training.bf16=true",
    "megatron_training.save_interval=100",
    "rl_config.log_probs_diff_limit=null",
    "rl_config.wait_timeout_s=600",
    "generate_config.dtype=bfloat16",
    "generate_config.gpu_memory_utilization=0.3",
    "generate_config.kv_cache_memory_gib=null",
    "generate_config.max_num_seqs=32",
    "generate_config.enforce_eager=true",
    "generate_config.offload_train_optimizer=true",
    "generate_config.offload_train_grad=true",
    "generate_config.offload_train_param=true",
)


def layout(dies: int, tensor: int = 1, rollout: int = 1, **keys: object) -> tuple[str, ...]:
    """Overrides of a layout: dies, tensor parallelism in training and in rollout, and further keys of the actor."""
    return (
        f"rl_config.actor_resource.num_npus={dies}",
        f"actor_config.tensor_model_parallel_size={tensor}",
        f"generate_config.infer_tensor_parallel_size={rollout}",
        *(f"actor_config.{name}={value}" for name, value in keys.items()),
    )


_TARGETS = "[linear_qkv,linear_proj,linear_fc1,linear_fc2]"
_LORA: dict[str, object] = {"lora_r": 4, "lora_alpha": 8, "lora_target_modules": _TARGETS}
ADAPTERS = layout(1, **_LORA)
slow = pytest.mark.slow
RUNS = {
    "TP2 to two engines": layout(2, tensor=2),
    "TP2 x DP2 to two engines of TP2": pytest.param(layout(4, tensor=2, rollout=2), marks=slow),
    "adapters": pytest.param(ADAPTERS, marks=slow),
    "adapters pushed by themselves": pytest.param((*ADAPTERS, "generate_config.lora_push=adapter"), marks=slow),
    "adapters pushed to an engine of TP2": pytest.param(
        (*layout(2, tensor=2, rollout=2, **_LORA), "generate_config.lora_push=adapter"), marks=slow
    ),
    "DP2 with a swapped optimizer": pytest.param(layout(2, swap_optimizer=True, use_distributed_optimizer=True), marks=slow),
}


def check(command: Command) -> None:
    """The run did its iterations, each push was proven, and rollout and trainer agree."""
    records = [record for record in command.metrics if "rollout/proven_parameters" in record]
    assert len(records) == ITERATIONS
    proven = {record["rollout/proven_parameters"] for record in records}
    assert len(proven) == 1 and 0 not in proven
    versions = [record["rollout/weight_version"] for record in records]
    assert versions == sorted(set(versions))
    updated = [record for record in records if "actor/grad_norm" in record]  # not while a critic warms up
    assert updated and all(record["rollout/log_probs_diff_max"] < BF16 for record in updated)
    assert any(record["actor/grad_norm"] > 0 for record in updated)


@pytest.mark.parametrize("changes", RUNS.values(), ids=list(RUNS))
def test_grpo_runs_as_a_command(changes: tuple[str, ...], task: Path, tmp_path: Path) -> None:
    check(finished(task, tmp_path, *COMMON, *changes, timeout_s=LIMIT_S))


#: run file of the tests on the CPU -> keys
OTHERS: dict[str, tuple[str, ...]] = {
    "ppo_tiny_cpu": (
        *layout(1, micro_batch_size=16),
        "critic_config.save=null",
        "critic_config.tensor_model_parallel_size=1",
        "critic_config.micro_batch_size=16",
        "critic_config.bf16=true",
        "generate_config.update_weight_mode=delta",
        "rl_config.actor_forward_micro_batch_size=8",
        "rl_config.ref_forward_micro_batch_size=8",
        "rl_config.use_dynamic_bsz=false",
        "rl_config.critic_warmup=1",
    ),
    # nothing has been learnt: many groups are of one reward
    "dapo_tiny_cpu": (*layout(1), "rl_config.filter_groups_max_batches=20"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_another_run_file_runs_as_a_command(name: str, task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "config", name)
    critic = [f"critic_config.load={task / 'model'}"] if "ppo" in name else []
    check(finished(task, tmp_path, *COMMON, *OTHERS[name], *critic, timeout_s=LIMIT_S))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharing"), [("qwen3-moe", 1), ("deepseek-v3", 2)])
def test_experts_split_in_training_and_in_rollout(tmp_path: Path, name: str, sharing: int) -> None:
    from tiny_task import make_other_task

    task = make_other_task(tmp_path / "task", name)
    changes = (
        *layout(2, rollout=2 // sharing, expert_model_parallel_size=2),
        "+model.tiny_qwen25.num_experts=4",
        "generate_config.enable_expert_parallel=true",
        f"generate_config.infer_expert_parallel_size={sharing}",
    )
    check(finished(task, tmp_path / "command", *COMMON, *changes, timeout_s=LIMIT_S))


@pytest.mark.slow
def test_experts_of_rollouts_are_replayed_and_counted(tmp_path: Path) -> None:
    from tiny_task import make_other_task

    from mindspeed_rl.rollout.expert_counts import sum_counts

    task, counts = make_other_task(tmp_path / "task", "qwen3-moe"), tmp_path / "counts"
    keys = ["+model.tiny_qwen25.num_experts=4", "rl_config.mini_batch_size=4", "rl_config.router_replay.mode=R3"]
    keys += ["generate_config.eplb_token_collects=true", f"generate_config.eplb_token_save_path={counts}"]
    command = finished(task, tmp_path / "command", *COMMON, *layout(1), *keys, timeout_s=LIMIT_S)
    check(command)
    assert all(0.8 < record["router/agreement"] <= 1.0 for record in command.metrics)
    # every token but the last of a response is sent to two of the four experts, in both layers
    tokens = sum(32 * (record["prompt_length/mean"] + record["response_length/mean"] - 1) for record in command.metrics)
    assert [sum(layer) for layer in sum_counts(counts)] == [round(2 * tokens)] * 2


#: layout, further keys of a rollout with experts in int8
INT8_EXPERTS = {
    "one device": (*layout(1), "rl_config.router_replay.mode=R3"),
    "two ranks, delta syncs": (
        *layout(2, rollout=2, expert_model_parallel_size=2, micro_batch_size=8),
        *("rl_config.router_replay.mode=R3", "generate_config.update_weight_mode=delta"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INT8_EXPERTS)
def test_grpo_with_experts_in_int8_runs_as_a_command(name: str, tmp_path: Path) -> None:
    from tiny_task import make_other_task

    task = make_other_task(tmp_path / "task", "qwen3-moe")
    keys = ["+model.tiny_qwen25.num_experts=4", "rl_config.mini_batch_size=4", "generate_config.quantization=int8"]
    command = finished(task, tmp_path, *COMMON, *INT8_EXPERTS[name], *keys, timeout_s=LIMIT_S)
    assert len(command.metrics) == ITERATIONS
    for version, record in enumerate(command.metrics, 1):
        # every byte of every sync; another policy than the trained one, by no more than int8 and bfloat16 explain
        assert record["rollout/weight_version"] == version and record["rollout/proven_parameters"] > 0
        assert 0 < record["rollout/log_probs_diff_mean"] < 0.1 and 0.8 < record["rollout/ess"] < 1
        # routers of a quantized policy choose nearly the same
        assert 0.8 < record["router/agreement"] <= 1
    assert any(record["actor/grad_norm"] > 0 for record in command.metrics)


@pytest.mark.slow
@pytest.mark.extra
def test_grpo_with_experts_in_int4_runs_as_a_command(tmp_path: Path) -> None:
    from tiny_task import make_other_task

    task = make_other_task(tmp_path / "task", "qwen3-moe-groups")
    keys = ["+model.tiny_qwen25.num_experts=4", "rl_config.mini_batch_size=4", "generate_config.quantization=w4a8"]
    command = finished(task, tmp_path, *COMMON, *layout(1), *keys, timeout_s=LIMIT_S)
    assert len(command.metrics) == ITERATIONS
    for version, record in enumerate(command.metrics, 1):
        assert record["rollout/weight_version"] == version and record["rollout/proven_parameters"] > 0
        # int4 is 10 % off or more in a product
        assert 0 < record["rollout/log_probs_diff_mean"] < 1.0 and 0.2 < record["rollout/ess"] < 1
    assert any(record["actor/grad_norm"] > 0 for record in command.metrics)


@pytest.mark.slow
def test_experts_of_log_probs_are_replayed_in_the_updates(tmp_path: Path) -> None:
    from tiny_task import make_other_task

    task = make_other_task(tmp_path / "task", "qwen3-moe")
    keys = ["+model.tiny_qwen25.num_experts=4", "rl_config.mini_batch_size=4", "rl_config.router_replay.mode=R2"]
    command = finished(task, tmp_path / "command", *COMMON, *layout(1), *keys, timeout_s=LIMIT_S)
    check(command)
    assert all(0.8 < record["router/agreement"] <= 1.0 for record in command.metrics)


@pytest.mark.slow
def test_prediction_layers_train_in_a_command_that_resumes(tmp_path: Path) -> None:
    from test_prediction_run import predicting_task

    task = predicting_task(tmp_path / "task")
    keys = ["+megatron_training.mtp_num_layers=1", "+megatron_training.mtp_loss_scaling_factor=1.0"]
    keys += ["actor_config.lr=5e-3", "rl_config.use_prefix_grouper=false", *layout(1)]
    first = finished(task, tmp_path, *COMMON, *keys, "megatron_training.save_interval=2", timeout_s=LIMIT_S)
    check(first)
    longer = (f"megatron_training.train_iters={ITERATIONS + 1}", f"run_dir={tmp_path / 'again'}")
    second = finished(task, tmp_path, *COMMON, *keys, *longer, timeout_s=LIMIT_S)
    assert f"resumes after iteration {ITERATIONS}" in second.output
    # each iteration has other samples, so a few of their losses say nothing about training
    assert all(0 < record["actor/mtp_loss"] < 10 for record in (*first.metrics, *second.metrics))
    before, after = (load_file(path / "model.safetensors") for path in (task / "model", tmp_path / "save/hf/latest"))
    for name in ("eh_proj", "self_attn.o_proj"):
        change = after[f"model.layers.2.{name}.weight"].float() - before[f"model.layers.2.{name}.weight"].float()
        assert 5e-3 < change.abs().max() < 4 * 5e-3


@pytest.mark.slow
def test_drafts_of_prediction_layers_follow_every_weight_sync(tmp_path: Path) -> None:
    from test_prediction_run import _DRAFTS, predicting_task

    keys = ["+megatron_training.mtp_num_layers=1", "+megatron_training.mtp_loss_scaling_factor=1.0"]
    keys += ["rl_config.use_prefix_grouper=false", *_DRAFTS, *layout(1)]
    command = finished(predicting_task(tmp_path / "task"), tmp_path, *COMMON, *keys, timeout_s=LIMIT_S)
    check(command)
    # the layer has learnt nothing: that its drafts are checked is enough
    rates = [record["rollout/draft_acceptance"] for record in command.metrics if "rollout/draft_acceptance" in record]
    assert len(rates) == ITERATIONS and all(0 <= rate <= 1 for rate in rates)


@pytest.mark.slow
def test_grpo_with_images_runs_as_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import test_vision_run as cpu

    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    example = load_script("examples/vision/make_task.py")
    example.NUM_SFT, example.NUM_TRAIN, example.NUM_HELD_OUT = 8, 16, 8
    example.main(tmp_path)
    (tmp_path / "looks.py").write_text(cpu.REWARD)
    keys = [key for key in COMMON if not key.startswith(("megatron_training.save_interval", "generate_config.kv"))]
    keys += ["generate_config.kv_cache_memory_gib=null", "actor_config.load=model"]
    keys += ["actor_config.save=null", "actor_config.save_hf=false"]
    keys += ["rl_config.verifier_function=[looks:starts_even]", "megatron_training.train_iters=2"]
    cpu.command("train", *cpu.GRPO, *keys, folder=tmp_path)
    records = cpu.metrics(tmp_path / "grpo_run")
    assert len(records) == 2 and all(record["rollout/log_probs_diff_max"] < BF16 for record in records)
    assert all(record["actor/grad_norm"] > 0 for record in records)


_FROZEN = ("actor_config.freeze_vit=true", "actor_config.freeze_aligner=true")
_DROPPED = (*_FROZEN, "actor_config.language_model_only=true")
#: what the published Qwen3.5 with experts learns from, with its tower or without -> format of the rollout, keys of the command
PUBLISHED = {
    "pictures, delta syncs and replayed experts": (
        "int8",
        ("actor_config.freeze_vit=false", "generate_config.update_weight_mode=delta", "rl_config.router_replay.mode=R3"),
    ),
    "text": ("int8", _FROZEN),
    "text, without the tower": ("int8", _DROPPED),
    "text, without the tower, experts in int4": ("w4a8", _DROPPED),
}
#: format -> model, largest mean difference of log-probs that it explains in bfloat16, least share of samples
EXPLAINED = {"int8": ("qwen3_5_moe_vl", 0.1, 0.8), "w4a8": ("qwen3_5_moe_vl_groups", 1.0, 0.2)}


@pytest.mark.slow
@pytest.mark.extra
@pytest.mark.parametrize("rows", PUBLISHED)
def test_grpo_of_the_published_qwen3_5_quantized_runs_as_a_command(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import test_vision_run as cpu
    import tiny_vision
    from engine import MODELS
    from test_language_model_only import REWARD

    quantization, changes = PUBLISHED[rows]
    model, largest, least = EXPLAINED[quantization]
    monkeypatch.setenv("NPU_SIM_MEMORY_GIB", "8")
    example = load_script("examples/vision/make_task.py")
    example.NUM_SFT, example.NUM_TRAIN, example.NUM_HELD_OUT = 8, 16, 8
    example.main(tmp_path)
    tiny_vision.save_for_the_example(example, tmp_path / "published", MODELS[model])
    (tmp_path / "looks.py").write_text(cpu.REWARD)
    keys = [key for key in COMMON if not key.startswith(("megatron_training.save_interval", "generate_config.kv"))]
    keys += ["generate_config.kv_cache_memory_gib=null", "actor_config.load=published"]
    keys += ["megatron_training.tokenizer_name_or_path=published", "actor_config.save=null", "actor_config.save_hf=false"]
    (tmp_path / "evens.py").write_text(REWARD)
    reward = "looks:starts_even" if "pictures" in rows else "evens:even"
    keys += [f"rl_config.verifier_function=[{reward}]", "megatron_training.train_iters=2"]
    keys += [f"generate_config.quantization={quantization}", "rl_config.use_prefix_grouper=false", *changes]
    if "pictures" not in rows:
        lines = (json.dumps({"instruction": f"{number}?", "output": "a"}) for number in range(16))
        (tmp_path / "text.jsonl").write_text("\n".join(lines) + "\n")
        keys += ["megatron_training.data_path=text.jsonl", "megatron_training.image_folder=null"]
    cpu.command("train", *cpu.GRPO, *keys, folder=tmp_path)
    records = cpu.metrics(tmp_path / "grpo_run")
    assert len(records) == 2
    for version, record in enumerate(records, 1):
        assert record["rollout/weight_version"] == version and record["rollout/proven_parameters"] > 0
        assert 0 < record["rollout/log_probs_diff_mean"] < largest and least < record["rollout/ess"] < 1
        assert "replayed" not in rows or 0.8 < record["router/agreement"] <= 1
    assert any(record["actor/grad_norm"] > 0 for record in records)
