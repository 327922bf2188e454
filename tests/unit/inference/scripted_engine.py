"""An engine that answers from a list, a token at a time, in place of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerFast

from mindspeed_rl.inference.engine_interface import Delta, Request
from mindspeed_rl.rollout.requests import Sampling


class ScriptedEngine:
    """Answers the n-th request it ever got with the n-th script; the end token follows unless `ends` is False.

    Attributes:
        asked: the texts of all prompts.
        requests: all requests.
        temperatures: of each request.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.script: list[str] = []
        self.ends = True
        self.asked: list[str] = []
        self.requests: list[Request] = []
        self.temperatures: list[float] = []

    def stream(self, requests: Sequence[Request], sampling: Sampling, stop_strings: Sequence[str] = ()) -> Iterator[Delta]:
        answers = []
        for request in requests:
            self.asked.append(self.tokenizer.decode(request.prompt_ids))
            self.requests.append(request)
            self.temperatures.append(sampling.temperature)
            ids = self.tokenizer(self.script[len(self.requests) - 1], add_special_tokens=False)["input_ids"]
            answers.append(ids + ([self.tokenizer.eos_token_id] if self.ends else []))
        for place in range(max(map(len, answers))):
            for index, ids in enumerate(answers):
                if place < len(ids):
                    last = place == len(ids) - 1
                    yield Delta(index, [ids[place]], [-1.0], ("stop" if self.ends else "length") if last else None)

    def next_tokens(self, prompts: Sequence[list[int]], count: int) -> list[list[tuple[int, float]]]:
        raise NotImplementedError

    def close(self) -> None:
        pass
