r"""One definition of a thought for all scorers: what counts is after it, in every family, whoever opened it."""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))
from byte_tokenizer import build_tokenizer

from mindspeed_rl.rewards.code import code
from mindspeed_rl.rewards.math_scores import (
    acc,
    acc_for_dapo,
    accuracy,
    base_acc,
    boxed_grade,
    gsm8k,
    gsm8k_flexible,
    math_verify_reward,
    retool_reward,
)
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.rewards.shaping import cosine
from mindspeed_rl.rewards.text_scores import exact_match, json_format, multiple_choice, think_alone, think_answer_alone
from mindspeed_rl.thoughts import (
    closes_thought,
    ends_inside_thought,
    find_opened,
    find_template_marks,
    list_mark_tokens,
    remove_thought,
    split_thought,
)
from mindspeed_rl.workers.reward_group import SampleReader

#: family -> (opening, closing), from the published chat templates and vLLM's reasoning parsers
FAMILIES = {
    "DeepSeek-R1, Qwen3, GLM-4.5": ("<think>\n", "\n</think>\n\n"),
    "Seed-OSS": ("<seed:think>", "</seed:think>"),
    "Hunyuan, Hy3": ("<think:opensource>", "</think:opensource>"),
    "MiniMax-M3": ("<mm:think>", "</mm:think>"),
    "LongCat": ("<longcat_think>\n", "\n</longcat_think>\n"),
    "K2": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "EXAONE Deep": ("<thought>\n", "\n</thought>\n"),
    "Magistral": ("[THINK]", "[/THINK]"),
    "Kimi-VL": ("◁think▷", "◁/think▷"),
    "Command A": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "Apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "PLaMo": ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
    "Gemma 4": ("<|channel>thought\n", "<channel|>"),
    "gpt-oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "gpt-oss without special tokens between": ("<|channel|>analysis<|message|>", "assistant<|channel|>final<|message|>"),
    "gpt-oss with a call": (
        "<|channel|>analysis<|message|>",
        '<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 4}<|call|>'
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>4<|end|>"
        "<|start|>assistant<|channel|>final<|message|>",
    ),
    "Kimi K3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "Granite": ("Here is my thought process:", "Here is my response:"),
}
TICKS = "`" * 3
GOOD, BAD = (f"{TICKS}python\ndef add(a, b): return a {sign} b\n{TICKS}\n" for sign in "+-")


def _run(response: str, prompt: str) -> float:
    return float(code(response, RewardSettings(), tests=["assert add(1, 2) == 3"], prompt=prompt)["score"])


def _cosine(response: str, prompt: str) -> float:
    return float(cosine(response, "4", [1] * 10, RewardSettings(cosine_min_len_value_correct=1.0), prompt) > 0)


