"""Multiple choice: the letters that a label has, and those that a response settles on.

A text is read as mentions of letters in order. Each mention is rejected ("not A", "A is wrong"), open ("A or B", a question) or
asserted; it is stated ("the answer is A", "I choose A", "A is correct") or only written. The last statement counts unless its
letters are rejected afterwards; without a statement, the only letters that are written.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

from mindspeed_rl.rewards.answers.extraction import extract_closed_boxed, extract_tagged_answer

#: characters at the end of a response that are searched
_TAIL = 20_000
#: characters before and after a mention that decide on its kind
_CONTEXT = 120
#: letters and a text of a box, a tag or a label; longer ones are explanations
_MAX_SLOT = 400

# Notation

_COMMAND = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|textit|textsf|mathsf|mathit|boxed|fbox|mbox|operatorname)\s*\{([^{}]*)\}"
)
_MARKDOWN = re.compile(r"\*+|__|`|\$|\\[()\[\]]|\\[,;:! ]|<[^<>\n]{1,20}>")
_BRACKETS = str.maketrans("【】〔〕「」『』［］｛｝“”‘’", "[][][][][]{}\"\"''")


def _normalize(text: str) -> str:
    """Return the text without markup, with letters, digits and brackets of ASCII width."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text).translate(_BRACKETS)
    for _ in range(3):
        text, count = _COMMAND.subn(r"\1", text)
        if not count:
            break
    return _MARKDOWN.sub("", text)


# Mentions

_OPEN, _CLOSE = r"[(\[{\"']?\s*", r"\s*[)\]}\"']?"
_BEFORE, _AFTER = r"(?<![A-Za-z0-9_'\\^])", r"(?![A-Za-z0-9_'^])"
_ONE = rf"{_OPEN}[A-J]{_CLOSE}"
_AND, _OR = (
    r"\s*(?:,\s*and\b|[,、&;]|\band\b|和|与|及)\s*",
    r"\s*(?:,\s*or\b|\bor\b|/|\||,?\s*或者?是?)\s*(?:else\s+|maybe\s+|perhaps\s+|even\s+)?",
)
_NOUN = r"(?:(?:option|choice|answer|letter)s?\s+)?"
#: a word after a single letter: it is the subject of another sentence
_VERB = (
    r"(?!\s*[)\]}\"']?\s*(?:is|was|has|does|would|says|seems|looks|can|cannot|think|am|believe|guess|know|will|chose|choose"
    r"|isn't)\b)"
)
_GROUP = re.compile(rf"{_BEFORE}(?:[A-J]{{2,10}}|{_ONE}(?:(?:{_AND}|{_OR}){_NOUN}{_BEFORE}{_ONE}{_AFTER}{_VERB})*){_AFTER}")
_ALTERNATIVE = re.compile(rf"[A-J]{_CLOSE}{_OR}")
_LETTER = re.compile(r"[A-J]")
#: the words "A" and "I", and a letter that something is defined as
_WORD = re.compile(r"(?:A(?=\s+[a-z])|I(?=\s+[a-z]|'|\s*$|,))")
_SUBJECT = re.compile(
    r"[AI]\s+(?:is|isn't|was|are|aren't|cannot|can|can't|because|since|and|or|but|would|should|must|seems|looks|does|doesn't|has"
    r"|fits|works|matches|says|nor|not|instead|over|as)\b"
)

# What surrounds a mention

