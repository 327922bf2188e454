"""Answers of a model in supervised training to prompts: generation with the Megatron model that trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.generation import CachedModel
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.token_sampling import sample_token
from mindspeed_rl.workers.answer_requests import AnswerRequest, GeneratedAnswer

#: answers that are generated in step
_ROWS = 32


def generate_answers(model: BuiltModel, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[GeneratedAnswer]:
    """Answer the prompts with a model that trains, whose modules are then as they were.

    Collective over the tensor- and pipeline-parallel ranks of a replica.
    """
    modes = [module.training for module in model.models]
    cached = CachedModel(model)
    answers = [GeneratedAnswer() for _ in requests]
    # batches have prompts of similar lengths
    order = sorted(range(len(requests)), key=lambda index: len(requests[index].prompt_ids))
    try:
        for first in range(0, len(order), _ROWS):
            rows = order[first : first + _ROWS]
            _answer_batch(cached, [requests[row] for row in rows], [answers[row] for row in rows], sampling)
    finally:
        for module, mode in zip(model.models, modes):
            module.train(mode)
    return answers


def _answer_batch(
    model: CachedModel, requests: Sequence[AnswerRequest], answers: Sequence[GeneratedAnswer], sampling: Sampling
) -> None:
    generators = [torch.Generator().manual_seed(request.seed) for request in requests]

    def choose(row: int, logits: Tensor) -> tuple[int, bool]:
        answer = answers[row]
        token, _ = sample_token(logits, sampling, generators[row], requests[row].prompt_ids, answer.token_ids)
        answer.token_ids.append(token)
        is_stopped = token in sampling.stop_token_ids
        answer.truncated = not is_stopped and len(answer.token_ids) == sampling.max_tokens
        return token, is_stopped or answer.truncated

    prompts = [request.prompt_ids for request in requests]
    for _ in model.generate(prompts, max(map(len, prompts)) + sampling.max_tokens, choose):
        pass
