"""Seeds of samples, and the sampling of held-out prompts."""

from __future__ import annotations

import dataclasses
import itertools

from mindspeed_rl.rollout.requests import EvaluationSampling, Sampling, sample_seed


def test_every_sample_has_a_seed_of_its_own_that_fits_31_bits() -> None:
    places = list(itertools.product(range(3), range(5), range(40), range(16)))
    seeds = [sample_seed(*place) for place in places]
    assert all(0 <= seed < 2**31 for seed in seeds)
    # 9600 draws of 2^31: 0.02 equal pairs are to be expected, numbers that ran together would give thousands
    assert len(set(seeds)) >= len(places) - 1


def test_numbers_do_not_run_together() -> None:
    assert sample_seed(1, 23, 4, 5) != sample_seed(12, 3, 4, 5)
    assert sample_seed(0, 0, 1, 0) != sample_seed(0, 0, 0, 1)


def test_seeds_are_the_same_in_every_run_of_every_version() -> None:
    # from `printf 1/2/3/4 | b2sum -l 64`, first 8 hex digits, without the lowest bit
    assert sample_seed(1, 2, 3, 4) == 0xAAC61176 >> 1


def test_greedy_responses_end_where_those_of_training_do_and_have_their_form() -> None:
    limits = {"max_tokens": 40, "stop_token_ids": (1, 5), "min_tokens": 2, "stop": ("</answer>",), "structured_output": "{}"}
    cuts = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
    penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    training = Sampling(0.7, **limits, **cuts, **penalties, images=("a",), adapter="old")
    # a new field of Sampling is one of these
    named = {"temperature", *limits, *cuts, *penalties, "images", "adapter"}
    assert named == {field.name for field in dataclasses.fields(Sampling)}
    assert EvaluationSampling(0.0).apply(training) == Sampling(0.0, **limits, images=("a",), adapter="old")
    assert EvaluationSampling(None).apply(training) == training
    assert EvaluationSampling(0.4).apply(training) == dataclasses.replace(training, temperature=0.4)
    cut = dataclasses.replace(training, top_p=0.7, top_k=-1)
    assert EvaluationSampling(None, 2, 0.7, -1).apply(training) == cut
    assert EvaluationSampling(0.0, 1, 0.7, 5).apply(training) == Sampling(0.0, **limits, images=("a",), adapter="old")
