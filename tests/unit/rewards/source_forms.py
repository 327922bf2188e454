r"""Forms of responses and labels by which scorers are compared with the functions of other projects.

A form is an answer, as a model may write it, in a text, as a model may write that. `list_forms` returns all of them, or as
many as a test takes, spread over the texts and the answers.
"""

from __future__ import annotations

import math
from itertools import product

LONG = "We add the numbers one by one and check each sum again. " * 9

#: label -> answers, right and wrong ones
ANSWERS: dict[str, tuple[str, ...]] = {
    "18": (
        "18", "18.0", "18.00", "$18", "\\$18", "18 dollars", "18%", "18\\%", "１８", "十八", "018", "+18", "-18", "18.",
        "1.8e1", "\\frac{36}{2}", "18 元", "2 \\cdot 9",
        "\\text{18}", "18^\\circ", "17", "18,", "1,8", "about 18", "18 or 19", "",
    ),
    "-3.5": ("-3.5", "-3.50", "−3.5", "-\\frac{7}{2}", "-7/2", "3.5", "- 3.5", "-3,5"),
    "1234": ("1234", "1,234", "1{,}234", "1\\,234", "1 234", "1234.0", "1.234", "1234 km", "1,234 units"),
    "1,234": ("1,234", "1234", "1\\!,\\!234"),
    "\\frac{1}{2}": (
        "\\frac{1}{2}", "0.5", "1/2", "\\dfrac12", "\\tfrac{1}{2}", "\\frac12", ".5", "50\\%", "\\frac{2}{4}", "2",
    ),
    "\\frac{\\sqrt{3}}{2}": ("\\frac{\\sqrt{3}}{2}", "\\frac{\\sqrt3}2", "\\sqrt{3}/2", "0.866", "\\sqrt{\\frac{3}{4}}"),
    "(1,2)": ("(1,2)", "(1, 2)", "1,2", "\\left(1,2\\right)", "(1,2]", "(2,1)"),
    "[0,1)": ("[0,1)", "\\left[0, 1\\right)", "(0,1)", "0 \\le x < 1"),
    "\\{1,2,3\\}": ("\\{1,2,3\\}", "1,2,3", "\\{3,2,1\\}", "{1,2,3}", "1, 2 and 3"),
    "x^2+1": ("x^2+1", "1+x^2", "x^{2} + 1", "y=x^2+1", "f(x) = x^2+1", "x^2-1"),
    "x=5": ("x=5", "5", "x = 5", "x=6"),
    "12\\text{ cm}": ("12\\text{ cm}", "12", "12 cm", "12\\,\\mathrm{cm}", "12 \\text{ cm}^2", "12\\text{cm}"),
    "10\\pi": ("10\\pi", "10 \\pi", "31.4", "10π"),
    "30^\\circ": ("30^\\circ", "30", "30^{\\circ}", "30 degrees", "30°"),
    "A": ("A", "(A)", "\\text{(A)}", "a", "B", "A. Paris", "\\textbf{A}"),
    "\\text{Tuesday}": ("\\text{Tuesday}", "Tuesday", "tuesday", "Wednesday"),
    "北京": ("北京", "北京市", "北 京", "上海"),
    "The Nile": ("The Nile", "nile", "the Nile.", "Nile River", "a Nile", "Amazon"),
    "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}": (
        "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}",
        "\\begin{bmatrix} 1 \\\\ 2 \\end{bmatrix}",
    ),
    "3,4": ("3,4", "4,3", "3, 4", "3 and 4", "3\\text{ and }4", "3"),
    "5 \\times 10^{-3}": ("5 \\times 10^{-3}", "0.005", "5e-3"),
    "\\infty": ("\\infty", "infinity", "∞"),
    "no solution": ("no solution", "\\text{no solution}", "\\emptyset"),
    "0": ("0", "0.0", "-0", "zero", "00"),
    "$7$": ("7", "$7$", "8"),
    "\\boxed{9}": ("9", "\\boxed{9}", "8"),
    "5 + 4 = 9\n#### 9": ("9", "8", "9.0"),
    "<answer>6</answer>": ("6", "5", "\\frac{12}{2}"),
}  # fmt: skip

#: texts around an answer
TEXTS: tuple[str, ...] = (
    "%",
    "#### %",
    "####%",
    "### %",
    "We get #### 1\n#### %",
    "#### %\n" + LONG,
    LONG + "#### %",
    "The answer is %.",
    "Answer: %",
    "Answer:%\nI am sure.",
    "answer : %",
    "**Answer:** %",
    "Answer: 1\nSo, Answer: %",
    "Answer: %<|im_end|>",
    "ANSWER: $%$",
    "Answer: \\boxed{%}",
    "答案：%",
    "因此答案是 $%$。",
    "所以最终答案为\\boxed{%}。",
    "\\boxed{%}",
    "$\\boxed{%}$",
    "\\boxed {%}",
    "$\\boxed %$",
    "\\fbox{%}",
    "\\boxed{%",
    "\\boxed{\\boxed{%}}",
    "\\boxed{ % }",
    "First \\boxed{1}, then \\boxed{%}",
    "First \\boxed{%}, then \\boxed{1}",
    "\\boxed{%}\n" + LONG,
    LONG + "\\boxed{%}",
    "Thus $x=%$.",
    "\\[ % \\]",
    "\\(%\\)",
    "$$%$$",
    "```\n%\n```",
    "1. We start.\n2. We end: \\boxed{%}",
    "<think>So it is \\boxed{1}</think>\\boxed{%}",
    "<think>So it is \\boxed{%}</think>The answer is 1.",
    "So it is 1.</think>\n\n\\boxed{%}",
    "<think>So.</think><answer>%</answer>",
    "<think>So.</think>\n<answer>\\boxed{%}</answer>\n",
    "<think>So.</think><answer>%</answer>.",
    "<think>So.<think>Again.</think>Or <answer>%</answer>",
    "So.</think><answer>%</answer>",
    "<answer>%</answer>",
    "<answer>1</answer><answer>%</answer>",
    "<answer>%</answer><answer>1</answer>",
    "<answer>\n% \n</answer>",
    "<answer>%</answer>" * 11,
    "<answer>%",
    "###Response\n\\boxed{%}",
    "<think>\n</think>\n% is \\boxed{%}, option (%).",
    "The correct option is %",
    "% % % % % % %",
    "<|im_start|>assistant\n%",
    "\n \t\n",
)

#: labels that whole numbers can be read from
WHOLE = tuple(label for label in ANSWERS if label.lstrip("-").replace(".", "").replace(",", "").isdigit())


def list_forms(labels: tuple[str, ...] = tuple(ANSWERS), most: int | None = None) -> list[tuple[str, str]]:
    """Return responses with their labels.

    Args:
        most: forms, spread evenly over all of them.
    """
    pairs = [(answer, label) for label in labels for answer in ANSWERS[label]]
    # a text without an answer is one form of a label
    forms = list(dict.fromkeys((text.replace("%", answer), label) for text, (answer, label) in product(TEXTS, pairs)))
    if most is None or most >= len(forms):
        return forms
    # no common factor, so no form comes twice
    step = next(step for step in range(len(forms) * 5 // 8, len(forms)) if math.gcd(step, len(forms)) == 1)
    return [forms[index * step % len(forms)] for index in range(most)]
