"""Templates whose prompt opens a thought: several turns, tools and thoughts train, as the table of the guide has it."""

import json
import re
from pathlib import Path

import pytest
from test_data_chat_templates import FOLDER, TOKENS, stand_in

from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data import handler_class
from mindspeed_rl.data.conversation import Conversation
from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.images import ImageReader
from mindspeed_rl.data.messages import openai_messages
from mindspeed_rl.data.templates import load_template

ROOT = Path(__file__).resolve().parents[3]
#: family in the guide -> a template of tests/data
FAMILIES = {
    "Qwen3.5, Qwen3.6": "qwen35",
    "Qwen3.8": "qwen38",
    "Step 3.5": "step35",
    "Hy3": "hy3",
    "MiniMax-M2": "minimax_m2",
    "Nemotron 3": "nemotron3",
    "GLM-4.7": "glm47",
    "Qwen3": "qwen3",
    "GLM-4.5": "glm45",
    "gpt-oss": "gpt_oss",
    "DeepSeek-R1": "deepseek_r1",
    "Qwen2.5": "qwen25",
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object", "properties": {}}}}
]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(city, **more):
    function = {"name": "look", "arguments": json.dumps({"city": city})}
    return answer(None, tool_calls=[{"id": "c1", "type": "function", "function": function}], **more)


RESULT = {"role": "tool", "tool_call_id": "c1", "content": "21 C"}
CASES = {
    "one": [user("Q1"), answer("A1", reasoning_content="hm")],
    "several": [user("Q1"), answer("A1", reasoning_content="hm"), user("Q2"), answer("A2", reasoning_content="so")],
    "tools": [
        user("Q1"),
        call("Rome", reasoning_content="hm"),
        RESULT,
        answer("A1", reasoning_content="so"),
        user("Q2"),
        answer("A2", reasoning_content="well"),
    ],
    "plain": [user("Q1"), answer("A1"), user("Q2"), answer("A2")],
    "off": [user("Q1"), answer("A1"), user("Q2"), answer("A2")],
}


def build_handler(name, **options):
    tokenizer = stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name])
    arguments = options.pop("arguments", None)
    template = load_template("hf", tokenizer, arguments=arguments)
    return handler_class("OpenAIInstructionHandler")(HandlerSettings(tokenizer, template, **options))


def encode(handler, messages):
    """Return (text, trained text) of each row, and the batch."""
    tools = {"tools": TOOLS} if any("tool_calls" in message for message in messages) else {}
    batch = handler.encode([(1, {"messages": messages, **tools})])
    decode = handler.settings.tokenizer.decode
    rows = [
        (decode(row.columns["input_ids"]), decode([int(label) for label in row.columns["labels"] if label != -100]))
        for row in batch.rows
    ]
    return rows, batch


OUTCOMES = {"en": ("yes", "rows of their own", "refused"), "zh": ("可以", "单独成行", "拒绝")}


def find_outcome(name, case):
    """Return the index in OUTCOMES; rows are checked for every text and every end of an answer."""
    handler = build_handler(name, enable_thinking="false" if case == "off" else "none")
    messages = CASES[case]
    rows, batch = encode(handler, messages)
    if batch.bad:
        assert not rows
        return 2
    trained = "".join(text for _, text in rows)
    for message in messages:
        if message["role"] == "assistant":
            texts = [message["content"] or ("Rome" if name in ("qwen35", "qwen38", "step35") else '"Rome"')]
            texts = [text.strip('"') for text in texts] + [message.get("reasoning_content", "")]
            assert all(text in trained for text in texts), (name, case, trained)
    assert batch.added == len(rows) - 1
    assert all(row.endswith(end) for (_, row), end in zip(rows, [find_end(handler)] * len(rows)))
    return int(len(rows) > 1)


def find_end(handler):
    return handler.settings.tokenizer.eos_token


