"""Files of ROLL's pipelines: numbers worked out by hand from their formulas."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

FILE = """
hydra: {run: {dir: "${now:%Y}"}}
exp_name: small
logging_dir: ./logs/${now:%H}
seed: 7
rollout_batch_size: 32
num_return_sequences_in_group: 8
prompt_length: 512
response_length: 1024
max_steps: 50
save_steps: 10
adv_estimator: grpo
whiten_advantages: false
reward_clip: 10
advantage_clip: 10.0
dual_clip_loss: true
use_kl_loss: true
kl_loss_coef: 0.01
max_len_mask: false
difficulty_mask: false
pretrain: Qwen/Qwen3-8B
actor_train:
  model_args: {dtype: bf16, disable_gradient_checkpointing: false}
  training_args:
    learning_rate: 1.0e-6
    weight_decay: 0
    per_device_train_batch_size: 2
    gradient_accumulation_steps: 8
    warmup_steps: 20
  data_args: {file_name: [data/math.jsonl], messages: messages, domain_interleave_probs: {math_rule: 1.0}, template: qwen3}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", top_p: 0.99, top_k: 100, temperature: 0.9}
  strategy_args: {strategy_name: vllm, strategy_config: {tensor_parallel_size: 4}}
  device_mapping: list(range(0,8))
reference: {device_mapping: "list(range(0,8))"}
rewards:
  math_rule: {worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker, tag_included: [math]}
