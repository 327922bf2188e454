"""`mindspeed-rl explain`: the plan of a run, printed without torch and without a device."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sample_runs import completion_level, prompt_level

from mindspeed_rl.cli.explain import main
from mindspeed_rl.config import build_run_config
from mindspeed_rl.run.batch_sizes import Layout
from mindspeed_rl.run.draft import draft, load_run
from mindspeed_rl.run.explain.effects import find_changed_keys, find_keys_without_effect
from mindspeed_rl.run.explain.plan_page import _list_parallel_groups, explain, render


def explained(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, dict]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_tiny_run_is_explained_as_worked_out_by_hand(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    write_tiny(tmp_path)
    code, report = explained(capsys, "--config-name", "tiny", "--config-dir", str(tmp_path))
    assert (code, report["valid"], report["errors"]) == (0, True, [])
    assert report["batch"] == {
        "counting": "prompts",
        "world_size": 2,
        "dp_size": 1,
        "micro_batch_size": 16,
        "num_generations": 8,
        "global_batch_size": 32,
        "generation_batch_size": 256,
        "steps_per_generation": 2,
        "num_rollout_prompts": 32,
        "num_train_prompts": 16,
        "num_rollout_prompts_per_dp_group": 32,
        "num_prompts_per_dp_group": 16,
        "per_device_generation_batch_size": 128,
        "num_iters_per_step": 2,
        "mini_batch_size": 128,
        "gradient_accumulation_steps": 8,
        "num_train_samples": 256,
        "num_minibatches": 2,
        "epochs": 1,
        "num_optimizer_steps": 2,
        "num_rollout_replicas": 2,
        "train_iters": 100,
        "total_optimizer_steps": 200,
        "total_samples": 25600,
        "total_prompts": 3200,
    }
    assert report["dispatch_sizes"] == {
        "actor_rollout_dispatch_size": 128,
        "actor_logprob_dispatch_size": 256,
        "ref_dispatch_size": 256,
        "reward_dispatch_size": 256,
        "adv_dispatch_size": 256,
        "actor_update_dispatch_size": 256,
        "dynamic_sampling_dispatch_size": 256,
        "kl_dispatch_size": 256,
    }
    resources = report["resources"]
    assert (resources["num_devices"], resources["devices_per_node"]) == (2, 2)
    assert resources["parallel_groups"]["tp"] == [[0, 1]] and resources["parallel_groups"]["rollout"] == [[0], [1]]
    phases = [phase["phase"] for phase in resources["phases"]]
    # Two steps a rollout: old log-probs are needed; KL in the loss: so is the reference.
    expected = ["generate", "rewards", "ref_log_probs", "old_log_probs", "advantages", "update_actor", "update_weights"]
    assert phases == expected
    assert "clip(r, 0.8, 1.2)" in report["formula"] and "0.001 * aggregate(KL)" in report["formula"]
    assert report["changed_keys"]["actor_config.lr"] == 3e-4
    assert report["keys_without_effect"] == {"rl_config.gamma": "adv_estimator is group_norm"}


TINY = """\
defaults:
  - model: [m]
platform: cpu
megatron_training:
  model: m
  stage: ray_grpo
  bf16: false
  global_batch_size: 32
  train_iters: 100
actor_config:
  tensor_model_parallel_size: 2
  micro_batch_size: 16
  lr: 3e-4
rl_config:
  actor_resource:
    num_npus: 2
  n_samples_per_prompt: 8
  mini_batch_size: 16
  init_kl_coef: 0.001
  gamma: 1.0
  verifier_function: [acc]
generate_config:
  infer_tensor_parallel_size: 1
  dtype: float32
