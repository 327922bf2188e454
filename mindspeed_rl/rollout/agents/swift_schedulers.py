"""Schedulers that ms-swift has built in, for `multi_turn_scheduler`: the same turns, tokens and masks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from mindspeed_rl.rewards.source_scores import swift_accuracy

#: columns with the reference answer, the first that a row has
_ANSWERS = ("solution", "label", "labels")
#: where a wrong response is cut
_ENDS = ("<answer>", "</think>")


class MathTips:
    """ms-swift's math_tip_trick: a wrong response goes on once, after a sentence that doubts it.

    The response is cut at its answer, or at the end of its thought, and the sentence is added, which does not train.
    """

    tip = "But wait... It seems I made a mistake,"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_turns: int | None = None) -> None:
        self.tokenizer, self.max_turns = tokenizer, max_turns

    def check_finished(self, infer_request: Any, response_choice: Any, current_turn: int) -> bool:
        """Return True for a right response, and for one that has the sentence already."""
        text = infer_request.messages[-1]["content"]
        if self.tip in text or response_choice.finish_reason == "length":
            return True
        row = infer_request.data_dict
        answer = next((row[name] for name in _ANSWERS if row.get(name) is not None), None)
        if answer is None:
            raise ValueError(f"math_tip_trick needs a reference answer, and the row has no column {', '.join(_ANSWERS)}")
        return swift_accuracy(text, answer) == 1 or (self.max_turns is not None and current_turn >= self.max_turns)

    def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> Mapping[str, Any]:
        """Return the request whose last message ends with the sentence, with the tokens of the turn and their mask."""
        text, token_ids = response_choice.message.content, list(response_choice.token_ids)
        cut = min((text.index(end) for end in _ENDS if end in text), default=len(text))
        # the first tokens with the text up to the cut, so that the end token of an uncut turn is left out
        kept = bisect_left(range(len(token_ids)), cut, key=lambda count: self._measure(token_ids[:count]))
        text, token_ids = text[:cut], token_ids[:kept]
        added = self.tokenizer.encode(self.tip, add_special_tokens=False)
        infer_request.messages[-1]["content"] = text + self.tip
        mask = [1] * len(token_ids) + [0] * len(added)
        return {"infer_request": infer_request, "response_token_ids": token_ids + added, "response_loss_mask": mask}

    def _measure(self, token_ids: list[int]) -> int:
        return len(str(self.tokenizer.decode(token_ids, skip_special_tokens=False)))
