"""Beam search on small hand-made language models."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from mindspeed_rl.inference.beam_search import BeamSettings, _Beam, beam_search

END = 0
#: next-token probabilities after a token; 9 is the prompt. The row of END is for searches that do not end there.
CHAIN = {
    9: {1: 0.5, 2: 0.4, END: 0.1},
    1: {1: 0.25, 2: 0.35, END: 0.4},
    2: {1: 0.04, 2: 0.06, END: 0.9},
    END: {1: 0.6, 2: 0.3, END: 0.1},
}


def next_tokens(prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
    """The `count` most likely tokens of the chain."""
    tables = [sorted(CHAIN[ids[-1]].items(), key=lambda item: -item[1]) for ids in prompts]
    return [[(token, math.log(p)) for token, p in table[:count]] for table in tables]


def log_prob(tokens: Sequence[int]) -> float:
    return sum(math.log(CHAIN[before][token]) for before, token in itertools.pairwise((9, *tokens)))


def every_sequence(length: int) -> list[tuple[int, ...]]:
    """All sequences that end, or have the full length."""
    results = []
    for size in range(1, length + 1):
        for tokens in itertools.product((END, 1, 2), repeat=size):
            if END not in tokens[:-1] and (tokens[-1] == END or size == length):
                results.append(tokens)
    return results


def test_beams_find_what_greedy_search_misses() -> None:
    result = beam_search([9], next_tokens, BeamSettings(2, 4, frozenset([END]), length_penalty=0.0))
    # greedy takes 1 (0.5), then ends (0.4): 0.2; beams find 2, end: 0.4 x 0.9
    assert result[0].token_ids == (2, END)
    assert result[0].log_prob == pytest.approx(math.log(0.36))
    assert result[0].finished


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
def test_with_as_many_beams_as_sequences_the_search_is_exhaustive(penalty: float) -> None:
    length = 3
    sequences = every_sequence(length)
    ranked = sorted(sequences, key=lambda tokens: -log_prob(tokens) / len(tokens) ** penalty)
    result = beam_search([9], next_tokens, BeamSettings(len(sequences), length, frozenset([END]), penalty))
    assert [beam.token_ids for beam in result[:4]] == ranked[:4]
    for beam in result:
        assert beam.score == pytest.approx(log_prob(beam.token_ids) / len(beam.token_ids) ** penalty)


def test_sequences_that_never_end_are_cut_at_the_limit() -> None:
    result = beam_search([9], next_tokens, BeamSettings(2, 5, frozenset()))
    assert [len(beam.token_ids) for beam in result] == [5, 5]
    assert not any(beam.finished for beam in result)


def test_sampled_beams_choose_first_tokens_by_their_tempered_and_cut_probability() -> None:
    # top-k 2 keeps 1 and 2; temperature 2 makes 0.5 : 0.4 into sqrt(0.5) : sqrt(0.4); one beam, one step: 2 of 2 are drawn
    roots = {token: math.sqrt(CHAIN[9][token]) for token in (1, 2)}
    settings = [BeamSettings(1, 1, frozenset(), sampling=(2.0, 2, 1.0), seed=seed) for seed in range(20)]
    for setting in settings:
        best: _Beam = beam_search([9], next_tokens, setting)[0]
        assert best.log_prob == pytest.approx(math.log(roots[best.token_ids[0]] / sum(roots.values())))


def test_sampled_beams_with_top_p_keep_the_smallest_set_that_holds_the_mass() -> None:
    counts = Counter(
        beam.token_ids[0]
        for seed in range(40)
        for beam in beam_search([9], next_tokens, BeamSettings(2, 1, frozenset(), sampling=(1.0, 3, 0.6), seed=seed))
    )
    assert set(counts) == {1, 2}  # 0.5 is below 0.6, 0.5 + 0.4 is above


def test_sampled_beams_vary_with_the_seed_and_with_nothing_else() -> None:
    def tokens(seed: int) -> list[tuple[int, ...]]:
        settings = BeamSettings(2, 6, frozenset(), sampling=(1.0, 3, 1.0), seed=seed)
        return [beam.token_ids for beam in beam_search([9], next_tokens, settings)]

    assert tokens(3) == tokens(3)
    assert len({tuple(tokens(seed)) for seed in range(20)}) > 2
