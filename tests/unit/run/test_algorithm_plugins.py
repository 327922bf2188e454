"""Losses and estimators of a user: the example of the documentation, bare functions, and what is refused."""

from __future__ import annotations

import dataclasses
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_runs import prompt_level

from mindspeed_rl.algorithms.advantages import compute_advantages
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, PolicyBatch
from mindspeed_rl.algorithms.policy_losses import policy_loss
from mindspeed_rl.config import ConfigError
from mindspeed_rl.run import Run
from mindspeed_rl.run.explain.effects import find_keys_without_effect
from mindspeed_rl.run.explain.plan_page import explain
from mindspeed_rl.run.formula import formula
from mindspeed_rl.run.resolve import resolve
from mindspeed_rl.run.rules.validation import validate
from mindspeed_rl.trainers.schedule import Schedule

DOCS = Path(__file__).parents[3] / "docs"
LOSS = {"loss_type": "my_algorithms:ANCHORED", "tau_pos": 0.5, "init_kl_coef": 0.0}
ADVANTAGE = {"adv_estimator": "my_algorithms:OVER_FIRST_VALUE"}


def example(page: str) -> str:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    return block


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with the example of the documentation in it; what is imported is forgotten afterwards."""
    (tmp_path / "my_algorithms.py").write_text(example("adding_an_algorithm.md"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def run_of(**rl: Any) -> Run:
    stage = {"stage": "ray_ppo", "train_iters": 1}
    return prompt_level(megatron_training=stage, rl_config=rl, critic_config={"load": "somewhere"})


def test_both_pages_have_the_same_example() -> None:
    assert example("adding_an_algorithm.md") == example("zh/adding_an_algorithm.md")


def test_explain_prints_the_formulas_of_plugins_with_the_runs_numbers(folder: Path) -> None:
    text = formula(run_of(**LOSS, **ADVANTAGE))
    assert "policy      L = -r * A + 0.5 / 2 * (log pi - log pi_ref)^2" in text
    assert "advantage   A = r - V(o_1), group of 8" in text


def test_what_a_plugin_needs_is_switched_on(folder: Path) -> None:
    run = run_of(**LOSS, **ADVANTAGE)
    assert validate(run) == []
    objective = run.objective
    assert objective.needs == {"reference", "values"}
    assert (objective.needs_ref, objective.has_critic, objective.kl_place) == (True, True, None)
    phases = [phase["phase"] for phase in explain(run)["resources"]["phases"]]
    assert {"ref_log_probs", "values", "update_critic"} <= set(phases) and "old_log_probs" not in phases
    schedule = Schedule(resolve(run.config, platform="cpu"))
    assert schedule.needs_ref and schedule.has_critic
    assert "ref_log_probs" in schedule.update_plan(0, None).columns
    assert not schedule.needs_old_log_probs
    assert {violation.rule for violation in validate(prompt_level(rl_config=ADVANTAGE))} == {"critic_group"}


def test_a_loss_that_needs_old_log_probs_and_entropies_gets_them_with_one_step_a_rollout(folder: Path) -> None:
    for need in ("old_log_probs", "entropies"):
        source = (
            f"from my_algorithms import ANCHORED\nimport dataclasses\nL = dataclasses.replace(ANCHORED, needs={{{need!r}}})\n"
        )
        (folder / f"loss_{need}.py").write_text(source)
        run = resolve(run_of(loss_type=f"loss_{need}:L").config, platform="cpu")
        assert run.plan.on_policy and Schedule(run).needs_old_log_probs


def test_the_loss_of_the_page_gives_the_numbers_of_its_formula(folder: Path) -> None:
    objective = run_of(**LOSS).objective
    objective = pickle.loads(pickle.dumps(objective))
    log_probs = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    ratio = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    batch = PolicyBatch(
        log_probs,
        torch.tensor([[1.0, -1.0]], dtype=torch.float64),
        torch.ones(1, 2, dtype=torch.bool),
        old_log_probs=log_probs.detach() - ratio.log(),
        ref_log_probs=torch.tensor([[-2.0, -1.0]], dtype=torch.float64),
    )
    output = policy_loss(batch, objective)
    output.loss_sum.backward()
    assert output.loss_sum.item() == pytest.approx((-1.0 + 0.25) + 2.0)
    assert output.count.item() == 2
    assert log_probs.grad[0].tolist() == pytest.approx([-1.0 + 0.5, 2.0])


def test_the_estimator_of_the_page_gives_the_numbers_of_its_formula(folder: Path) -> None:
    objective = run_of(**ADVANTAGE).objective
    mask = torch.tensor([[True, True], [True, False]])
    inputs = AdvantageInputs(torch.tensor([2.0, 1.0]), mask, values=torch.tensor([[0.5, 9.0], [0.25, 9.0]]))
    advantages, returns, metrics = compute_advantages(inputs, objective)
    assert advantages.tolist() == [[1.5, 1.5], [0.75, 0.0]]
    assert returns.tolist() == [[2.0, 2.0], [1.0, 0.0]]
    assert metrics["critic/advantages/max"].result() == 1.5
    with pytest.raises(ValueError, match="OVER_FIRST_VALUE needs values, the critic's values"):
        compute_advantages(dataclasses.replace(inputs, values=None), objective)


def test_a_setting_that_a_plugin_does_not_read_is_named(folder: Path) -> None:
    idle = find_keys_without_effect(run_of(**LOSS, **ADVANTAGE, clip_ratio=0.1, epochs=2, gamma=0.5))
    assert idle["rl_config.clip_ratio"] == "loss_type is my_algorithms:ANCHORED"
    assert idle["rl_config.gamma"] == "adv_estimator is my_algorithms:OVER_FIRST_VALUE"
    assert "rl_config.tau_pos" not in idle


def test_a_bare_function_runs_and_explain_says_that_it_brings_no_formula(folder: Path) -> None:
    (folder / "bare.py").write_text(
        "def reinforce(inputs, objective):\n    return -inputs.advantages * inputs.log_probs, inputs.mask & False\n\n"
        "def twice(x):\n    return 2 * x\n"
    )
    run = prompt_level(rl_config={"loss_type": "bare:reinforce", "kl_penalty": "bare:twice"})
    text = formula(run)
    assert "L = bare:reinforce (brings no formula)" in text and "clip" not in text
    assert "KL          bare:twice (brings no formula)" in text
    log_probs, ones = torch.tensor([[-3.0]]), torch.ones(1, 1)
    output = policy_loss(PolicyBatch(log_probs, ones, ones.bool(), ref_log_probs=ones * -4), run.objective)
    assert output.loss_sum.item() == pytest.approx(3.0 + 0.01 * 2.0)


def test_a_plugin_is_found_beside_a_file_of_external_plugins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = folder / "elsewhere"
    beside.mkdir()
    (folder / "my_algorithms.py").rename(beside / "my_algorithms.py")
    run = run_of(**LOSS, external_plugins=[str(beside / "my_algorithms.py")])
    assert run.objective.loss.formula is not None
    with pytest.raises(ConfigError, match="cannot import the module 'no_such_module'"):
        run_of(loss_type="no_such_module:X", external_plugins=[str(beside / "my_algorithms.py")])


@pytest.mark.parametrize(
    ("keys", "source", "message"),
    [
        ({"loss_type": "absent:L"}, "", r"rl_config.loss_type 'absent:L': cannot import the module 'absent': No module"),
        ({"loss_type": "wrong:L"}, "1 / 0", r"loss_type 'wrong:L': cannot import the module 'wrong': ZeroDivisionError"),
        ({"adv_estimator": "wrong:A"}, "", r"adv_estimator 'wrong:A' cannot be imported: the module 'wrong' has no 'A'"),
        ({"kl_penalty": "wrong:K"}, "K = 3", r"'wrong:K': it is neither a KlEstimator nor a function, but a int"),
        ({"loss_type": "wrong:f"}, "def f(x): pass", r"'wrong:f': wrong:f does not take the parameters \(inputs, objective\)"),
        ({"adv_estimator": "my_algorithms:ANCHORED"}, "", r"it is a PolicyLoss, but a AdvantageEstimator is expected"),
        (
            {"loss_type": "wrong:L"},
            "from my_algorithms import ANCHORED as a\nimport dataclasses\nL = dataclasses.replace(a, formula='{temprature}')",
            r"its formula cannot be filled: KeyError 'temprature'",
        ),
        (
            {"loss_type": "wrong:L"},
            "from my_algorithms import ANCHORED as a\nimport dataclasses\nL = dataclasses.replace(a, reads={'temprature'})",
            r"its record names temprature, no number of an objective",
        ),
        (
            {"loss_type": "wrong:L"},
            "from my_algorithms import ANCHORED as a\nimport dataclasses\nL = dataclasses.replace(a, needs={'values'})",
            r"a PolicyLoss cannot need values; it may need entropies .*, reference \(log-probs of the reference model\)",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_one_error_with_key_and_value(
    folder: Path, keys: dict[str, str], source: str, message: str
) -> None:
    (folder / "wrong.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as caught:
        run_of(**keys)
    assert len(caught.value.errors) == 1


def test_the_command_of_the_page_explains_without_torch(folder: Path) -> None:
    code = (
        "import sys\nfrom mindspeed_rl.cli.explain import main\nstatus = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules\nsys.exit(status)"
    )
    command = re.search(r"```bash\nmindspeed-rl explain (.*?)```", (DOCS / "adding_an_algorithm.md").read_text(), re.DOTALL)
    arguments = command.group(1).replace("\\\n", " ").split()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "L = -r * A + 0.5 / 2 * (log pi - log pi_ref)^2" in done.stdout and "values " in done.stdout