"""


def write_tiny(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "m.yaml").write_text("m:\n  num_layers: 4\n  num_attention_heads: 4\n")
    (folder / "tiny.yaml").write_text(TINY)


def test_the_guides_second_example_is_explained_with_its_fraction(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "guide.yaml").write_text(
        "actor_config: {}\nmegatron_training:\n  stage: ray_grpo\n  tensor_model_parallel_size: 2\n"
        "  micro_batch_size: 1\n  global_batch_size: 16\n"
        "rl_config:\n  num_generations: 4\n  steps_per_generation: 2\n  actor_resource: {num_npus: 16}\n"
        "generate_config:\n  infer_tensor_parallel_size: 2\n"
    )
    code, report = explained(capsys, "--config-name", "guide", "--config-dir", str(tmp_path), "--nodes", "2")
    assert (code, report["valid"]) == (2, False)
    assert len(report["errors"]) == 1 and "num_prompts_per_dp_group" in report["errors"][0] and "0.5" in report["errors"][0]
    assert "megatron_training.global_batch_size=32" in report["errors"][0]
    batch = report["batch"]
    assert (batch["dp_size"], batch["generation_batch_size"], batch["num_rollout_prompts"], batch["num_train_prompts"]) == (
        8,
        32,
        8,
        4,
    )
    assert (batch["num_rollout_prompts_per_dp_group"], batch["num_prompts_per_dp_group"], batch["mini_batch_size"]) == (
        1,
        0.5,
        16,
    )
    assert report["resources"]["devices_per_node"] == 8
    code, report = explained(
        capsys, "--config-name", "guide", "--config-dir", str(tmp_path), "megatron_training.global_batch_size=32"
    )
    assert (code, report["valid"], report["batch"]["num_prompts_per_dp_group"]) == (0, True, 1)


def test_an_unreadable_run_file_is_reported_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = explained(capsys, "--config-name", "grpo_tiny_cpu", "rl_config.clip_ration=1", "actor_config.lr=x")
    assert (code, report["valid"], len(report["errors"]), report["batch"]) == (2, False, 2, {})
    code, report = explained(capsys, "--config-name", "nothing_like_it")
    assert code == 2 and "nothing_like_it" in report["errors"][0]


def test_a_run_without_devices_or_batch_is_still_explained(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = explained(capsys, "--config-name", "grpo_tiny_cpu", "rl_config.actor_resource.num_npus=null")
    assert code == 2 and report["batch"] == {} and "num_npus is not set" in report["errors"][0] and report["formula"]
    code, report = explained(capsys, "--config-name", "grpo_tiny_cpu", "actor_config.micro_batch_size=0")
    assert code == 2 and "actor_config.micro_batch_size (0) must be at least 1" in report["errors"][0]


def test_the_text_form_shows_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config-name", "dapo_qwen25_7b_A2_multi_turn"]) == 0
    text = capsys.readouterr().out
    for part in ("Batch", "Devices: 8", "Parallel groups", "Objective", "Keys that differ", "have no effect", "Samples"):
        assert part in text
    assert "tool_agent, tools of ./configs/tools/retool_config.yaml with calls in the format hermes, 1 calls at most" in text
    assert "2048 tokens after the prompt together" in text
    assert "clip(r, 0.8, 1.28)" in text
    assert main(["--config-name", "grpo_qwen25_7b_A3", "rl_config.mini_batch_size=5"]) == 2
    assert "INVALID" in capsys.readouterr().out


def test_explain_loads_neither_torch_nor_ray() -> None:
    script = (
        "import sys\nfrom mindspeed_rl.cli.explain import main\n"
        "code = main(['--config-name', 'grpo_qwen25_7b_A3', '--json'])\n"
        "assert not {'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules), 'heavy import'\n"
        "sys.exit(code)"
    )
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_parallel_groups_follow_megatrons_rank_order() -> None:
    # Twelve devices, TP2 CP1 DP3 PP2: rank = tp + 2 dp + 6 pp.
    groups = _list_parallel_groups(Layout(12, 2, 2))
    assert groups["tp"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert groups["dp"] == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert groups["pp"] == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    # With data last: rank = tp + 2 pp + 4 dp.
    assert _list_parallel_groups(Layout(8, 2, 2), tp_pp_dp=True)["dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert _list_parallel_groups(Layout(8, 2, 1, 2))["cp"] == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_a_memory_snapshot_without_a_trace_reads_its_own_keys() -> None:
    integrated = {"profile_memory_snapshot": True, "stage": "actor_update", "profile_level": "level1"}
    tree = {"platform": "npu", "megatron_training": {"stage": "sft"}, "profiler_config": {"integrated": integrated}}
    idle = find_keys_without_effect(draft(build_run_config(tree)))
    assert idle["profiler_config.integrated.profile_level"] == "profile is false"
    read = "profile_memory_snapshot stage profile_save_path profile_step_start profile_step_end profile_ranks".split()
    assert idle.keys().isdisjoint(f"profiler_config.integrated.{name}" for name in read)


def test_keys_without_effect_are_named_with_the_reason() -> None:
    run = prompt_level(
        megatron_training={
            "use_mcore_models": True,
            "dpo_beta": 0.2,
            "moe_router_topk": 4,
            "save_interval": 5,
            "hidden_dropout": 0.1,
        },
        rl_config={
            "clip_higher_enable": False,
            "clip_ratio_low": 0.2,
            "kl_horizon": 10,
            "beta": 0.1,
            "cosine_max_len": 5,
            "zmq_communication": False,
            "token_level_loss": False,
            "max_packing_token_size": 9,
        },
        generate_config={"infer_expert_parallel_size": 1},
    )
    assert find_keys_without_effect(run) == {
        "megatron_training.use_mcore_models": "models of engine megatron are Megatron-core's",
        "megatron_training.dpo_beta": "stage is ray_grpo; the key belongs to dpo",
        "megatron_training.moe_router_topk": "the model has no experts",
        "megatron_training.save_interval": "save is not set",
        "megatron_training.hidden_dropout": "rl_config.dropout_in_update is false: rollout, old log-probs and reference have "
        "no dropout either",
        "rl_config.clip_higher_enable": "each rollout makes one optimizer step, in which the ratio is 1",
        "rl_config.clip_ratio_low": "clip_higher_enable is false",
        "rl_config.kl_horizon": "kl_ctrl_type is fixed",
        "rl_config.beta": "without num_generations the coefficient is init_kl_coef",
        "rl_config.cosine_max_len": "no reward function cosine",
        "rl_config.zmq_communication": "rows are broadcast over the process group",
        "rl_config.token_level_loss": "stage is ray_grpo",
        "rl_config.max_packing_token_size": "use_dynamic_bsz is false",
        "generate_config.infer_expert_parallel_size": "enable_expert_parallel is false",
    }


@pytest.mark.parametrize(
    ("rl", "idle"),
    [
        ({"clip_ratio": 0.1}, {"clip_ratio": "each rollout makes one optimizer step, in which the ratio is 1"}),
        ({"clip_ratio": 0.1, "epochs": 2}, {}),
        ({"clip_ratio": 0.1, "old_log_probs": "rollout"}, {}),  # of weights that may be older
        ({"clip_ratio": 0.1, "mini_batch_size": 16}, {}),
        ({"adv_estimator": "rloo", "adv_epsilon": 0.1}, {"adv_epsilon": "adv_estimator is rloo"}),
        ({"scale_rewards": "none", "adv_epsilon": 0.1}, {"adv_epsilon": "scale_rewards is none"}),
        ({"adv_estimator": "reinforce_plus_plus", "advantage_whiten": False}, {}),
        ({"init_kl_coef": 0.0, "sync_ref_model": True}, {"sync_ref_model": "init_kl_coef is 0"}),
        ({"init_kl_coef": 0.0, "use_kl_in_reward": True}, {"use_kl_in_reward": "init_kl_coef is 0"}),
        ({"kl_penalty": "mse", "kl_clamp": False}, {"kl_clamp": "kl_penalty is mse"}),
        ({"eval_greedy": False}, {"eval_greedy": "eval_data_path is not set, and split holds nothing back"}),
        ({"use_kl_in_reward": True, "use_bias_correction_kl": True}, {"use_bias_correction_kl": "the KL is in the reward"}),
    ],
)
def test_keys_that_other_keys_make_idle_are_named(rl: dict, idle: dict) -> None:
    changes = {name: value for name, value in rl.items() if name != "mini_batch_size"}
    run = prompt_level(rl_config={**changes, "mini_batch_size": rl.get("mini_batch_size", 32)})
    assert find_keys_without_effect(run) == {f"rl_config.{name}": reason for name, reason in idle.items()}


def test_every_phase_of_a_run_says_who_holds_the_devices() -> None:
    def phases(**rl: object) -> list[str]:
        return [phase["phase"] for phase in explain(prompt_level(rl_config=rl))["resources"]["phases"]]

    log_probs, updates = ["ref_log_probs", "advantages"], ["update_actor", "update_weights"]
    assert phases() == ["generate", "rewards", *log_probs, *updates]
    remax = phases(adv_estimator="remax", reward_model="somewhere", sync_ref_model=True)
    assert remax == [
        "generate",
        "rewards",
        "greedy_baselines",
        "reward_model",
        *log_probs,
        "update_actor",
        "sync_reference",
        updates[1],
    ]
    judged = phases(rule_reward=False, judge_url="http://127.0.0.1", init_kl_coef=0.0)
    assert judged == ["generate", "rewards", "advantages", *updates]


def test_keys_of_another_platform_are_without_effect_only_there() -> None:
    keys = {"swap_attention": True, "npu_deterministic": True}
    run = prompt_level(megatron_training=keys, platform="npu")
    assert find_keys_without_effect(run) == {}
    elsewhere = prompt_level(megatron_training=keys, platform="cpu")
    idle = {"megatron_training.swap_attention", "megatron_training.npu_deterministic"}
    assert set(find_keys_without_effect(elsewhere)) == idle


def test_changed_keys_leave_out_defaults() -> None:
    run = prompt_level(rl_config={"clip_ratio": 0.2, "epochs": 2})
    changed = find_changed_keys(run.config)
    assert changed["rl_config.epochs"] == 2 and "rl_config.clip_ratio" not in changed
    assert changed["rl_config.actor_resource.num_npus"] == 16


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m mindspeed_rl.cli.main explain --config-name grpo_tiny_cpu | true"
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_report_of_a_completion_level_run_renders() -> None:
    text = render(explain(completion_level(world=8, batch=16, generations=4, steps=2)))
    assert "completions of one optimizer step" in text and "num_rollout_prompts" in text


def test_nonsense_numbers_are_explained_and_never_crash() -> None:
    rng = random.Random(0)
    for _ in range(80):
        training = {
            "stage": rng.choice(["ray_grpo", "ray_dapo", "sft"]),
            "num_layers": 28,
            "num_attention_heads": 28,
            "global_batch_size": rng.randint(-1, 600),
            "micro_batch_size": rng.randint(0, 5),
            "tensor_model_parallel_size": rng.randint(0, 9),
            "pipeline_model_parallel_size": rng.randint(0, 5),
            "num_experts": rng.choice([None, 8]),
            "expert_model_parallel_size": rng.randint(0, 4),
            "num_layer_list": rng.choice([None, "1,2", "x"]),
        }
        rl = {
            "actor_resource": {"num_npus": rng.choice([None, 0, 1, 8, 65])},
            "n_samples_per_prompt": rng.randint(0, 9),
            "mini_batch_size": rng.randint(0, 70),
            "num_generations": rng.choice([None, 0, 4]),
            "steps_per_generation": rng.choice([None, 0, 2]),
            "filter_groups_enable": rng.random() < 0.5,
            "reward_dispatch_size": rng.choice([None, 0, 3]),
        }
        rollout = {"infer_tensor_parallel_size": rng.randint(0, 9), "infer_pipeline_parallel_size": rng.randint(0, 2)}
        cfg = build_run_config({"megatron_training": training, "rl_config": rl, "generate_config": rollout})
        report = explain(draft(cfg, rng.randint(1, 3)))
        assert report["valid"] == (not report["errors"])
        assert render(report) and json.dumps(report)


@pytest.mark.parametrize(
    ("name", "replicas", "sharing", "devices"),
    [
        ("grpo_deepseek_r1_671b_A2", 64, 16, 64),
        ("grpo_deepseek_r1_671b_A3", 64, 64, 256),
        ("grpo_qwen3_235b_a22b_A2", 32, 8, 32),
        ("dapo_qwen3_30b_a3b_A3", 16, 8, 8),
    ],
)
def test_engines_that_share_experts_are_shown_with_their_groups(name: str, replicas: int, sharing: int, devices: int) -> None:
    result = explain(load_run(name))["resources"]
    rollout = result["roles"]["rollout"]
    assert (rollout["replicas"], rollout["replicas_sharing_experts"], rollout["ep"]) == (replicas, sharing, devices)
    groups = result["parallel_groups"]["rollout_ep"]
    assert groups[0] == list(range(devices)) and sum(groups, []) == list(range(rollout["devices"]))
    (holds,) = [phase["holds"] for phase in result["phases"] if phase["phase"] == "generate"]
    assert f"experts over {devices} devices (EP{devices})" in holds


_TWO_RANKS = ("rl_config.actor_resource.num_npus=2", "generate_config.infer_tensor_parallel_size=2")


def test_an_engine_in_int8_is_corrected_unless_the_run_file_says_otherwise() -> None:
    keys = ["platform=cpu", "generate_config.quantization=int8"]
    run = load_run("grpo_tiny_cpu", None, keys)
    report = explain(run)
    assert report["errors"] == [] and run.objective is not None
    assert run.rl.rollout_importance_sampling_mode == "token_truncate" and run.objective.correction is not None
    assert "the engine's matrices are in int8, corrected by token_truncate" in render(report)
    ranks = explain(load_run("grpo_tiny_cpu", None, [*keys, *_TWO_RANKS]))
    assert "in int8, with scales of a token on each of 2 ranks, corrected" in " ".join(render(ranks).split())
    blocks = explain(load_run("grpo_tiny_cpu", None, ["platform=cpu", "generate_config.quantization=mxfp8"]))
    said = "matrices are in mxfp8 (emulated in float32: slow, and no memory is saved), corrected by token_truncate"
    assert blocks["errors"] == [] and said in " ".join(render(blocks).split())
    off = load_run("grpo_tiny_cpu", None, [*keys, "rl_config.rollout_importance_sampling_mode=null"])
    assert off.objective is not None and off.objective.correction is None
    assert "corrected by none" in render(explain(off))
    for change, reason in (
        ("platform=cuda", "not available on cuda"),
        ("platform=npu", "not available in float32 on npu"),
        ("generate_config.speculative_config={method: mtp}", "not available with a draft model"),
    ):
        assert any(reason in error for error in explain(load_run("grpo_tiny_cpu", None, [*keys, change]))["errors"])


def test_spare_samples_are_told_with_what_becomes_of_them() -> None:
    keys = ["guarantee_order=false", "partial_rollout_max_split=2", "spare_samples_per_prompt=2"]
    words = [f"rl_config.{key}" for key in keys]
    for further, fate in (([], "are aborted"), (["rl_config.keep_spare_samples=true"], "continue in its second group")):
        report = explain(load_run("grpo_tiny_cpu", None, [*words, *further]))
        assert report["errors"] == []
        assert f"2 spare samples of each prompt: the unfinished ones {fate}" in render(report)


def test_drafts_are_explained_on_one_line_with_reasons_why_they_will_not_pay() -> None:
    generate = {"speculative_config": {"spec_method": "suffix", "spec_tokens": 6}, "max_num_seqs": 16}
    report = explain(prompt_level(generate_config=generate))
    assert report["errors"] == [] and "drafts by suffix, 6 tokens a step at most" in render(report)
    assert not [text for text in report["warnings"] if "speculative_config" in text]
    # vLLM's own default of suffix decoding
    generate = {"speculative_config": {"method": "suffix"}, "max_num_seqs": 64}
    report = explain(prompt_level(generate_config=generate | {"sampling_config": {"max_tokens": 32, "temperature": 1.2}}))
    assert "24 tokens a step at most" in report["samples"]
    result = "\n".join(text for text in report["warnings"] if "speculative_config" in text)
    assert [words for words in ("temperature 1.2", "32 tokens", "64 responses") if words not in result] == []
    assert prompt_level().generate.drafts is None