@pytest.mark.parametrize("language", OUTCOMES)
def test_the_table_of_the_guide_is_what_the_templates_do(language):
    page = ROOT / ("docs/models.md" if language == "en" else "docs/zh/models.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    for family, name in FAMILIES.items():
        cells = [OUTCOMES[language][find_outcome(name, case)] for case in CASES]
        assert f"| {family} | {' | '.join(cells)} |" in lines, (family, cells)


def test_each_row_is_the_templates_text_up_to_its_answer():
    handler = build_handler("qwen35")
    rows, batch = encode(handler, CASES["tools"])
    system = "<|im_start|>system\n# Tools\n\n<tools>\n" + json.dumps(TOOLS[0]) + "\n</tools><|im_end|>\n"
    look = "<tool_call>\n<function=look>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call><|im_end|>"
    result = "\n<|im_start|>user\n<tool_response>\n21 C\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    first = f"hm\n</think>\n\n{look}", "so\n</think>\n\nA1<|im_end|>"
    question, opening = f"{system}<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\n", "<think>\n"
    second = "\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert rows == [
        (f"{question}{opening}{first[0]}{result}{opening}{first[1]}\n", "".join(first)),
        (f"{question}{look}{result}A1<|im_end|>{second}well\n</think>\n\nA2<|im_end|>\n", "well\n</think>\n\nA2<|im_end|>"),
    ]
    assert (batch.added, batch.bad) == (1, [])


def test_an_argument_of_the_template_that_keeps_thoughts_makes_one_row():
    rows, batch = encode(build_handler("qwen35", arguments={"preserve_thinking": True}), CASES["several"])
    assert batch.added == 0
    assert [trained for _, trained in rows] == ["hm\n</think>\n\nA1<|im_end|>so\n</think>\n\nA2<|im_end|>"]


def test_qwen38_keeps_thoughts_unless_an_argument_drops_them_and_states_the_effort():
    rows, batch = encode(build_handler("qwen38"), CASES["several"])
    system, first = "<|im_start|>system\nThink carefully before you answer.<|im_end|>\n", "hm\n</think>\n\nA1<|im_end|>"
    turns = [f"<|im_start|>user\nQ{i}<|im_end|>\n<|im_start|>assistant\n<think>\n" for i in (1, 2)]
    trained = f"{first}so\n</think>\n\nA2<|im_end|>"
    assert rows == [(f"{system}{turns[0]}{first}\n{turns[1]}so\n</think>\n\nA2<|im_end|>\n", trained)] and batch.added == 0
    arguments = {"preserve_thinking": False, "reasoning_effort": "medium"}
    rows, batch = encode(build_handler("qwen38", arguments=arguments), CASES["several"])
    assert [row[1] for row in rows] == [first, "so\n</think>\n\nA2<|im_end|>"] and batch.added == 1
    assert not any("system" in text for text, _ in rows)


def test_context_gets_no_row_and_an_answer_trains_once():
    messages = [user("Q1"), answer("A1", weight=0), user("Q2"), answer("A2"), user("Q3"), answer("A3", weight=0)]
    rows, batch = encode(build_handler("qwen35"), messages)
    assert [trained for _, trained in rows] == ["\n</think>\n\nA2<|im_end|>"] and batch.added == 0


def test_our_own_templates_make_rows_of_dropped_thoughts_unless_they_are_to_be_dropped():
    tokenizer = stand_in((FOLDER / "qwen3.jinja").read_text(encoding="utf-8"), **TOKENS["qwen3"])
    kinds = {None: ["<think>\nhm\n</think>\n\nA1<|im_end|>\n", "<think>\nso\n</think>\n\nA2<|im_end|>\n"]}
    kinds[True] = ["A1<|im_end|>\n<think>\nso\n</think>\n\nA2<|im_end|>\n"]
    for drops, expected in kinds.items():
        settings = HandlerSettings(tokenizer, load_template("qwen3"), drop_thinking=drops)
        rows, _ = encode(handler_class("OpenAIInstructionHandler")(settings), CASES["several"])
        assert [trained for _, trained in rows] == expected


SWIFT_ROW = [user("Q1"), answer("A1"), user("Q2"), answer("<think>\nhm\n</think>\n\nA2"), user("Q3"), answer("A3")]
QUESTION = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
EMPTY, THOUGHT, SYSTEM = "<think>\n\n</think>\n\n", "<think>\nhm\n</think>\n\n", "<|im_start|>system\nS<|im_end|>\n"


@pytest.mark.parametrize(
    ("drops", "before", "trained"),
    [
        # ms-swift's sft: an empty thought in each answer without one, none of which trains; earlier thoughts stay and train
        (False, (EMPTY, "", EMPTY), ("A1", f"{THOUGHT}A2", "A3")),
        # its preference stages, of which only the last answers train: earlier answers have no thought at all
        (True, ("", "", EMPTY), ("A1", "A2", "A3")),
    ],
)
def test_hybrid_models_read_empty_thoughts_as_in_ms_swift(drops, before, trained):
    tokenizer = stand_in((FOLDER / "qwen3.jinja").read_text(encoding="utf-8"), **TOKENS["qwen3"])
    template = load_template("qwen3")
    template.drop_thinking = drops
    settings = HandlerSettings(tokenizer, template, drop_thinking=drops, system_prompt="S")
    rows, _ = encode(handler_class("OpenAIInstructionHandler")(settings), SWIFT_ROW)
    answers = [f"{text}<|im_end|>\n" for text in trained]
    turns = [QUESTION.format(f"Q{i + 1}") + before[i] + answers[i] for i in range(3)]
    assert rows == [(SYSTEM + "".join(turns), "".join(answers))]


