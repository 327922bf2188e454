"""Files and programs of AReaL: numbers worked out by hand from the formulas of its trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError
from mindspeed_rl.importers.command import PROJECTS
from mindspeed_rl.importers.importer import import_command
from mindspeed_rl.importers.result import Import, ImportSettings

PROGRAM = """
import sys
from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset

def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    rows = get_custom_dataset(split="train", dataset_config=config.train_dataset)
    kwargs = dict(reward_fn="own.score", gconfig=config.gconfig, enable_thinking=True)
    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=kwargs)

main(sys.argv[1:])
"""
FILE = """
experiment_name: small
seed: 3
total_train_epochs: 2
tokenizer_path: ${actor.path}
rollout:
  backend: "vllm:d2t2"
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
gconfig: {n_samples: 4, max_new_tokens: 512, temperature: 0.9, top_p: 0.95, top_k: 100}
actor:
  backend: megatron:d2t2p1
  path: Qwen/Qwen3-8B
  dtype: bfloat16
  gradient_checkpointing: true
  optimizer: {type: adam, lr: 2e-6, weight_decay: 0.02, lr_scheduler_type: cosine, min_lr_ratio: 0.1,
              warmup_steps_proportion: 0.1, gradient_clipping: 0.5, eps: 1e-8}
  eps_clip: 0.2
  temperature: ${gconfig.temperature}
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  rejection_sampling: {metric: ratio, upper: 5.0}
  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}
  adv_norm: {mean_level: batch, std_level: batch}