"""

MEGATRON = "strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, sequence_parallel: true}"
CRITIC = "{training_args: {learning_rate: 1.0e-5, per_device_train_batch_size: 2, gradient_accumulation_steps: 8}}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_import(changes: dict[str, str] | None = None, accepted: frozenset[str] = frozenset(), **variables: str) -> Import:
    text = FILE
    for before, after in (changes or {}).items():
        assert before in text
        text = text.replace(before, after)
    Path("own/rlvr.yaml").write_text(text)
    command = "python examples/start_rlvr_pipeline.py --config_path own --config_name rlvr"
    settings = ImportSettings(variables={"REWARD": "accuracy", **variables}, accepted=accepted)
    return import_command(PROJECTS["roll"], command, settings)


def test_a_file_has_the_numbers_of_the_pipeline(folder: Path) -> None:
    run = run_import()
    assert run.plans is not None
    there, here = run.plans
    # 32 prompts of 8 responses; 2 x 8 rows on each of 8 / 2 replicas are 64, so 4 steps a rollout; 1 + 2 x 0.2 is the dual clip
    expected = {
        "rollout_prompts": 32, "rollout_completions": 256, "step_samples": 64, "steps_per_rollout": 4, "total_steps": 200,
        "lr_warmup_steps": 20, "lr_first": 0.0, "loss": "grpo", "aggregation": "sequence", "clip_low": 0.2, "clip_high": 0.2,
        "clip_c": 1.4, "kl_coef": 0.01, "kl_estimator": "low_var_kl", "kl_place": "loss", "advantage": "group_norm",
        "advantage_scale": "group", "temperature": 0.9, "top_p": 0.99, "top_k": 100, "prompt_length": 512,
        "response_length": 1024, "tp": 2, "dp": 4, "infer_tp": 4, "weight_decay": 0.0, "engine": "megatron",
    }  # fmt: skip
    for plan in (there, here):
        assert {name: getattr(plan, name) for name in expected} == expected
    # linear: 1e-6 (200 - 40) / (200 - 20) at step 40, the first of rollout 10
    assert there.lr_10 == pytest.approx(1e-6 * 160 / 180)
    keys = {
        "rl_config.overlong_filter": False,
        "megatron_training.map_keys.prompt": "messages",
        "megatron_training.map_keys.response": "ground_truth",
        "megatron_training.seed": 7,
        "megatron_training.save_interval": 10,
        "rl_config.reward_funcs": ["accuracy"],
    }
    assert {path: run.get(path) for path in keys} == keys


def test_defaults_are_those_of_the_dataclasses(folder: Path) -> None:
    sampling = {"top_p: 0.99, top_k: 100, temperature: 0.9": "num_beams: 1", "use_kl_loss: true": "use_kl_loss: false"}
    run = run_import({**sampling, "dual_clip_loss: true": "gamma: 1", "seed: 7\n": ""})
    assert run.plans is not None
    there = run.plans[0]
    assert (there.temperature, there.top_p, there.top_k, there.kl_coef, there.clip_c) == (0.95, 0.7, 50, 0.0, None)
    assert run.get("megatron_training.seed") == 42


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"adv_estimator: grpo": "adv_estimator: reinforce", "whiten_advantages: false": "whiten_advantages: true",
          "advantage_clip: 10.0": "gamma: 1"}, {"advantage": "reinforce_plus_plus"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nloss_agg_mode: token-mean"}, {"aggregation": "token"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nimportance_sampling: seq"}, {"level": "sequence"}),
        ({"adv_estimator: grpo": "adv_estimator: grpo\nuse_pg_clip_range: true\npg_clip_high: 0.28"}, {"clip_high": 0.28}),
        ({"list(range(0,8))\nreference": "list(range(8,12)) + [12, 13, 14, 15]\nreference"}, {"infer_tp": 4}),
        # a rollout that shares some devices has the actor's
        ({"list(range(0,8))\nreference": "list(range(0,6))\nreference"}, {"dp": 4, "infer_tp": 4}),
        ({"whiten_advantages: false": "whiten_advantages: true", "advantage_clip: 10.0": "gamma: 1"},
         {"advantage": "group_norm_whitened", "advantage_scale": "group"}),
        # whitening undoes a mean and a spread that the whole batch shares
        ({"adv_estimator: grpo": "adv_estimator: reinforce\nnorm_mean_type: batch\nnorm_std_type: batch",
          "false\nreward_clip": "true\nreward_clip",
          "advantage_clip: 10.0": "gamma: 0.9"}, {"advantage": "reinforce_plus_plus", "gamma": 0.9}),
        ({"dtype: bf16,": "dtype: bf16, lora_target: 'q_proj,o_proj', lora_rank: 16,"}, {"lora_rank": 16}),
        ({"adv_estimator: grpo": "adv_estimator: gae\nvalue_clip: 0.3\nreward_pretrain: critic\nlambd: 0.9",
          "use_kl_loss: true": "use_kl_loss: false", "advantage_clip: 10.0": "gamma: 0.99",
          "reference:": f"critic: {CRITIC}\nreference:"},
         {"advantage": "gae", "gamma": 0.99, "lam": 0.9, "value_clip": 0.3, "critic_lr": 1e-5}),
    ],
)  # fmt: skip
def test_objectives_and_devices(folder: Path, changes: dict[str, str], expected: dict[str, object]) -> None:
    run = run_import(changes, frozenset(("value_average",)))
    assert run.plans is not None
    for plan in run.plans:
        assert {name: getattr(plan, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "difficulty_mask: false",
            "difficulty_mask: true\ndifficulty_high_threshold: 0.9",
            "with a mean score between 0 and 0.9 in ROLL; --accept trained_groups",
        ),
        ("advantage_clip: 10.0", "advantage_clip: 2.0", "is 2 in ROLL; --accept advantage_bound"),
        ("adv_estimator: grpo", "adv_estimator: gae\nnorm_mean_type: batch", "adv_estimator=gae.*not available here"),
        ("math_rule: 1.0}", "math_rule: 0.5, code: 0.5}", "say --set PROMPTS=FILE"),
        (
            "tag_included: [math]",
            "tag_included: [math], query_filter_config: {type: mean_filter}",
            "bounds of their mean score choose",
        ),
        ("dtype: bf16,", "dtype: bf16, lora_target: '.*proj',", "adapters in .*proj"),
        ("dtype: bf16,", "dtype: bf16, freeze_module_prefix: lm_head,", "models with sound, and models of images"),
        ("use_kl_loss: true", "add_token_level_kl: true", "a KL in rewards that are normalized before it"),
        ("max_steps: 50", "max_steps: 50\nuse_opd: true", "one teacher with a model is"),
        (
            "adv_estimator: grpo\nwhiten_advantages: false\nreward_clip: 10\nadvantage_clip: 10.0\ndual_clip_loss: true\n"
            "use_kl_loss: true\nkl_loss_coef: 0.01\nmax_len_mask: false",
            "adv_estimator: reinforce\nwhiten_advantages: true\nmax_len_mask: true",
            "the tokens of responses that train in ROLL; --accept whitened_over",
        ),
        ("max_steps: 50", "max_steps: 50\nasync_generation_ratio: 1", "run ahead on the devices that train"),
        ("max_steps: 50", "max_steps: 50\nuse_topr_loss: true", "terms of TOPR"),
        ("max_steps: 50", "max_steps: 50\nno_such_key: 1", "no option of ROLL"),
        ("Qwen/Qwen3-8B", "deepseek-ai/DeepSeek-V3", "ROLL's converter decides"),
        ("megatron_train", "deepspeed_train", "megatron_train and fsdp2_train are"),
        ("list(range(0,8))\nreference", "[0, x]\nreference", "must be a list of devices"),
        ("response_length: 1024", "response_length: ${absent}", "a reference has no value"),
        ("rollout_batch_size: 32", "rollout_batch_size: 20", "not whole optimizer steps"),
        ("use_kl_loss: true", "use_kl_loss: true\nadd_token_level_kl: true", "has one place here"),
    ],
)
def test_what_is_not_available_is_named(folder: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_import({before: after})


def test_the_format_of_the_rollout_engine_is_a_key(folder: Path) -> None:
    layout = "strategy_config: {tensor_parallel_size: 4}"

    def run(more: str) -> Import:
        return run_import({layout: layout.replace("4}", f"4, {more}}}")}, frozenset({"importance_sampling"}))

    keys = run("quantization: mxfp8, kv_cache_dtype: fp8_e4m3").tree["generate_config"]
    assert (keys["quantization"], keys["kv_cache_dtype"]) == ("mxfp8", "fp8_e4m3")
    with pytest.raises(ConfigError, match="a rollout engine in fp8; int8, ascend, mxfp8 and w8a8_int8 are available"):
        run("quantization: fp8")
    with pytest.raises(ConfigError, match="another config.json for the engine"):
        run("hf_overrides: {quantization_config: {quant_method: fp8}}")
    # the engine's own dtype is overwritten by the model's
    assert "actor_infer.model_args" in run("dtype: float16").without_effect["actor_infer.strategy_args.strategy_config.dtype"]
    assert run("block_size: 16, sleep_level: 2, compilation_config: {level: 1}").refused == {}
    drafts = run("speculative_config: {method: qwen3_next_mtp, num_speculative_tokens: 2}, additional_config: {a: 1}")
    assert drafts.get("generate_config.speculative_config") == {"method": "mtp", "num_speculative_tokens": 2}
    assert drafts.get("generate_config.additional_config") == {"a": 1}
    for more in ("calculate_kv_scales: true", "quantization_param_path: a.json", "hf_config_path: b", "logits_processors: [c]"):
        with pytest.raises(ConfigError, match="a setting of the rollout engine that may change its responses"):
            run(more)
    assert run("calculate_kv_scales: false").get("generate_config.kv_cache_dtype") is None


@pytest.mark.parametrize(("name", "ours"), [("bf16", "bfloat16"), ("fp32", "float32"), ("fp16", None)])
def test_the_dtype_of_the_rollout_engine_is_that_of_its_model(folder: Path, name: str, ours: str | None) -> None:
    changes = {"actor_infer:\n": f"actor_infer:\n  model_args: {{dtype: {name}}}\n"}
    if name != "bf16":
        match = "but is rollouts in float16 in ROLL; --accept weights" if ours is None else "must agree: trainer and rollout"
        with pytest.raises(ConfigError, match=match):
            run_import(changes)
    if ours == "float32":
        return
    accepted = frozenset() if ours else frozenset(["weights"])
    assert run_import(changes, accepted).get("generate_config.dtype") == ours


def test_rollouts_in_the_format_of_a_quantized_folder_are_a_difference_in_roll(folder: Path) -> None:
    changes = {"Qwen/Qwen3-8B": "Qwen/Qwen3-8B-FP8"}
    with pytest.raises(ConfigError, match="but is rollouts in fp8, which Qwen3-8B-FP8 has in ROLL; --accept weights"):
        run_import(changes)


def test_the_mean_over_responses_that_train_is_accepted_by_name(folder: Path) -> None:
    changes = {"max_len_mask: false": "max_len_mask: true"}
    with pytest.raises(ConfigError, match="sequence, over the responses that train in ROLL; --accept aggregation"):
        run_import(changes)
    assert run_import(changes, frozenset(("aggregation",))).get("rl_config.overlong_filter") is True
    # a mean over tokens counts those that train here too
    run = run_import({**changes, "adv_estimator: grpo": "adv_estimator: grpo\nloss_agg_mode: token-mean"})
    assert run.plans is not None and run.plans[0].aggregation == "token"


def test_what_scores_is_said_by_the_user(folder: Path) -> None:
    run_import()
    with pytest.raises(ConfigError, match=r"classes of ROLL \(MathRuleRewardWorker\) score there.*--set REWARD=NAME"):
        import_command(PROJECTS["roll"], "own/rlvr.yaml", ImportSettings())


def test_weights_of_fsdp_in_bfloat16_are_accepted_by_name(folder: Path) -> None:
    changes = {MEGATRON: "strategy_name: fsdp2_train, strategy_config: {param_dtype: bf16, fsdp_size: 8}",
               "gradient_accumulation_steps: 8": "gradient_accumulation_steps: 4"}  # fmt: skip
    with pytest.raises(ConfigError, match="--accept weights"):
        run_import(changes)
    assert run_import(changes, frozenset(("weights",))).get("megatron_training.engine") == "fsdp"


def test_rollouts_that_run_ahead_and_groups_of_equal_scores_have_keys(folder: Path) -> None:
    run = run_import(
        {
            "max_steps: 50": "max_steps: 50\nasync_generation_ratio: 1",
            "list(range(0,8))\nreference": "list(range(8,12))\nreference",
            "[math]": "[math], query_filter_config: {type: std_filter, filter_args: {std_threshold: 0}}",
        }
    )
    keys = {
        "trainer_mode": "async",
        "max_off_policy_threshold": 1.0,
        "rollout_resource.num_npus": 4,
        "filter_groups_enable": True,
        "long_prompts": "drop_longer",
    }
    assert {name: run.get(f"rl_config.{name}") for name in keys} == keys


def test_experts_are_balanced_by_config_json_with_megatron_and_not_at_all_with_fsdp(folder: Path) -> None:
    model = {"Qwen/Qwen3-8B": "Qwen/Qwen3-30B-A3B"}
    assert run_import(model).get("megatron_training.moe_aux_loss_coeff") is None
    given = {**model, "sequence_parallel: true": "sequence_parallel: true, moe_aux_loss_coeff: 0.0"}
    assert run_import(given).get("megatron_training.moe_aux_loss_coeff") == 0.0
    fsdp = {MEGATRON: "strategy_name: fsdp2_train", "gradient_accumulation_steps: 8": "gradient_accumulation_steps: 4"}
    run = run_import({**model, **fsdp})
    assert run.get("megatron_training.moe_aux_loss_coeff") == run.get("megatron_training.moe_router_bias_update_rate") == 0.0


@pytest.mark.parametrize(
    ("parts", "expected"),
    [("vision_model", (True, True)), ("'vision_model.blocks,vision_model.patch_embed'", (True, False)), ("~", (False, False))],
)
def test_parts_of_a_model_of_images_are_frozen_as_there(folder: Path, parts: str, expected: tuple[bool, bool]) -> None:
    changes = {"Qwen/Qwen3-8B": "Qwen/Qwen2.5-VL-7B-Instruct", "dtype: bf16,": f"dtype: bf16, freeze_module_prefix: {parts},",
               "template: qwen3}": "image_max_pixels: 1048576}"}  # fmt: skip
    with pytest.raises(ConfigError, match="text around the questions of images.*--set PROMPTS=FILE"):
        run_import(changes)
    run = run_import(changes, PROMPTS="prompts.jsonl")
    names = ("freeze_vit", "freeze_aligner", "max_pixels")
    assert tuple(run.get(f"megatron_training.{name}") for name in names) == (*expected, 1048576)


def test_dropout_of_adapters_is_active_in_updates_and_images_have_none(folder: Path) -> None:
    adapters = {"dtype: bf16,": "dtype: bf16, lora_target: all-linear, lora_dropout: 0.1,"}
    run = run_import(adapters)
    names = ("megatron_training.lora_dropout", "megatron_training.lora_alpha", "rl_config.dropout_in_update")
    assert [run.get(name) for name in names] == [0.1, 16, True]
    with pytest.raises(ConfigError, match="lora_target: not available here: adapters of a model of images"):
        run_import({**adapters, "Qwen/Qwen3-8B": "Qwen/Qwen2.5-VL-7B-Instruct"}, PROMPTS="p.jsonl")


DISTILLATION = {
    "actor_train:": "student_train:", "actor_infer:": "student_infer:", "adv_estimator: grpo": "adv_estimator: reinforce",
    "use_kl_loss: true": "use_kl_loss: false", "reference: {device_mapping: \"list(range(0,8))\"}":
    "teacher: {model_args: {model_name_or_path: Qwen/Qwen3-32B}, device_mapping: 'list(range(0,8))'}",
}  # fmt: skip

SCALED = {name: value.replace("teacher: {", "teacher: {opd_kl_coef: 0.5, ") for name, value in DISTILLATION.items()}


def test_a_teacher_of_sampled_answers_is_the_only_objective(folder: Path) -> None:
    run = run_import(DISTILLATION)
    names = ("enabled", "teacher_models", "loss_mode", "use_policy_gradient", "use_task_rewards")
    assert [run.get(f"rl_config.distillation.{name}") for name in names] == [True, ["Qwen/Qwen3-32B"], "k1", True, False]
    with pytest.raises(ConfigError, match=r"teacher\.opd_kl_coef: not available here: another weight than 1"):
        run_import(SCALED)


ROLE = """
  model_args: {dtype: bf16}
  training_args: {num_train_epochs: 2, per_device_train_batch_size: 2, gradient_accumulation_steps: 4, learning_rate: 1.0e-6}
  data_args: {file_name: data/rows.json, template: qwen2_5}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