def test_all_rows_of_a_row_are_left_out_if_one_cannot_be_written():
    # the last answer has no thought, which this template cannot write after its prompt
    rows, batch = encode(build_handler("minimax_m2"), [*CASES["one"], user("Q2"), answer("A2")])
    assert rows == [] and len(batch.bad) == 1 and batch.added == 0 and "opens an answer with" in batch.bad[0][1]


def test_a_thought_in_the_text_of_the_last_answer_is_not_lost():
    drops = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    tokenizer = stand_in(drops + "{{ 'assistant:' if add_generation_prompt }}", eos_token="<|im_end|>")
    handler = handler_class("OpenAIInstructionHandler")(HandlerSettings(tokenizer, load_template("hf", tokenizer)))
    batch = handler.encode([(1, {"messages": [user("Q"), answer("<think>hm</think>A")]})])
    assert "drops the reasoning_content of the last answer" in batch.bad[0][1]


def test_prompts_read_earlier_answers_as_the_template_writes_them():
    tokenizer = stand_in((FOLDER / "qwen35.jinja").read_text(encoding="utf-8"), **TOKENS["qwen35"])
    handler = handler_class("Math17kAlpacaStyleInstructionHandler")(HandlerSettings(tokenizer, load_template("hf", tokenizer)))
    prompt = [*CASES["one"], user("Q2")]
    batch = handler.encode([(1, {"prompt": prompt, "reward_model": {"ground_truth": "1"}})])
    expected = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(batch.rows[0].columns["input_ids"]) == expected
    assert expected.endswith(
        "<|im_start|>assistant\nA1<|im_end|>\n<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


def test_pairs_of_which_an_earlier_answer_would_need_a_row_are_refused():
    tokenizer = stand_in((FOLDER / "qwen35.jinja").read_text(encoding="utf-8"), **TOKENS["qwen35"])
    handler = handler_class("AlpacaStylePairwiseHandler")(HandlerSettings(tokenizer, load_template("hf", tokenizer)))
    row = {"prompt": [user("Q1")], "chosen": [answer("A1"), user("Q2"), answer("A2")], "rejected": [answer("B1")]}
    batch = handler.encode([(1, row)])
    assert "opens an answer with" in batch.bad[0][1] and "let the row end with message 1" in batch.bad[0][1]
    row["chosen"][0]["weight"] = 0
    assert len(handler.encode([(1, row)]).rows) == 1


def test_added_rows_have_the_images_of_their_messages():
    reader = ImageReader(None, "<mark>")
    system, messages = openai_messages([user("<mark>Q1"), answer("A1"), user("<mark><mark>Q2"), answer("A2")])
    whole = Conversation(messages, system, images=("a", "b", "c"))
    beginning = Conversation(messages[:2], system, images=whole.images)
    assert (reader.select(beginning).images, reader.select(whole).images) == (("a",), ("a", "b", "c"))


def test_the_summary_counts_added_rows(tmp_path, capsys):
    tokenizer = stand_in((FOLDER / "qwen35.jinja").read_text(encoding="utf-8"), **TOKENS["qwen35"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [CASES["one"], CASES["several"], [user("Q1"), answer("A1"), user("Q2"), answer("A2"), user("Q3"), answer("A3")]]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    words = ["--input", tmp_path / "rows.jsonl", "--output-prefix", tmp_path / "out", "--prompt-type", "hf"]
    words += ["--tokenizer-name-or-path", tmp_path / "tokenizer", "--handler-name", "OpenAIInstructionHandler"]
    assert main([*map(str, words)]) == 0
    text = capsys.readouterr().out
    # 3 rows, of which the second has one earlier answer and the third two
    assert "rows read 3, kept 6, dropped 0, truncated 0\n  added, earlier answers as rows of their own: 3\n" in text
    assert main([*map(str, words), "--seq-length", "60"]) == 0
    kept, dropped, added = map(int, re.search(r"kept (\d+), dropped (\d+).*\n.*own: (\d+)", capsys.readouterr().out).groups())
    assert kept + dropped == 3 + added and dropped > 0
