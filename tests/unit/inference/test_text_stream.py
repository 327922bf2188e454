"""Streams of tokens and of text."""

from __future__ import annotations

import pytest
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.inference.text_stream import IncrementalText, TextDecoder, ThoughtSplitter, cut_at_stop, split_thought

MARKS = ("<think>", "</think>")


@pytest.mark.parametrize("text", ["plain words", "naïve café", "你好，世界", "a🙂b🙂", " leading blank", "<s>hidden</s>shown"])
def test_chunks_of_a_stream_add_up_to_the_decoded_text_and_have_whole_characters(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    stream = IncrementalText(TextDecoder(tokenizer))
    chunks = [stream.add([token]) for token in ids] + [stream.finish()]
    assert "".join(chunks) == tokenizer.decode(ids, skip_special_tokens=True)
    assert all("\N{REPLACEMENT CHARACTER}" not in chunk for chunk in chunks)


def test_a_character_whose_bytes_never_come_is_not_shown(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("好你", add_special_tokens=False)["input_ids"]
    stream = IncrementalText(TextDecoder(tokenizer))
    assert "".join([stream.add([token]) for token in ids[:-1]]) + stream.finish() == "好"


def test_special_tokens_are_left_out_but_for_those_that_are_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("<think>a</think>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert TextDecoder(tokenizer).decode(ids) == "ab"
    kept = TextDecoder(tokenizer, keep=("<think>", "</think>"))
    assert kept.decode(ids) == "<think>a</think>b"
    stream = IncrementalText(kept)
    assert "".join(stream.add([token]) for token in ids) == "<think>a</think>b"


def test_thoughts_are_separated_wherever_the_stream_is_cut() -> None:
    text = "<think>\n2 < 3, so <b>\n</think>\n\nYes <thin ice>"
    expected = [("thought", "2 < 3, so <b>\n"), ("answer", "Yes <thin ice>")]
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            splitter = ThoughtSplitter(MARKS)
            parts = [part for chunk in (text[:first], text[first:second], text[second:]) for part in splitter.add(chunk)]
            joined: list[tuple[str, str]] = []
            for kind, chunk in parts + splitter.finish():
                if joined and joined[-1][0] == kind:
                    joined[-1] = (kind, joined[-1][1] + chunk)
                else:
                    joined.append((kind, chunk))
            assert joined == expected


def test_an_answer_may_begin_inside_a_thought_that_the_prompt_opened() -> None:
    assert split_thought("hm\n</think>\n\nfour", MARKS, thinking=True) == ("hm\n", "four")
    assert split_thought("never closed", MARKS, thinking=True) == ("never closed", "")
    assert split_thought("no thought", MARKS) == ("", "no thought")


def test_text_is_cut_at_the_first_stop_string_whichever_it_is() -> None:
    assert cut_at_stop("one\nQ: two\nA: three", ["\nA:", "\nQ:"]) == "one"
    assert cut_at_stop("one", ["\nQ:"]) == "one"
    assert cut_at_stop("one", []) == "one"
