"""Beam search over an engine that returns the most likely next tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: prompts -> for each, (token, log-prob) of its most likely next tokens, most likely first
_NextTokens = Callable[[Sequence[list[int]], int], list[list[tuple[int, float]]]]


@dataclass(frozen=True)
class BeamSettings:
    """Settings of a beam search.

    Attributes:
        num_beams: running sequences after each step.
        max_tokens: limit of generated tokens.
        stop_token_ids: tokens that end a sequence; they belong to it.
        length_penalty: a finished sequence scores its log-prob divided by length ** length_penalty.
        sampling: None extends by the most likely tokens; else (temperature, top_k, top_p), and a step samples without
            replacement from the product of the beams and their distributions with cut-offs, as transformers' beam sampling.
        seed: seed of the samples.
    """

    num_beams: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    length_penalty: float = 1.0
    sampling: tuple[float, int, float] | None = None
    seed: int = 0


@dataclass(frozen=True)
class _Beam:
    """A sequence: its generated tokens, their log-prob, and its score once it is finished."""

    token_ids: tuple[int, ...]
    log_prob: float
    score: float = -math.inf
    finished: bool = False


def beam_search(prompt_ids: list[int], next_tokens: _NextTokens, settings: BeamSettings) -> list[_Beam]:
    """Return the best `num_beams` sequences, best first.

    Each step ranks the 2 x num_beams best extensions of all beams: those that end become results if they rank among the first
    num_beams, the best others continue. The search ends when no running beam can beat the worst result by its present score,
    or at max_tokens, where running beams become results.
    """
    width = settings.num_beams
    generator = random.Random(settings.seed)
    running = [_Beam((), 0.0)]
    results: list[_Beam] = []
    for step in range(1, settings.max_tokens + 1):
        candidates = _extend_beams(running, prompt_ids, next_tokens, settings, generator)
        running = []
        for rank, beam in enumerate(candidates):
            if beam.token_ids[-1] in settings.stop_token_ids:
                if rank < width:
                    results.append(_score_beam(beam, settings, finished=True))
            elif len(running) < width:
                running.append(beam)
        results = sorted(results, key=lambda beam: -beam.score)[:width]
        if not running:
            break
        best_possible = max(beam.log_prob for beam in running) / step**settings.length_penalty
        if len(results) == width and results[-1].score >= best_possible:
            break
    else:
        results += [_score_beam(beam, settings, finished=False) for beam in running]
    return sorted(results, key=lambda beam: -beam.score)[:width]


def _extend_beams(
    running: Sequence[_Beam], prompt_ids: list[int], next_tokens: _NextTokens, settings: BeamSettings, generator: random.Random
) -> list[_Beam]:
    """Return the best extensions, best first; at most 2 x num_beams."""
    # twice as many, so that num_beams can continue where as many end
    count = 2 * settings.num_beams
    top = count if settings.sampling is None else max(settings.sampling[1], count)
    extended: list[tuple[float, _Beam]] = []
    for beam, entries in zip(running, next_tokens([prompt_ids + list(beam.token_ids) for beam in running], top)):
        added = [log_prob for _, log_prob in entries] if settings.sampling is None else _cut_off(entries, *settings.sampling)
        for (token, _), token_log_prob in zip(entries, added):
            log_prob = beam.log_prob + token_log_prob
            # the largest of log-probs with Gumbel noise are samples without replacement
            # random() may be 0, which has no logarithm
            noise = 0.0 if settings.sampling is None else -math.log(-math.log(generator.random() or 1e-300))
            extended.append((log_prob + noise, _Beam((*beam.token_ids, token), log_prob)))
    extended.sort(key=lambda item: -item[0])
    chosen = [beam for _, beam in extended[:count]]
    # the noise decides which are sampled, not which rank first
    return chosen if settings.sampling is None else sorted(chosen, key=lambda beam: -beam.log_prob)


def _cut_off(entries: Sequence[tuple[int, float]], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Return log-probs after temperature, top-k and top-p, renormalised; `entries` are sorted."""
    tempered = [log_prob / temperature for _, log_prob in entries[:top_k]]
    highest = tempered[0]
    weights = [math.exp(value - highest) for value in tempered]
    total = sum(weights)
    num_tokens, mass = 0, 0.0
    for weight in weights:
        if num_tokens and mass >= top_p * total:
            break
        num_tokens, mass = num_tokens + 1, mass + weight
    return [math.log(weight / mass) if weight > 0 else -math.inf for weight in weights[:num_tokens]]


def _score_beam(beam: _Beam, settings: BeamSettings, *, finished: bool) -> _Beam:
    score = beam.log_prob / len(beam.token_ids) ** settings.length_penalty
    return _Beam(beam.token_ids, beam.log_prob, score, finished)