_KEYWORD = (
    r"(?:answers?|solution|selection|response|conclusion"
    r"|(?:choices?|options?|pick)(?=\s*(?:is|are|was|would|should|must|to|[:=]|-+>?|→)))"
)
_VERB_OF_CHOICE = (
    r"(?:choose|chose|chosen|choosing|pick|picked|picking|select|selected|selecting|(?:go|going|went)\s+(?:with|for)"
    r"|settle\s+(?:on|for)|settling\s+on|opt\s+for|opting\s+for|vote\s+for|stick\s+with|conclude|concluding|conclusion\s+is)"
)
_FILLER = (
    r"(?:\s|[:=,\"'(\[{>→]|-+>?|–|—|\b(?:is|are|was|would|will|should|must|has|have|be|to|this|that|the|question|problem|therefore|thus|"
    r"hence|then|so|clearly|definitely|obviously|certainly|probably|likely|most|indeed|still|simply|actually|only|just|both|of|for|"
    r"in|my|your|our|final|correct|right|best|true|option|options|choice|choices|letter|letters|answer|number|as|here|given|by|"
    r"now|really|surely|i|think|believe|it|think|say|can|could|might|may|maybe|perhaps|possibly)\b)"
)
_CHINESE = (
    r"(?:答案(?:应该|应当|应|就|显然|正确)?(?:是|为|选)?|正确(?:答案|选项)(?:是|为)?"
    r"|故选|应选|所以选|因此选|我选|选择?)(?:项|的?是)?"
)
_STATED_LEFT = re.compile(
    rf"(?:\b(?:{_KEYWORD}|{_VERB_OF_CHOICE})\b{_FILLER}{{0,24}}|\bit(?:'s|\s+is|\s+must\s+be|\s+has\s+to\s+be|\s+should\s+be)\s+{_FILLER}{{0,8}}"
    rf"|{_CHINESE}[\s:,(\[]*)$",
    re.IGNORECASE,
)
_STATED_RIGHT = re.compile(
    r"\s*(?:option|choice)?\s*(?:is|are|must\s+be|has\s+to\s+be|would\s+be)\s+(?:clearly\s+|definitely\s+|therefore\s+|indeed\s+|both\s+)?(?:the\s+)?"
    r"(?:only\s+|most\s+|final\s+)?(?:correct|right|best|true|accurate|answers?|solution)\b|\s*(?:项|选项)?(?:是)?(?:正确|对的|答案)",
    re.IGNORECASE,
)
_NEGATED_LEFT = re.compile(
    r"(?:\b(?:not(?!\s+(?:sure|certain|only|just|surprising))|cannot|never|neither|nor|without|rul(?:e|es|ed|ing)\s+out|eliminat\w+|exclud\w+|reject\w*"
    r"|discard\w*|dismiss\w*|instead\s+of|rather\s+than|other\s+than|except|besides|unlike|none\s+of|wrong|incorrect|false|avoid|against|no\s+longer"
    r"|doubt\w*|unlikely|improbable|impossible|no\s+way|no\s+reason|no\s*(?:body|\s+one)"
    r"|(?:all|any(?:thing|one)?|every(?:thing|one)?)(?:\s+(?:choice|option|answer|letter)s?)?\s+but)\b"
    r"|n't\b(?!\s+(?:know|sure|matter))|不是|不选|不应|不能选|并非|排除|而非|不为|除了|错误|不可能|绝不|绝非|怀疑)[^,;:.!?\n。,;]{0,60}$",
    re.IGNORECASE,
)
#: headings and signs of what is rejected, whose colon or mark would end a clause
_REJECTED_LEFT = re.compile(
    r"(?:\b(?:wrong|incorrect|false|eliminated|excluded|rejected)(?:\s+(?:options?|choices?|answers?))?|错误(?:选项|答案)?)\s*:\s*$"
    r"|(?:!=|≠|\\neq?)\s*$",
    re.IGNORECASE,
)
_NEGATED_RIGHT = re.compile(
    r"\s*(?:option|choice|项|选项)?\s*(?:is|are|was|were|would\s+be|seems?|looks?|must\s+be|has\s+to\s+be|can\s+be|does|do|did|could|can|would|should|has|have)?\s*"
    r"(?:also\s+|clearly\s+|obviously\s+|definitely\s+|both\s+|all\s+|therefore\s+|thus\s+|probably\s+|simply\s+|(?:\w+\s+)?but\s+(?:is\s+)?|(?:the|an?)\s+|\()*"
    r"(?:not\b(?!\s+only)|never\b|n't\b|isn't|aren't|wasn't|wrong|incorrect|false\b|out\b|impossible|ruled\s+out|eliminated|excluded|invalid|cannot|can't|doesn't"
    r"|don't|won't|fails\b|contradicts?\b|trap\b|distractors?\b|decoy\b|mistake\b|不对|不正确|不符|不是|不能|不选|是?错误?|有误|排除)",
    re.IGNORECASE,
)
_HEDGED_LEFT = re.compile(
    r"(?:\b(?:or|could|might|may|maybe|perhaps|possibly|alternatively|either)\b|也可能|或者?)[^.!?\n。]{0,40}$", re.IGNORECASE
)
#: what is before a letter that takes the place of an earlier one
_CORRECTED_LEFT = re.compile(
    r"(?:\b(?:no|wait|actually|sorry|correction|scratch\s+that|on\s+second\s+thought)\b\s*[,:.—–-]+|更正|不对)"
    r"[\s,:.—–-]*(?:(?:it(?:'s|\s+is)|make\s+that|应该是|是)\s*)?$",
    re.IGNORECASE,
)
_BETWEEN_LEFT = re.compile(r"\b(?:between|either|among|one\s+of)\s*$", re.IGNORECASE)
_POSSIBLE_RIGHT = re.compile(
    r"\s*(?:is|are|could|might|may|can|would)\s+(?:also\s+be|also|possible|plausible|be\s+(?:possible|plausible))\b",
    re.IGNORECASE,
)
_SUPPOSED_LEFT = re.compile(r"\b(?:if|suppose|supposing|assume|assuming|whether|were)\b[^,;.!?\n。]{0,60}$", re.IGNORECASE)
_QUESTION = re.compile(r"[^.!\n。;]{0,60}?[?？]")
_CLAUSE = re.compile(
    r"[;!?\n。；！？]|[.](?=\s|$)|,|，|:(?=\s)"
    r"|(?<!\ball )(?<!any )(?<!thing )(?<!one )(?<!choice )(?<!option )(?<!answer )\bbut\b"  # all but B
    r"|\bso\b|\bbecause\b|\bsince\b|\bhowever\b|\bthus\b|\btherefore\b|\bhence\b|而是|但|所以|因此",
    re.IGNORECASE,
)
_SENTENCE = re.compile(r"[!?\n。！？]|[.](?=\s|$)")
#: small letters count where nothing else can be meant
_SMALL_STATED = re.compile(
    rf"(\b(?:{_KEYWORD}|{_VERB_OF_CHOICE})\b(?:\s|[:=\"'(\[]|\b(?:is|are|be|would|should|must|option|choice|the|letter)\b){{1,12}})"
    r"([a-j])(?=\s*[)\]}\"']?\s*(?:[.,;:!?]|$|\n|\b(?:because|since|as it|with)\b))",
    re.IGNORECASE,
)
_SMALL_BRACKET = re.compile(r"(\boption\s+|\bchoice\s+|\()([a-j])(?=\))", re.IGNORECASE)
_SMALL_NOUN = re.compile(r"(\b(?:option|choice)\s+)([b-hj])(?![A-Za-z'])", re.IGNORECASE)


