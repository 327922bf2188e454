"""AGIEval: exams for people, in English and Chinese; choices with one or several right letters, and cloze questions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from mindspeed_rl.inference.tasks.files import column, find_data_files, find_split_files, parse_subject, read_data_rows
from mindspeed_rl.inference.tasks.task import Question, Task
from mindspeed_rl.rewards.answers.equality import is_same_answer
from mindspeed_rl.rewards.answers.extraction import extract_final_answer, list_accepted_answers
from mindspeed_rl.rewards.choices import extract_chosen_letters
from mindspeed_rl.rewards.text_scores import multiple_choice

_LETTERS = "ABCDEFGHIJ"
#: files whose questions are Chinese
_CHINESE = ("gaokao", "jec-qa", "logiqa-zh")


def score(response: str, label: Any, has_options: bool) -> float:
    """Return 1.0 if the chosen letters are the label's, or the final answer is mathematically equal, else 0.0."""
    if has_options:
        return multiple_choice(response, label)
    answer = extract_final_answer(response)
    return float(bool(answer) and any(is_same_answer(answer, accepted) for accepted in list_accepted_answers(label)))


class AgiEval(Task):
    """arXiv:2304.06364: `<exam>.jsonl` with passage, question, options and label, or answer for a cloze question.

    One right letter is read from the first token; `--chain-of-thought`, several right letters and cloze questions are
    answered in words. Without examples (the paper's zero-shot setting).
    """

    name: ClassVar[str] = "agieval"
    scorer = "mindspeed_rl.inference.tasks.agieval:score"
    max_new_tokens = 1024
    default_shots = 0

    def vote(self, text: str) -> str | None:
        return "".join(sorted(extract_chosen_letters(text))) or extract_final_answer(text)

    def questions(self) -> list[Question]:
        if self.num_shots:
            raise ValueError(f"agieval: --num-shots {self.num_shots}; the data has no examples")
        files = [self.path] if self.path.is_file() else find_split_files(self.path, ("test",)) or find_data_files(self.path)
        if not files:
            raise ValueError(f"agieval: {self.path} has no <exam>.jsonl files")
        return [self._question(row, where, parse_subject(file)) for file in files for where, row in read_data_rows(file)]

    def _question(self, row: Mapping[str, Any], where: str, exam: str) -> Question:
        chinese = (self.options.language or ("zh" if exam.startswith(_CHINESE) else "en")) == "zh"
        text = str(column(row, ("question",), where)).strip()
        if passage := str(row.get("passage") or "").strip():
            text = f"{passage}\n{text}"
        options = [str(option).strip() for option in row.get("options") or ()]
        cue = "答案：" if chinese else "Answer:"
        if not options:
            label = column(row, ("answer", "label"), where)
            return Question(text, label, exam, _CLOZE[chinese], cue=cue, columns={"has_options": False})
        if len(options) > len(_LETTERS):
            raise ValueError(f"{where}: has {len(options)} options; a question has at most {len(_LETTERS)}")
        letters = _LETTERS[: len(options)]
        label = "".join(sorted(set(str(column(row, ("label", "answer"), where)).upper()) & set(_LETTERS)))
        if not label or set(label) - set(letters):
            raise ValueError(f"{where}: the label {row.get('label')!r} is none of {', '.join(letters)}")
        lines = [f"{letter}. {_remove_letter(option, letter)}" for letter, option in zip(letters, options)]
        reasons = self.options.chain_of_thought
        in_words = len(label) > 1 or reasons or self.options.alternative_prompt
        return Question(
            text="\n".join([text, *lines]),
            label=label,
            group=exam,
            instruction=(_REASONING if reasons else _SEVERAL if len(label) > 1 else _ONE)[chinese],
            cue=cue,
            choices=() if in_words else tuple(letters),
            columns={"has_options": True},
        )


#: (English, Chinese)
_ONE = ("The question has one right answer. Give its letter.", "下面的单项选择题只有一个正确选项，请给出它的字母。")
_SEVERAL = (
    "The question may have several right answers. Give all their letters: The answer is (letters).",
    "下面的选择题可能有多个正确选项，请写出全部字母：答案是（字母）。",
)
_REASONING = (
    "Reason step by step and end with: The answer is (letter).",
    "请先逐步推理，最后写出：答案是（字母）。",
)
_CLOZE = ("Answer the question. End with: the answer is ...", "请回答下面的问题，最后写出：答案是……")


def _remove_letter(option: str, letter: str) -> str:
    """Return the option's text without its own "(A)" or "A."."""
    for mark in (f"({letter})", f"（{letter}）", f"{letter}.", f"{letter}．", f"{letter}、"):
        if option.startswith(mark):
            return option[len(mark) :].strip()
    return option
