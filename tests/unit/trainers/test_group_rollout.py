"""From groups to the rows of an iteration: versions that are pushed, filters, the record, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rl.config import load_run_config
from mindspeed_rl.data.prompts import PromptItem
from mindspeed_rl.dataplane.transfer_dock import TransferDock
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.rewards.samples import RewardResult
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.trajectory import Trajectory
from mindspeed_rl.run import Run
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.resume import ResumePoint
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.admission import Admission
from mindspeed_rl.trainers.group_rollout import GroupRollout
from mindspeed_rl.trainers.model_rewards import ModelRewards
from mindspeed_rl.trainers.old_policy import DisagreementError
from mindspeed_rl.trainers.prompt_groups import PromptGroup
from mindspeed_rl.trainers.prompt_loader import PromptLoader
from mindspeed_rl.trainers.prompt_sampling import PromptOrder
from mindspeed_rl.trainers.rl_setup import DATA_PLANE_USERS
from mindspeed_rl.trainers.rollout import GroupFilter
from mindspeed_rl.trainers.schedule import Schedule, _resolve_admission

PROMPTS, GROUP = 4, 2
KEYS = [
    "megatron_training.global_batch_size=4",
    "megatron_training.train_iters=5",
    "rl_config.mini_batch_size=4",
    "rl_config.n_samples_per_prompt=2",
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    "rl_config.actor_resource.num_npus=1",
    "actor_config.tensor_model_parallel_size=1",
    "actor_config.micro_batch_size=8",
]


def prompt(number: int) -> PromptItem:
    return PromptItem(prompt_ids=[number + 1, 2], label=str(number), columns={})


def run_of(folder: Path, *keys: str) -> Run:
    saved = [f"actor_config.save={folder / 'save'}", f"actor_config.load={folder / 'save'}", f"run_dir={folder / 'run'}"]
    run = resolve(load_run_config("grpo_tiny_cpu", None, [*KEYS, *saved, *keys]), platform="cpu")
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


class Source:
    """Every group is complete at once; of every third prompt both samples score alike.

    Attributes:
        calls: what was asked, in order.
    """

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.calls: list[Any] = []
        self.restored: tuple[list[PromptGroup], int, int] | None = None
        self._next = self._version = 0

    def take(self, iteration: int, count: int) -> tuple[list[PromptGroup], list[WorkerReport]]:
        self.calls.append(count)
        groups = [self._group(self._next + number) for number in range(count)]
        self._next += count
        return groups, []

    def _group(self, number: int) -> PromptGroup:
        scores = [1.0, 1.0 if number % 3 == 0 else 0.0]
        generated = [Generated((5, 6 + place), (-0.5, -1.0), (0, 0), "stop") for place in range(GROUP)]
        samples: list[Trajectory | None] = [
            Trajectory.from_response(prompt(number)["prompt_ids"], response) for response in generated
        ]
        results = [RewardResult(score, {"exact_match": score}) for score in scores]
        return PromptGroup(number, prompt(number), self._version, samples, results)

    def reject(self, count: int) -> None:
        self.calls.append(("rejected", count))

    def before_push(self) -> None:
        self.calls.append("before")

    def after_push(self, version: int) -> None:
        self.calls.append(("after", version))

    def snapshot(self) -> tuple[list[PromptGroup], int, int]:
        return [self._group(self._next)], self._next + 1, self._next

    def restore(self, groups: list[PromptGroup], next_prompt: int, num_taken: int) -> None:
        self.restored = groups, next_prompt, num_taken


class Plane:
    """A data plane in this process."""

    def __init__(self) -> None:
        self._dock = TransferDock(PROMPTS, GROUP, DATA_PLANE_USERS)
        self.put, self.clear = self._dock.put, self._dock.clear

    def get(self, consumer: str, columns: Sequence[str], count: int | None = None, *, indexes: Any, timeout_s: float) -> Any:
        result = self._dock.get(consumer, columns, count, list(indexes))
        assert result[0] is not None, (consumer, columns)
        return result


def rollout_of(run: Run) -> tuple[GroupRollout, Source, Plane]:
    source, plane = Source(_resolve_admission(run)), Plane()
    order = PromptOrder.from_config(run.rl)
    loader = PromptLoader([prompt(number) for number in range(100)], plane, run.plan, order, seed=1, shuffle=False)
    rewards: Any = None  # every group has its scores
    no_model = ModelRewards(None, plane, weight=0.0, timeout_s=1.0)
    group_filter = GroupFilter.from_config(run.rl, run.plan.n_samples_per_prompt, Schedule(run).objective, {})
    return GroupRollout(run, plane, rewards, loader, source, group_filter, no_model), source, plane


def rows(plane: Plane, count: int) -> Mapping[str, Any]:
    columns = ["prompt_ids", "rewards", "weight_versions", "sequence_lengths", "input_ids"]
    return plane.get("metrics", columns, indexes=range(count), timeout_s=1)[0]


def test_an_iteration_gets_its_prompts_with_scores_and_versions(tmp_path: Path) -> None:
    run = run_of(tmp_path, "rl_config.trainer_mode=async")
    rollout, _, plane = rollout_of(run)
    assert rollout.before_push(0) == 0
    rollout.after_push(0)
    reports = rollout.run(0)
    result = rows(plane, PROMPTS * GROUP)
    assert [ids.tolist() for ids in result["prompt_ids"]] == [[number + 1, 2] for number in range(4) for _ in range(2)]
    assert [float(reward) for reward in result["rewards"]] == [1, 1, 1, 0, 1, 0, 1, 1]
    assert [ids.tolist() for ids in result["input_ids"][:2]] == [[1, 2, 5, 6], [1, 2, 5, 7]]
    assert [version.tolist() for version in result["weight_versions"]] == [[0, 0]] * 8
    assert reports[-1].metrics.results()["rollout/tokens"] == 16
    (line,) = [json.loads(line) for line in (run.folder / "consumed.jsonl").read_text().splitlines()]
    assert [prompt["prompt"] for prompt in line["prompts"]] == [0, 1, 2, 3]


def test_weights_are_pushed_when_a_version_ends_and_after_the_last_iteration(tmp_path: Path) -> None:
    keys = ["rl_config.trainer_mode=async", "rl_config.parameter_sync_step=2", "actor_config.save_interval=2"]
    run = run_of(tmp_path, *keys, "megatron_training.eval_interval=2")
    rollout, source, _ = rollout_of(run)
    pushed = []
    for iteration in range(6):
        pushed.append(rollout.before_push(iteration))
        if pushed[-1] is not None:
            rollout.after_push(iteration)
    # after the fifth and last iteration the engine gets the last weights, and generates nothing more to train on
    assert pushed == [0, None, 1, None, 2, 3]
    assert source.calls == ["before", ("after", 0), "before", ("after", 1), "before", ("after", 2), "before"]


def test_a_filter_samples_only_as_many_further_groups_as_are_missing(tmp_path: Path) -> None:
    keys = [
        "rl_config.filter_groups_enable=true",
        "rl_config.filter_groups_metric=exact_match",
        "rl_config.filter_groups_max_batches=3",
        "rl_config.filter_groups_train_batch_size=4",
    ]
    run = run_of(tmp_path, "megatron_training.stage=ray_dapo", "rl_config.trainer_mode=async", *keys)
    rollout, source, plane = rollout_of(run)
    reports = rollout.run(0)
    # of 0 to 3 two teach nothing, so two more are drawn; 4 and 5 do
    assert source.calls == [4, ("rejected", 2), 2, ("rejected", 0)]
    assert [ids.tolist()[0] - 1 for ids in rows(plane, 8)["prompt_ids"]] == [1, 1, 2, 2, 4, 4, 5, 5]
    assert reports[-1].metrics.results() == {"train/num_gen_batches": 1.5, "train/kept_groups_fraction": 4 / 6}
    (line,) = [json.loads(line) for line in (run.folder / "consumed.jsonl").read_text().splitlines()]
    assert [prompt["prompt"] for prompt in line["prompts"]] == [1, 2, 4, 5]


def test_a_filter_that_may_sample_no_more_fills_up_or_gives_up(tmp_path: Path) -> None:
    filling = ["rl_config.dynamic_sample=true", "rl_config.max_resample_times=0"]
    run = run_of(tmp_path / "fill", "rl_config.trainer_mode=async", *filling)
    rollout, source, plane = rollout_of(run)
    rollout.run(0)
    assert source.calls == [4, ("rejected", 2), ("rejected", -2)]
    assert [ids.tolist()[0] - 1 for ids in rows(plane, 8)["prompt_ids"]] == [1, 1, 2, 2, 0, 0, 3, 3]
    keys = ["rl_config.filter_groups_enable=true", "rl_config.filter_groups_metric=exact_match"]
    bounded = ["rl_config.filter_groups_max_batches=1", "rl_config.filter_groups_train_batch_size=4"]
    strict = run_of(tmp_path / "strict", "megatron_training.stage=ray_dapo", "rl_config.trainer_mode=async", *keys, *bounded)
    with pytest.raises(RuntimeError, match="iteration 1: 4 prompts gave 2 of 4 groups whose exact_match varies"):
        rollout_of(strict)[0].run(0)


def test_a_checkpoint_holds_what_was_on_its_way(tmp_path: Path) -> None:
    run = run_of(tmp_path, "rl_config.trainer_mode=async")
    rollout, source, _ = rollout_of(run)
    rollout.before_push(0)
    rollout.after_push(0)
    rollout.run(0)
    state = json.loads(json.dumps(rollout.state_dict()))
    checkpoint = tmp_path / "save" / "iter_0000001"
    checkpoint.mkdir()
    (tmp_path / "save" / "in_flight.partial").rename(checkpoint / "in_flight")
    resumed, other, _ = rollout_of(run)
    resumed.load_state_dict(state, ResumePoint(tmp_path / "save", 1))
    resumed.before_push(1)
    assert other.restored == (source.snapshot()[0], 5, 4)


def test_a_run_that_had_another_mode_goes_on_with_the_next_prompts(tmp_path: Path) -> None:
    rollout, source, _ = rollout_of(run_of(tmp_path, "rl_config.trainer_mode=one_step_off"))
    rollout.load_state_dict({}, ResumePoint(tmp_path, 3))  # of a version that counted only iterations
    rollout.before_push(3)
    assert source.restored == ([], 12, 12)


@pytest.mark.parametrize(
    ("keys", "admission"),
    [
        ([], Admission("pace", 0, 4)),
        (["rl_config.trainer_mode=one_step_off"], Admission("wait", 1, 4)),
        (["rl_config.async_generate=true"], Admission("wait", 1, 4)),
        (["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=0.5"], Admission("pace", 0.5, 4)),
        (
            ["rl_config.trainer_mode=async", "rl_config.max_off_policy_strategy=drop", "rl_config.max_off_policy_threshold=3"],
            Admission("drop", 3, 4),
        ),
    ],
)
def test_the_run_file_says_how_far_the_rollout_may_be_ahead(tmp_path: Path, keys: list[str], admission: Admission) -> None:
    run = run_of(tmp_path, *keys)
    assert _resolve_admission(run) == admission
    # log-probs are compared with a limit where the tokens are of the weights that train
    assert (Schedule(run)._agreement is not None) == (admission.bound == 0)


DROPOUT = ["actor_config.hidden_dropout=0.1"]
HALF = ["actor_config.bf16=true", "generate_config.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("keys", "mean", "largest", "stops"),
    [
        # auto: the mean, by format; a single token may differ by much in bfloat16
        ([], 0.04, 3.0, ""),
        ([], 0.06, 0.06, "differ by 0.06 in the mean, more than the 0.05 that log_probs_diff_limit auto allows in float32"),
        (HALF, 0.4, 9.0, ""),
        (HALF, 0.6, 9.0, "more than the 0.5 that log_probs_diff_limit auto allows in bfloat16"),
        (["generate_config.quantization=int8"], 0.15, 1.0, ""),
        (["generate_config.quantization=int8"], 0.25, 1.0, "more than the 0.2 that"),
        (["rl_config.log_probs_diff_limit=0.1"], 0.01, 0.2, "differ by 0.2, more than log_probs_diff_limit 0.1"),
        (["rl_config.log_probs_diff_limit=0.1"], 0.01, 0.09, ""),
        (["rl_config.log_probs_diff_limit=null"], 5.0, 50.0, ""),
        # the engine has no dropout, so the difference comes from the dropout; a limit that is set holds all the same
        ([*DROPOUT, "rl_config.dropout_in_update=true"], 0.3, 3.0, ""),
        ([*DROPOUT, "rl_config.dropout_in_update=true", "rl_config.log_probs_diff_limit=0.1"], 0.3, 3.0, "differ by 3, more"),
        (DROPOUT, 0.3, 3.0, "more than the 0.05"),
    ],
)
def test_trainer_and_engine_that_disagree_stop_the_run(
    tmp_path: Path, keys: list[str], mean: float, largest: float, stops: str
) -> None:
    limit = ["rl_config.log_probs_diff_limit=auto"]
    schedule, metrics = Schedule(run_of(tmp_path, *limit, *keys)), Metrics()
    metrics.add_last("rollout/log_probs_diff_mean", mean)
    metrics.add_last("rollout/log_probs_diff_max", largest)
    with pytest.raises(DisagreementError, match=stops) if stops else nullcontext():
        schedule.after_update(0, metrics)


def test_only_iterations_after_a_weight_sync_are_held_against_the_engine(tmp_path: Path) -> None:
    """Between two weight syncs the engine has older weights, and its log-probs differ by what was learnt since."""
    ahead = ["rl_config.trainer_mode=async", "rl_config.max_off_policy_threshold=0", "rl_config.parameter_sync_step=2"]
    schedule, metrics = Schedule(run_of(tmp_path, *ahead, "rl_config.log_probs_diff_limit=0.1")), Metrics()
    metrics.add_last("rollout/log_probs_diff_max", 0.5)
    for iteration in range(7):
        with pytest.raises(DisagreementError) if iteration in (0, 2, 4, 6) else nullcontext():
            schedule.after_update(iteration, metrics)
