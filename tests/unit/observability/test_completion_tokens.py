"""The text of each token, whatever the tokenizer does to words and bytes."""

from mindspeed_rl.observability.completions import Completion, Tokens, decode_tokens


def by_bytes(ids):
    """A tokenizer whose tokens are bytes, as byte-level BPE falls back to."""
    return bytes(ids).decode("utf-8", "replace")


WORDS = {1: "▁The", 2: "▁answer", 3: "s", 4: "▁7"}


def by_words(ids):
    """A SentencePiece-like decoder: the first token's space is dropped."""
    return "".join(WORDS[token] for token in ids).replace("▁", " ").removeprefix(" ")


def test_a_character_of_several_tokens_belongs_to_the_last_of_them():
    ids = list("7 是 ok".encode())
    assert decode_tokens(by_bytes, ids) == ["7", " ", "", "", "是", " ", "o", "k"]


def test_spaces_between_words_stay():
    texts = decode_tokens(by_words, [1, 2, 3, 4])
    assert texts == ["The", " answer", "s", " 7"] and "".join(texts) == by_words([1, 2, 3, 4])


def test_bytes_that_are_no_text_hold_up_nothing():
    assert "".join(decode_tokens(by_bytes, [0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x37])).endswith("7")
    assert len(decode_tokens(by_bytes, [0xE6])) == 1


def test_what_is_not_known_is_not_written():
    tokens = Tokens([5], ["a"], [-0.5], [1.0], [True])
    record = Completion("p", "a", None, group=0, sample=1, tokens=tokens).to_record()
    assert record["reward"] is None and record["group"] == 0
    assert record["tokens"] == {"ids": [5], "texts": ["a"], "log_probs": [-0.5], "advantages": [1.0], "loss_mask": [True]}
