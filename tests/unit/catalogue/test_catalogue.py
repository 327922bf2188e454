"""Every record of the catalogue: its function, its needs, its formula; and that nothing else knows the names."""

from __future__ import annotations

import ast
import math
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mindspeed_rl
from mindspeed_rl import catalogue
from mindspeed_rl.algorithms.interfaces import AdvantageInputs, PolicyInputs
from mindspeed_rl.catalogue.objective import Objective
from mindspeed_rl.catalogue.records import NEEDS, Algorithm, _check_parameters
from mindspeed_rl.config import RLConfig
from mindspeed_rl.run.objective import build_objective

PACKAGE = Path(mindspeed_rl.__file__).parent
FAMILIES = (catalogue.POLICY_LOSSES, catalogue.ADVANTAGES, catalogue.KL_ESTIMATORS, catalogue.CORRECTIONS)
RECORDS = {f"{record.key}-{name}": record for table in FAMILIES for name, record in table.items()}


def made_objective(stage: str = "ray_grpo", **keys: Any) -> Objective:
    return build_objective(RLConfig(**{"n_samples_per_prompt": 4, **keys}), stage, max_response_length=8)


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_record_is_importable_callable_and_complete(record: Algorithm) -> None:
    _check_parameters(record)
    assert record.needs <= record.may_need <= set(NEEDS)
    assert record.formula is not None and record.reads is not None
    keys = {*record.reads, *record.bounds, *(choice.setting for choice in record.choices.values())}
    assert keys <= set(made_objective().numbers())
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_a_formula_fills_for_every_choice(record: Algorithm) -> None:
    numbers = made_objective().numbers() | {"clip_ratio_c": 3.0, "delta": 4.0}
    values = {choice.setting: [*choice.texts, numbers[choice.setting]] for choice in record.choices.values()}
    fillings = [numbers | {setting: value} for setting, those in values.items() for value in those] or [numbers]
    for filling in fillings:
        if any(filling[choice.setting] is None and None not in choice.texts for choice in record.choices.values()):
            continue
        text = record.format_formula(filling)
        assert text and "{" not in text and "None" not in text


def test_the_levels_and_normalizers_of_the_losses_have_formulas() -> None:
    for record in catalogue.POLICY_LOSSES.values():
        assert record.normalizer in catalogue.NORMALIZERS
        assert set(record.levels) <= set(catalogue.LEVELS) and record.level in record.levels


def test_defaults_of_stages_and_stand_ins_are_names_of_the_catalogue() -> None:
    for stage in catalogue.STAGES.values():
        assert {stage.loss_type, stage.sequence_loss_type or stage.loss_type} <= set(catalogue.POLICY_LOSSES)
    for record in catalogue.ADVANTAGES.values():
        assert record.instead is None or record.instead[2] in catalogue.ADVANTAGES


def test_only_the_catalogue_spells_the_names() -> None:
    names = set().union(*FAMILIES) - {"abs", "kl", "grpo", "dapo"}  # words with other meanings too: a metric's prefix, ...
    # the defaults of the keys
    known = {
        # and the choices of distillation, which a type has to spell
        "config/keys/rl.py": {"group_norm", "low_var_kl", *catalogue.KL_ESTIMATORS},
        # the names of the Tinker API, whose losses are sums by that API's definitions
        "service/backend.py": {"cispo", "dro", "gspo"},
        "algorithms/call_losses.py": {"cispo", "dro", "gspo"},
        # TRL's names of losses, and the same choices, which editors complete
        "objects/arguments.py": {"dr_grpo", "bnpo", "luspo", "sapo", "vespo", "cispo", *catalogue.KL_ESTIMATORS},
    }
    results = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("catalogue", "compat", "importers"):  # importers: what other projects' names are called here
            continue
        where = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and node.value in names - known.get(where, set()):
                results.add(f"{where}:{node.lineno} {node.value}")
    assert results == set()


def test_the_catalogue_loads_neither_torch_nor_the_configuration() -> None:
    code = "import sys, mindspeed_rl.catalogue; print([n for n in sys.modules if n == 'torch' or n.startswith('mindspeed_rl')])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    ours = ["mindspeed_rl", "mindspeed_rl.catalogue", "mindspeed_rl.catalogue.records", "mindspeed_rl.registry"]
    assert sorted(ast.literal_eval(out)) == ours


# --- formula against function ------------------------------------------------------------------------------------------------


