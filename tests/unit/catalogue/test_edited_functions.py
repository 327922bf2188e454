"""What a reader edits is what runs: an edit of any function that a run selects changes the loss of its update."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_updates import compute_critic_update, compute_policy_update, compute_supervised_update, edited
from torch import Tensor

import mindspeed_rl
from mindspeed_rl import catalogue
from mindspeed_rl.algorithms import corrections, distillation, policy_losses, preference_losses
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.config import MegatronConfig, RLConfig, load_run_config
from mindspeed_rl.config.keys.rl import DistillationKeys
from mindspeed_rl.config.run_files import find_project_configs
from mindspeed_rl.diagnostics import cost_worker
from mindspeed_rl.run.objective import build_objective, read_objective
from mindspeed_rl.workers import trainer_worker
from mindspeed_rl.workers.stages import STAGES
from mindspeed_rl.workers.stages.stage import Stage

PACKAGE = Path(mindspeed_rl.__file__).parent
#: those with a loop: the clients of a server write their own
RUN_FILES = sorted(
    path.stem
    for path in find_project_configs().glob("*.yaml")
    if "serve_config:" not in path.read_text(encoding="utf-8").splitlines()
)
#: losses that compare the responses of a prompt read the order of their advantages: another scale would not do
EDITS: dict[str, Callable[[Tensor], Tensor]] = {"nothing": lambda values: 0.0 * values, "opposite": lambda values: -values}
#: the functions of the supervised stages
SUPERVISED: dict[str, Callable[..., Any]] = {
    "pretrain": Stage.loss,
    "sft": Stage.loss,
    "dpo": preference_losses.dpo_loss,
    "simpo": preference_losses.simpo_loss,
    "cpo": preference_losses.cpo_loss,
    "orpo": preference_losses.orpo_loss,
    "kto": preference_losses.kto_loss,
    "orm": preference_losses.pairwise_reward_loss,
    "prm": preference_losses.process_reward_loss,
}


def find_functions(objective: Objective) -> dict[str, Callable[..., Any]]:
    """Return the functions that the objective selects and its update depends on, as the catalogue names them."""
    term, results = objective.distillation, {}
    if term is None or term.use_task_rewards:
        results[f"advantage {objective.advantage.target}"] = objective.advantage.load()
    if term is None or term.use_task_rewards or term.use_policy_gradient:
        results[f"loss {objective.loss.target}"] = objective.loss.load()
        if objective.correction is not None:
            results[f"correction {objective.correction.target}"] = objective.correction.load()
    if objective.kl_place is not None:
        results[f"kl {objective.kl.target}"] = objective.kl.load()
    if term is not None:
        results["divergence"] = distillation.compute_divergence if term.estimator is None else term.estimator.load()
    return results


def list_ineffective(objective: Objective) -> list[str]:
    """Return the functions and edits that leave the loss of the objective's update as it was."""
    expected = compute_policy_update(objective)
    # an edit could not be told from noise otherwise
    assert compute_policy_update(objective) == expected
    ineffective = []
    for name, function in find_functions(objective).items():
        for label, edit in EDITS.items():
            with edited(function, edit):
                if compute_policy_update(objective)[0] == expected[0]:
                    ineffective.append(f"{name}: {label}")
    assert compute_policy_update(objective) == expected
    return ineffective


def made_objective(**keys: Any) -> Objective:
    return build_objective(RLConfig(**{"n_samples_per_prompt": 4, **keys}), "ray_grpo", max_response_length=8)


def made_distillation(**keys: Any) -> Objective:
    return made_objective(distillation=DistillationKeys(enabled=True, teacher_models=["a", "b"], **keys), init_kl_coef=0.0)


# --- every shipped run file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUN_FILES)
def test_an_edit_of_any_function_of_a_run_file_changes_the_loss_of_its_update(name: str) -> None:
    cfg = load_run_config(name)
    objective = read_objective(cfg)
    if objective is None:
        assert cfg.stage is not None
        check_supervised(cfg.stage, cfg.actor_config, SUPERVISED[cfg.stage])
        return
    assert list_ineffective(objective) == []
    if objective.has_critic:
        expected = compute_critic_update(objective)
        for edit in EDITS.values():
            with edited(policy_losses.value_loss, edit):
                assert compute_critic_update(objective) != expected
        assert compute_critic_update(objective) == expected


def check_supervised(stage: str, config: MegatronConfig, function: Callable[..., Any]) -> None:
    expected = compute_supervised_update(stage, config)
    assert compute_supervised_update(stage, config) == expected != 0.0
    for edit in EDITS.values():
        with edited(function, edit):
            assert compute_supervised_update(stage, config) != expected
    assert compute_supervised_update(stage, config) == expected


