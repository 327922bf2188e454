"""Text models of Qwen3.5 where vLLM has their classes for images alone."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.adaptors.vllm_hybrid_texts import give_axes, override_config

TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SECTIONS = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
AXES = {"mrope_section": [32, 0, 0], "mrope_interleaved": False}


def test_a_text_without_axes_gets_all_its_angles_on_the_first_one() -> None:
    assert give_axes(TEXT) == {"rope_parameters": {**TEXT["rope_parameters"], **AXES}}


def test_scaled_angles_of_older_files_stay_scaled() -> None:
    scaled = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = give_axes({"head_dim": 256, "rope_theta": 1e7, "rope_scaling": scaled})["rope_parameters"]
    kept = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e7}
    assert rope == {**kept, "partial_rotary_factor": 0.25, **AXES}


def test_sections_that_are_there_stay_and_so_does_every_other_model() -> None:
    assert give_axes(TEXT | {"rope_parameters": TEXT["rope_parameters"] | SECTIONS}) == {}
    assert override_config(TEXT | {"architectures": ["Qwen3_5ForConditionalGeneration"]}) == {}
    assert override_config({"head_dim": 64}) == {}


def test_a_class_of_vllms_own_is_left_as_it_is() -> None:
    # this environment's release has the text models in its registry
    assert override_config(TEXT) == {}
