"""Training as a service on real engines: numbers of transformers, models that do not depend on each other, exact resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from patience import patient
from test_lora_rl import save_model

PROGRAM = Path(__file__).with_name("service_program.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("service")
    save_model(folder / "model")
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder / "model"), str(folder / "work")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_passes_have_the_log_probs_losses_and_gradients_of_transformers_with_peft(seen: dict[str, Any]) -> None:
    # float32 against float64; gradients of two calls and of weights of any size and sign, relative to the largest of a matrix
    numbers = seen["numbers"]
    assert numbers["log_probs"] < 1e-5 and numbers["loss"] < 1e-4 and numbers["gradients"] < 1e-4
    assert numbers["forward_only"] == 0.0


def test_a_model_has_the_same_bits_alone_and_with_three_others_in_any_order(seen: dict[str, Any]) -> None:
    # 16 passes of four models, twice: at least some of them waited together
    assert seen["company"]["differing"] == [] and seen["company"]["joined"][0] == 0 < seen["company"]["joined"][1]


def test_a_loaded_model_goes_on_exactly_and_without_moments_as_a_new_one(seen: dict[str, Any]) -> None:
    state = seen["state"]
    assert state["resumes"] and state["is_fresh"] and state["samples"] and state["lives"]
    assert state["files"] == [
        "full/adapter",
        "full/adapter/adapter_config.json",
        "full/adapter/adapter_model.safetensors",
        "full/state.json",
        "full/state.safetensors",
    ]
    assert state["refused_leaves_nothing"] == ["full", "weights"]


def test_calls_that_cannot_be_done_are_refused_in_a_sentence(seen: dict[str, Any]) -> None:
    expected = [
        "exists already",
        "was saved without the optimizer's state",
        "is no saved model",
        "model saved exists already",
        "rank: 9 is above this server's 8",
        "model nobody does not exist",
        "sampler nobody does not exist",
        "not finite",
    ]
    assert [text in error for text, error in zip(expected, seen["state"]["errors"], strict=True)] == [True] * len(expected)


def test_samples_end_where_the_call_says_and_have_the_log_probs_of_the_model(seen: dict[str, Any]) -> None:
    sampling = seen["sampling"]
    assert sampling["length"] == [10, "length"]
    assert sampling["stopped"] == sampling["by_text"] == [True, "stop"]
    assert sampling["first_of_two"] and sampling["greedy"] and sampling["cancelled"] and sampling["after"]
    # temperature 0.5 and 0: both are those at temperature 1
    assert sampling["untempered"] < 1e-6
    assert sampling["prompt"] == [[], None, 0.0, 0.0, [0, 3, 3, 3]]


def test_a_call_that_the_rollout_engine_refuses_leaves_the_calls_of_others(seen: dict[str, Any]) -> None:
    kind, text, length = seen["sampling"]["beside"]
    assert kind == "CallError" and "top_p" in text and length == 10


def test_a_loop_of_a_program_learns_averages_its_weights_and_is_loaded_by_peft(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM.with_name("service_trainer_program.py")), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    # ten of 98 characters are digits
    assert result["before"] < 0.4 and result["after"] > 0.9
    # greedy tokens of two implementations may differ where two are equally likely
    assert abs(result["by_peft"] - result["after"]) < 0.1
    assert result["average"] < 1e-6
    assert result["merged_gap"] < 1e-3
    assert result["returns"]