vllm: {max_model_len: 4096}
train_dataset: {batch_size: 64, path: openai/gsm8k, type: rl, max_length: 256, shuffle: true}
saver: {freq_epochs: 1, freq_steps: 20}
"""
ROWS = 6400
VARIABLES = {"REWARD": "accuracy", "PROMPTS": "own/prompts.jsonl"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_import(
    changes: dict[str, str] | None = None, *accepted: str, words: str = "", program: str = PROGRAM, text: str = FILE
) -> Import:
    for before, after in (changes or {}).items():
        assert before in text
        text = text.replace(before, after)
    Path("own/run.yaml").write_text(text)
    Path("own/train.py").write_text(program)
    settings = ImportSettings(variables=VARIABLES, accepted=frozenset(accepted), rows=ROWS)
    return import_command(PROJECTS["areal"], f"python own/train.py --config own/run.yaml {words}", settings)


def test_a_file_has_the_numbers_of_the_trainer(folder: Path) -> None:
    run = run_import()
    assert run.plans is not None
    there, here = run.plans
    # 6,400 rows of 64 prompts are 100 batches an epoch; 64 x 4 responses; 0.1 of 200 batches warm up
    expected = {
        "rollout_prompts": 64, "rollout_completions": 256, "step_samples": 256, "steps_per_rollout": 1, "total_steps": 200,
        "lr_warmup_steps": 20, "lr_first": 0.0, "loss": "grpo", "aggregation": "token", "clip_low": 0.2, "clip_high": 0.2,
        "clip_c": None, "kl_coef": 0.0, "advantage": "group_norm_whitened", "advantage_scale": "group", "temperature": 0.9,
        "top_p": 0.95, "top_k": 100, "response_length": 512, "tp": 2, "dp": 2, "infer_tp": 2, "weight_decay": 0.02,
        "clip_grad": 0.5, "old_policy": "actor", "importance_sampling": "token_mask 5", "engine": "megatron",
    }  # fmt: skip
    for plan in (there, here):
        assert {name: getattr(plan, name) for name in expected} == expected
    # Megatron warms up from 0: 2e-6 x 10 / 20
    assert there.lr_10 == pytest.approx(1e-6)
    keys = {
        "rl_config.trainer_mode": "async",
        "rl_config.max_off_policy_threshold": 2.0,
        "rl_config.actor_resource.num_npus": 4,
        "rl_config.rollout_resource.num_npus": 4,
        "rl_config.reward_weights": [10.0],
        "rl_config.adv_epsilon": 1e-5,
        "generate_config.max_model_len": 4096,
        "megatron_training.save_interval": 20,
        "megatron_training.enable_thinking": True,
        "megatron_training.train_epochs": 2,
        "megatron_training.seed": 3,
    }
    assert {path: run.get(path) for path in keys} == keys


def test_words_of_a_command_are_over_the_file(folder: Path) -> None:
    run = run_import(words="gconfig.n_samples=8 +total_train_steps=50 actor.eps_clip_higher=0.3")
    assert run.plans is not None
    there, here = run.plans
    for plan in (there, here):
        assert (plan.rollout_completions, plan.total_steps, plan.clip_high) == (512, 50, 0.3)
    # the rate decays over the epochs, which the run does not reach the end of
    assert run.get("megatron_training.lr_decay_iters") == 200


@pytest.mark.parametrize(
    ("changes", "expected", "keys"),
    [
        # without a spread of the group, only the batch's divides
        ({"std_level: group": "std_level: null"}, {"advantage_scale": "none"}, {"adv_epsilon": 1e-5}),
        # rewards less the mean of the other three are 4/3 as large, so epsilon is 3/4
        ({"std_level: group": "std_level: null, mean_leave1out: true"}, {"advantage_scale": "none"}, {"adv_epsilon": 7.5e-6}),
        ({"  adv_norm: {mean_level: batch, std_level: batch}\n": ""}, {"advantage": "group_norm"}, {"adv_epsilon": 1e-5}),
        ({"  adv_norm: {mean_level: batch, std_level: batch}\n": "",
          "std_level: group": "std_level: null, mean_leave1out: true"}, {"advantage": "rloo"}, {}),
        ({"max_head_offpolicyness: 2": "max_head_offpolicyness: 0"}, {}, {"trainer_mode": None}),
        ({"use_decoupled_loss: true": "use_decoupled_loss: false"}, {"old_policy": "actor", "importance_sampling": None}, {}),
        ({"use_decoupled_loss: true": "use_decoupled_loss: false", "recompute_logprob: true": "recompute_logprob: false"},
         {"old_policy": "rollout engine"}, {"old_log_probs": "rollout"}),
        ({"metric: ratio": "metric: ratio, action: clamp"}, {"importance_sampling": "token_truncate 5"}, {}),
        ({"metric: ratio": "metric: ratio, level: sequence, lower: 0.5"}, {"importance_sampling": "geometric_mask 5"},
         {"rollout_importance_sampling_threshold_min": 0.5}),
        ({"eps_clip: 0.2": "eps_clip: 0.2\n  c_clip: 3.0"}, {"clip_c": 3.0}, {}),
        ({"max_head_offpolicyness: 2": "max_head_offpolicyness: 0\n  scheduling_strategy: {type: colocation, target: actor}"},
         {}, {"trainer_mode": None, "use_integrated_worker": None, "rollout_resource.num_npus": None}),
        # the penalty has the factor of the reward: 0.5 x 10
        ({"eps_clip: 0.2": "eps_clip: 0.2\n  overlong_reward_penalty: true\n  overlong_tokens: 128\n  max_new_tokens: 512\n"
          "  overlong_penalty_factor: 0.5"}, {}, {"overlong_buffer": 128, "overlong_buffer_penalty_factor": 5.0,
          "rollout_max_tokens": 512}),
        ({"eps_clip: 0.2": "eps_clip: 0.2\n  use_lora: true\n  target_modules: [all-linear]"}, {"lora_rank": 32}, {}),
        ({"megatron:d2t2p1": "megatron:(attn:d4t1|ffn:d4e1)"}, {"tp": 1, "dp": 4}, {}),
        # the least rate of FSDP's linear schedule is 0
        ({"lr_scheduler_type: cosine": "lr_scheduler_type: linear"}, {}, {}),
    ],
)  # fmt: skip
def test_objectives_and_devices(
    folder: Path, changes: dict[str, str], expected: dict[str, object], keys: dict[str, object]
) -> None:
    run = run_import(changes)
    assert run.plans is not None
    for plan in run.plans:
        assert {name: getattr(plan, name) for name in expected} == expected
    assert {name: run.get(f"rl_config.{name}") for name in keys} == keys


@pytest.mark.parametrize(
    ("changes", "accepted", "message"),
    [
        ({"megatron:d2t2p1": "fsdp:d4"}, ("weights",), "weights would be float32 here, but is bfloat16"),
        ({"ppo_n_minibatches: 1": "ppo_n_minibatches: 4"}, ("packed_rows",), "about 64, as many as have an equal share"),
        ({"std_level: group": "std_level: batch"}, ("advantage_scale",), "batch, of centred rewards, then of tokens"),
        ({'  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}\n': ""},
         ("advantage_scale",), r"std of the batch \+ 1e-05"),
        ({'  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}\n': "",
          "  adv_norm: {mean_level: batch, std_level: batch}\n": ""}, ("reward_scale",), "scores with -0.5 added"),
        ({"reward_scaling: 10.0": "reward_scaling: 30.0"}, ("reward_scale",), "clipped at 20"),
        ({"use_decoupled_loss: true": "use_decoupled_loss: true\n  prox_logp_method: loglinear"}, ("old_policy",),
         "between engine and actor"),
        ({"kl_ctl: 0.0": "kl_ctl: 0.1", "vllm: {": "ref: {path: Qwen/Qwen3-8B, backend: 'megatron:d4'}\nvllm: {"},
         ("kl_place",), "reward, after the norm of the group, of the engine's log-probs"),
        ({"eps_clip: 0.2": "eps_clip: 0.2\n  importance_sampling_level: sequence"}, ("aggregation",),
         "ratios over the tokens that the mask keeps"),
        ({"use_decoupled_loss: true": "use_decoupled_loss: false\n  use_sapo_loss: true"}, ("aggregation",),
         "aggregation would be .*sequence.* here, but is .*token"),
        ({"metric: ratio": "metric: ratio, action: clamp, lower: 0.2"}, ("importance_sampling",), "at least 0.2"),
        ({"eps: 1e-8}": "eps: 1e-8}\n  megatron: {fp8_config: {mode: e4m3}}"}, ("weights",), "products of matrices in fp8"),
    ],
)  # fmt: skip
def test_numbers_that_differ_are_accepted_by_name(
    folder: Path, changes: dict[str, str], accepted: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        run_import(changes)
    assert len(error.value.errors) == 1
    run_import(changes, *accepted)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("mean_level: batch", "mean_level: group", "adv_norm: not available here.*mean and std of the batch are"),
        ("std_level: group", "std_level: group, mean_leave1out: true", "without the own reward std_level is null"),
        ("std_level: group", "std_level: group, std_unbiased: false", "a spread divided by n"),
        ('"${gconfig.n_samples}"', "2", "groups of 2 next to 4 responses"),
        ("mean_level: group, std_level: group", "mean_level: batch, std_level: batch", "centred on their group"),
        ("eps_clip: 0.2", "eps_clip: 0.2\n  m2_threshold: 0.04", "second moment of their ratio"),
        ("eps_clip: 0.2", "eps_clip: 0.2\n  no_such_key: 1", "actor.no_such_key: .*no option of AReaL"),
        ("seed: 3", "seed: 3\ndynamic_bs: true", "batches whose size is what is ready"),
        ("metric: ratio", "metric: kl_k2", "ratios of tokens, or their mean of a sequence"),
        ("metric: ratio", "metric: ratio, level: sequence, agg: max", "ratios of tokens, or their mean of a sequence"),
        ("kl_ctl: 0.0", "kl_ctl: 0.1", "a KL without a reference"),
        ("use_decoupled_loss: true", "use_decoupled_loss: true\n  use_sapo_loss: true", "SAPO with use_decoupled_loss"),
        ("temperature: ${gconfig.temperature}", "temperature: 1.0", "temperature 1 next to 0.9 of sampling"),
        ("consumer_batch_size: ${train_dataset.batch_size}", "consumer_batch_size: 1", "prompts next to batches of 64"),
        ("max_head_offpolicyness: 2", "max_head_offpolicyness: 2\n  scheduling_strategy: {type: colocation, target: actor}",
         "rollouts that run ahead on the devices that train"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "experts, as Qwen/Qwen3-30B-A3B has them"),
        ("megatron:d2t2p1", "deepspeed:d4", "must be fsdp or megatron or archon"),
        ("megatron:d2t2p1", "megatron:x4", "with sizes, such as fsdp:d4p1t1"),
        ("megatron:d2t2p1", "megatron:(attn:d4|ffn:all)", "with sizes, such as fsdp:d4p1t1"),
        ("openai/gsm8k", "hiyouga/geometry3k", "rows with images"),
        ("tokenizer_path: ${actor.path}", "tokenizer_path: ${absent.path}", "absent"),
        ("eps_clip: 0.2", "eps_clip: 0.2\n  use_lora: true\n  target_modules: [router]", "adapters in router"),
        ("seed: 3", "seed: [3", "own/run.yaml: while parsing"),
        ("max_head_offpolicyness: 2", "max_head_offpolicyness: 2\n  agent: {mode: online}", "prompts that a service sends"),
        ("seed: 3", "total_train_steps: 0", "total_train_steps is 0"),
        ("seed: 3", "seed: 3\nteacher: {path: own/teacher, backend: 'fsdp:d1'}", "a teacher next to rewards"),
        ("max_head_offpolicyness: 2\ngconfig: {n_samples: 4, max_new_tokens: 512",
         "max_head_offpolicyness: 2\ngconfig: {n_samples: 4, max_tokens: 600, max_new_tokens: 512", "below the sum of both"),
        ("eps_clip: 0.2", "eps_clip: 0.2\n  importance_sampling_level: sequence\n  gae_lambda: 0.9", "differ between tokens"),
        ("type: adam", "type: sgd", "sgd; AdamW"),
        ("n_samples: 4", "n_samples: 4, greedy: true", "greedy responses in training"),
        ("adv_norm: {mean_level: batch, std_level: batch}",
         "adv_norm: {mean_level: batch, std_level: batch}\n  discount: 0.9", "discounted over tokens"),
    ],
)  # fmt: skip
def test_what_is_not_available_is_named(folder: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_import({before: after})


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("areal.workflow.rlvr.RLVRWorkflow", "own.Agent", "the workflow own.Agent"),
        ("workflow_kwargs=kwargs", "workflow_kwargs=kwargs, dynamic_filter_fn='own.keep'", "groups that own.keep chooses"),
        ("GRPOConfig)\n", "GRPOConfig)\n    config.actor.eps_clip = 0.1\n", "config.actor.eps_clip is set by code"),
        ("gconfig=config.gconfig", "gconfig=config.gconfig.new(top_p=0.5)", "changes the sampling"),
        ("args, GRPOConfig)", "args, OwnConfig)", "OwnConfig, its own configuration"),
        ("enable_thinking=True", "enable_thinking=args[0]", "enable_thinking is code"),
        ("PPOTrainer", "Trainer", "train.py starts no trainer"),
        ("def main", "def main:", "is not a Python program"),
    ],
)
def test_what_a_program_changes_is_named(folder: Path, before: str, after: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_import(program=PROGRAM.replace(before, after))


def test_a_file_alone_has_the_program_next_to_it(folder: Path) -> None:
    run_import()
    settings = ImportSettings(variables=VARIABLES, rows=ROWS)
    assert import_command(PROJECTS["areal"], "own/run.yaml", settings).get("rl_config.reward_funcs") == ["accuracy"]
    Path("own/other.py").write_text(PROGRAM)
    with pytest.raises(ConfigError, match=r"there is other.py, train.py: --set PROGRAM=FILE"):
        import_command(PROJECTS["areal"], "own/run.yaml", settings)
    Path("own/run.py").write_text(PROGRAM)
    import_command(PROJECTS["areal"], "own/run.yaml", settings)
    for name in ("REWARD", "PROMPTS"):
        variables = {key: value for key, value in VARIABLES.items() if key != name}
        with pytest.raises(ConfigError, match=f"--set {name}="):
            import_command(PROJECTS["areal"], "own/run.yaml", ImportSettings(variables=variables))


def test_a_launcher_and_a_script_start_a_run(folder: Path) -> None:
    run_import()
    text = "N=4\npython3 -m areal.infra.launcher.local own/train.py --config own/run.yaml \\\n  gconfig.n_samples=$((N * 2))"
    run = import_command(PROJECTS["areal"], text, ImportSettings(variables=VARIABLES, rows=ROWS))
    assert run.get("rl_config.n_samples_per_prompt") == 8


def test_values_of_the_machine_are_asked_for_where_they_matter(folder: Path) -> None:
    with pytest.raises(ConfigError, match="say it with --set N=VALUE"):
        run_import(words="gconfig.n_samples=$N trial_name=$TRIAL")
    with pytest.raises(ConfigError, match="say it with --set N=VALUE"):
        run_import(words="actor.backend=megatron:d$N")
    run_import(words="trial_name=run-$TRIAL")
    with pytest.raises(ConfigError, match="a word of the command is NAME=VALUE"):
        run_import(words="~seed")


def test_another_reference_is_loaded(folder: Path) -> None:
    changes = {"kl_ctl: 0.0": "kl_ctl: 0.1", "vllm: {": "ref: {path: own/reference, backend: 'megatron:d4'}\nvllm: {"}
    assert run_import(changes, "kl_place").get("ref_config.load") == "own/reference"
    changes["max_head_offpolicyness: 2"] = "max_head_offpolicyness: 0\n  scheduling_strategy: {type: colocation, target: actor}"
    run = run_import(changes, "kl_place")
    assert run.get("rl_config.integrated_mode_config.ref_model_load_path") == "own/reference"


def test_a_critic_has_its_own_rate_and_clip(folder: Path) -> None:
    changes = {
        '  reward_norm: {mean_level: group, std_level: group, group_size: "${gconfig.n_samples}"}\n': "",
        "vllm: {": "critic: {path: own/critic, backend: 'megatron:d4', ppo_n_minibatches: 1, eps_clip: 0.4, is_critic: true,\n"
        "  optimizer: {type: adam, lr: 9e-6, lr_scheduler_type: constant}}\nvllm: {",
        "kl_ctl: 0.0": "kl_ctl: 0.0\n  gae_lambda: 0.95",
    }
    with pytest.raises(ConfigError, match="the value of its last token is added to the longest response"):
        run_import(changes)
    run = run_import(changes, "reward_scale", "advantage_scale")
    assert run.plans is not None
    for plan in run.plans:
        numbers = (plan.stage, plan.advantage, plan.value_clip, plan.critic_lr, plan.lam, plan.gamma)
        assert numbers == ("ray_ppo", "gae", 0.4, 9e-6, 0.95, 1.0)


SUPERVISED = """
total_train_epochs: 1
tokenizer_path: ${actor.path}
actor:
  backend: "fsdp:d8p1t1"
  path: Qwen/Qwen3-1.7B
  dtype: float32
  optimizer: {type: adam, lr: 1e-5, lr_scheduler_type: cosine, min_lr_ratio: 0.1, warmup_steps_proportion: 0.1}
