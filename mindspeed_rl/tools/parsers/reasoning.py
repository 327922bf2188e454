"""Taking the thought off a turn. Calls inside a thought are part of it, and are not made."""

from __future__ import annotations

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))


def split_thought(text: str, first_call: int, thinks: bool = False) -> tuple[str | None, str]:
    """(the thought without its marks or None, the rest) of a turn. A thought that does not end is all of the turn.

    Args:
        first_call: where the first mark of a call is, or the text's length. A closing mark behind it, in a turn that did not
            begin as a thought, stands in an argument.
        thinks: the prompt has opened the thought.
    """
    for opening, closing in _MARKS:
        begins = text.lstrip().startswith(opening)
        end = text.find(closing)
        if end >= 0 and (begins or thinks or end < first_call):
            return text[:end].replace(opening, "", 1).strip(), text[end + len(closing) :]
        if begins:
            return text.replace(opening, "", 1).strip(), ""
    return (text.strip(), "") if thinks else (None, text)
