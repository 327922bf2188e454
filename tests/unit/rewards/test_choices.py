"""What a response to a multiple-choice question settles on, what a label says, and that no mutation of either is right."""

import random
import time

import pytest

from mindspeed_rl.rewards.choices import extract_chosen_letters, extract_label_letters
from mindspeed_rl.rewards.text_scores import multiple_choice

#: (response, letters that a reader would say it chooses; "" for none)
RESPONSES = [
    ("The answer is A or B", ""),
    ("The answer is not A", ""),
    ("Option A is wrong, so I choose C", "C"),
    ("Either A or B.", ""),
    ("The answer is neither A nor B.", ""),
    ("I'd go with B", "B"),
    ("My choice: B", "B"),
    ("It's B.", "B"),
    ("the answer is b", "B"),
    ("the answer is b.", "B"),
    ("(b)", "B"),
    ("b)", "B"),
    ("b", "B"),
    ("B) Paris", "B"),
    ("(B) Paris", "B"),
    ("B. Paris is the capital of France", "B"),
    ("Answer: b", "B"),
    ("The answer is: \n\nB", "B"),
    ("The answer is A, not B", "A"),
    ("The answer is not A but B", "B"),
    ("The answer isn't A; it's B", "B"),
    ("The answer is B. A is wrong because it is too small.", "B"),
    ("A is wrong. B is wrong. C is too. D.", "D"),
    ("The answer is A. Wait, the answer is not A.", ""),
    ("The answer is A, or maybe B.", ""),
    ("The answer could be A or possibly C", ""),
    ("B is correct.", "B"),
    ("B is the correct answer", "B"),
    ("Option B is right, A is not", "B"),
    ("A, B and D are incorrect, so C is the answer", "C"),
    ("The answers are A and C.", "AC"),
    ("Both A and C are correct", "AC"),
    ("\\boxed{A or B}", ""),
    ("\\boxed{not A}", ""),
    ("\\boxed{b}", "B"),
    ("\\boxed{(B)}", "B"),
    ("\\boxed{B) Paris}", "B"),
    ("\\boxed{\\text{B. }42}", "B"),
    ("\\boxed{\\textbf{(C)}\\ 5}", "C"),
    ("<answer>b</answer>", "B"),
    ("<answer>Option B</answer>", "B"),
    ("<answer>The answer is B</answer>", "B"),
    ("<answer>A/B</answer>", ""),
    ("Is the answer A? No, B.", "B"),
    ("If the answer is A, then 2=3. So B.", "B"),
    ("We can rule out A and B. C remains.", "C"),
    ("All of them except B", ""),
    ("None of A, B, C", ""),
    ("A good guess is D", "D"),
    ("I think it is C", "C"),
    ("The correct option is therefore (D).", "D"),
    ("The answer is (B) because A is too big", "B"),
    ("The answer is B, A is too small", "B"),
    ("The answer is A, I think", "A"),
    ("答案不是A", ""),
    ("答案是A或B", ""),
    ("排除A，选B", "B"),
    ("A选项错误，B正确", "B"),
    ("故选：ＡＣ", "AC"),
    ("答案：（b）", "B"),
    ("A: 3\nB: 4\nC: 5\nAnswer: C", "C"),
    ("A: 3\nB: 4\nC: 5", ""),
    ("Answer = D", "D"),
    ("Final answer — B", "B"),
    ("Answer → B", "B"),
    ("The answer is a number", ""),
    ("I don't know", ""),
    ("The answer is a", "A"),
    ("The answer is A.", "A"),
    ("I would not choose A", ""),
    ("I don't think the answer is A", ""),
    ("I don't think it is A; I choose D", "D"),
    ("I'm not sure, but A", "A"),
    ("I am not certain but the answer is A", "A"),
    ("It might be A, but it could be B", ""),
    ("C is not correct", ""),
    ("I choose option b", "B"),
    ("ABD", "ABD"),
    ("The choice is between A and B", ""),
    ("**C**", "C"),
    ("Answer: **C. London**", "C"),
    ('The answer is "C"', "C"),
    ("The correct answer is C: London, not B: Paris", "C"),
    ("The answer is B, rather than A", "B"),
    ("Instead of A, the answer is B", "B"),
    ("The answer is A\nHmm, no: the answer is B", "B"),
    ("The answer is clearly option (D)", "D"),
    ("Options A and B are both wrong; C it is.", "C"),
    ("A and B", "AB"),
    ("A", "A"),
    ("I", "I"),
    ("D because the sun is hot", "D"),
    ("The best choice would be D", "D"),
    ("The answer is A. However, B is also possible.", ""),
    ("The answer is all of A, B, C and D", "ABCD"),
    ("None of these", ""),
    ("E. None of the above", "E"),
    ("The answer is D) All of the above", "D"),
    ("The answer is D) Both A and B", "D"),
    ("\\boxed{D) Both A and C}", "D"),
    ("D. Both A and C", "D"),
    ("So A cannot be; hence B.", "B"),
    ("It can't be B. A.", "A"),
    ("$B$", "B"),
    ("\\(B\\)", "B"),
    ("So the answer is $\\boxed{B}$.", "B"),
    ("The answer is A and definitely not B.", "A"),
    ("A, not B", "A"),
    ("The only correct option is A since B, C and D fail.", "A"),
    ("The correct statement is B", "B"),
    ("Thus, statement B is true.", "B"),
    ("I select C as my final answer.", "C"),
    ("C is my final answer", "C"),
    ("My final answer is C", "C"),
    ("Vote: C", "C"),
    ("Correct: C", "C"),
    ("All but B", ""),
    ("Anything but B", ""),
    ("Every option but B", ""),
    ("All but B are wrong, so the answer is B", "B"),
    ("I doubt that the answer is B", ""),
    ("There is no doubt: the answer is B", "B"),
    ("It is unlikely that the answer is B", ""),
    ("There is no way the answer is B", ""),
    ("It is impossible that A holds, so B", "B"),
    ("I have no reason to choose B", ""),
    ("Nobody should choose B", ""),
    ("B would be the wrong answer", ""),
    ("B is a trap", ""),
    ("B is tempting but false", ""),
    ("B looks right but is wrong", ""),
    ("B has to be eliminated", ""),
    ("B is never the answer", ""),
    ("The answer is B (wrong)", ""),
    ("Wrong: B", ""),
    ("Incorrect options: A, C. Correct answer: B", "B"),
    ("answer != B", ""),
    ("The answer is B... actually, C", "C"),
    ("The answer is A. No, wait: it's B", "B"),
    ("I said A. Sorry, B", "B"),
    ("答案是A,不对,应该是B", "B"),
    ("答案不可能是B", ""),
    ("怀疑是B", ""),
    ("B是错的", ""),
    ("No, the answer is B.", "B"),
]