# --- every entry of the catalogue, and stages without a run file --------------------------------------------------------


@pytest.mark.parametrize("loss_type", catalogue.POLICY_LOSSES)
def test_an_edit_of_a_policy_loss_changes_the_loss(loss_type: str) -> None:
    assert list_ineffective(made_objective(loss_type=loss_type)) == []


@pytest.mark.parametrize("loss_type", catalogue.POLICY_LOSSES)
def test_an_edit_of_the_clip_changes_every_loss_that_clips_by_it(loss_type: str) -> None:
    objective = made_objective(loss_type=loss_type)
    expected, _ = compute_policy_update(objective)
    with edited(policy_losses.clip, EDITS["opposite"]):
        clips = compute_policy_update(objective)[0] != expected
    # the entries that read its bounds and have its formula
    assert clips == ("clip(r, {lower:g}, {upper:g}) * A)" in str(objective.loss.formula))


@pytest.mark.parametrize("name", catalogue.ADVANTAGES)
def test_an_edit_of_an_estimator_changes_the_loss(name: str) -> None:
    assert list_ineffective(made_objective(adv_estimator=name)) == []


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("place", ["loss", "reward"])
@pytest.mark.parametrize("name", catalogue.KL_ESTIMATORS)
def test_an_edit_of_a_kl_estimator_changes_the_loss_and_one_of_its_gradient_the_update(
    name: str, place: str, weighted: bool
) -> None:
    keys = {"kl_penalty": name, "init_kl_coef": 0.1, "use_kl_in_reward": place == "reward"}
    objective = made_objective(**keys, use_bias_correction_kl=weighted and place == "loss")
    assert objective.kl_place == place
    assert list_ineffective(objective) == []
    gradient = objective.kl.load_gradient(weighted=weighted)
    if gradient is not None and place == "loss":
        _, expected = compute_policy_update(objective)
        with edited(gradient, EDITS["opposite"]):
            assert compute_policy_update(objective)[1] != expected


@pytest.mark.parametrize("mode", catalogue.CORRECTIONS)
def test_an_edit_of_a_correction_changes_the_loss(mode: str) -> None:
    # 0 outside of narrow bounds would be 0 twice, too
    keys = {"rollout_importance_sampling_threshold": 3.0, "rollout_importance_sampling_threshold_min": 0.2}
    assert list_ineffective(made_objective(rollout_importance_sampling_mode=mode, **keys)) == []


def test_an_edit_of_the_mask_of_sequences_changes_the_loss() -> None:
    objective = made_objective(off_policy_sequence_mask_delta=0.01)
    expected = compute_policy_update(objective)
    with edited(corrections.find_on_policy_sequences, torch.logical_not):
        assert compute_policy_update(objective)[0] != expected[0]


@pytest.mark.parametrize("keys", [{}, {"use_task_rewards": False}, {"use_policy_gradient": True}], ids=str)
@pytest.mark.parametrize("loss_mode", ["forward_kl_topk", "reverse_kl_topk", "jsd_topk", *catalogue.KL_ESTIMATORS])
def test_an_edit_of_a_divergence_to_teachers_changes_the_loss(loss_mode: str, keys: dict[str, bool]) -> None:
    assert list_ineffective(made_distillation(loss_mode=loss_mode, **keys)) == []


@pytest.mark.parametrize("stage", STAGES)
def test_an_edit_of_the_loss_of_a_supervised_stage_changes_it(stage: str) -> None:
    config = MegatronConfig(seq_length=8, reward_tokens=["y", "n"] if stage == "prm" else None)
    check_supervised(stage, config, SUPERVISED[stage])


@pytest.mark.parametrize("kind", ["forward_kl", "reverse_kl"])
def test_an_edit_of_a_divergence_to_stored_log_probs_changes_the_loss(kind: Any) -> None:
    check_supervised("sft", MegatronConfig(sft_loss_type=kind), distillation.compute_divergence)


# --- no second implementation ------------------------------------------------------------------------------------------


def test_workers_call_the_one_policy_loss_and_losses_are_made_where_they_are_documented() -> None:
    assert trainer_worker.policy_loss is cost_worker.policy_loss is policy_losses.policy_loss
    files = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    makers = {name for name, text in files.items() if re.search(r"\bLossOutput\(", text)}
    assert makers == {
        "algorithms/policy_losses.py",
        "algorithms/preference_losses.py",
        # of a micro-batch that only fills up
        "engine/passes.py",
        # of losses that clients of a server name, whose sum is the loss
        "engine/train_engine.py",
        # of weights that no run has, for the comparison of engines
        "diagnostics/engine_parity.py",
        "workers/stages/instruction.py",
        "workers/stages/stage.py",
    }
