"""Log-probs of the rollout engine are of one distribution under every setting: the full one at the request's temperature."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from vllm_program import run_program

from mindspeed_rl.adaptors import vllm_log_probs


def test_log_probs_are_those_of_the_full_tempered_distribution_under_every_setting(tmp_path: Path) -> None:
    result = run_program(Path(__file__).with_name("sampling_grid.py"), tmp_path)
    assert len(result["exact"]) == 6 * 5 * 5
    assert {setting: error for setting, error in result["exact"].items() if error > 1e-5} == {}
    assert {setting: error for setting, error in result["trainer"].items() if error > 1e-5} == {}
    # the model is far enough from even for another temperature to show
    assert result["at temperature 1"] > 0.01


def test_a_model_runner_with_another_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setattr(vllm_log_probs, "_applied", False)
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER: 1 .* set it to 0"):
        vllm_log_probs.apply()
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_a_text_ends_a_response_and_a_form_shapes_it_while_log_probs_stay_those_of_all_tokens(tmp_path: Path) -> None:
    result = run_program(Path(__file__).with_name("shaped_sampling.py"), tmp_path)
    for text in result["stop"]["texts"]:
        body = text.removesuffix("</s>")
        # the text that ends it is its last, and is nowhere before
        assert not set("a7") & set(body[:-1]) and (body[-1:] in ("a", "7") or text.endswith("</s>")), text
    assert any(text.endswith(("a", "7")) for text in result["stop"]["texts"]) and not any(result["stop"]["truncated"])
    assert all(re.fullmatch(r"[0-9]{3}\.[0-9](</s>)?", text) for text in result["regex"]["texts"]), result["regex"]["texts"]
    assert {text.removesuffix("</s>") for text in result["choice"]["texts"]} <= {"yes", "no"}
    # in the four steps of its letters, and one of its end, all requests share each step
    assert result["together"] == {"compiled here": [True] * 4, "ends": [0, 0, 0, 0, 4], "error": 0.0}
    assert {name: report["error"] for name, report in result.items() if report["error"] > 1e-5} == {}