@dataclass(frozen=True)
class _Mention:
    """Letters in a text.

    Attributes:
        letters: letters of the mention.
        start, end: its place.
        stated: the text says that these are the answer.
        rejected: the text says that they are not.
        is_open: the letters are alternatives, or also possible.
    """

    letters: frozenset[str]
    start: int
    end: int
    stated: bool
    rejected: bool
    is_open: bool


def _raise_small(text: str) -> str:
    """Return the text with small letters in capitals where they are choices."""
    for pattern in (_SMALL_STATED, _SMALL_BRACKET, _SMALL_NOUN):
        text = pattern.sub(lambda match: match[1] + match[2].upper(), text)
    return text


def _find_mentions(text: str) -> Iterator[_Mention]:
    """Yield the mentions of a normalized text, in order."""
    previous_end = 0
    for match in _GROUP.finditer(text):
        written = match[0]
        letters = _LETTER.findall(written)
        if len(set(letters)) < len(letters):
            if written.isalpha():
                continue  # a word
            letters = list(dict.fromkeys(letters))
        start, end = match.span()
        first = start + len(written) - len(written.lstrip("([{\"' "))
        before = text[max(first - _CONTEXT, 0) : first]
        stated_left = _STATED_LEFT.search(before) is not None
        if len(letters) == 1 and written.strip("([{\"')]} ") == written.strip() and _WORD.match(text, first):
            if not _SUBJECT.match(text, first):
                continue
        after = text[end : end + _CONTEXT]
        clause_start = max((one.end() for one in _CLAUSE.finditer(before)), default=0)
        clause = before[max(clause_start, previous_end - first + len(before), 0) :]
        # "neither A nor B": the words that reject a first letter are those before it
        rejected = (
            _NEGATED_LEFT.search(clause) is not None
            or _NEGATED_RIGHT.match(after) is not None
            or _REJECTED_LEFT.search(before) is not None
        )
        supposed = _SUPPOSED_LEFT.search(clause) is not None
        is_question = _QUESTION.match(after) is not None
        previous_end = end
        if supposed or is_question:
            continue
        between = _BETWEEN_LEFT.search(clause) is not None and len(letters) > 1
        is_open = between or _ALTERNATIVE.search(written) is not None or _POSSIBLE_RIGHT.match(after) is not None
        stated = stated_left or _STATED_RIGHT.match(after) is not None or _CORRECTED_LEFT.search(before) is not None
        yield _Mention(frozenset(letters), first, end, stated, rejected, is_open)


