"""The scheduler math_tip_trick: the turns, tokens and masks of ms-swift's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mindspeed_rl.rollout.agents.swift_schedulers import MathTips

TIP = "But wait... It seems I made a mistake,"


class Characters:
    """A tokenizer of one character a token, whose end token is 0."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [ord(character) for character in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join("<end>" if token == 0 else chr(token) for token in token_ids)


def ask(text: str, columns: dict, *, turn: int = 1, reason: str = "stop") -> tuple[MathTips, SimpleNamespace, SimpleNamespace]:
    scheduler = MathTips(Characters(), max_turns=2)  # type: ignore[arg-type]
    messages = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": text}]
    choice = SimpleNamespace(message=SimpleNamespace(content=text), token_ids=[*map(ord, text), 0], finish_reason=reason)
    return scheduler, SimpleNamespace(messages=messages, data_dict=columns), choice


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("I think 3</think><answer>3</answer>", "I think 3"),
        ("so <answer>3</answer>", "so "),
        ("it is 3", "it is 3"),
        ("</think>3", ""),
        ("", ""),
    ],
)
def test_a_wrong_response_is_cut_and_goes_on_after_a_tip_that_does_not_train(text: str, kept: str) -> None:
    scheduler, request, choice = ask(text, {"label": "$2$"})
    assert not scheduler.check_finished(request, choice, 1)
    result = scheduler.step(request, choice, 1)
    assert request.messages[-1]["content"] == kept + TIP
    assert result["response_token_ids"] == [*map(ord, kept + TIP)]
    assert result["response_loss_mask"] == [1] * len(kept) + [0] * len(TIP)


@pytest.mark.parametrize(
    ("text", "columns", "turn", "reason"),
    [
        (r"\boxed{2}", {"solution": "$2$", "label": "$3$"}, 1, "stop"),
        (f"it is 3{TIP} no, 3", {"label": "$2$"}, 1, "stop"),
        ("it is 3", {"label": "$2$"}, 2, "stop"),
        ("it is 3", {"label": "$2$"}, 1, "length"),
    ],
)
def test_a_right_response_a_second_tip_the_last_turn_and_a_cut_one_end_it(text, columns, turn, reason) -> None:
    scheduler, request, choice = ask(text, columns, reason=reason)
    assert scheduler.check_finished(request, choice, turn)


def test_a_row_without_an_answer_is_an_error() -> None:
    scheduler, request, choice = ask("it is 3", {"other": 1})
    with pytest.raises(ValueError, match="needs a reference answer"):
        scheduler.check_finished(request, choice, 1)