"""


def import_rows(text: str, accepted: frozenset[str] = frozenset(), program: str = "", rows: int = 320) -> Import:
    Path("own/rows.yaml").write_text(text)
    command = f"python examples/{program}.py --config_path own --config_name rows" if program else "own/rows.yaml"
    return import_command(PROJECTS["roll"], command, ImportSettings(accepted=accepted, rows=rows))


def test_sft_reads_rows_in_their_order(folder: Path) -> None:
    text = f"pretrain: Qwen/Qwen2.5-7B\nsequence_length: 2048\nquery_key: input\nprompt_key: question\nsft_train:{ROLE}"
    run = import_rows(text, program="start_sft_pipeline")
    assert run.plans is not None
    # 2 x 4 rows on each of 8 / 2 replicas; 2 epochs of 320 rows are 20 steps, over which the rate falls to 0
    for plan in run.plans:
        assert (plan.stage, plan.step_samples, plan.total_steps, plan.sequence_length) == ("sft", 32, 20, 2048)
        assert (plan.lr_first, plan.lr_last) == (1e-6, pytest.approx(1e-6 / 20))
    assert run.get("megatron_training.no_shuffle") is True
    assert '"prompt": "question", "query": "input", "response": "output", "system": ""' in run.summarize()


def test_dpo_ends_after_max_steps_and_has_the_beta_of_the_loss(folder: Path) -> None:
    text = f"pretrain: Qwen/Qwen2.5-7B\nsequence_length: 512\nmax_steps: 8\nbeta: 0.1\nreference: {{}}\nactor_train:{ROLE}"
    with pytest.raises(ConfigError, match="the head of their turn in ROLL; --accept trained_tokens"):
        import_rows(text)
    run = import_rows(text, frozenset(("trained_tokens",)))
    assert run.plans is not None
    for plan in run.plans:
        assert (plan.stage, plan.step_samples, plan.total_steps, plan.beta) == ("dpo", 32, 8, 0.1)
        # ROLL divides the steps of the schedule by its 4 replicas: from step 2 on the rate is 0
        assert (plan.lr_first, plan.lr_last) == (1e-6, 0.0)
    with pytest.raises(ConfigError, match="beta: not available here: another beta than 0.1"):
        import_rows(text.replace("beta: 0.1", "beta: 0.2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("custom_envs: {FrozenLake: {}}\ntrain_env_manager: {tags: [FrozenLake]}", "pipeline of agents, which play FrozenLake"),
        ("custom_env: {}", "there is no command of a pipeline of ROLL for rows.yaml, a part of another file"),
        (f"sft_train:{ROLE}  x: 1", "pretrain is missing"),
        (f"pretrain: m\nsft_train:{ROLE}".replace("data/rows.json", "[a.json, b.json]"), "2 files: .*--set DATA=FILE"),
    ],
)
def test_files_of_other_pipelines_are_named(folder: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        import_rows(text)


def test_a_program_reads_the_files_of_its_pipeline(folder: Path) -> None:
    with pytest.raises(ConfigError, match="start_agentic_pipeline of ROLL; start_rlvr_pipeline, .* are"):
        import_rows("x: 1", program="start_agentic_pipeline")
    with pytest.raises(ConfigError, match="start_dpo_pipeline reads no file with the roles of rows.yaml, which is one of sft"):
        import_rows(f"pretrain: m\nsft_train:{ROLE}", program="start_dpo_pipeline")


@pytest.mark.parametrize("rows", [336, 351, 352])
def test_the_rate_decays_over_the_rows_of_all_epochs_together(rows: int, folder: Path) -> None:
    text = f"pretrain: Qwen/Qwen2.5-7B\nsequence_length: 2048\nprompt_key: question\nsft_train:{ROLE}"
    run = import_rows(text, program="start_sft_pipeline", rows=rows)
    assert run.plans is not None
    # a loader of 32 rows that drops the incomplete batch, twice; the scheduler of 2 * rows / (2 * 4) steps / 4 replicas
    taken, steps = 2 * len(range(0, rows - 31, 32)), 2 * rows // (2 * 4) // 4
    last = 1e-6 * (steps - (taken - 1)) / steps  # transformers' linear schedule at the last step
    for plan in run.plans:
        assert (plan.total_steps, plan.lr_last) == (taken, pytest.approx(last))
    # an epoch here has all rows, so the run has the number of steps
    expected = (taken, None) if rows % 32 else (None, 2)
    assert (run.get("megatron_training.train_iters"), run.get("megatron_training.train_epochs")) == expected


DISTILLED = """
student_pretrain: Qwen/Qwen2.5-7B-Instruct
teacher_pretrain: Qwen/Qwen2.5-14B-Instruct
logits_topk: 32
distill_loss_weight: 0.8
sequence_length: 1001
max_grad_norm: 2.0
question_key: q
answer_key: a
student:
  training_args: {learning_rate: 2.0e-5, lr_scheduler_type: constant, per_device_train_batch_size: 4,
    gradient_accumulation_steps: 2, num_train_epochs: 2}
  data_args: {file_name: [rows.json], template: qwen2_5}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2}}
  device_mapping: list(range(0,8))