@pytest.mark.parametrize(("response", "letters"), RESPONSES)
def test_a_response_chooses_what_a_reader_would_say_it_does(response: str, letters: str) -> None:
    assert "".join(sorted(extract_chosen_letters(response))) == letters


@pytest.mark.parametrize(
    ("label", "letters"),
    [
        *((label, "B") for label in (
            "B", "b", "(B)", "B)", "B) Paris", "B. 42", "B: x", "B - Paris", "B、巴黎", "Ｂ", "**B**", "option b", "#### B",
            r"\boxed{B}",
            r"\boxed{\text{B. Paris}}", "<answer>B</answer>", "<answer>B) Paris</answer>", "The answer is B", "Answer: B",
            "答案：B", "B) Both A and C", "(B) I am",
        )),
        *((label, "AC") for label in ("A,C", "AC", "A and C", ["A", "C"], '["A","C"]', "['A', 'C']", "A、C")),
        ("a) Apple", "A"), ("A. Banana", "A"), ("ABCD", "ABCD"), ("I", "I"),
        *((label, "") for label in ("Paris", "5", "Bed", "A bird in the hand", "", "A or B", "not A")),
    ],
)  # fmt: skip
def test_a_label_has_its_letters_in_every_form_of_data_sets(label: object, letters: str) -> None:
    assert "".join(sorted(extract_label_letters(label))) == letters


