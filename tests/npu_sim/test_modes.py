"""Runs in which others generate while the trainer trains, or responses take several rollouts, on simulated devices.

Their samples and figures are those that the same run has without an interruption, or by the formulas of the CPU in float64.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from grpo_command import Command, finished
from patience import patient
from test_elastic_run import HELPING, check_consumed, generating
from test_rollout_modes import IN_TURN, consumed, iterations, responses, same_figures
from test_training import BF16, COMMON, LIMIT_S, layout

from mindspeed_rl.algorithms.rollout_file import RolloutBatch
from mindspeed_rl.cli.parity import replay

SOURCE = os.environ.get("MINDSPEED_SRC")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("small_devices"),
    pytest.mark.skipif(not SOURCE, reason="MINDSPEED_SRC does not point to a checkout of MindSpeed core_r0.16.0"),
]

#: sums in another order in float32
FP32 = 1e-4
#: in float32, and every response is known
SHARED = (
    *COMMON,
    *layout(1),
    "megatron_training.bf16=false",
    "generate_config.dtype=float32",
    "rl_config.log_completions=true",
    "rl_config.log_completions_keep=1000",
)
#: a device for the trainer, one for a server, one for the reference; old log-probs are those of the server
DEDICATED = (
    *(key for key in SHARED if "offload_train" not in key),
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    "rl_config.reference_resource.num_npus=1",
    "rl_config.old_log_probs=rollout",
    f"generate_config.vllm_server_timeout={patient(300):.0f}",
)


def dedicated(task: Path) -> list[str]:
    return [*DEDICATED, f"ref_config.load={task / 'model'}"]


def test_an_asynchronous_run_keeps_its_bound_and_trains_by_the_formulas(task: Path, tmp_path: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=1", "rl_config.save_rollouts_interval=1"]
    keys += ["generate_config.sampling_config.ignore_eos=true"]
    run = finished(task, tmp_path, *dedicated(task), *keys, iterations(4), timeout_s=LIMIT_S)
    records = consumed(run)
    assert [record["iteration"] for record in records] == [1, 2, 3, 4]
    taken = [prompt["prompt"] for record in records for prompt in record["prompts"]]
    assert len(set(taken)) == len(taken) == 4 * 8
    for record, metrics in zip(records, run.metrics, strict=True):
        samples = [sample for prompt in record["prompts"] for sample in prompt["samples"]]
        versions = [version for sample in samples for version, count in sample["versions"] for _ in range(count)]
        assert metrics["rollout/staleness_max"] == max(record["version"] - version for version in versions) <= 1
        batch = RolloutBatch.load(run.folder / "run" / "rollouts" / f"iteration_{record['iteration']:07d}.safetensors")
        assert batch.columns["weight_versions"][batch.columns["response_mask"]].tolist() == versions
        again = replay(batch, {}, torch.float64)
        loss = metrics["actor/pg_loss"] + metrics["actor/kl_coef"] * metrics["actor/kl_loss"]
        assert again.loss == pytest.approx(loss, abs=1e-6)
        assert metrics["response_length/mean"] == 4  # no end token ends a response
    assert any(metrics["rollout/staleness_max"] == 1 for metrics in run.metrics)  # the rollout was ahead
    # log-probs of the server are the trainer's with the same weights: checked where all tokens are of the present ones
    fresh = [metrics for metrics in run.metrics if metrics["rollout/staleness_max"] == 0]
    assert fresh and all(metrics["rollout/old_log_probs_diff_mean"] < FP32 for metrics in fresh)


def test_one_step_off_resumes_as_if_it_had_not_stopped(task: Path, tmp_path: Path) -> None:
    keys = [*dedicated(task), IN_TURN, "rl_config.trainer_mode=one_step_off", "actor_config.lr_decay_style=constant"]
    keys += ["megatron_training.save_interval=2"]
    whole = finished(task, tmp_path / "whole", *keys, iterations(4), timeout_s=LIMIT_S)
    load = [f"actor_config.load={whole.folder / 'save'}", "actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path / "resumed", *keys, *load, iterations(4), timeout_s=LIMIT_S)
    assert consumed(resumed) == consumed(whole)[2:]
    assert responses(resumed) == responses(whole)[2 * 32 :]
    same_figures(resumed.metrics[-1], whole.metrics[-1])
    assert all(record["rollout/staleness_max"] <= 1 and record["actor/grad_norm"] > 0 for record in whole.metrics)


#: responses of four tokens in two rollouts, and none of the tokens of older weights trains
PARTIAL = (
    *SHARED,
    "rl_config.partial_rollout_max_split=2",
    "rl_config.guarantee_order=false",
    "rl_config.off_policy_token_limit=0",
    "generate_config.sampling_config.ignore_eos=true",
    "generate_config.sampling_config.repetition_penalty=1.2",
    "megatron_training.save_interval=2",
)


@pytest.fixture(scope="module")
def partial(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    return finished(task, tmp_path_factory.mktemp("partial"), *PARTIAL, iterations(4), timeout_s=LIMIT_S)


def test_long_responses_go_on_in_later_rollouts(partial: Command) -> None:
    taken = [prompt["prompt"] for record in consumed(partial) for prompt in record["prompts"]]
    assert taken == list(range(4 * 8))
    assert all(metrics["rollout/staleness_max"] <= 2 for metrics in partial.metrics)
    assert any(metrics["rollout/old_tokens_masked"] > 0 for metrics in partial.metrics)
    assert all(metrics["response_length/mean"] == 4 for metrics in partial.metrics)


def test_a_run_with_long_responses_resumes_as_if_it_had_not_stopped(partial: Command, task: Path, tmp_path: Path) -> None:
    load = [f"actor_config.load={partial.folder / 'save'}", "actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path, *PARTIAL, *load, iterations(4), timeout_s=LIMIT_S)
    assert responses(resumed) == responses(partial)[2 * 32 :]
    same_figures(resumed.metrics[-1], partial.metrics[-1])


#: a form of responses, which the texts of the task have in part
FORM = re.compile("[0-9]{1,3}")
#: the form, cut-offs of evaluations, and settings of vLLM and vllm-ascend by their own names, which change no token
LIMITED = (
    f"generate_config.sampling_config.structured_output={{regex: '{FORM.pattern}'}}",
    "megatron_training.eval_interval=1",
    "+megatron_training.eval_num_prompts=8",
    "+megatron_training.eval_temperature=1.0",
    "+megatron_training.eval_top_p=0.9",
    "+megatron_training.eval_top_k=8",
    "+generate_config.engine_kwargs={long_prefill_token_threshold: 4}",
    "+generate_config.additional_config={enable_cpu_binding: false}",
)


def test_experts_under_fsdp2_train_on_responses_of_a_form_and_resume(tmp_path: Path) -> None:
    from tiny_task import make_other_task

    task = make_other_task(tmp_path / "task", "qwen3-moe")
    keys = [*COMMON, *layout(1), "+model.tiny_qwen25.num_experts=4", "rl_config.use_prefix_grouper=false", *LIMITED]
    keys += ["megatron_training.engine=fsdp", "actor_config.fsdp_size=1", "megatron_training.save_interval=2"]
    keys += [f"megatron_training.eval_data_path={task / 'heldout.jsonl'}"]
    keys += ["rl_config.log_completions=true", "rl_config.log_completions_keep=1000"]
    whole = finished(task, tmp_path / "whole", *keys, iterations(3), timeout_s=LIMIT_S)
    assert len(whole.metrics) == 3
    for record in whole.metrics:
        # log-probs are of all tokens, also of those that the form excludes
        assert record["rollout/log_probs_diff_max"] < BF16 and record["rollout/proven_parameters"] > 0
        assert "eval/accuracy" in record
    assert any(record["actor/grad_norm"] > 0 for record in whole.metrics)
    assert all(FORM.fullmatch(text.removesuffix("<eos>")) for text in responses(whole))
    load = [f"actor_config.load={whole.folder / 'save'}", "actor_config.load_iteration=2"]
    resumed = finished(task, tmp_path / "resumed", *keys, *load, iterations(3), timeout_s=LIMIT_S)
    assert responses(resumed) == responses(whole)[2 * 32 :]
    same_figures(resumed.metrics[-1], whole.metrics[-1])


#: a device for the trainer, which generates too while an iteration waits, and one for a server
ELASTIC = (
    *(key for key in DEDICATED if "reference_resource" not in key),
    *HELPING,
    # a step takes as long for eight as for one; half of the responses are still to come when the engines meet
    "generate_config.max_num_seqs=8",
)


@pytest.mark.extra
def test_one_engine_becomes_two_and_one_again_and_a_resumed_run_continues(task: Path, tmp_path: Path) -> None:
    run = finished(task, tmp_path, *ELASTIC, iterations(2), timeout_s=LIMIT_S)
    check_consumed(run, 2)
    awake = [record["iteration"] for record in run.metrics if record["rollout/elastic_servers"] == 1]
    # nothing is ready before the first iteration
    assert awake[0] == 1 and generating(run, "elastic server 0") == awake
    assert "was taken out" not in (run.folder / "run" / "run.log").read_text()
    first = run.metrics[0]
    # tokens of both engines are of the weights that train on them, and so are their log-probs
    assert first["rollout/staleness_max"] == 0 and first["rollout/old_log_probs_diff_mean"] < FP32
    second = finished(task, tmp_path, *ELASTIC, iterations(3), timeout_s=LIMIT_S)
    check_consumed(second, 3)
    assert not second.leftovers()
