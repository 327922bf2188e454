"""Every key of a role is read by its training engine, refused, or listed as without effect; the engine is named."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import pytest
from published import MODELS
from sample_runs import prompt_level

import mindspeed_rl
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.config.keys.megatron import ENGINES
from mindspeed_rl.config.keys.schema import list_keys
from mindspeed_rl.models import architecture_for, find_architecture
from mindspeed_rl.run.explain.effects import find_keys_without_effect
from mindspeed_rl.run.rules import training_engine_rules as rules
from mindspeed_rl.run.rules.validation import validate

#: keys of data, stages and losses, which are the same with every engine
_SHARED_GROUPS = ("_DataKeys", "_PreferenceKeys")
#: keys that the engine of transformers' modules reads
_READ = set(
    "engine num_npus lr lr_decay_style lr_decay_iters lr_warmup_fraction lr_warmup_iters lr_warmup_init min_lr weight_decay "
    "clip_grad adam_beta1 adam_beta2 adam_eps no_check_for_nan_in_loss_and_grad load save save_interval save_hf keep_last "
    "ckpt_format load_iteration load_previous sigterm_grace_s finetune no_load_optim no_load_rng no_save_optim no_save_rng "
    "pretrained_checkpoint base_model load_checkpoint_loosely swap_optimizer optimizer_offload_fraction optimizer_offload_path "
    "optimizer_state_dtype offload_gradients trust_remote_code loss_chunk_size loss_vocab_chunk_size "
    "fp32_lm_head stage model global_batch_size micro_batch_size train_iters train_epochs seq_length seed bf16 "
    "npu_deterministic threads_per_worker "
    "deterministic ai_framework log_interval device_hour_price eval_iters eval_interval skip_train "
    "eval_max_tokens eval_metric eval_n_samples eval_patience eval_sets eval_target eval_temperature eval_top_k eval_top_p "
    "eval_verifier keep_best context_parallel_size context_parallel_algo fsdp_size "
    "lora_target_modules lora_r lora_alpha lora_dropout lora_ckpt_filter freeze_vit freeze_aligner vit_lr aligner_lr "
    "optimizer muon_momentum muon_use_nesterov muon_num_ns_steps muon_scale_mode muon_extra_scale_factor muon_split_qkv".split()
)


def _list_group(name: str) -> set[str]:
    (owner,) = [base for base in MegatronConfig.__mro__ if base.__name__ == name]
    return set(owner.__dict__["__annotations__"])


def test_every_key_of_a_role_is_read_refused_or_without_effect() -> None:
    limits = rules._LIMITS["fsdp"]
    shape = {name for name in _list_group("ModelKeys") if name not in {*limits.role_keys, *limits.without_effect}}
    # a model block describes the model, and is compared with config.json whatever the engine
    known = [_READ, set(limits.role_keys), set(limits.without_effect) - {"padded_vocab_size"}, shape]
    known += [_list_group(group) for group in _SHARED_GROUPS]
    keys = sorted(name for names in known for name in names)
    assert keys == sorted(list_keys(MegatronConfig))


_FSDP = {"engine": "fsdp", "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
#: group, key, value
_REFUSED: list[tuple[str, str, Any]] = [
    ("actor_config", "tensor_model_parallel_size", 2),
    ("actor_config", "recompute_granularity", "selective"),
    ("actor_config", "async_save", True),
    ("actor_config", "mtp_num_layers", 1),
    ("actor_config", "grad_reduce_in_fp32", False),
    ("actor_config", "stream_ref_weights", True),
    ("rl_config", "opponents", {"roles": ["player"]}),
    ("rl_config", "role_adapters", {"player": "own"}),
    ("msprobe_config", "msprobe", True),
]


def _find_messages(**groups: Any) -> list[str]:
    return [violation.message for violation in validate(prompt_level(**groups))]


@pytest.mark.parametrize(("group", "key", "value"), _REFUSED)
def test_what_the_engine_lacks_is_refused_with_its_name(group: str, key: str, value: Any) -> None:
    (message,) = [text for text in _find_messages(megatron_training=_FSDP, **{group: {key: value}}) if "engine: fsdp" in text]
    assert message.startswith(f"{group}.{key}")
    megatron = _FSDP | {"engine": "megatron"}
    assert not any("engine:" in text for text in _find_messages(megatron_training=megatron, **{group: {key: value}}))


def test_a_sound_run_breaks_no_rule() -> None:
    assert _find_messages(megatron_training=_FSDP) == []
    assert _find_messages(megatron_training=_FSDP | {"context_parallel_size": 2, "fsdp_size": 2}) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"context_parallel_size": 2, "context_parallel_algo": "megatron_cp_algo"},
            "exchanges tokens for heads, and has no ring",
        ),
        ({"fsdp_size": 3}, "actor_config.fsdp_size (3) must divide the 16 devices of the role into equal groups"),
        ({"fsdp_size": 0}, "actor_config.fsdp_size (0) must divide the 16 devices"),
        ({"context_parallel_size": 8, "num_attention_heads": 28}, "num_attention_heads (28) must be divisible by"),
    ],
)
def test_groups_of_devices_are_checked_before_anything_starts(keys: dict[str, Any], words: str) -> None:
    assert any(words in text for text in _find_messages(megatron_training=_FSDP | keys)), words


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (_FSDP | {"optimizer_offload_fraction": 0.5, "optimizer": "muon"}, "it keeps momentum on the device"),
        (_FSDP | {"optimizer_state_dtype": "bfloat16", "optimizer": "muon"}, "it keeps momentum on the device"),
        (_FSDP | {"optimizer_state_dtype": "bfloat16", "optimizer_offload_fraction": 1}, "off the device are in float32"),
        (_FSDP | {"swap_optimizer": True, "optimizer_offload_fraction": 1}, "it brings all states to the device"),
        (_FSDP | {"offload_gradients": True, "optimizer": "muon"}, "it joins gradients on the device"),
        ({"offload_gradients": True}, "its gradients are in Megatron's buffers on the device"),
        ({"trust_remote_code": True}, "its layers are Megatron's"),
        ({"optimizer_state_dtype": "bfloat16"}, "would need Transformer Engine's optimizer"),
        (_FSDP | {"optimizer_state_dtype": "fp8"}, "optimizer_state_dtype"),
    ],
)
def test_states_of_the_optimizer_are_checked_before_anything_starts(keys: dict[str, Any], words: str) -> None:
    try:
        found = _find_messages(megatron_training=keys)
    except ValueError as error:
        found = [str(error)]
    assert any(words in text for text in found), found


def test_layers_that_compute_whole_rows_are_refused_with_divided_tokens() -> None:
    shape = architecture_for(MODELS["Qwen3-30B-A3B"]).read_model_config(MODELS["Qwen3-30B-A3B"])
    config = MegatronConfig(engine="fsdp", context_parallel_size=2)
    rules.check_model_form(config, find_architecture("qwen3_moe"), shape)
    with pytest.raises(
        ValueError, match="^context_parallel_size: 2 with engine: fsdp .* layers of qwen3_next compute whole rows"
    ):
        rules.check_model_form(config, find_architecture("qwen3_next"), shape)


def test_adapters_of_experts_are_refused() -> None:
    shape = architecture_for(MODELS["Qwen3-30B-A3B"]).read_model_config(MODELS["Qwen3-30B-A3B"])
    for targets, is_refused in ((["linear_qkv"], False), (["linear_qkv", "linear_fc2"], True)):
        config = MegatronConfig(engine="fsdp", lora_target_modules=targets)
        with pytest.raises(ValueError, match="layers of experts") if is_refused else contextlib.nullcontext():
            rules.check_model_form(config, find_architecture("qwen3_moe"), shape)


def test_only_the_role_with_the_engine_is_limited() -> None:
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    found = _find_messages(ref_config=layout | {"engine": "fsdp", "recompute_granularity": "selective"})
    (message,) = [text for text in found if "engine:" in text]
    assert message.startswith("ref_config.recompute_granularity (selective) cannot be used with engine: fsdp")


def test_what_all_roles_share_is_limited_by_the_engine_of_any() -> None:
    layout = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    found = _find_messages(ref_config=layout | {"engine": "fsdp"}, rl_config={"opponents": {"roles": ["player"]}})
    assert [text.partition(" ")[0] for text in found if "engine: fsdp" in text] == ["rl_config.opponents.roles"]


def test_explain_lists_what_has_no_effect() -> None:
    keys = _FSDP | {"use_distributed_optimizer": True, "overlap_grad_reduce": True}
    reasons = find_keys_without_effect(prompt_level(megatron_training=keys))
    for name in ("use_distributed_optimizer", "overlap_grad_reduce"):
        assert reasons[f"megatron_training.{name}"].startswith("engine is fsdp: ")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mimo", "does not compute mimo: transformers has no class of its own"),
        ("ernie4_5_moe", "ernie4_5_moe keeps some in float32, such as mlp.gate.weight; set bf16: false"),
        *((name, None) for name in ("qwen3_moe", "deepseek_v3", "deepseek_v32", "qwen3_next", "gpt_oss", "llama")),
    ],
)
def test_families_that_the_engine_does_not_compute_are_refused_with_the_reason(name: str, words: str | None) -> None:
    architecture, shape = (
        find_architecture(name),
        architecture_for(MODELS["Qwen3-30B-A3B"]).read_model_config(MODELS["Qwen3-30B-A3B"]),
    )
    rules.check_model_form(MegatronConfig(), architecture, shape)
    fsdp = MegatronConfig(engine="fsdp", bf16=True)
    if words is None:
        rules.check_model_form(fsdp, architecture, shape)
        return
    with pytest.raises(ValueError, match=words):
        rules.check_model_form(fsdp, architecture, shape)


def test_models_of_images_are_computed() -> None:
    architecture = architecture_for(MODELS["Qwen2.5-VL-7B-Instruct"])
    shape = architecture.read_model_config(MODELS["Qwen2.5-VL-7B-Instruct"])
    rules.check_model_form(MegatronConfig(engine="fsdp", context_parallel_size=2, bf16=True), architecture, shape)


def test_commands_that_know_only_megatron_refuse_the_other_engine() -> None:
    for command in ("diff", "npu-cost"):
        rules.check_command(MegatronConfig(), "actor_config", command)
        with pytest.raises(ValueError, match=f"^actor_config.engine: fsdp: mindspeed-rl {command} knows"):
            rules.check_command(MegatronConfig(engine="fsdp"), "actor_config", command)


#: modules in which "engine" is something else: that of a command or of a rollout, or the one that an import comes from
_OTHER_ENGINES = ("importers/", "inference/", "cli/inference_options.py")


def test_no_module_asks_for_the_name_of_a_training_engine() -> None:
    package = Path(mindspeed_rl.__file__).parent
    paths = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    asked = re.compile(rf"""[!=]= ?["']({"|".join(ENGINES)})["']""")
    assert asked.search('if config.engine == "fsdp":') and not asked.search('engine="fsdp"')
    read = (name for name in paths if not name.startswith(_OTHER_ENGINES))
    assert [name for name in read if asked.search(paths[name].read_text())] == []


def test_the_common_value_of_a_key_is_one_that_each_engine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = rules._KeyLimit
    limits = {
        "first": rules._EngineLimits({"recompute_granularity": limit(("full", None), ""), "mtp_num_layers": limit((0,), "")}),
        "second": rules._EngineLimits({"recompute_granularity": limit((None, "selective"), "")}),
        "third": rules._EngineLimits({"recompute_granularity": limit(("selective",), "")}),
    }
    monkeypatch.setattr(rules, "_LIMITS", limits)
    assert rules.list_common_values(["first", "second"]) == {"recompute_granularity": None, "mtp_num_layers": 0}
    assert rules.list_common_values(["second", "first"]) == {"recompute_granularity": None, "mtp_num_layers": 0}
    assert rules.list_common_values(["third", "second"]) == {"recompute_granularity": "selective"}
    with pytest.raises(ValueError, match="recompute_granularity: no value of it is taken by each of the engines first, third"):
        rules.list_common_values(["first", "third"])
