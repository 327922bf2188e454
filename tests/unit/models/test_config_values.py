"""Any config.json gives a model config, or one sentence that names the key; never another error, never slowly."""

from __future__ import annotations

import time

import pytest
import tiny_models

from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.models import architecture_for
from mindspeed_rl.models.model_config import LinearAttention, ModelConfig

VALUES = [None, 0, -1, 1, 0.5, 1e9, 10**9, 10**12, float("nan"), float("inf"), True, False, "", "x", [], [1], {"a": 1}]
MORE_KEYS = ("rope_scaling", "rope_theta", "mlp_only_layers", "use_sliding_window", "head_dim", "max_window_layers")


@pytest.mark.parametrize("name", tiny_models.CONFIGS)
def test_every_key_with_every_kind_of_value_is_read_or_refused_in_one_line(name: str) -> None:
    config = tiny_models.hf_config_of(tiny_models.make_hf_model(name))
    rope = config.get("rope_parameters") or {}
    changed = [{key: value} for key in (*config, *MORE_KEYS) for value in VALUES]
    changed += [{"rope_parameters": {**rope, key: value}} for key in rope for value in VALUES]
    changed += [{"use_sliding_window": True, "layer_types": value} for value in VALUES]
    for change in changed:
        start = time.process_time()
        try:
            architecture = architecture_for({**config, **change})
            model_config = architecture.read_model_config({**config, **change})
            assert (
                isinstance(model_config, ModelConfig)
                and model_config.num_layers == config["num_hidden_layers"]
                or "num_" in str(change)
            )
            architecture.weight_ops(model_config)
        except ValueError as error:
            assert "\n" not in str(error), change
        assert time.process_time() - start < 2, change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads 0; expected a whole number from 1 to"),
        ({"rms_norm_eps": None}, "rms_norm_eps null; expected a number above 0"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers 1000000000.0; expected a whole number from 1 to 10000"),
        ({"num_hidden_layers": 10**400}, "expected a whole number from 1 to 10000"),
        ({"rms_norm_eps": 10**400}, "expected a number above 0"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings "false"; expected true or false'),
        ({"num_attention_heads": 128, "head_dim": None}, "num_attention_heads 128, more than its hidden_size 64"),
        ({"vocab_size": "128"}, 'vocab_size "128"; expected a whole number'),
        ({"rope_scaling": [1]}, r"rope_scaling \[1\]; expected a JSON object"),
        ({"rope_scaling": {"rope_type": "linear"}}, "no 'factor' among the settings of its rope type"),
        ({"architectures": [1]}, r"architectures \[1\]; expected a list of class names"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_its_key(change: dict, message: str) -> None:
    config = {**tiny_models.hf_config_of(tiny_models.make_hf_model("llama")), **change}
    with pytest.raises(ValueError, match=message):
        architecture_for(config).read_model_config(config)


def test_a_vision_model_around_a_supported_text_model_says_how_to_get_the_text_model() -> None:
    text = tiny_models.hf_config_of(tiny_models.make_hf_model("qwen3.5"))
    config = {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "text_config": text}
    with pytest.raises(ValueError, match=r"its text model is supported: save it with AutoModelForCausalLM"):
        architecture_for(config)


def test_states_of_drafts_are_counted() -> None:
    """Two layers of 4 heads x 64 x 64 numbers in float32, and 3 tokens of 512 channels in bfloat16."""
    linear = LinearAttention((0, 2), 2, 4, 64, 64, 4)
    assert linear.count_state_bytes(2) == 2 * (4 * 64 * 64 * 4 + 3 * 512 * 2)
    # with two drafts three states each, whose convolution reaches back two tokens more; half of it on each of two ranks
    assert linear.count_state_bytes(2, 2, 2) == 2 * 3 * (4 * 64 * 64 * 4 + 5 * 512 * 2) // 2
    drafts = {None: 0, "suffix": 24, "ngram": 3, "mtp": 1}
    for method, count in drafts.items():
        given = {"method": method} | ({"num_speculative_tokens": 3} if method == "ngram" else {})
        config = GenerateConfig(speculative_config=None if method is None else given)
        assert (config.num_draft_tokens, config.draft_method) == (count, method or "")
    assert GenerateConfig(speculative_config={"method": "mtp", "num_speculative_tokens": None}).num_draft_tokens == 1
