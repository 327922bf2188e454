"""What a run on NPUs can have besides its algorithm, several in one command: averages, audits, other engines, games, serving.

Each is compared with the run that was not interrupted, with its formula, or with the CPU in float32.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.append(str(Path(__file__).parents[1] / "dist"))  # which has a module `ranks` too

from grpo_command import Command, finished
from measured_figures import select_computed
from patience import patient
from ranks import run_ranks
from test_training import BF16, COMMON, LIMIT_S, layout

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("small_devices"),
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]

DECAY, ITERATIONS = 0.75, 3
#: a character of many responses
STOP = ord("5")
#: sums in another order in float32
FP32 = 1e-4


def average_keys(task: Path) -> list[str]:
    """A run with an average, a second reward that no update reads, and named evaluation sets."""
    held_out = task / "heldout.jsonl"
    return [
        *(key for key in COMMON if "save_interval" not in key),
        "megatron_training.save_interval=1",
        f"+rl_config.ema_decay={DECAY}",
        "+rl_config.old_log_probs=rollout",
        f"+generate_config.sampling_config.stop_token_ids=[{STOP}]",
        f"+megatron_training.eval_sets={{copy: {held_out}, few: '{held_out}#4'}}",
        "megatron_training.eval_interval=1",
        "+megatron_training.eval_num_prompts=8",
        "+megatron_training.eval_n_samples=2",
        "+megatron_training.keep_best=true",
        "+audit.verifier_function=[exact_match]",
        "+audit.interval=2",
        "+audit.num_prompts=4",
        "+rl_config.log_completions=true",
        "+rl_config.log_completions_keep=1000",
    ]


#: where the state of the optimizer is: MindSpeed's swap with a streamed reference, or a share of it with the host's AdamW, a
#: reference that follows the actor, and passes of few tokens
STATES = {
    "swapped": (
        *layout(1, swap_optimizer=True, stream_ref_weights=True),
        "+megatron_training.eval_temperature=1.0",
    ),
    "offloaded by a fraction": (
        *layout(2, tensor=2, optimizer_offload_fraction=0.5),
        "+rl_config.eval_greedy=false",
        "+generate_config.sampling_config.presence_penalty=0.1",
        "+generate_config.sampling_config.frequency_penalty=0.1",
        "+generate_config.sampling_config.repetition_penalty=1.1",
        "+rl_config.old_log_probs_fallback=trainer",
        "rl_config.log_probs_diff_limit=auto",
        "+rl_config.sync_ref_model=true",
        "+rl_config.ref_model_sync_steps=1",
        "+rl_config.use_dynamic_bsz=true",
        "+rl_config.ref_max_packing_token_size=64",
        "+rl_config.actor_max_packing_token_size=64",
        "+rl_config.update_max_packing_token_size=64",
        "+rl_config.ref_dynamic_max_batch_size=8",
        "+rl_config.actor_dynamic_max_batch_size=8",
        "+rl_config.update_dynamic_max_batch_size=8",
    ),
}


def export(command: Command, name: str, iteration: int) -> dict[str, Tensor]:
    return load_file(command.folder / "save" / name / f"iter_{iteration:07d}" / "model.safetensors")


@pytest.fixture(scope="module", params=STATES)
def whole(request: pytest.FixtureRequest, task: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Command, list[str]]:
    """A run without an interruption, and its keys."""
    keys = [*average_keys(task), *STATES[request.param]]
    return finished(task, tmp_path_factory.mktemp("whole"), *keys, timeout_s=LIMIT_S), keys


def test_the_exported_average_is_that_of_the_exported_weights(whole: tuple[Command, list[str]], task: Path) -> None:
    command, _ = whole
    model = load_file(task / "model" / "model.safetensors")
    average = {name: weight.bfloat16().double() for name, weight in model.items()}
    for iteration in range(1, ITERATIONS + 1):
        weights = export(command, "hf", iteration)
        average = {name: DECAY * old + (1 - DECAY) * weights[name].double() for name, old in average.items()}
        exported = export(command, "hf_ema", iteration)
        assert exported.keys() == average.keys()
        for name, value in exported.items():  # in bf16, as the model is
            torch.testing.assert_close(value.double(), average[name], rtol=2**-8, atol=1e-6)
        assert any(not torch.equal(value, weights[name]) for name, value in exported.items())


def test_its_export_is_merged_with_that_of_the_weights(whole: tuple[Command, list[str]], tmp_path: Path) -> None:
    command, _ = whole
    models = [str(command.folder / "save" / name / f"iter_{ITERATIONS:07d}") for name in ("hf", "hf_ema")]
    words = ["merge", "--method", "linear", "--models", *models, "--weights", "1", "3", "--params-dtype", "fp32"]
    line = [sys.executable, "-m", "mindspeed_rl.cli.main", *words, "-o", str(tmp_path / "merged")]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=patient(300), check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    weights, average = (export(command, name, ITERATIONS) for name in ("hf", "hf_ema"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in merged.items():
        expected = 0.25 * weights[name].double() + 0.75 * average[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-8)


def test_it_is_evaluated_audited_and_held_to_its_promise(whole: tuple[Command, list[str]]) -> None:
    command, _ = whole
    assert [record["iteration"] for record in command.metrics] == list(range(1, ITERATIONS + 1))
    for record in command.metrics:
        assert record["rollout/log_probs_diff_max"] < BF16 and record["rollout/old_log_probs_diff_mean"] < BF16
        assert {"eval/copy/accuracy", "eval/few/accuracy", "eval_ema/copy/accuracy"} <= record.keys()
        assert record["eval/few/prompts"] == 4
    lines = [json.loads(line) for line in (command.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    # every second iteration and the last; the reward's own function: the gap is 0
    assert {line["iteration"]: line["audit/gap"] for line in lines if "audit/gap" in line} == {0: 0.0, 2: 0.0, 3: 0.0}
    best = json.loads((command.folder / "save" / "evaluations.json").read_text())["best"]
    values = {record["iteration"]: record["eval/copy/accuracy"] for record in lines if "eval/copy/accuracy" in record}
    assert best["value"] == values[best["iteration"]] == max(values.values())
    # seconds of a simulated device are not those of the published figures, which the check says
    assert "promise, iteration 3: all" in command.output


def test_responses_end_at_a_further_token(whole: tuple[Command, list[str]]) -> None:
    command, _ = whole
    texts = [json.loads(line)["response"] for line in (command.folder / "run" / "completions.jsonl").read_text().splitlines()]
    ended = [text for text in texts if chr(STOP) in text]
    assert ended and all(text.index(chr(STOP)) == len(text) - 1 for text in ended)


def test_it_resumes_with_every_number_of_the_run_without_an_interruption(
    whole: tuple[Command, list[str]], task: Path, tmp_path: Path
) -> None:
    command, keys = whole
    load = [f"actor_config.load={command.folder / 'save'}", f"+actor_config.load_iteration={ITERATIONS - 1}"]
    resumed = finished(task, tmp_path, *keys, *load, timeout_s=LIMIT_S)
    assert select_computed(resumed.metrics[-1]) == select_computed(command.metrics[-1])
    for name in ("hf", "hf_ema"):
        ours, theirs = export(resumed, name, ITERATIONS), export(command, name, ITERATIONS)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


#: the module of transformers as the engine, in float32
MODULE = (
    *(key for key in COMMON if "gpu_memory" not in key and "enforce_eager" not in key),
    "megatron_training.bf16=false",
    "megatron_training.train_iters=2",
    "generate_config.dtype=float32",
    "+generate_config.engine=transformers",
    "+rl_config.old_log_probs=rollout",
    "+rl_config.old_log_probs_fallback=warn",
    "rl_config.log_probs_diff_limit=auto",
    "rl_config.dropout_in_update=true",
    *layout(1, attention_dropout=0.1),
)


def test_a_rollout_by_the_module_of_transformers_trains(task: Path, tmp_path: Path) -> None:
    command = finished(task, tmp_path, *MODULE, timeout_s=LIMIT_S)
    assert [record["iteration"] for record in command.metrics] == [1, 2]
    for record in command.metrics:
        # trainer and module compute the same in float32, both on the device's operators; the update alone has dropout
        assert record["rollout/old_log_probs_diff_max"] < FP32 and record["actor/grad_norm"] > 0
        assert record["rollout/log_probs_diff_max"] > 100 * FP32


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe", "deepseek3", "qwen3_5_predicting"])
def test_the_module_of_transformers_samples_the_tokens_of_the_cpu(model: str) -> None:
    on_cpu, on_npu = (run_ranks("module_rollout", 1, {"platform": name, "model": model})[0] for name in ("cpu", "npu"))
    assert on_npu["tokens"] == on_cpu["tokens"] and on_npu["truncated"] == on_cpu["truncated"]
    for ours, theirs in zip(on_npu["log_probs"], on_cpu["log_probs"], strict=True):
        assert ours == pytest.approx(theirs, abs=FP32)


def test_a_model_plays_a_game_of_two_roles_against_itself(task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_roles_run import HERE, ONE_PROCESS, keys_of

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]))
    keys = [key for key in keys_of(task, tmp_path, "Duel") if key not in ONE_PROCESS]
    # rows as long as the longest one
    keys += ["rl_config.use_remove_padding=false", "rl_config.use_prefix_grouper=false", "actor_config.lr=3e-4"]
    command = finished(task, tmp_path, *COMMON, *layout(2), *keys, timeout_s=LIMIT_S)
    assert len(command.metrics) == ITERATIONS
    for record in command.metrics:
        # what one wins the other loses
        assert record["roles/first/reward"] == pytest.approx(-record["roles/second/reward"], abs=1e-9)
        assert record["grpo/score/mean"] == pytest.approx(0.0, abs=1e-9) and record["turns/mean"] == 2.0
        assert record["rollout/log_probs_diff_max"] < BF16 and record["actor/grad_norm"] > 0


def test_two_roles_train_their_own_adapters_and_resume_exactly(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_role_adapters_run import OWN, adapters_of, equal, tensors_of
    from test_roles_run import HERE, ONE_PROCESS

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ["PYTHONPATH"]]))

    def keys_of(folder: Path, *changes: str) -> list[str]:
        keys = [key for key in adapters_of(task, folder, "Pair", OWN) if key not in ONE_PROCESS]
        common = [key for key in COMMON if "save_interval" not in key]
        return [*keys, *common, *layout(2, tensor=2, rollout=2), *changes]

    whole = finished(task, tmp_path / "whole", *keys_of(tmp_path / "whole"), timeout_s=LIMIT_S)
    assert len(whole.metrics) == ITERATIONS
    for record in whole.metrics:
        assert record["rollout/log_probs_diff_max"] < BF16
    names = ("solver", "critic")
    assert all(any(record.get(f"adapters/{name}/grad_norm", 0) > 0 for record in whole.metrics) for name in names)
    load = (f"actor_config.load={whole.folder / 'save'}", "+actor_config.load_iteration=1")
    resumed = finished(task, tmp_path / "part", *keys_of(tmp_path / "part", *load), timeout_s=LIMIT_S)
    for iteration in (2, 3):
        ours, theirs = (
            next(select_computed(record) for record in command.metrics if record["iteration"] == iteration)
            for command in (resumed, whole)
        )
        assert ours == theirs
    trained = {}
    for name in names:
        trained[name] = tensors_of(whole.folder / "save/hf/latest" / name)
        assert equal(trained[name], tensors_of(resumed.folder / "save/hf/latest" / name)), name
    assert not equal(trained["solver"], trained["critic"])


def test_a_service_trains_and_samples_with_the_numbers_of_transformers_and_peft(tmp_path: Path) -> None:
    from test_lora_rl import save_model

    # vLLM's dummy adapter of a tied head has the largest rank's columns and a row per hidden element
    save_model(tmp_path / "model", 128)
    (seen,) = run_ranks("service", 1, {"folder": str(tmp_path)}, timeout_s=600)
    numbers = seen["numbers"]
    assert numbers["log_probs"] < FP32 and numbers["loss"] < FP32 and numbers["gradients"] < FP32
    assert numbers["forward_only"] == 0.0
    state, sampling = seen["state"], seen["sampling"]
    assert state["resumes"] and state["is_fresh"] and state["samples"] and state["lives"]
    assert all(error != "nothing" for error in state["errors"])
    assert sampling["length"] == [10, "length"] and sampling["stopped"] == sampling["by_text"] == [True, "stop"]
    # sums of two rows round otherwise than those of one: only the CPU has kernels by which they do not
    assert sampling["first_tokens_of_two"] and sampling["greedy"] and sampling["cancelled"] and sampling["after"]
    assert sampling["untempered"] < FP32
