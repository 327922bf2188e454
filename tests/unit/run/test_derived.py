"""Keys that are not written follow from the rest of the run file, are shown, and never touch what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.cli.explain import main
from mindspeed_rl.config import build_run_config
from mindspeed_rl.config.model_metadata import read_model_metadata
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.effects import describe_learning_rate, find_warnings
from mindspeed_rl.run.explain.plan_page import explain, render
from mindspeed_rl.run.rules.validation import unavailable, validate


def run(
    *,
    devices: int = 2,
    generate: dict[str, Any] | None = None,
    platform: str = "cpu",
    passes: dict[str, Any] | None = None,
    **actor: Any,
) -> Run:
    """16 prompts of 8 responses, prompts of at most 32 tokens and responses of at most 16; nothing else is written."""
    training = {"stage": "ray_grpo", "global_batch_size": 16, "micro_batch_size": 16, "bf16": False, **actor}
    rl = {
        "actor_resource": {"num_npus": devices},
        "mini_batch_size": 16,
        "n_samples_per_prompt": 8,
        "max_prompt_length": 32,
        **(passes or {}),
    }
    keys = {"dtype": "float32", "sampling_config": {"max_tokens": 16}, **(generate or {})}
    tree = {"platform": platform, "megatron_training": training, "rl_config": rl, "generate_config": keys}
    return draft(build_run_config(tree, config_name="test"))


def model(folder: Path, **config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def rollout(run: Run) -> tuple[int, int, int]:
    generate = run.generate
    return generate.infer_tensor_parallel_size, generate.max_model_len, generate.max_num_seqs


def test_a_short_run_file_gets_a_rollout_engine_that_fits() -> None:
    assert rollout(run()) == (1, 48, 32)  # two replicas with 64 responses each, 32 at a time on a CPU
    assert rollout(run(platform="npu")) == (1, 48, 64)
    assert rollout(run(devices=4, tensor_model_parallel_size=2, platform="npu")) == (2, 48, 64)
    assert rollout(run(devices=8, pipeline_model_parallel_size=4, platform="npu")) == (4, 48, 64)
    assert rollout(run(seq_length=64))[1] == 64


def test_what_is_written_stays() -> None:
    passes = {"use_remove_padding": False, "use_prefix_grouper": False}
    written = run(generate={"infer_tensor_parallel_size": 2, "max_model_len": 2048, "max_num_seqs": 1}, passes=passes)
    assert rollout(written) == (2, 2048, 1) and written.config.derived == {}


_RING = {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"}
_ULYSSES = {"context_parallel_size": 2, "context_parallel_algo": "ulysses_cp_algo"}


@pytest.mark.parametrize(
    ("passes", "actor", "packs", "shares"),
    [
        ({}, {}, True, True),
        ({"use_remove_padding": True}, {}, True, True),
        ({"use_remove_padding": False}, {}, False, False),
        ({"use_prefix_grouper": True}, {}, True, True),
        ({"use_prefix_grouper": False}, {}, True, False),
        ({"use_dynamic_bsz": True}, {}, True, True),
        ({}, _RING, True, False),
        ({}, _ULYSSES, True, True),
        ({"use_dynamic_bsz": True}, _ULYSSES | {"dynamic_context_parallel": True}, True, False),
        ({}, {"mtp_num_layers": 1}, True, False),
        ({"dropout_in_update": True}, {"hidden_dropout": 0.1}, True, False),
        ({"n_samples_per_prompt": 1, "adv_estimator": "reinforce_plus_plus"}, {}, True, False),
        ({}, {"engine": "fsdp"}, True, True),
    ],
)
def test_padding_and_shared_prompts_are_computed_only_where_a_run_asks_or_cannot_do_without(
    passes: dict[str, Any], actor: dict[str, Any], packs: bool, shares: bool
) -> None:
    drafted = run(passes=passes, **actor)
    assert (drafted.rl.use_remove_padding, drafted.rl.use_prefix_grouper) == (packs, shares)
    chosen = {name for name in ("use_remove_padding", "use_prefix_grouper") if name not in passes}
    assert {f"rl_config.{name}" for name in chosen} == {name for name in drafted.config.derived if "use_" in name}
    broken = {violation.rule for violation in validate(drafted)}
    assert not broken & {"dynamic_context", "prefixes_are_whole", "prediction_prefixes", "groups_or_prefixes"}


def test_a_loss_that_compares_the_samples_of_a_prompt_and_a_token_budget_leave_prompts_unshared() -> None:
    assert run(passes={"loss_type": "real"}).rl.use_prefix_grouper is True
    drafted = run(passes={"loss_type": "real", "use_dynamic_bsz": True})
    assert drafted.rl.use_prefix_grouper is False
    assert "compares the responses of a prompt" in render(explain(drafted))


def test_heads_bound_the_split_of_a_replica(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", num_attention_heads=14, num_key_value_heads=2)
    split = run(devices=4, tensor_model_parallel_size=4, tokenizer_name_or_path=folder)
    assert rollout(split)[0] == 2
    written = run(devices=4, generate={"infer_tensor_parallel_size": 4}, tokenizer_name_or_path=folder)
    assert "num_attention_heads (14) must be divisible by generate_config.infer_tensor_parallel_size (4)" in str(
        [str(violation) for violation in validate(written)]
    )


@pytest.mark.parametrize(
    ("config", "tokenizer", "longest"),
    [
        ({"max_position_embeddings": 512}, None, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None, 2048),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, 512),
        ({"max_position_embeddings": 512}, {"model_max_length": 256}, 256),
        ({"max_position_embeddings": 512}, {"model_max_length": 10**30}, 512),
        ({}, None, None),
    ],
)
def test_the_model_s_longest_sequence_is_read_from_its_files(
    tmp_path: Path, config: dict[str, Any], tokenizer: dict[str, Any] | None, longest: int | None
) -> None:
    folder = model(tmp_path / "m", num_attention_heads=8, **config)
    if tokenizer is not None:
        (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    facts = read_model_metadata(run(load=folder).config.actor_config)
    assert facts is not None and facts.folder == facts.shape.source == folder
    assert (facts.shape.num_heads, facts.shape.num_kv_heads, facts.shape.max_length) == (8, 8, longest)


def test_a_length_beyond_the_model_is_one_error_with_its_cause(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", max_position_embeddings=40)
    (derived,) = validate(run(load=folder))
    assert "max_model_len (48, from max_prompt_length 32 + max_tokens 16) must be at most 40" in str(derived)
    (written,) = validate(run(load=model(tmp_path / "m", max_position_embeddings=64), generate={"max_model_len": 2048}))
    assert "max_model_len (2048) must be at most 64" in str(written)
    assert [dict(option) for option in written.suggestions] == [{"generate_config.max_model_len": 64}]


def test_explain_shows_what_was_derived_and_what_it_warns_of() -> None:
    report = explain(run(lr=1e-3, train_iters=100))
    assert report["derived"]["generate_config.max_model_len"] == {"value": 48, "from": "max_prompt_length 32 + max_tokens 16"}
    assert len(report["warnings"]) == 2 and "actor_config.save is not set" in report["warnings"][0]
    text = render(report)
    assert "Derived" in text and "Warnings" in text and "linear from 0.001 to 0 at iteration 100" in text


def test_a_learning_rate_that_falls_to_0_by_default_is_warned_of() -> None:
    assert any("falls linearly from 0.001 to 0" in line for line in find_warnings(run(lr=1e-3, save="x")))
    for keys in ({"lr_decay_style": "linear"}, {"lr_decay_style": "constant"}, {"min_lr": 0.0}):
        assert find_warnings(run(lr=1e-3, save="x", **keys)) == []
    assert describe_learning_rate(run(lr=1e-3, lr_decay_style="constant").config) == "constant 0.001"
    warm = run(lr=1e-3, lr_decay_style="cosine", min_lr=1e-4, train_iters=50, lr_warmup_iters=5)
    expected = "cosine from 0.001 to 0.0001 at iteration 50, after a warm-up from 0 over 5 iteration(s)"
    assert describe_learning_rate(warm.config) == expected


def test_a_rollout_that_takes_many_rounds_is_warned_of() -> None:
    keys = {"save": "x", "lr_decay_style": "constant"}
    (warning,) = find_warnings(run(generate={"max_num_seqs": 1}, **keys))
    assert "max_num_seqs is 1: a replica generates its 64 responses 1 at a time" in warning
    assert find_warnings(run(generate={"max_num_seqs": 32}, **keys)) == find_warnings(run(**keys)) == []


def test_a_file_that_would_be_refused_is_not_called_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.yaml").write_text(
        "platform: cpu\nactor_config: {}\n"
        "megatron_training: {stage: ray_grpo, global_batch_size: 16, micro_batch_size: 16, bf16: false}\n"
        "rl_config: {actor_resource: {num_npus: 2}, mini_batch_size: 16, n_samples_per_prompt: 4,\n"
        "  verifier_function: [exact_match]}\n"
        "generate_config: {dtype: float32}\n"
    )
    words = ["--config-name", "short", "--config-dir", str(tmp_path)]
    assert main(words) == 0
    assert capsys.readouterr().out.strip().endswith("not ready: 4 key(s) are still needed; see above")
    assert main([*words, "rl_config.verifier_function=[exact_mach]"]) == 2
    output = capsys.readouterr().out
    assert "unknown reward function 'exact_mach'; did you mean 'exact_match'?" in output and "not ready" not in output
    needed = [f"megatron_training.{name}=x" for name in ("data_path", "tokenizer_name_or_path")]
    assert main([*words, *needed, "megatron_training.train_iters=3", "megatron_training.lr=1e-3"]) == 0
    assert capsys.readouterr().out.strip().endswith("valid")


def algorithm(stage: str = "ray_grpo", **rl: Any) -> Run:
    """The same run with other keys of its algorithm; PPO has a critic."""
    tree: dict[str, Any] = {
        "platform": "cpu",
        "megatron_training": {"stage": stage, "global_batch_size": 16, "micro_batch_size": 16, "bf16": False},
        "critic_config": {"lr": 1e-4},
        "rl_config": {"actor_resource": {"num_npus": 1}, "mini_batch_size": 4, "n_samples_per_prompt": 8, **rl},
        "generate_config": {"dtype": "float32", "sampling_config": {"max_tokens": 16}},
    }
    return draft(build_run_config(tree, config_name="test"))


def test_ppo_trains_a_critic_unless_that_is_contradicted() -> None:
    objective = algorithm("ray_ppo").objective
    assert objective is not None and objective.adv_estimator == "gae" and objective.has_critic
    (violation,) = validate(algorithm("ray_ppo", adv_estimator="rloo"))
    assert violation.rule == "ppo_critic" and "adv_estimator rloo" in str(violation)
    assert violation.suggestions == ({"rl_config.adv_estimator": "gae"}, {"megatron_training.stage": "ray_grpo"})
    other = algorithm().objective
    assert other is not None and other.adv_estimator == "group_norm"


def test_a_clip_ratio_of_one_side_acts_where_it_is_set() -> None:
    def clips(**rl: Any) -> tuple[float, float]:
        objective = algorithm(**rl).objective
        assert objective is not None
        return objective.clip_ratio_low, objective.clip_ratio_high

    assert clips() == (0.2, 0.2)
    assert clips(clip_ratio_high=0.28) == (0.2, 0.28)
    assert clips(clip_ratio_low=0.1, clip_ratio=0.15) == (0.1, 0.15)
    assert clips(clip_ratio_low=0.1, clip_ratio_high=0.3) == (0.1, 0.3)
    assert clips(clip_ratio_high=0.28, clip_higher_enable=False) == (0.2, 0.2)
    off = find_warnings(algorithm(clip_ratio_high=0.28, clip_higher_enable=False))
    assert "rl_config.clip_ratio_high: no effect in this run, because clip_higher_enable is false" in off


def test_a_filter_of_groups_works_with_the_rewards_and_sizes_of_the_run() -> None:
    def filter_keys(**rl: Any) -> tuple[object, ...]:
        filtering = algorithm(filter_groups_enable=True, **rl)
        assert validate(filtering) == []
        keys = filtering.rl
        return keys.filter_groups_metric, keys.filter_groups_train_batch_size, keys.filter_groups_max_batches

    several = {"verifier_function": ["format", "acc"], "verifier_weight": [1.0, 1.0]}
    assert filter_keys(verifier_function=["gsm8k"]) == ("gsm8k", 16, 10)
    assert filter_keys(**several) == ("acc", 16, 10)
    assert filter_keys(**several, filter_groups_metric="format", filter_groups_train_batch_size=4) == ("format", 4, 10)
    assert filter_keys(verifier_function=["gsm8k"], filter_groups_max_batches=3) == ("gsm8k", 16, 3)
    page = render(explain(algorithm(filter_groups_enable=True, verifier_function=["gsm8k"])))
    assert "gsm8k  from the first reward function" in page


def test_a_key_that_is_merely_missing_is_no_missing_feature() -> None:
    (sentence,) = unavailable(algorithm(trainer_mode="async"))
    assert "rl_config.rollout_resource" in sentence and "not available" not in sentence
