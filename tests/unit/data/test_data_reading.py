"""One reader of conversations for every stage: each text of a random row is in the tokens, or the row is refused."""

import json
import random
from functools import cache
from pathlib import Path

import pytest
from byte_tokenizer import build_tokenizer
from test_data_chat_templates import FOLDER, TOKENS, stand_in
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mindspeed_rl import data
from mindspeed_rl.checkpoint.hf import set_end_token
from mindspeed_rl.data import handler_class
from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.indexed import IGNORE_INDEX
from mindspeed_rl.data.templates import find_end_token, load_template
from mindspeed_rl.data.tokenizer import check_tokens, load_tokenizer

#: it writes all that a template can read, with the prompt before each answer
CHAT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }}{{ c.function.arguments | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENAI_KEYS = ("reasoning_content", "reasoning", "thinking", "thought", "refusal")
FLAGS = [("weight", 0), ("loss", False), ("train", False), ("loss_weight", 0), ("weight", 1), ("loss_scale", 1.0)]
#: our templates, and the templates of tests/data by their files
OWN = tuple(json.loads((Path(data.__file__).parent / "templates.json").read_text(encoding="utf-8")))
OWN = tuple(entry["name"] for entry in OWN)
FILES = {path.stem: path for path in sorted(FOLDER.rglob("*.jinja"))}


@cache
def load(name):
    """A tokenizer and the template: one of ours, `hf` with CHAT, or `hf` with a file."""
    if name in FILES and name not in OWN:
        tokenizer = stand_in(FILES[name].read_text(encoding="utf-8"), **TOKENS.get(name, {}))
        return tokenizer, load_template("hf", tokenizer)
    tokenizer = build_tokenizer(eos_token="<|im_end|>")
    tokenizer.chat_template = CHAT
    return tokenizer, load_template(name, tokenizer)


def build_handler(name, template, **options):
    tokenizer, loaded = load(template)
    return handler_class(name)(HandlerSettings(tokenizer=tokenizer, template=loaded, **options))


class Row:
    """A random row.

    Attributes:
        texts: all texts that it marks to be read or trained; `aside` is a thought of an answer that does not train.
        trained, context: texts of answers that train, and of those that do not.
    """

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.texts, self.trained, self.context = [], [], []

    def mark(self, kind):
        self.texts.append(f"{kind}{len(self.texts):03d}x")
        return self.texts[-1]

    def call(self):
        arguments = {"a": self.mark("value")} | ({"b": [self.mark("value")]} if self.rng.random() < 0.3 else {})
        return {"name": self.mark("call"), "arguments": json.dumps(arguments) if self.rng.random() < 0.5 else arguments}

    def question(self):
        return {"role": "user", "content": self.mark("question")}

    def answer(self, *, is_context=False, may_call=True):
        first = len(self.texts)
        message = {"role": "assistant", "content": self.mark("answer")}
        kind = self.rng.random() if may_call else 1.0
        if kind < 0.2:
            calls = [self.call() for _ in range(self.rng.choice([1, 1, 2]))]
            message["tool_calls"] = [
                {"id": f"c{index:08d}", "type": "function", "function": call} for index, call in enumerate(calls)
            ]
            message["content"] = self.rng.choice([None, "", message["content"]])
        elif kind < 0.3:
            message["function_call"] = self.call()
        if self.rng.random() < 0.2:
            key, value = self.rng.choice(FLAGS)
            message[key] = value
            is_context = is_context or not value
        if self.rng.random() < 0.4:
            thought = self.mark("aside" if is_context else "thought")
            if self.rng.random() < 0.3 and message["content"]:
                message["content"] = f"<think>\n{thought}\n</think>\n\n{message['content']}"
            else:
                message[self.rng.choice(OPENAI_KEYS[: self.rng.choice([3, 3, 5])])] = thought
        said = [text for text in self.texts[first:] if text in json.dumps(message)]
        (self.context if is_context else self.trained).extend(said)
        return message

    def turns(self, count, *, is_context=False):
        """Questions with answers; the results of calls, too."""
        messages = []
        for _ in range(count):
            messages.append(self.question())
            answer = self.answer(is_context=is_context)
            messages.append(answer)
            results = len(answer.get("tool_calls", ())) or int("function_call" in answer)
            for index in range(results):
                messages.append({"role": "tool", "tool_call_id": f"c{index:08d}", "content": self.mark("result")})
            if results:
                messages.append(self.answer(is_context=is_context, may_call=False))
        return messages

    def sharegpt(self, messages):
        """The same messages in ShareGPT's form, as far as it has them."""
        speakers = {"user": "human", "assistant": "gpt", "tool": "observation", "system": "system"}
        return [
            {"from": speakers[message["role"]], "value": message["content"] or ""}
            | {key: value for key, value in message.items() if key not in ("role", "content", "tool_call_id")}
            for message in messages
        ]

    def columns(self):
        """Columns beside the messages."""
        columns = {}
        if self.rng.random() < 0.3:
            columns["system"] = self.mark("system")
        if self.rng.random() < 0.5:
            columns["tools"] = [{"name": self.mark("tool"), "parameters": {"type": "object", "properties": {}}}]
        if self.rng.random() < 0.1:
            columns["history"] = [[self.mark("question"), self.mark("answer")]]
        return columns

    def start(self):
        return [{"role": "system", "content": self.mark("system")}] if self.rng.random() < 0.3 else []


def instruction(row, form):
    messages = row.start() + row.turns(row.rng.randint(1, 3))
    return {"messages": messages} if form == "openai" else {"conversations": row.sharegpt(messages)}


def judged(row):
    """A conversation of which the last answer is judged, and the others are context."""
    messages = row.start() + row.turns(row.rng.randint(0, 2), is_context=True)
    return {"conversations": row.sharegpt([*messages, row.question(), row.answer()]), "label": 0}


def alpaca(row):
    columns = {"instruction": row.mark("question"), "output": row.mark("answer")}
    return columns | ({"input": row.mark("input")} if row.rng.random() < 0.5 else {})


def preference(row, keys):
    """Rows in TRL's explicit and implicit forms, and with a text as the prompt."""
    kind = row.rng.choice(["explicit", "implicit", "again", "text", "short"])
    before = row.start() if kind != "text" else []
    before += row.turns(row.rng.randint(0, 1), is_context=True) if kind != "text" else []
    before.append(row.question())
    sides = []
    for _ in keys:
        # of one conversation without a prompt only the last answer trains
        is_long = row.rng.random() < 0.3 and (len(keys) > 1 or kind != "implicit")
        after = [row.answer(may_call=not is_long)]
        sides.append([*after, row.question(), row.answer()] if is_long else after)
    columns = {}
    if kind == "explicit":
        columns = {"prompt": before, **dict(zip(keys, sides))}
    elif kind == "implicit":
        columns = {key: [*before, *side] for key, side in zip(keys, sides)}
    elif kind == "again":
        columns = {"prompt": before, **{key: [*before, *side] for key, side in zip(keys, sides)}}
    elif kind == "text":
        columns = {"prompt": before[0]["content"]} | {
            key: [*before, *side] if row.rng.random() < 0.5 else side for key, side in zip(keys, sides)
        }
    else:
        columns = {"prompt": before} | dict(zip(keys, (side[0] if len(side) == 1 else side for side in sides)))
    return columns


def prompt(row):
    before = row.start() + row.turns(row.rng.randint(0, 2), is_context=True) + [row.question()]
    return {"prompt": before, "reward_model": {"ground_truth": "1"}}


def conversation_prompt(row):
    before = row.start() + row.turns(row.rng.randint(0, 2), is_context=True) + [row.question()]
    return {"conversations": row.sharegpt([*before, {"role": "assistant", "content": "1"}])}


ROWS = {
    "OpenAIInstructionHandler": lambda row: instruction(row, "openai"),
    "SharegptStyleInstructionHandler": lambda row: instruction(row, "sharegpt"),
    "AlpacaStyleInstructionHandler": alpaca,
    "AlpacaStylePairwiseHandler": lambda row: preference(row, ("chosen", "rejected")),
    "SharegptStylePairwiseHandler": lambda row: {
        {"prompt": "conversations"}.get(key, key): value for key, value in preference(row, ("chosen", "rejected")).items()
    },
    "AlpacaStyleUnpairedHandler": lambda row: preference(row, ("output",)) | {"label": True},
    "SharegptStyleUnpairedHandler": judged,
    "Math17kAlpacaStyleInstructionHandler": prompt,
    "R1SharegptStyleInstructionHandler": conversation_prompt,
    "R1AlpacaStyleInstructionHandler": lambda row: {"instruction": row.mark("question"), "output": "1"},
    "PPOAlpacaStyleInstructionHandler": lambda row: {"instruction": row.mark("question"), "output": "1"},
}
#: kinds of texts in messages
OF_TURNS = ("question", "answer", "result", "call", "value")
#: what they train is known of each answer; pairs and judged answers have context of their own
TRAINERS = ("OpenAIInstructionHandler", "SharegptStyleInstructionHandler")


def read(handler, columns):
    """Return the text of all tokens and of the trained ones, and the error of a refused row."""
    batch = handler.encode([(1, columns)])
    text, trained = "", ""
    for row in batch.rows:
        for name, ids in row.columns.items():
            if name.endswith("input_ids"):
                labels = row.columns.get(name.replace("input_ids", "labels"), [IGNORE_INDEX] * len(ids))
                text += handler.settings.tokenizer.decode(ids) + "\n"
                if len(labels) == len(ids):
                    trained += handler.settings.tokenizer.decode([int(label) for label in labels if label != IGNORE_INDEX])
    return text, trained, batch


def check_row(name, template, seed):
    """Return True for an accepted row, of which every text is in the tokens; thoughts of context may be left out."""
    row = Row(seed)
    columns = ROWS[name](row) | row.columns()
    written = json.dumps(columns)
    text, trained, batch = read(build_handler(name, template), columns)
    if not batch.rows:
        assert batch.bad or batch.dropped
        return False
    # where thoughts of earlier turns go, a row ends with its last answer that trains: what follows changes no token of it
    last = max((int(one[-4:-1]) for one in row.trained), default=len(row.texts)) if name in TRAINERS else len(row.texts)
    follows = [one for one in row.texts if one.startswith(OF_TURNS) and int(one[-4:-1]) > last]
    missing = [one for one in row.texts if one in written and one not in text and not one.startswith("aside")]
    missing = [one for one in missing if one not in follows]
    assert not missing, (template, seed, missing, columns, text)
    if name in TRAINERS:
        assert [one for one in row.trained if one not in trained] == [], (template, seed, columns, trained)
        assert [one for one in row.context if one in trained] == [], (template, seed, columns, trained)
    return True


def check_rows(name, seeds):
    """Return the number of accepted rows by template."""
    return {template: sum(check_row(name, template, seed) for seed in seeds) for template in (*OWN, "hf", *FILES)}


@pytest.mark.parametrize("name", ROWS)
def test_every_text_of_a_row_is_in_the_tokens_or_the_row_is_refused(name):
    accepted = check_rows(name, range(3))
    assert sum(count > 0 for count in accepted.values()) >= 5, accepted


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_every_text_of_many_rows_is_in_the_tokens_or_the_row_is_refused(name):
    accepted = check_rows(name, range(3, 60))
    assert sum(count > 0 for count in accepted.values()) >= 60, accepted


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


PAIRS = [
    # TRL's explicit prompt; the common beginning of the answers is context
    (
        {
            "prompt": [user("Q1")],
            "chosen": [assistant("S"), user("Q2"), assistant("G")],
            "rejected": [assistant("S"), user("Q2"), assistant("B")],
        },
        "G<|im_end|>B<|im_end|>",
    ),
    # from the first difference on, all answers train
    (
        {
            "prompt": [user("Q1")],
            "chosen": [assistant("S"), user("Q2"), assistant("G")],
            "rejected": [assistant("T"), user("Q2"), assistant("B")],
        },
        "S<|im_end|>G<|im_end|>T<|im_end|>B<|im_end|>",
    ),
    # the implicit prompt, with a question that differs
    (
        {
            "chosen": [user("Q1"), assistant("S"), user("Q2"), assistant("G")],
            "rejected": [user("Q1"), assistant("S"), user("Q3"), assistant("B")],
        },
        "G<|im_end|>B<|im_end|>",
    ),
    # one conversation begins the other
    ({"chosen": [user("Q1"), assistant("S")], "rejected": [user("Q1"), assistant("S"), user("Q2"), assistant("B")]},
     "S<|im_end|>S<|im_end|>B<|im_end|>"),
    # the prompt is the first question, and again a part of the answers (UltraFeedback)
    ({"prompt": "Q1", "chosen": [user("Q1"), assistant("G")], "rejected": [user("Q1"), assistant("B")]},
     "G<|im_end|>B<|im_end|>"),
    # an answer that is marked as context does not train
    (
        {
            "prompt": [user("Q1")],
            "chosen": [assistant("S", weight=0), user("Q2"), assistant("G")],
            "rejected": [assistant("B")],
        },
        "G<|im_end|>B<|im_end|>",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "expected"), PAIRS)
@pytest.mark.parametrize("template", ["chatml", "hf"])
def test_of_a_pair_what_follows_the_common_beginning_trains(columns, expected, template):
    _, trained, batch = read(build_handler("AlpacaStylePairwiseHandler", template), columns)
    assert not batch.bad and trained.replace("\n", "") == expected


@pytest.mark.parametrize(("columns", "expected"), PAIRS)
def test_columns_of_a_pair_as_json_text_are_the_messages(columns, expected):
    written = {name: json.dumps(value) if isinstance(value, list) else value for name, value in columns.items()}
    _, trained, batch = read(build_handler("AlpacaStylePairwiseHandler", "chatml"), written)
    assert not batch.bad and trained.replace("\n", "") == expected


@pytest.mark.parametrize(
    ("name", "columns", "problem"),
    [
        ("AlpacaStylePairwiseHandler", {"prompt": "[{'role': 'user'", "chosen": "G", "rejected": "B"}, "but not JSON"),
        ("AlpacaStyleUnpairedHandler", {"prompt": "Q", "output": "[{'role': 'x'", "label": True}, "but not JSON"),
        ("AlpacaStyleInstructionHandler", {"instruction": json.dumps([user("Q")]), "output": "A"}, "reads plain text"),
        ("AlpacaStyleInstructionHandler", {"instruction": "Q", "output": json.dumps([assistant("A")])}, "reads plain text"),
        ("AlpacaStyleInstructionHandler", {"instruction": "Q", "output": "A", "system_prompt": "S"}, '"system_prompt"}'),
        ("OpenAIInstructionHandler", {"messages": [user("Q"), assistant("A")], "functions": [{}]}, '{"tools": "functions"}'),
    ],
)
def test_a_text_that_would_be_written_wrong_or_left_out_is_refused(name, columns, problem):
    batch = build_handler(name, "chatml").encode([(1, columns)])
    assert not batch.rows and problem in batch.bad[0][1]


def test_a_system_prompt_in_another_column_is_named_or_switched_off():
    row = {"instruction": "Q", "output": "A", "system_prompt": "S"}
    for column, expected in (("system_prompt", True), ("", False)):
        handler = build_handler("AlpacaStyleInstructionHandler", "chatml", map_keys={"system": column})
        text, trained, batch = read(handler, row)
        assert not batch.bad and ("S" in text) is expected and "A" in trained


REFUSED = [
    ({"prompt": "Q", "chosen": [user("other"), assistant("G")], "rejected": "B"}, "not with the messages of the prompt"),
    ({"chosen": "G", "rejected": "B"}, "has no prompt"),
    ({"prompt": [user("Q")], "chosen": [assistant("G"), user("R")], "rejected": "B"}, "the last message is not from the"),
    ({"prompt": [user("Q")], "chosen": ["G", "H"], "rejected": "B"}, "must hold an answer"),
    (
        {"prompt": [{"role": "system", "content": "S"}, user("Q")], "chosen": "G", "rejected": "B", "system": "T"},
        "two system prompts: 'T' in column 'system', and 'S'",
    ),
    ({"prompt": "Q", "chosen": [{"role": "system", "content": "S"}, user("Q"), assistant("G")],
      "rejected": [{"role": "system", "content": "T"}, user("Q"), assistant("B")]}, "another system prompt"),
    ({"prompt": [user("Q")], "chosen": assistant("G", mood="glad"), "rejected": "B"}, "'mood', which template 'chatml'"),
    ({"prompt": [user("Q")], "chosen": assistant("G", reasoning="hm"), "rejected": "B"}, "cannot write reasoning_content"),
    ({"prompt": [user("Q")], "chosen": "G", "rejected": "B", "loss_weight": 2}, "loss_weight=2, but all rows"),
]  # fmt: skip


@pytest.mark.parametrize(("columns", "problem"), REFUSED)
def test_a_pair_of_which_a_part_cannot_be_written_is_refused(columns, problem):
    batch = build_handler("AlpacaStylePairwiseHandler", "chatml").encode([(1, columns)])
    assert not batch.rows and problem in batch.bad[0][1]


def test_a_thought_that_the_template_leaves_out_of_an_answer_that_trains_is_refused_in_pairs():
    chosen = [assistant("S", reasoning_content="why"), user("Q2"), assistant("G")]
    columns = {"prompt": [user("Q")], "chosen": chosen, "rejected": [assistant("B")]}
    batch = build_handler("AlpacaStylePairwiseHandler", "qwen3").encode([(1, columns)])
    assert "leaves out the thought 'why'" in batch.bad[0][1]


def test_two_names_with_different_thoughts_are_refused():
    for answer in (assistant("A", reasoning="x", reasoning_content="y"), assistant("<think>x</think>A", reasoning="y")):
        batch = build_handler("OpenAIInstructionHandler", "qwen3").encode([(1, {"messages": [user("Q"), answer]})])
        assert "thoughts" in batch.bad[0][1]


@pytest.mark.parametrize("key", ["loss_weight", "loss_scale", "weight"])
def test_an_answer_with_weight_0_is_context_and_other_weights_are_refused(key):
    handler = build_handler("OpenAIInstructionHandler", "chatml")
    turns = [user("Q"), assistant("A", **{key: 0}), user("R"), assistant("B")]
    assert read(handler, {"messages": turns})[1].replace("\n", "") == "B<|im_end|>"
    turns[1][key] = 0.5
    assert f"{key}=0.5" in read(handler, {"messages": turns})[2].bad[0][1]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_a_thought_reaches_the_tokenizers_template_under_the_name_that_it_reads(key, name):
    handler = build_handler("OpenAIInstructionHandler", "chatml")
    handler.settings.tokenizer.chat_template = CHAT.replace("reasoning_content", name)
    template = load_template("hf", handler.settings.tokenizer)
    handler = handler_class("OpenAIInstructionHandler")(HandlerSettings(handler.settings.tokenizer, template))
    trained = read(handler, {"messages": [user("Q"), assistant("A", **{key: "why"})]})[1]
    assert trained == "<think>why</think>A<|im_end|>"


def test_openais_earlier_keys_of_calls_are_read():
    call = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    turns = [user("Q"), assistant(None, function_call=call), {"role": "function", "name": "weather", "content": "21"}]
    turns.append(assistant("A"))
    handler = build_handler("OpenAIInstructionHandler", "qwen3")
    text, trained, _ = read(handler, {"messages": turns})
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>' in trained
    assert "<tool_response>\n21\n</tool_response>" in text


def test_a_tokenizer_that_transformers_builds_by_other_rules_than_its_file_is_an_error(tmp_path):
    alphabet = [*map(chr, range(33, 127)), "▁", "<eos>", "<unk>"]
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.save(str(tmp_path / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "unk_token": "<unk>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    check_tokens(load_tokenizer(tmp_path), tmp_path)
    # for this type transformers has its own pre-tokenizer, which has no Metaspace
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "Qwen2Tokenizer"}))
    with pytest.raises(ValueError, match="The green guitars .* by tokenizer.json itself: transformers builds Qwen2Tokenizer"):
        check_tokens(load_tokenizer(tmp_path), tmp_path)


@pytest.mark.parametrize(("before", "after"), [(3, [5, 3]), ([3, 4], [5, 3, 4]), (None, 5)])
def test_an_exported_folder_ends_with_the_end_token_of_the_training(tmp_path, before, after):
    build_tokenizer(eos_token="<|endoftext|>").save_pretrained(tmp_path)
    config = {"model_type": "qwen2"} | ({} if before is None else {"eos_token_id": 3})
    (tmp_path / "config.json").write_text(json.dumps(config))
    if before is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": before, "top_k": 2}))
    set_end_token(tmp_path, find_end_token("qwen3"))
    # <|im_end|> has the id 5
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"eos_token_id": after} | ({} if before is None else {"top_k": 2})
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 5
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_token, loaded.eos_token_id) == ("<|im_end|>", 5)
    with pytest.raises(ValueError, match="has no token '<none>'"):
        set_end_token(tmp_path, "<none>")


def test_templates_that_keep_the_end_token_change_nothing():
    assert [find_end_token(name) for name in (None, "hf", "default", "gemma", "llama3")] == [None] * 4 + ["<|eot_id|>"]


def test_the_prompt_of_a_row_has_its_own_tools_and_system_column():
    handler = build_handler("Math17kAlpacaStyleInstructionHandler", "qwen3", tools=({"name": "of_the_run"},))
    row = {"prompt": [user("Q")], "reward_model": {"ground_truth": "1"}, "system": "S", "tools": [{"name": "own"}]}
    text = read(handler, row)[0]
    assert text.startswith("<|im_start|>system\nS\n\n# Tools") and '"name": "own"' in text and "of_the_run" not in text