def _settle(text: str) -> frozenset[str] | None:
    """Return the letters that a normalized text settles on; an empty set where it leaves it open, None without letters."""
    mentions = list(_find_mentions(text))
    if not mentions:
        return None
    chosen: _Mention | None = None
    is_open = False
    weak: list[_Mention] = []
    rejected: set[str] = set()
    for mention in mentions:
        if mention.rejected:
            rejected |= mention.letters
            if chosen is not None and chosen.letters & mention.letters:
                chosen, is_open = None, False
            weak = [one for one in weak if not one.letters <= mention.letters]
        elif chosen is not None and mention.is_open and not mention.letters <= chosen.letters and not mention.stated:
            is_open = True  # "B is also possible"
        elif mention.stated and not _is_doubt(text, chosen, mention):
            chosen, is_open, weak = mention, mention.is_open, []
        elif _is_doubt(text, chosen, mention):
            is_open = True
        elif chosen is None:
            weak.append(mention)
    if chosen is not None:
        return frozenset() if is_open else chosen.letters
    weak = [one for one in weak if not one.letters <= rejected or one.start > mentions[-1].start]
    if not weak:
        return frozenset()
    if len({one.letters for one in weak}) > 1 and not _is_alone(text, weak[-1]):
        return frozenset()
    return frozenset() if weak[-1].is_open else weak[-1].letters


def _is_doubt(text: str, chosen: _Mention | None, mention: _Mention) -> bool:
    """Return True if a mention makes the choice before it an alternative: "the answer is A, or maybe B"."""
    if chosen is None or mention.letters <= chosen.letters:
        return False
    between = text[chosen.end : mention.start]
    return len(between) < _CONTEXT and _SENTENCE.search(between) is None and _HEDGED_LEFT.search(between) is not None


def _is_alone(text: str, mention: _Mention) -> bool:
    """Return True if a mention is a sentence of its own, or follows "so" or "therefore"."""
    before, after = text[: mention.start].rstrip(" ([{\"'"), text[mention.end :].lstrip(" )]}\"'")
    ends = not after or after[0] in ".!\n。"
    starts = (
        not before
        or before[-1] in ".!?\n。:"
        or re.search(r"(?:\b(?:so|thus|therefore|hence)\b|->|→|⇒|所以|因此)[\s,:]*(?:it\s+is\s+)?$", before, re.I)
    )
    return ends and bool(starts)