teacher:
  data_args: {template: qwen2_5}
  strategy_args: {strategy_name: megatron_infer, strategy_config: {tensor_model_parallel_size: 4}}
  device_mapping: list(range(0,8))
"""


def import_distilled(folder: Path, text: str = DISTILLED, **variables: str) -> Import:
    (folder / "own" / "distill.yaml").write_text(text)
    command = "python examples/start_distill_pipeline.py --config_path own --config_name distill"
    settings = ImportSettings(variables={"PROMPTS": "rows.jsonl", **variables}, rows=320)
    return import_command(PROJECTS["roll"], command, settings)


def test_a_teacher_on_the_answers_of_rows_is_a_distillation_that_samples_nothing(folder: Path) -> None:
    run = import_distilled(folder)
    distillation = run.tree["rl_config"]["distillation"]
    expected = {
        "teacher_models": ["Qwen/Qwen2.5-14B-Instruct"], "loss_mode": "forward_kl_topk", "topk": 32, "topk_rest": "renormalize",
        "on_policy_fraction": 0.0,
    }  # fmt: skip
    assert {name: distillation[name] for name in expected} == expected
    # the loss there is 0.8 D + 0.2 CE, here D + 0.25 CE: gradients are 1 / 0.8 times as large, and so are limit and epsilon
    assert distillation["supervised_coef"] == pytest.approx(0.25)
    assert run.get("megatron_training.clip_grad") == pytest.approx(2.5)
    assert run.get("megatron_training.adam_eps") == pytest.approx(1.25e-8)
    # 4 rows x 2 passes x 4 replicas, 320 rows twice
    assert run.plans is not None
    assert (run.plans[1].step_samples, run.plans[1].total_steps, run.plans[1].dp) == (32, 20, 4)
    assert (run.plans[1].prompt_length, run.plans[1].response_length) == (501, 500)
    assert run.get("generate_config.max_model_len") == 1001


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("logits_topk: 32", "logits_topk: 0", "the divergence over the whole vocabulary"),
        ("distill_loss_weight: 0.8", "distill_loss_weight: 0", "0 is the pipeline of SFT"),
        ("logits_topk: 32", "kd_objective: adaptive_kl", "kd_objective adaptive_kl: not available here"),
        ("logits_topk: 32", "kd_temperature: 2", "other temperatures than 1"),
        ("logits_topk: 32", "distill_on_prompt: true", "a divergence on the tokens of the questions"),
        ("teacher_pretrain: Qwen/Qwen2.5-14B-Instruct", "", "teacher_pretrain is missing"),
        ("7B-Instruct", "VL-7B-Instruct", "distillation on the answers of rows with images"),
        ("num_train_epochs: 2", "num_train_epochs: 0.5", "takes a whole number"),
    ],
)
def test_what_another_distillation_has_is_named(folder: Path, before: str, after: str, sentence: str) -> None:
    assert before in DISTILLED
    with pytest.raises(ConfigError, match=sentence):
        import_distilled(folder, DISTILLED.replace(before, after))


def test_rows_of_a_distillation_are_written_by_the_user(folder: Path) -> None:
    (folder / "own" / "distill.yaml").write_text(DISTILLED)
    with pytest.raises(ConfigError, match="a line break in front of each question"):
        import_command(PROJECTS["roll"], "own/distill.yaml", ImportSettings(rows=320))
