"""Run files become typed groups, or one clear sentence for each mistake."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rl.config import ConfigError, MegatronConfig, RLConfig, build_run_config, load_run_config
from mindspeed_rl.config.run_files import compose, find_project_configs
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import find_changed_keys, find_keys_without_effect

RUN = """\
defaults:
  - model: [small]

megatron_training:
  stage: ray_grpo
  model: small
  global_batch_size: 32
  lr: 1e-6
  norm_epsilon: 1e-4

actor_config:
  min-lr: 1e-7
  tensor_model_parallel_size: 2

rl_config:
  actor_resource:
    num_npus: 2

generate_config:
  infer_tensor_parallel_size: 1
"""
SMALL = "small:\n  hidden_size: 128\n  norm_epsilon: '1e-6'\n  rotary_base: 1e6\n  tensor_model_parallel_size: 4\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "run.yaml").write_text(RUN)
    (tmp_path / "model" / "small.yaml").write_text(SMALL)
    return tmp_path


def errors_of(folder: Path, *overrides: str, name: str = "run") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(name, folder, overrides)
    return caught.value.errors


def test_a_number_in_scientific_notation_is_a_number_quoted_or_not(folder: Path) -> None:
    cfg = load_run_config("run", folder, ["rl_config.clip_ratio='2e-1'"])
    assert cfg.actor_config.lr == 1e-6
    assert cfg.rl_config.clip_ratio == 0.2
    assert cfg.actor_config.rotary_base == 1_000_000 and isinstance(cfg.actor_config.rotary_base, int)


def test_a_role_takes_the_model_block_then_shared_keys_then_its_own(folder: Path) -> None:
    cfg = load_run_config("run", folder)
    assert cfg.actor_config.hidden_size == 128  # from the block
    assert cfg.actor_config.norm_epsilon == 1e-4  # shared over block
    assert cfg.actor_config.tensor_model_parallel_size == 2  # own over block
    assert cfg.megatron_training.tensor_model_parallel_size == 4  # the shared group keeps the block's
    assert cfg.ref_config == cfg.actor_config
    assert cfg.critic_config is None and cfg.reward_config is None


def test_hyphens_in_keys_count_as_underscores(folder: Path) -> None:
    assert load_run_config("run", folder).actor_config.min_lr == 1e-7
    assert load_run_config("run", folder, ["actor_config.min_lr=3e-7"]).actor_config.min_lr == 3e-7


def test_an_override_may_set_a_key_the_file_does_not_have(folder: Path) -> None:
    cfg = load_run_config("run", folder, ["rl_config.clip_ratio=0.1", "platform=cpu", "run_dir=runs/x"])
    assert (cfg.rl_config.clip_ratio, cfg.platform, cfg.run_dir) == (0.1, "cpu", "runs/x")


def test_all_mistakes_are_reported_at_once(folder: Path) -> None:
    errors = errors_of(
        folder,
        "rl_config.clip_ration=0.1",
        "actor_config.lr=fast",
        "actor_config.bf16=1",
        "platform=gpu",
        "rl_config.adv_estimator=grop_norm",
        "rl_config.kl_ctrl_type=fix",
        "generate_config.sampling_config.temprature=1",
        "extra.key=1",
        "rl_config.epochs=1.5",
        "rl_config.verifier_function=acc",
    )
    text = "\n".join(errors)
    assert len(errors) == 10
    for part in (
        "rl_config.clip_ration (value 0.1) is not a known key; the nearest known key is rl_config.clip_ratio",
        "actor_config.lr is 'fast', but must be a number",
        "actor_config.bf16 is 1, but must be true or false",
        "platform is 'gpu', but must be one of auto, npu, cpu, cuda",
        "rl_config.adv_estimator is 'grop_norm', but must be one of group_norm",
        "did you mean 'group_norm'?",
        "rl_config.kl_ctrl_type is 'fix', but must be one of fixed, adaptive",
        "the nearest known key is generate_config.sampling_config.temperature",
        "extra (value {'key': 1}) is not a known key",
        "rl_config.epochs is 1.5, but must be a whole number",
        "rl_config.verifier_function is 'acc', but must be a list, each item text",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("rl_config.use_tensorboard", "yes please", "must be true or false"),
        ("rl_config.n_samples_per_prompt", "true", "must be a whole number"),
        ("rl_config.init_kl_coef", "true", "must be a number"),
        ("rl_config.init_kl_coef", "nan", "must be a number"),
        ("rl_config.verifier_weight", "[a]", "rl_config.verifier_weight[0] is 'a', but must be a number"),
        ("megatron_training.lr_decay_style", "cosin", "did you mean 'cosine'?"),
        ("megatron_training.stage", "grpo", "did you mean 'ray_grpo'?"),
        ("rl_config.actor_resource", "8", "must be a group with the keys num_npus"),
        ("rl_config.actor_resource.num_gpus", "8", "rl_config.actor_resource.num_npus"),
        ("rl_config.epochs", "1" + 400 * "0", "must be a whole number"),
        ("rl_config.epochs", "null", "is empty, but must be a whole number"),
        ("generate_config.dtype", "float16", "must be one of bfloat16, float32"),
    ],
)
def test_a_wrong_type_or_value_names_key_value_and_what_is_right(folder: Path, key: str, value: str, sentence: str) -> None:
    (error,) = errors_of(folder, f"{key}={value}")
    assert error.startswith(key) and sentence in error


def test_a_key_of_another_project_is_answered_with_its_name_here(folder: Path) -> None:
    (error,) = errors_of(folder, "rl_config.epsilon=0.2")
    assert "the nearest known key is rl_config.clip_ratio" in error


def test_the_beginning_of_one_key_is_answered_with_that_key(folder: Path) -> None:
    (error,) = errors_of(folder, "rl_config.n_sample=4")
    assert "the nearest known key is rl_config.n_samples_per_prompt" in error


def test_a_run_file_of_the_working_directory_is_named_for_another_suffix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as raised:
        load_run_config("run.yml")
    assert "there is no run file run.yml (run files end in .yaml)" in str(raised.value)
    assert f"the nearest one is {folder / 'run.yaml'}" in str(raised.value)


def test_run_files_are_listed_with_the_folder_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text("")
    with pytest.raises(ConfigError) as raised:
        load_run_config("xxyyzz")
    assert f"there is no run file xxyyzz.yaml in {find_project_configs()}" in str(raised.value)
    assert "grpo_tiny_cpu" in str(raised.value) and str(raised.value).endswith(f"; {tmp_path} has base")
    assert " base," not in str(raised.value)


def test_a_missing_run_file_names_the_nearest_one(folder: Path) -> None:
    (error,) = errors_of(folder, name="rum")
    assert f"there is no run file rum.yaml in {folder}" in error and "run" in error
    with pytest.raises(ConfigError, match="does not exist"):
        load_run_config("run", folder / "nowhere")


def test_a_missing_model_block_names_the_nearest_one(folder: Path) -> None:
    (error,) = errors_of(folder, "model=[smal]")
    assert "model/smal.yaml does not exist" in error and "small" in error
    errors = errors_of(folder, "actor_config.model=tiny")
    assert errors == [
        "actor_config.model is 'tiny', but must be one of small; blocks are listed under defaults: [{model: [...]}]"
    ]


def test_a_run_file_may_start_from_another_and_the_later_entry_of_its_defaults_wins(folder: Path) -> None:
    (folder / "own.yaml").write_text("megatron_training: {lr: 2e-6}\nrl_config: {epochs: 2}\n")
    (folder / "last.yaml").write_text("defaults: [run, own, _self_]\nmegatron_training: {lr: 3e-6}\n")
    (folder / "first.yaml").write_text("defaults: [_self_, run, own]\nmegatron_training: {lr: 3e-6, seed: 7}\n")
    last, first = load_run_config("last", folder), load_run_config("first", folder)
    assert (last.actor_config.lr, last.rl_config.epochs, last.actor_config.hidden_size) == (3e-6, 2, 128)
    assert (first.actor_config.lr, first.megatron_training.seed) == (2e-6, 7)
    assert "lr" in last.set_keys["megatron_training"] and "norm_epsilon" in last.set_keys["megatron_training"]


def test_a_run_file_may_start_from_a_shipped_one_with_another_model(folder: Path) -> None:
    (folder / "large.yaml").write_text(
        "defaults: [grpo_qwen25_vl_7b_A2, {override model: [small]}, _self_]\n"
        "megatron_training: {model: small}\nactor_config: {model: small}\n"
    )
    cfg = load_run_config("large", folder)
    assert (cfg.actor_config.hidden_size, cfg.actor_config.model, cfg.rl_config.actor_resource.num_npus) == (128, "small", 8)
    assert compose(folder, "large", [])["model"].keys() == {"small"}


def test_null_takes_back_what_the_other_file_sets(folder: Path) -> None:
    (folder / "few.yaml").write_text("defaults: [run, _self_]\nrl_config: {ref_forward_micro_batch_size: 4}\n")
    (folder / "own.yaml").write_text("defaults: [few, _self_]\nrl_config: {ref_forward_micro_batch_size: null}\n")
    assert load_run_config("few", folder).rl_config.ref_forward_micro_batch_size == 4
    assert load_run_config("own", folder).rl_config == load_run_config("run", folder).rl_config


def test_run_files_that_start_from_each_other_are_refused_with_the_circle(folder: Path) -> None:
    (folder / "a.yaml").write_text("defaults: [run, b, _self_]\n")
    (folder / "b.yaml").write_text("defaults: [{model: [c]}, _self_]\n")
    (folder / "model" / "c.yaml").write_text("defaults: [small, /a]\n")
    (folder / "own.yaml").write_text("defaults: [a, own]\n")
    assert errors_of(folder, name="a") == [
        "defaults of a.yaml go in a circle: a.yaml -> b.yaml -> model/c.yaml -> a.yaml; remove one of these entries"
    ]
    assert "circle: a.yaml -> b.yaml" in errors_of(folder, name="own")[0]


def test_a_run_file_that_starts_from_an_unknown_one_names_the_nearest(folder: Path) -> None:
    (folder / "own.yaml").write_text("defaults: [rum, _self_]\n")
    (error,) = errors_of(folder, name="own")
    assert error == f"defaults of own.yaml: rum.yaml does not exist in {folder}; the nearest name there is run"


def test_an_unknown_key_in_a_model_block_is_an_error(folder: Path) -> None:
    (folder / "model" / "small.yaml").write_text(SMALL + "  num_layer: 2\n")
    (error,) = errors_of(folder)
    assert "model.small.num_layer (value 2)" in error and "model.small.num_layers" in error


@pytest.mark.parametrize("text", ["rl_config: [\n", "a: 1\na: 2\n", "rl_config:\n  epochs: ${nothing}\n"])
def test_yaml_that_cannot_be_read_is_one_sentence(folder: Path, text: str) -> None:
    (folder / "broken.yaml").write_text(text)
    (error,) = errors_of(folder, name="broken")
    assert "broken.yaml cannot be read" in error and "\n" not in error


def test_an_override_that_is_no_assignment_is_an_error(folder: Path) -> None:
    assert "'rl_config.epochs' is not of the form group.key=value" in errors_of(folder, "rl_config.epochs")[0]


def test_a_folder_without_model_blocks_uses_those_of_the_project(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(RUN.replace("small", "qwen25_7b"))
    assert load_run_config("mine", tmp_path).actor_config.hidden_size == 3584


def test_a_run_file_can_be_given_by_its_path(folder: Path) -> None:
    assert load_run_config(str(folder / "run.yaml")).actor_config.lr == 1e-6


def test_sampling_keys_left_out_are_neutral_but_a_missing_group_keeps_the_defaults(folder: Path) -> None:
    whole = load_run_config("run", folder).generate_config.sampling_config
    assert (whole.top_k, whole.temperature, whole.max_tokens) == (-1, 0.2, 128)
    part = load_run_config("run", folder, ["generate_config.sampling_config.max_tokens=8"]).generate_config.sampling_config
    assert (part.top_k, part.temperature, part.max_tokens) == (-1, 1.0, 8)


def test_layer_lists_may_be_text_numbers_or_lists() -> None:
    for value, text in (("16,17", "16,17"), ([16, 17], "16,17"), (5, "5"), (None, None)):
        cfg = build_run_config({"megatron_training": {"stage": "sft", "num_layer_list": value}})
        assert cfg.actor_config.num_layer_list == text


def test_a_key_without_effect_is_accepted_with_its_type_and_reported() -> None:
    cfg = build_run_config({"megatron_training": {"stage": "sft", "pad_to_multiple_of": 3, "num-workers": 2}})
    assert cfg.ignored == {"megatron_training.pad_to_multiple_of": 3, "megatron_training.num_workers": 2}
    reasons = find_keys_without_effect(draft(cfg))
    assert reasons["megatron_training.pad_to_multiple_of"] == "derived: tensor x context parallel size"
    assert "megatron_training.num_workers" not in find_changed_keys(cfg)  # 2 is its default
    for group, values in {
        "megatron_training": {"num_workers": "many"},
        "rl_config": {"vit_resource": 4},
        "generate_config": {"sampling_config": {"detokenize": 1}},
    }.items():
        with pytest.raises(ConfigError, match="must be"):
            build_run_config({"megatron_training": {}, group: values})


def test_packing_budgets_of_the_passes_follow_the_base_budget_unless_set() -> None:
    rl = RLConfig(max_packing_token_size=10240, update_max_packing_token_size=2048, dynamic_max_batch_size=3)
    assert (rl.ref_max_packing_token_size, rl.actor_max_packing_token_size) == (10240, 10240)
    assert rl.update_max_packing_token_size == 2048
    assert rl.update_dynamic_max_batch_size == 3
    assert RLConfig().actor_max_packing_token_size == 4096


def test_ms_swift_spellings_set_the_keys_the_system_reads() -> None:
    cfg = build_run_config(
        {
            "megatron_training": {"stage": "ray_grpo", "global_batch_size": 16},
            "rl_config": {
                "num_generations": 4,
                "num_iterations": 2,
                "reward_funcs": ["accuracy", "format"],
                "max_completion_length": 77,
                "beta": 0.04,
            },
            "generate_config": {},
        }
    )
    rl = cfg.rl_config
    assert (rl.n_samples_per_prompt, rl.epochs, rl.init_kl_coef) == (4, 2, 0.04)
    assert (rl.verifier_function, rl.verifier_weight) == (["accuracy", "format"], [1.0, 1.0])
    assert cfg.generate_config.sampling_config.max_tokens == 77


def test_beta_without_num_generations_is_upstreams_unused_key() -> None:
    cfg = build_run_config({"megatron_training": {"stage": "ray_grpo"}, "rl_config": {"beta": 0.5}, "generate_config": {}})
    assert cfg.rl_config.init_kl_coef == 0.01


def test_the_exception_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(["one", "two"])))
    assert error.errors == ["one", "two"] and "2 mistakes" in str(error)


def test_two_runs_do_not_share_their_lists() -> None:
    first, second = MegatronConfig(), MegatronConfig()
    first.dataset_additional_keys.append("labels")
    assert second.dataset_additional_keys == []


def test_importing_the_package_loads_no_heavy_library() -> None:
    script = (
        "import sys, mindspeed_rl.config, mindspeed_rl.cli.explain\n"
        "print(sorted({'torch', 'ray', 'hydra', 'omegaconf', 'vllm', 'numpy', 'megatron'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_a_run_file_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "grpo_tiny_cpu"):
        (tmp_path / f"{name}.yaml").write_text("megatron_training: {stage: sft, seed: 7}\n")
    for written in ("mine.yaml", "mine", "./mine.yaml", "grpo_tiny_cpu.yaml"):
        assert load_run_config(written).megatron_training.seed == 7, written
    assert load_run_config("grpo_tiny_cpu").stage == "ray_grpo"  # a bare name is a shipped one first


@pytest.mark.parametrize("asked", [False, True])
def test_rl_has_dropout_in_no_role_unless_it_is_asked_for(asked: bool) -> None:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.2, "lora_dropout": 0.3}
    training = {"stage": "ray_grpo", **dropout}
    tree = {"megatron_training": training, "critic_config": {}, "rl_config": {"dropout_in_update": asked}}
    cfg = build_run_config(tree)
    for role in (cfg.actor_config, cfg.ref_config, cfg.critic_config):
        assert {name: getattr(role, name) for name in dropout} == (dropout if asked else dict.fromkeys(dropout, 0.0))
    assert cfg.ref_config is cfg.actor_config
    supervised = build_run_config({"megatron_training": {"stage": "sft", **dropout}})
    assert supervised.actor_config.hidden_dropout == 0.2