#: scorer -> (function of response and prompt, right text, wrong text)
SCORERS: dict[str, tuple[Callable[[str, str], float], str, str]] = {
    **{
        score.__name__: (lambda text, prompt, score=score: score(text, "4", prompt), r"So \boxed{4}.", r"So \boxed{5}.")
        for score in (acc, accuracy, boxed_grade, gsm8k_flexible)
    },
    "retool": (lambda response, prompt: retool_reward(response, "4", prompt=prompt), r"So \boxed{4}", r"So \boxed{5}"),
    "gsm8k": (lambda response, prompt: gsm8k(response, "4", prompt), "#### 4", "#### 5"),
    "dapo": (lambda response, prompt: acc_for_dapo(response, "4", prompt), "Answer: 4", "Answer: 5"),
    "cosine": (_cosine, r"\boxed{4}", r"\boxed{5}"),
    "exact": (lambda response, prompt: exact_match(response, "4", prompt), "4", "5"),
    "choice": (lambda response, prompt: multiple_choice(response, "B", prompt), "The answer is B.", "The answer is A."),
    "json": (lambda response, prompt: json_format(response, {"const": {"a": 1}}, prompt), '{"a": 1}', '{"a": 2}'),
    "code": (_run, GOOD, BAD),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scorer", SCORERS)
def test_what_counts_is_after_the_thought(scorer: str, family: str) -> None:
    score, right, wrong = SCORERS[scorer]
    opening, closing = FAMILIES[family]
    if scorer == "code" and family not in ("Seed-OSS", "gpt-oss", "Gemma 4"):
        pytest.skip("a sandbox takes a tenth of a second")
    for prompt, start in (("question: ", opening), (f"question: {opening}", "")):
        assert score(f"{start}maybe\n{wrong}\n{closing}{right}", prompt) >= 1
        assert score(f"{start}maybe\n{right}\n{closing}{wrong}", prompt) < 1
        assert score(f"{start}maybe\n{right}\n{closing}I do not know", prompt) < 1
        assert score(f"{start}maybe\n{right}", prompt) < 1
        assert score(f"{start}{right}", prompt) < 1
    assert score(f"{closing}{right}", f"question: {opening}") >= 1
    assert score(right, "question: ") >= 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_opens_a_thought_only_at_its_end(family: str) -> None:
    opening, closing = FAMILIES[family]
    assert find_opened(f"a{opening}") is not None and ends_inside_thought(f"a{opening}")
    assert find_opened(f"a{opening}{closing}") is None and not ends_inside_thought(f"a{opening}{closing}")
    assert find_opened(f"write it between {opening} and {closing}, please") is None
    assert closes_thought(f"a{closing}b") and not closes_thought("a b")
    assert split_thought(f"x{closing}y", f"a{opening}")[1].strip() == "y"


def test_marks_of_another_family_in_a_thought_or_an_answer_do_not_reach_the_score() -> None:
    assert remove_thought("<think>the tag [THINK] opens</think>4") == "4"
    assert remove_thought("<think>a [/THINK] 4") == ""
    assert remove_thought("</think><seed:think>4") == ""
    assert remove_thought("<think>a</think>4 <seed:think>5") == "4 "
    assert remove_thought("no thought, x < y and a[T]") == "no thought, x < y and a[T]"
    assert remove_thought("<|channel|>final<|message|>4<|return|>") == "4"


def test_a_template_tells_its_family() -> None:
    assert find_template_marks("{% if x %}<seed:think>{{ y }}</seed:think>").texts == ("<seed:think>", "</seed:think>")
    assert find_template_marks("<|start|>assistant<|channel|>analysis<|message|>").texts[0] == "<|channel|>analysis<|message|>"
    assert find_template_marks("", ["<|channel>", "<channel|>", "a"]).texts[1] == "<channel|>"
    assert find_template_marks("", ["</think:x>", "<think:x>"]).texts == ("<think:x>", "</think:x>")
    assert find_template_marks("", ["a"]).texts == ("<think>", "</think>")
    assert list_mark_tokens(["<think>", "</think>", "<|message|>", "<s>"]) == {"<think>", "</think>"}
    assert list_mark_tokens(["<|channel|>", "<|message|>", "<|end|>"]) == {"<|channel|>", "<|message|>"}


def test_rewards_see_the_marks_that_are_special_tokens() -> None:
    tokenizer = build_tokenizer()
    reader = SampleReader(tokenizer, "response", 1000)

    def read(text: str) -> str:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return reader.read(tokenizer.encode("q", add_special_tokens=False), ids, "4", {}, False).response

    assert read(r"<think>\boxed{4}</think>no<|im_end|>") == r"<think>\boxed{4}</think>no"
    assert read("<|channel|>final<|message|>4<|end|>") == "<|channel|>final<|message|>4"
    assert read("4<|im_end|>") == "4"


@pytest.mark.parametrize("empty", ["<think>\n", "<think>"])
def test_scores_with_a_frame_accept_the_thought_that_the_prompt_opened(empty: str) -> None:
    """The default verifier gave 0 to every response of such a template."""
    prompt, response = f"<|im_start|>assistant\n{empty}", r"why</think><answer>\boxed{4}</answer>"
    assert base_acc(response, "4", prompt) == math_verify_reward(response, "4", prompt) == 1.0
    assert base_acc(response, "5", prompt) == math_verify_reward(response, "5", prompt) == 0.0
    assert base_acc(response, "4") == 0.0
    assert think_answer_alone(response, prompt) == think_alone(response, prompt) == 1.0
    assert base_acc(r"why \boxed{4}", "4", prompt) == 0.0


def test_no_text_makes_it_slow() -> None:
    generator = random.Random(5)
    pieces = [mark for pair in FAMILIES.values() for mark in pair] + ["a", " ", "<", "|", ">", "</", "final"]
    texts = ["".join(generator.choices(pieces, k=40)) for _ in range(300)]
    repeated = ("<think>", "</think>", "<|channel|>final", "<a:", "<a:think", "</a:think></b:think>", "<|open|>")
    texts += [piece * 20_000 for piece in repeated]
    texts += ["".join(f"<t{index}:think></t{index}:think>" for index in range(5000))]
    start = time.process_time()
    for text in texts:
        remove_thought(text, text[-50:])
        closes_thought(text)
    assert time.process_time() - start < 10
