"""The page "which algorithm", and names of other projects' registries: each is here, by this or another name, or refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from mindspeed_rl.catalogue import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, POLICY_LOSSES
from mindspeed_rl.catalogue.guide import ADVICE, NOT_AVAILABLE
from mindspeed_rl.config import ConfigError, build_run_config
from mindspeed_rl.config.compat import VALUES_ELSEWHERE
from mindspeed_rl.config.keys import GROUPS
from mindspeed_rl.run.explain.algorithm_page import render_page

DOCS = Path(__file__).parents[3] / "docs"
FAMILIES = {"loss_type": POLICY_LOSSES, "adv_estimator": ADVANTAGES}
#: registries and choices of other projects; tests of the algorithms hold them against the packages
ELSEWHERE = json.loads((DOCS.parent / "tests" / "data" / "registries" / "names.json").read_text(encoding="utf-8"))
NAMES = sorted({(key, name) for table in ELSEWHERE.values() for key in table.keys() - {"source"} for name in table[key]})


@pytest.mark.parametrize(("page", "language"), [("which_algorithm.md", "en"), ("zh/which_algorithm.md", "zh")])
def test_the_page_is_made_from_the_catalogue(page, language):
    made_by = "run python -m mindspeed_rl.run.explain.algorithm_page"
    assert (DOCS / page).read_text(encoding="utf-8") == render_page(language), made_by


@pytest.mark.parametrize("key", FAMILIES)
def test_every_algorithm_has_advice_in_both_languages(key):
    assert set(ADVICE[key]) == set(FAMILIES[key])
    for name, advice in ADVICE[key].items():
        assert all(advice.use) and re.search("[一-鿿]", advice.use[1]), name
        assert re.fullmatch(r"(\d{4}\.\d{5})?", advice.paper), name


#: of keys that take one of a list of words
_WORDS = get_type_hints(GROUPS["megatron_training"]), get_type_hints(GROUPS["rl_config"])


def list_choices(key):
    """The names of ours that a key takes."""
    if key in FAMILIES:
        return set(FAMILIES[key])
    (hint,) = (hints[key] for hints in _WORDS if key in hints)
    results, left = set(), [hint]
    while left:
        item = left.pop()
        left += get_args(item)
        results |= {item} if isinstance(item, str) else set()
    return results or set({"kl_penalty": KL_ESTIMATORS, "rollout_importance_sampling_mode": CORRECTIONS}[key])


@pytest.mark.parametrize(("key", "name"), NAMES)
def test_every_name_of_another_registry_is_here_or_answered_with_the_nearest(key, name):
    if name in list_choices(key):
        return
    group = "rl_config" if key in _WORDS[1] else "megatron_training"
    with pytest.raises(ConfigError) as caught:
        build_run_config({"megatron_training": {"stage": "ray_grpo"}} | {group: {key: name}})
    (sentence,) = (text for text in caught.value.errors if f"{key} is" in text)
    here, missing = VALUES_ELSEWHERE.get(key, {}).get(name), NOT_AVAILABLE.get(key, {}).get(name)
    if missing is not None:
        assert f"is {name!r}, which is not available: {missing}" in sentence and "nearest: " in missing
    elif here is not None:
        assert f"did you mean {here!r}" in sentence and here in list_choices(key)
    else:  # a name of another key here
        assert re.search(r"; write (rl_config|megatron_training)\.\w+: \w+$", sentence)


def test_what_is_not_available_is_no_name_of_ours():
    for key, names in NOT_AVAILABLE.items():
        assert not set(names) & (list_choices(key) | set(VALUES_ELSEWHERE.get(key, {})))
