"""Beam search over an engine that tells the most likely next tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: prompts -> for each, (token, log-prob) of its most likely next tokens, most likely first
NextTokens = Callable[[Sequence[list[int]], int], list[list[tuple[int, float]]]]


@dataclass(frozen=True)
class BeamSettings:
    """How the beams grow.

    Attributes:
        num_beams: sequences that are kept.
        max_tokens: most generated tokens.
        stop_token_ids: tokens that end a sequence; they belong to it.
        length_penalty: a finished sequence scores its log-prob divided by length ** length_penalty.
        sampling: None extends by the most likely tokens; else (temperature, top_k, top_p) and a draw without replacement from
            the product of the beams and their cut distributions, as transformers' beam sampling.
        seed: of the draws.
    """

    num_beams: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    length_penalty: float = 1.0
    sampling: tuple[float, int, float] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Beam:
    """A sequence: its generated tokens, their log-prob, and its score once it is finished."""

    token_ids: tuple[int, ...]
    log_prob: float
    score: float = -math.inf
    finished: bool = False


def beam_search(prompt_ids: list[int], next_tokens: NextTokens, settings: BeamSettings) -> list[Beam]:
    """The best `num_beams` sequences, best first.

    Each step looks at the 2 x num_beams best extensions of all beams: those that end are kept as results if they rank among
    the first num_beams, the best others go on. The search ends when no running beam can beat the worst result any more, by
    the score it has now, or at max_tokens, where running beams become results.
    """
    width = settings.num_beams
    draw = random.Random(settings.seed)
    running = [Beam((), 0.0)]
    results: list[Beam] = []
    for step in range(1, settings.max_tokens + 1):
        candidates = _candidates(running, prompt_ids, next_tokens, settings, draw)
        running = []
        for rank, beam in enumerate(candidates):
            if beam.token_ids[-1] in settings.stop_token_ids:
                if rank < width:
                    results.append(_scored(beam, settings, finished=True))
            elif len(running) < width:
                running.append(beam)
        results = sorted(results, key=lambda beam: -beam.score)[:width]
        if not running:
            break
        best_possible = max(beam.log_prob for beam in running) / step**settings.length_penalty
        if len(results) == width and results[-1].score >= best_possible:
            break
    else:
        results += [_scored(beam, settings, finished=False) for beam in running]
    return sorted(results, key=lambda beam: -beam.score)[:width]


def _candidates(
    running: Sequence[Beam], prompt_ids: list[int], next_tokens: NextTokens, settings: BeamSettings, draw: random.Random
) -> list[Beam]:
    """The best extensions, best first; at most 2 x num_beams."""
    # twice as many, so that num_beams can go on where as many end
    wanted = 2 * settings.num_beams
    top = wanted if settings.sampling is None else max(settings.sampling[1], wanted)
    extended: list[tuple[float, Beam]] = []
    for beam, entries in zip(running, next_tokens([prompt_ids + list(beam.token_ids) for beam in running], top)):
        shares = [log_prob for _, log_prob in entries] if settings.sampling is None else _cut(entries, *settings.sampling)
        for (token, _), share in zip(entries, shares):
            log_prob = beam.log_prob + share
            # the largest of log-probs with Gumbel noise are a draw without replacement
            # random() may be 0, which has no logarithm
            noise = 0.0 if settings.sampling is None else -math.log(-math.log(draw.random() or 1e-300))
            extended.append((log_prob + noise, Beam((*beam.token_ids, token), log_prob)))
    extended.sort(key=lambda item: -item[0])
    chosen = [beam for _, beam in extended[:wanted]]
    # the noise decides who is drawn, not who ranks first
    return chosen if settings.sampling is None else sorted(chosen, key=lambda beam: -beam.log_prob)


def _cut(entries: Sequence[tuple[int, float]], temperature: float, top_k: int, top_p: float) -> list[float]:
    """Log-probs after temperature, top-k and top-p, renormalised over what is kept; `entries` are sorted."""
    tempered = [log_prob / temperature for _, log_prob in entries[:top_k]]
    highest = tempered[0]
    weights = [math.exp(value - highest) for value in tempered]
    total = sum(weights)
    kept, mass = 0, 0.0
    for weight in weights:
        if kept and mass >= top_p * total:
            break
        kept, mass = kept + 1, mass + weight
    return [math.log(weight / mass) if weight > 0 else -math.inf for weight in weights[:kept]]


def _scored(beam: Beam, settings: BeamSettings, *, finished: bool) -> Beam:
    score = beam.log_prob / len(beam.token_ids) ** settings.length_penalty
    return Beam(beam.token_ids, beam.log_prob, score, finished)