#: forms of an answer {0} among others {1}, {2}, and texts in which it is not chosen
RIGHT = (
    "{0}",
    "({0})",
    "{0}.",
    "The answer is {0}",
    "The answer is ({0}).",
    "the correct answer is {0}: 42",
    "**Answer: {0}**",
    "\\boxed{{{0}}}",
    "\\boxed{{\\text{{({0})}}}}",
    "<answer>{0}</answer>",
    "<answer>{0}. 42</answer>",
    "答案是{0}",
    "故选：{0}。",
    "I choose {0}",
    "I would go with {0}, since it is smaller",
    "{0} is correct.",
    "The answer is {0}, not {1}.",
    "The answer is not {1} but {0}.",
    "{1} is wrong, and {2} is impossible, so the answer is {0}.",
    "First {1}? No: the answer is {0}.",
    "Option {1} is incorrect. Option {0} is correct.",
    "We can rule out {1} and {2}.\n\nAnswer: {0}",
    "If it were {1}, x = 1. So {0}.",
    "<think>\\boxed{{{1}}} the answer is {1}</think>The answer is {0}.",
    "The answer is {1}. Wait, the answer is {0}.",
)
WRONG = (
    "The answer is not {0}",
    "The answer isn't {0}.",
    "{0} is wrong",
    "{0} is not correct.",
    "{0} cannot be the answer",
    "I would not choose {0}",
    "The answer is {0} or {1}",
    "The answer is {0}, or maybe {1}.",
    "Either {0} or {1}",
    "neither {0} nor {1}",
    "anything except {0}",
    "The answer is {1}, not {0}",
    "The answer is {1} rather than {0}",
    "Instead of {0}, I choose {1}",
    "{0} is wrong, so the answer is {1}",
    "The answer is {0}. Wait, the answer is {1}.",
    "The answer is {0}. No, it is not {0}.",
    "\\boxed{{{0} or {1}}}",
    "\\boxed{{\\text{{not }}{0}}}",
    "\\boxed{{{0},{1}}}",
    "<answer>{0}/{1}</answer>",
    "<answer>{1}</answer> {0}",
    "the answer is {0}, \\boxed{{{1}}}",
    "答案不是{0}",
    "答案是{0}或{1}",
    "排除{0}",
    "{0}: 1\n{1}: 2\n{2}: 3",
    "Is the answer {0}?",
    "<think>The answer is {0}</think>I do not know.",
    "<think>The answer is {0}",
    "The answers are {0} and {1}",
    "The answer could be {0}, but it might be {1}.",
)


@pytest.mark.parametrize("letters", ["BCD", "CDE", "DBC", "EFH", "GHB", "ABC", "CAB", "BCA"])
def test_every_way_of_choosing_is_right_and_no_mutation_of_it(letters: str) -> None:
    labels = (letters[0], letters[0].lower(), f"({letters[0]})", f"{letters[0]}) 42", f"<answer>{letters[0]}</answer>")
    for label in labels:
        assert [form for form in RIGHT if multiple_choice(form.format(*letters), label) != 1.0] == []
        assert [form for form in WRONG if multiple_choice(form.format(*letters), label) != 0.0] == []


def test_a_small_letter_counts_where_nothing_else_can_be_meant() -> None:
    for letter in "abcde":
        for form in (
            "{}",
            "({})",
            "{})",
            "the answer is {}.",
            "Answer: {}",
            r"\boxed{{{}}}",
            "<answer>{}</answer>",
            "the answer is ({})",
        ):
            assert multiple_choice(form.format(letter), letter.upper()) == 1.0, form.format(letter)
    for text in ("the answer is a number", "it is a trap", "the answer depends on b and c", "a + b = c"):
        assert not extract_chosen_letters(text)


def test_no_text_makes_the_reader_raise_or_take_long() -> None:
    generator = random.Random(3)
    pieces = [
        "A",
        "B",
        "C",
        "(",
        ")",
        " or ",
        " and ",
        ",",
        ".",
        "not ",
        "the answer is ",
        "option ",
        "\\boxed{",
        "}",
        "\n",
        "?",
        "is wrong",
        "选",
        "是",
    ]
    texts = ["".join(generator.choices(pieces, k=generator.randint(1, 60))) for _ in range(300)]
    long = [
        "A or " * 20_000,
        "the answer is " * 8000,
        "A, " * 30_000,
        "(A" * 20_000,
        "not " * 20_000 + "A",
        "is " * 30_000 + "A",
        "\\text{" * 9000,
    ]
    start = time.process_time()
    for text in texts + long:
        extract_chosen_letters(text)
        extract_label_letters(text)
    assert time.process_time() - start < 20
