"""Text models of Qwen3.5 where vLLM has their classes for images alone."""

from __future__ import annotations

from typing import Any

from mindspeed_rl.adaptors.vllm_hybrid_texts import override_config

TEXT: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
SECTIONS = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}


def test_a_text_without_axes_gets_all_its_angles_on_the_first_one() -> None:
    rope = override_config(TEXT)["rope_parameters"]
    assert rope == {**TEXT["rope_parameters"], "mrope_section": [32, 0, 0], "mrope_interleaved": False}


def test_sections_that_are_there_stay_and_so_does_every_other_model() -> None:
    assert override_config(TEXT | {"rope_parameters": TEXT["rope_parameters"] | SECTIONS}) == {}
    assert override_config(TEXT | {"architectures": ["Qwen3_5ForConditionalGeneration"]}) == {}
    assert override_config({"head_dim": 64}) == {}