train_dataset: {batch_size: 64, path: DATA, type: TYPE, max_length: 2048}
"""
TRAINERS = {"sft": "SFTTrainer", "dpo": "DPOTrainer", "rw": "RWTrainer"}


@pytest.mark.parametrize(
    ("kind", "data", "extra", "expected"),
    [
        ("sft", "openai/gsm8k", "", {"stage": "sft", "loss": "cross_entropy"}),
        ("dpo", "own/pairs", "  beta: 0.3\n  loss_type: ipo\n", {"stage": "dpo", "loss": "ipo", "beta": 0.3}),
        ("rw", "own/pairs", "", {"stage": "orm", "loss": "ranking"}),
    ],
)
def test_supervised_trainers(folder: Path, kind: str, data: str, extra: str, expected: dict[str, object]) -> None:
    text = SUPERVISED.replace("DATA", data).replace("TYPE", kind).replace("  dtype", f"{extra}  dtype")
    Path("own/run.yaml").write_text(text)
    Path("own/train.py").write_text(
        f"rows = get_custom_dataset()\nwith {TRAINERS[kind]}(config) as trainer:\n  trainer.train()"
    )
    settings = ImportSettings(variables={"DATA": "own/pairs.jsonl"}, rows=ROWS)
    run = import_command(PROJECTS["areal"], "own/run.yaml", settings)
    assert run.plans is not None
    # 6,400 rows in batches of 64; 10 of them warm up from a tenth of the rate
    shared = {"step_samples": 64, "total_steps": 100, "sequence_length": 2048, "lr_warmup_steps": 10, "lr_first": 1e-6,
              "lr_10": 1e-5, "dp": 8, "engine": "fsdp"}  # fmt: skip
    for plan in run.plans:
        numbers = {name: getattr(plan, name) for name in (*shared, *expected)}
        assert numbers == pytest.approx({**shared, **expected}) or numbers == {**shared, **expected}


def test_pairs_and_lengths_are_asked_for(folder: Path) -> None:
    Path("own/run.yaml").write_text(SUPERVISED.replace("DATA", "Anthropic/hh-rlhf").replace("TYPE", "dpo"))
    Path("own/train.py").write_text("with DPOTrainer(config) as trainer:\n  trainer.train()")
    with pytest.raises(ConfigError, match="write prompt, chosen and rejected to a file, --set DATA=FILE"):
        import_command(PROJECTS["areal"], "own/run.yaml", ImportSettings())
    Path("own/run.yaml").write_text(Path("own/run.yaml").read_text().replace(", max_length: 2048", ""))
    with pytest.raises(ConfigError, match="--set MAX_LENGTH=TOKENS"):
        import_command(PROJECTS["areal"], "own/run.yaml", ImportSettings())