# Slots: labels, boxes, tags

_LEAD = (
    r"(?:(?:the\s+)?(?:correct\s+|final\s+|right\s+|best\s+)?(?:options?|choices?|answers?|letters?)\s*(?:is|are)?\s*[:=]?\s*"
    r"|答案(?:是|为)?\s*[:]?\s*|选\s*|####\s*)*"
)
_SLOT = re.compile(rf"{_LEAD}({_ONE}(?:{_AND}{_ONE}|\s+{_ONE}|[A-J])*)\s*(?:[.:、,)\]-]\s*|$)", re.IGNORECASE | re.DOTALL)
_SLOT_TEXT = re.compile(rf"{_LEAD}({_OPEN}[A-J]{_CLOSE})\s*(?:[.:、)\]]|-(?=\s))\s*(\S.*)", re.IGNORECASE | re.DOTALL)
_SLOT_ONLY = re.compile(rf"{_LEAD}({_ONE}(?:(?:{_AND}|\s+)?{_ONE})*)\s*[.。、:)\]]*\s*", re.IGNORECASE)


#: how the text after the letter of a choice does not begin
_DOUBTFUL = re.compile(r"(?i)(?:or|and|not|isn't|is\s+(?:not|wrong|incorrect))\b|或|[(\[]?[A-J]\s*[.:、)\]]")


def _read_slot(text: str) -> frozenset[str] | None:
    """Return the letters of a short text that should be a choice: "B", "(b)", "B. Paris", "A, C", "AC"; None for other text.

    An empty set is a choice that is left open or rejected.
    """
    text = _normalize(text).strip()
    if not text or len(text) > _MAX_SLOT:
        return None
    only = _SLOT_ONLY.fullmatch(text)
    if only is not None:
        letters = re.findall(r"[A-J]", re.sub(r"(?i)\band\b", " ", only[1]).upper())
        is_word = only[1].isalpha() and len(letters) > 1 and not only[1].isupper()
        return None if is_word or len(set(letters)) < len(letters) else frozenset(letters)
    with_text = _SLOT_TEXT.fullmatch(text)
    if with_text is not None and not _DOUBTFUL.match(with_text[2]):
        others = _find_mentions(_raise_small(with_text[2]))
        if not any(one.stated or one.rejected or one.is_open for one in others):
            return frozenset(with_text[1].upper()) & frozenset("ABCDEFGHIJ")
    return _settle(_raise_small(text))


def extract_label_letters(label: object) -> frozenset[str]:
    """Return the letters of a label: "B", "(b)", "B) Paris", "A, C", "AC", in a box, in <answer>..</answer>, after "answer is".

    A list is the letters of all of its items. A label without a choice has none.
    """
    if isinstance(label, (list, tuple)):
        return frozenset().union(*(extract_label_letters(item) for item in label))
    text = str(label)
    if (match := re.fullmatch(r"\s*\[(.*)\]\s*", text)) is not None and re.fullmatch(r"[\sA-Ja-j,\"']*", match[1]):
        text = match[1]
    for slot in (extract_tagged_answer(text), extract_closed_boxed(text), text):
        if slot is not None and (letters := _read_slot(slot)):
            return letters
    return _settle(_raise_small(_normalize(text)[-_TAIL:])) or frozenset() if len(text) > _MAX_SLOT else frozenset()


def extract_chosen_letters(response: str) -> frozenset[str]:
    """Return the chosen letters of a response to a multiple-choice question; none if it chooses nothing."""
    for slot in (extract_closed_boxed(response), extract_tagged_answer(response)):
        if slot is not None and (letters := _read_slot(slot)) is not None:
            return letters
    text = response[-_TAIL:].strip()
    if "\n" not in text and (letters := _read_slot(text)):
        return letters
    return _settle(_raise_small(_normalize(text))) or frozenset()