def value_of(text: str, **names: Any) -> float:
    """The number that a formula's text stands for; after a semicolon it says in words what a name is."""
    text = text.partition(";")[0]
    text, *where = re.split(r", (\w+) = ", text)
    while where:  # the last name is defined without the others
        name, inner = where[-2:]
        names[name] = value_of(inner, **names)
        where = where[:-2]
    python = text.replace("[", "(").replace("]", ")").replace("^", "**").replace(", else", " else")
    python = re.sub(r"\|(.*)\|", r"abs(\1)", python)
    phrases = {"log pi_ref": "log_ref", "log pi_old": "log_old", "log pi": "log_pi"}  # the longer ones first
    phrases |= {"prod w": "prod", "prod r": "r", "geo w": "geo"}
    for phrase, name in phrases.items():
        python = python.replace(phrase, name)
    known = {
        "exp": math.exp,
        "log": math.log,
        "mean_t": float,  # of one token
        "sg": float,
        "clip": lambda x, low, high: min(max(x, low), high),
        "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    }
    return eval(python, {"__builtins__": {"min": min, "max": max, "abs": abs}}, known | names)


#: a loss of a whole group has a test by hand
OF_TOKENS = [name for name, record in catalogue.POLICY_LOSSES.items() if not record.compares_group]


@pytest.mark.parametrize("loss_type", OF_TOKENS)
@pytest.mark.parametrize("changes", [{}, {"delta": 2.5}], ids=["plain", "delta"])
def test_the_formula_of_a_policy_loss_is_what_its_function_computes(loss_type: str, changes: dict[str, float]) -> None:
    high = 1.5 if loss_type == "cispo_cap" else 0.28
    made = made_objective(
        loss_type=loss_type, clip_higher_enable=True, clip_ratio_low=0.2, clip_ratio_high=high, tau_pos=1.3, **changes
    )
    text = made.loss.format_formula(made.numbers())
    for number, ratio in enumerate((0.5, 0.9, 1.0, 1.1, 1.6, 3.0)):
        is_marked = number % 2 == 1
        for advantage in (-1.5, 2.0):
            tensors = {
                name: torch.tensor([[value]], dtype=torch.float64)
                for name, value in (("ratio", ratio), ("advantages", advantage))
            }
            mask = torch.ones(1, 1, dtype=torch.bool)
            old = math.log(p := math.exp(-1.2)) - math.log(ratio)
            tensors["log_probs"] = torch.tensor([[-1.2]], dtype=torch.float64)
            tensors["old_log_probs"] = torch.tensor([[old]], dtype=torch.float64)
            tensors |= dict.fromkeys(("drift", "log_ratio"), tensors["log_probs"] - tensors["old_log_probs"])
            inputs = PolicyInputs(**tensors, mask=mask, marked=torch.full_like(mask, is_marked))
            losses, _ = made.loss.load()(inputs, made)
            q = math.exp(old)
            divergence = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
            ahead = math.log(ratio) if ratio <= (made.delta or 9.0) else 0.0
            names = {"pi": p, "pi_old": q, "log_pi": -1.2, "log_old": old, "D": ahead, "KL_b": divergence}
            names["M"] = is_marked
            assert losses.item() == pytest.approx(value_of(text, r=ratio, A=advantage, **names))


@pytest.mark.parametrize("name", catalogue.KL_ESTIMATORS)
def test_the_formula_of_a_kl_estimator_is_what_its_function_computes(name: str) -> None:
    record = catalogue.KL_ESTIMATORS[name]
    value, slope = record.formula, None
    if value.startswith("value "):
        value, slope, where = value.removeprefix("value ").split(", ")
        value, slope = f"{value}, {where}", f"{slope.removeprefix('gradient of ')}, {where}"
    for log_pi, log_ref in ((-1.0, -1.7), (-2.0, -0.5)):
        x = torch.tensor(log_pi - log_ref, dtype=torch.float64, requires_grad=True)
        got = record.load()(x)
        (record.load_gradient(weighted=False) or record.load())(x).backward()
        assert got.item() == pytest.approx(value_of(value, log_pi=log_pi, log_ref=log_ref))
        ends = [value_of(slope or value, log_pi=log_pi + step, log_ref=log_ref) for step in (1e-6, -1e-6)]
        assert x.grad.item() == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("mode", catalogue.CORRECTIONS)
def test_the_formula_of_a_correction_is_what_its_function_computes(mode: str) -> None:
    low = {"rollout_importance_sampling_threshold_min": 0.7} if "mask" in mode else {}
    made = made_objective(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=1.4, **low)
    text = made.correction.format_formula(made.numbers())
    for weights in ((0.5, 1.2, 1.6), (1.1, 1.2, 0.9), (3.0, 0.9, 0.8)):
        difference = torch.tensor([weights], dtype=torch.float64).log()
        got = made.correction.load()(difference, torch.ones(1, 3, dtype=torch.bool), made)[0]
        product = math.prod(weights)
        expected = [value_of(text, w_t=w, prod=product, geo=product ** (1 / 3)) for w in weights]
        np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_the_formula_of_group_norm_is_what_its_function_computes(scale: str) -> None:
    made = made_objective(scale_rewards=scale, adv_epsilon=0.5)
    rewards = torch.tensor([1.0, 4.0, 0.0, 2.0], dtype=torch.float64)
    got, _ = made.advantage.load()(AdvantageInputs(rewards, torch.ones(4, 1, dtype=torch.bool), group_size=4), made)
    spread = {"std_4": lambda r: r.std(ddof=1), "std_batch": lambda r: r.std(ddof=1), "mean_4": lambda r: r.mean()}
    expected = value_of(made.advantage.format_formula(made.numbers()), r=rewards.numpy(), **spread)
    np.testing.assert_allclose(got[:, 0], expected, rtol=1e-12)
