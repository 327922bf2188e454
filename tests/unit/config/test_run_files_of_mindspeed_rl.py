"""Run files as MindSpeed-RL has them are accepted unchanged, or refused by a sentence that names what the README lists.

`PUBLIC_RUN_FILES=folder` adds all run files below a folder (see tests/data/README.md).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from published import ALL, DATA, name_of

from mindspeed_rl.config import ConfigError, load_run_config
from mindspeed_rl.run import Run
from mindspeed_rl.run.draft import load_run
from mindspeed_rl.run.explain.effects import find_keys_without_effect, find_warnings
from mindspeed_rl.run.rules.validation import unavailable, validate

RUN_FILES = DATA / "run_files"
README = Path(__file__).parents[3] / "README.md"
#: key that a refusal names -> words of the README's list of what is not there
NOT_THERE: dict[str, str] = {}


def refusals(path: Path) -> list[str]:
    """The sentences with which `train` refuses a run file; none for one that it accepts."""
    try:
        run = load_run(path.stem, path.parent)
    except ConfigError as error:
        return [sentence.removeprefix("not available in this version: ") for sentence in error.errors]
    return [str(violation) for violation in validate(run)] + unavailable(run)


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_run_file_is_accepted_or_asks_for_what_the_readme_says_is_missing(path: Path) -> None:
    sentences = refusals(path)
    assert len(sentences) <= 1, sentences
    for sentence in sentences:
        assert NOT_THERE[sentence.split(":")[0]] in README.read_text().replace("\n  ", " ")


def test_each_refusal_of_this_list_has_a_run_file_of_ours() -> None:
    results = {sentence.split(":")[0] for path in RUN_FILES.glob("*.yaml") for sentence in refusals(path)}
    assert results == set(NOT_THERE)


def load(name: str) -> Run:
    return load_run(name, RUN_FILES)


def test_names_of_earlier_releases_mean_the_present_keys() -> None:
    latent = load("names_of_2_2_latent").config.actor_config
    assert (latent.qk_head_dim, latent.qk_pos_emb_head_dim, latent.moe_router_num_groups) == (128, 64, 8)
    assert (latent.moe_router_topk_scaling_factor, latent.beta_fast, latent.multi_latent_attention) == (2.5, 32, True)
    assert latent.moe_ffn_hidden_size == 2048 and latent.moe_router_group_topk == 4
    masks = load("names_of_2_2_moe").config
    assert (masks.ignored["megatron_training.attention_mask_type"], masks.actor_config.npu_deterministic) == ("causal", False)
    assert "npu_deterministic" in masks.set_keys["megatron_training"]
    assert masks.deprecated["megatron_training.use_deter_comp"] == "read as npu_deterministic, its name since MindSpeed-RL 2.3"


def test_a_key_that_was_dropped_is_said_to_do_nothing() -> None:
    said = find_keys_without_effect(load("names_of_2_0"))
    for name in ("rl_config.rew_micro_batch_size", "generate_config.gen_micro_batch_size"):
        assert "never read" in said[name]
    assert "dispatch sizes" in said["rl_config.experience_count"]


def test_two_names_of_a_key_with_two_values_are_an_error() -> None:
    expected = r"shuffle_minibatch \(False\) is an earlier name of .*shuffle_mini_batch, which is True"
    with pytest.raises(ConfigError, match=expected):
        load_run_config("names_of_2_0", RUN_FILES, ["+rl_config.shuffle_mini_batch=true"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mini_batch_of_more", ["mini_batch_size (64)", "4 prompts", "one optimizer step of 4 prompts"]),
        ("lengths_that_contradict", ["1024 + 3100 = 4124", "max_model_len (4096)", "more than 996 tokens", "truncated"]),
    ],
)
def test_a_contradiction_that_mindspeed_rl_runs_is_a_warning(name: str, words: list[str]) -> None:
    (warning,) = [text for text in find_warnings(load(name)) if words[0] in text]
    for word in words:
        assert word in warning


def test_no_other_run_file_of_ours_has_such_a_warning() -> None:
    for name in ("names_of_2_0", "packing_without_masks", "small_dispatch"):
        assert not [text for text in find_warnings(load(name)) if "mini_batch_size" in text or "max_model_len" in text]
