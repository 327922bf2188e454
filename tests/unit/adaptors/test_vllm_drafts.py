"""Speculative decoding: responses, log-probs and distribution are those without drafts, and suffix drafts continue a match."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_program import run_program

from mindspeed_rl.adaptors.vllm_drafts import _SuffixDrafts

#: quantiles 0.999 of the chi-square distribution, by degrees of freedom
_CHI_SQUARE = {1: 10.83, 2: 13.82, 4: 18.47, 8: 26.12}


def _run(program: str, *arguments: object) -> dict:
    return run_program(Path(__file__).with_name(program), *arguments, timeout_s=800)


@pytest.mark.slow
def test_drafted_tokens_have_the_distribution_and_log_probs_of_the_model() -> None:
    result = _run("drafted_sampling.py")
    assert len(result["samples"]) == 4
    for setting, sample in result["samples"].items():
        for kind in ("first", "pairs", "after"):
            statistic, freedom = sample[kind]
            assert statistic < _CHI_SQUARE[freedom], (setting, kind)
        assert sample["error"] < 1e-6, setting
    # drafts [0, 0], [4, 2], [1] and none, where 0 is the most likely token
    assert result["greedy"] == [[0, 0, 0], [0], [0], [0]]
    # one token each, of the two most likely ones
    assert result["undrafted"] == [1, 0, 1]
    # of the installed release: the patch can go once these are 0.7
    assert result["unadapted temperature"] == [9.0, 9.0]


def _check_responses(result: dict, kinds: tuple[str, ...]) -> None:
    assert result["none"]["tokens"] > 1000
    for kind in kinds:
        drafted = result[kind]
        assert drafted["different"] == [] and drafted["tokens"] == result["none"]["tokens"], kind
        assert drafted["error"] < 1e-4 and drafted["again"][0], kind
        assert 0 < drafted["accepted"] < drafted["proposed"], kind
        # each token had a step of its own, or was accepted from a draft, some beyond the end of a response
        assert drafted["tokens"] <= drafted["steps"] + drafted["accepted"] < 1.1 * drafted["tokens"], kind


def test_responses_with_suffix_drafts_are_those_without_token_by_token(tmp_path: Path) -> None:
    result = _run("drafted_responses.py", tmp_path, "none", "suffix")
    _check_responses(result, ("suffix",))
    # the same response once more is found in the cache: most of its 40 tokens cost no step
    first, second = result["suffix"]["again"][1:]
    assert second > 20 and second > first


@pytest.mark.slow
def test_responses_are_those_without_drafts_whatever_makes_the_drafts(tmp_path: Path) -> None:
    kinds = ("ngram", "alone", "model", "itself", "eagle", "eagle3")
    result = _run("drafted_responses.py", tmp_path, "none", *kinds)
    _check_responses(result, kinds)
    # the policy's own most likely tokens are accepted more often than another model's
    rate = {kind: result[kind]["accepted"] / result[kind]["proposed"] for kind in kinds}
    assert rate["itself"] > 2 * rate["model"]
    # alone, the same response is as new as before
    assert result["alone"]["again"][1] == result["alone"]["again"][2]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_next"])
def test_drafts_over_gated_delta_nets_change_no_bit(family: str, tmp_path: Path) -> None:
    """In bfloat16; requests of a step have one token, several, or are at their prompts, of which one has a token alone."""
    result = _run("drafted_states.py", family, tmp_path, "none", "ngram", "suffix", "mtp")
    assert result["none"]["tokens"] > 1000
    for kind in ("ngram", "suffix", "mtp"):
        assert result[kind]["different"] == [] and 0 < result[kind]["accepted"] < result[kind]["proposed"], kind
    # the layer's most likely token, by transformers in float32; in bfloat16 two may be as likely, or experts be others
    wrong, count = result["mtp"]["wrong"]
    assert count > 40 and wrong < 0.2 * count


def test_a_suffix_draft_is_what_followed_the_longest_match_in_the_group() -> None:
    drafts = _SuffixDrafts(max_tokens=8)
    drafts.start("a", [1, 2, 3])
    drafts.extend("a", [4, 5, 6, 7, 8, 9])
    drafts.start("b", [1, 2, 3])
    drafts.extend("b", [4, 5])
    # the match begins in the prompt: 1 2 3 4 5, so five tokens at most; four follow
    assert drafts.propose("b", 100) == [6, 7, 8, 9]
    assert drafts.propose("b", 2) == [6, 7]
    drafts.extend("b", [0, 5, 6])
    # two tokens match: a draft of two
    assert drafts.propose("b", 100) == [7, 8]
    # another prompt shares nothing
    drafts.start("c", [9, 9, 9, 2])
    drafts.extend("c", [4, 5])
    assert drafts.propose("c", 100) == []


def test_a_suffix_draft_ends_where_its_tokens_are_rare_among_the_matches() -> None:
    drafts = _SuffixDrafts(max_tokens=8, min_probability=0.6, max_factor=4.0)
    for name, following in (("a", [5, 6, 7]), ("b", [5, 6, 8]), ("c", [5, 9, 9])):
        drafts.start(name, [1])
        drafts.extend(name, [3, 4, *following])
    drafts.start("d", [1])
    drafts.extend("d", [3, 4])
    # of three matches all continue with 5, two of them with 6, and one with 7
    assert drafts.propose("d", 100) == [5, 6]


def test_without_a_cache_a_response_is_continued_by_itself_alone() -> None:
    drafts = _SuffixDrafts(max_tokens=8, max_responses=0)
    drafts.start("a", [1, 2])
    drafts.extend("a", [3, 4, 5, 6])
    drafts.start("b", [1, 2])
    drafts.extend("b", [3, 4])
    assert drafts.propose("b", 100) == []
    drafts.extend("b", [7, 2, 3, 4])
    assert drafts.propose("b", 100) == [7, 2, 3]
    drafts.end_all_but(set())
    assert not drafts._corpora and not drafts._running and drafts._num_responses == 0 and drafts._num_tokens == 0


def test_the_cache_drops_prompts_that_were_used_long_ago_and_keeps_running_ones() -> None:
    drafts = _SuffixDrafts(max_tokens=8, max_responses=3)
    for index in range(6):
        drafts.start(str(index), [index, index])
        drafts.extend(str(index), [7, 8])
    assert len(drafts._corpora) == 6  # all of them run
    drafts.end_all_but(set())
    drafts.start("6", [5, 5])
    assert list(drafts._corpora) == [(4, 4), (5, 5)]
    drafts.extend("6", [7])
    assert drafts.propose("6", 100) == [8]
