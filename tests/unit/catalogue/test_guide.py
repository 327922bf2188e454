"""The page "which algorithm", and names of other projects' registries: each is here, by this or another name, or refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from mindspeed_rl.catalogue import ADVANTAGES, POLICY_LOSSES
from mindspeed_rl.catalogue.guide import ADVICE, NOT_AVAILABLE
from mindspeed_rl.config import ConfigError, build_run_config
from mindspeed_rl.config.compat import VALUES_ELSEWHERE
from mindspeed_rl.config.explain.algorithm_page import render_page
from mindspeed_rl.config.keys import GROUPS

DOCS = Path(__file__).parents[3] / "docs"
FAMILIES = {"loss_type": POLICY_LOSSES, "adv_estimator": ADVANTAGES}
#: registries of verl 0.9.1 (core_algos), loss types of TRL 1.16 (GRPOConfig) and ms-swift 4.6 (GRPO arguments)
ELSEWHERE = {
    "loss_type": "vanilla dppo_tv dppo_kl gspo sapo gpg clip_cov kl_cov geo_mean dro cispo bypass_mode "
    "grpo bnpo dr_grpo dapo luspo vespo real fipo",
    "adv_estimator": "gae grpo gdpo grpo_passk reinforce_plus_plus reinforce_plus_plus_baseline rloo opo remax gpg "
    "optimal_token_baseline tir_optimal_token_baseline grpo_vectorized rloo_vectorized",
}


@pytest.mark.parametrize(("page", "language"), [("which_algorithm.md", "en"), ("zh/which_algorithm.md", "zh")])
def test_the_page_is_made_from_the_catalogue(page, language):
    made_by = "run python -m mindspeed_rl.config.explain.algorithm_page"
    assert (DOCS / page).read_text(encoding="utf-8") == render_page(language), made_by


@pytest.mark.parametrize("key", FAMILIES)
def test_every_algorithm_has_advice_in_both_languages(key):
    assert set(ADVICE[key]) == set(FAMILIES[key])
    for name, advice in ADVICE[key].items():
        assert all(advice.use) and re.search("[一-鿿]", advice.use[1]), name
        assert re.fullmatch(r"(\d{4}\.\d{5})?", advice.paper), name


@pytest.mark.parametrize(("key", "name"), [(key, name) for key, names in ELSEWHERE.items() for name in names.split()])
def test_every_name_of_another_registry_is_here_or_answered_with_the_nearest(key, name):
    if name in FAMILIES[key]:
        return
    with pytest.raises(ConfigError) as caught:
        build_run_config({"megatron_training": {"stage": "ray_grpo"}, "rl_config": {key: name}})
    (sentence,) = caught.value.errors
    here = VALUES_ELSEWHERE[key].get(name)
    answer = f"did you mean {here!r}" if here else f"is {name!r}, which is not available: {NOT_AVAILABLE[key][name]}"
    assert answer in sentence
    assert here is None or here in FAMILIES[key]


def test_what_is_not_available_is_no_name_of_ours():
    optimizers = get_args(get_type_hints(GROUPS["megatron_training"])["optimizer"])
    here = {**FAMILIES, "optimizer": optimizers}
    for key, names in NOT_AVAILABLE.items():
        assert not set(names) & (set(here[key]) | set(VALUES_ELSEWHERE[key]))
