"""What each handler writes, as exact arrays read back with megatron-core, from hand-written rows."""

import json

import pyarrow
import pyarrow.parquet
import pytest
from byte_tokenizer import Trained, build_tokenizer
from tokenizers import normalizers, processors

from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data import HANDLERS, handler_class
from mindspeed_rl.data.conversation import Conversation, assistant, user
from mindspeed_rl.data.encoding import join_turns
from mindspeed_rl.data.handlers import llamafactory
from mindspeed_rl.data.handlers.base import HandlerSettings
from mindspeed_rl.data.messages import openai_messages
from mindspeed_rl.data.prompts import open_prompts
from mindspeed_rl.data.sources import drop_nulls, open_source, read_rows
from mindspeed_rl.data.templates import join_text, load_template
from mindspeed_rl.data.tokenizer import check_vocabulary, load_tokenizer

BYTES = build_tokenizer()


def ids(text):
    return BYTES(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def preprocess(tmp_path, tokenizer_folder, write_jsonl, read_columns, capsys):
    """Write rows through the command line; return the columns, or the error text where the command failed."""

    def run(handler, rows, *flags, template="default", folder=None):
        prefix = str(tmp_path / "out")
        command = ["--input", write_jsonl(rows), "--tokenizer-name-or-path", folder or tokenizer_folder]
        command += ["--output-prefix", prefix, "--handler-name", handler]
        command += ["--prompt-type", template] if template else []
        code = main([*command, *flags])
        captured = capsys.readouterr()
        if code:
            return captured.err
        columns = read_columns(prefix)
        columns["summary"] = captured.out
        return columns

    return run


def sft(columns):
    """(input_ids, labels) rows of a supervised dataset; its attention mask must be ones."""
    assert columns["attention_mask"] == [[1] * len(row) for row in columns["input_ids"]]
    return list(zip(columns["input_ids"], columns["labels"], strict=True))


ALPACA = [
    ({"instruction": "Add", "input": "1 and 2", "output": "3"}, ["Human: Add\n1 and 2\nAssistant:", Trained("3</s>")]),
    ({"instruction": "Hi", "input": "", "output": "Hello"}, ["Human: Hi\nAssistant:", Trained("Hello</s>")]),
    ({"instruction": "Hi", "output": "Hello"}, ["Human: Hi\nAssistant:", Trained("Hello</s>")]),
    ({"instruction": "Hi", "input": None, "output": "Hello"}, ["Human: Hi\nAssistant:", Trained("Hello</s>")]),
    ({"instruction": "", "input": "only this", "output": "x"}, ["Human: only this\nAssistant:", Trained("x</s>")]),
    ({"instruction": "你好", "output": "再见"}, ["Human: 你好\nAssistant:", Trained("再见</s>")]),
    ({"instruction": "a\nb", "input": "c\n", "output": " d\n"}, ["Human: a\nb\nc\n\nAssistant:", Trained(" d\n</s>")]),
    ({"instruction": "n", "output": 42}, ["Human: n\nAssistant:", Trained("42</s>")]),
    ({"instruction": "s", "output": "o", "system": "Be short."}, ["Be short.\nHuman: s\nAssistant:", Trained("o</s>")]),
    (
        {"instruction": "q3", "output": "a3", "history": [["q1", "a1"], ["q2", "a2"]]},
        [
            "Human: q1\nAssistant:",
            Trained("a1</s>"),
            "\nHuman: q2\nAssistant:",
            Trained("a2</s>"),
            "\nHuman: q3\nAssistant:",
            Trained("a3</s>"),
        ],
    ),
    (
        {"instruction": "q2", "input": "i", "output": "a2", "system": "S", "history": [["q1", "a1"]]},
        ["S\nHuman: q1\nAssistant:", Trained("a1</s>"), "\nHuman: q2\ni\nAssistant:", Trained("a2</s>")],
    ),
    ({"instruction": "{{content}}", "output": "<s>"}, ["Human: {{content}}\nAssistant:", Trained("<s></s>")]),
]


def test_alpaca_rows(preprocess, expected):
    columns = preprocess("AlpacaStyleInstructionHandler", [row for row, _ in ALPACA])
    assert sft(columns) == [expected(*pieces) for _, pieces in ALPACA]


def test_alpaca_map_keys_rename_and_switch_off_columns(preprocess, expected):
    rows = [{"question": "Q", "input": "not used", "answer": "A", "persona": "P", "system": "not used"}]
    keys = {"prompt": "question", "query": "", "response": "answer", "system": "persona"}
    columns = preprocess("AlpacaStyleInstructionHandler", rows, "--map-keys", json.dumps(keys))
    assert sft(columns) == [expected("P\nHuman: Q\nAssistant:", Trained("A</s>"))]


SHAREGPT = [
    ([("human", "Q"), ("gpt", "A")], None, ["Human: Q\nAssistant:", Trained("A</s>")]),
    ([("system", "S"), ("human", "Q"), ("gpt", "A")], None, ["S\nHuman: Q\nAssistant:", Trained("A</s>")]),
    ([("human", "Q"), ("gpt", "A")], "C", ["C\nHuman: Q\nAssistant:", Trained("A</s>")]),
    ([("system", "C"), ("human", "Q"), ("gpt", "A")], "C", ["C\nHuman: Q\nAssistant:", Trained("A</s>")]),
    (
        [("human", "1"), ("gpt", "2"), ("human", "3"), ("gpt", "4")],
        None,
        ["Human: 1\nAssistant:", Trained("2</s>"), "\nHuman: 3\nAssistant:", Trained("4</s>")],
    ),
    (
        [("human", "W?"), ("function_call", '{"name": "f", "arguments": {"c": 1}}'), ("observation", "9"), ("gpt", "9!")],
        None,
        [
            "Human: W?\nAssistant:",
            Trained('Action: f\nAction Input: {"c": 1}</s>'),
            "\nHuman: 9\nAssistant:",
            Trained("9!</s>"),
        ],
    ),
    (
        [("human", "W?"), ("function_call", 'Look. [{"name": "f", "arguments": "{}"}, {"name": "g"}]')],
        None,
        ["Human: W?\nAssistant:", Trained("Look.\nAction: f\nAction Input: {}\nAction: g\nAction Input: {}</s>")],
    ),
]


def test_sharegpt_rows(preprocess, expected):
    rows = []
    for turns, system, _ in SHAREGPT:
        row = {"conversations": [{"from": speaker, "value": text} for speaker, text in turns]}
        rows.append({**row, "system": system} if system else row)
    assert sft(preprocess("SharegptStyleInstructionHandler", rows)) == [expected(*pieces) for *_, pieces in SHAREGPT]


def test_sharegpt_tags_left_out_keep_their_defaults(preprocess, expected):
    rows = [{"talk": [{"who": "me", "value": "Q"}, {"who": "gpt", "value": "A"}]}]
    keys = {"messages": "talk", "tags": {"role_tag": "who", "user_tag": "me"}}
    columns = preprocess("SharegptStyleInstructionHandler", rows, "--map-keys", json.dumps(keys))
    assert sft(columns) == [expected("Human: Q\nAssistant:", Trained("A</s>"))]


def test_sharegpt_tools_are_written(preprocess):
    tool = {"name": "f", "description": "does f", "parameters": {"type": "object", "properties": {}}}
    row = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "tools": json.dumps([tool])}
    columns = preprocess("SharegptStyleInstructionHandler", [row], template="qwen_lf")
    text = BYTES.decode(columns["input_ids"][0])
    assert '<tools>\n{"type": "function", "function": {"name": "f", "description": "does f"' in text


OPENAI = [
    ([{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}], ["Human: Q\nAssistant:", Trained("A</s>")]),
    (
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
        ["S\nHuman: Q\nAssistant:", Trained("A</s>")],
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "Q"}]}, {"role": "assistant", "content": "A"}],
        ["Human: Q\nAssistant:", Trained("A</s>")],
    ),
    (
        [
            {"role": "user", "content": "W?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": '{"c": 1}'}}],
            },
            {"role": "tool", "content": "8"},
            {"role": "tool", "content": "9"},
            {"role": "assistant", "content": "17"},
        ],
        [
            "Human: W?\nAssistant:",
            Trained('Action: f\nAction Input: {"c": 1}</s>'),
            "\nHuman: 8\n9\nAssistant:",
            Trained("17</s>"),
        ],
    ),
]


def test_user_messages_in_a_row_are_refused_by_a_template_that_has_one_between_answers(preprocess):
    row = [{"role": "user", "content": "Q"}, {"role": "user", "content": "R"}, {"role": "assistant", "content": "A"}]
    assert "2 in a row" in preprocess("OpenAIInstructionHandler", [{"messages": row}])


FLAGGED = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "weight": 0},
    {"role": "user", "content": "R", "loss": False},
    {"role": "assistant", "content": "B", "loss": True, "train": None},
]


def test_answers_that_a_row_marks_as_context_are_read_and_not_trained(preprocess, expected):
    columns = preprocess("OpenAIInstructionHandler", [{"messages": FLAGGED}])
    wanted = expected("Human: Q\nAssistant:", "A</s>", "\nHuman: R\nAssistant:", Trained("B</s>"))
    assert sft(columns) == [wanted]
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A", "train": False}]
    turns += [{"from": "human", "value": "R"}, {"from": "gpt", "value": "B"}]
    assert sft(preprocess("SharegptStyleInstructionHandler", [{"conversations": turns}])) == [wanted]


def test_the_end_of_an_answer_that_is_context_is_not_trained_where_ends_are_labels_of_the_next_turn():
    turns = [([1, 2], [3, 4]), ([5, 6], [7])]
    options = {"eos_id": 9, "efficient_eos": True, "budget": 99, "keeps_fitting_half": False}
    _, labels, _ = join_turns(turns, **options)
    assert labels.tolist() == [-100, -100, 3, 4, 9, -100, 7, 9]
    _, labels, _ = join_turns([([1, 2, 3, 4], []), turns[1]], **options)
    assert labels.tolist() == [-100, -100, -100, -100, -100, -100, 7, 9]
    _, labels, _ = join_turns([turns[0], ([5, 6, 7], [])], **options)
    assert labels.tolist() == [-100, -100, 3, 4, 9, -100, -100, -100]


@pytest.mark.parametrize(
    ("flag", "index", "says"),
    [
        ({"weight": 0.5}, 1, "weight=0.5"),
        ({"loss": "no"}, 1, "loss='no'"),
        ({"train": True}, 0, "only answers of the assistant are trained"),
    ],
)
def test_flags_that_cannot_be_obeyed_are_refused(preprocess, flag, index, says):
    row = [dict(message) for message in FLAGGED]
    row[index] = {"role": row[index]["role"], "content": "x", **flag}
    assert says in preprocess("OpenAIInstructionHandler", [{"messages": row}])


def test_keys_that_arrow_adds_to_messages_calls_and_schemas_are_not_there(tmp_path):
    table = tmp_path / "rows.parquet"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": None}}}
    other = {"id": "c2", "type": "function", "function": {"name": "mail", "arguments": {"to": "x", "body": ["y"]}}}
    rows = []
    for one in (call, other):
        answer = {"role": "assistant", "content": None, "tool_calls": [one]}
        tool = {"role": "tool", "content": "ok", "tool_call_id": one["id"]}
        rows.append({"messages": [{"role": "user", "content": "w"}, answer, tool, {"role": "assistant", "content": "done"}]})
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table)
    read = [row for _, _, row in read_rows(open_source(str(table)))]
    assert read[0]["messages"][1]["tool_calls"][0]["function"]["arguments"].keys() == {"city", "days", "to", "body"}
    for row, arguments in zip(read, ({"city": "Oslo"}, {"to": "x", "body": ["y"]})):
        _, messages = openai_messages(drop_nulls(row["messages"]))
        assert messages[1].calls[0].arguments == arguments
        entry = messages[1].entries[0]
        assert set(entry) == {"role", "content", "tool_calls"} and entry["content"] == ""
        assert set(messages[2].entries[0]) == {"role", "content", "tool_call_id"}


def test_an_answer_that_ends_a_thought_without_opening_it_has_one_thought():
    texts = []
    for content in ("hm</think>\n\nA", "<think>\nhm\n</think>\n\nA"):
        (turn,) = load_template("qwen3").render(Conversation([user("Q"), assistant(content)])).turns
        texts.append(join_text(turn.target))
        assert "think" not in join_text(turn.source)
    assert texts[0] == texts[1]
    assert texts[0].count("</think>") == texts[0].count("<think>") == 1
    (turn,) = load_template("qwen3").render(Conversation([user("Q"), assistant("A </think> B <think>C</think>")])).turns
    assert join_text(turn.target).count("<think>") == 2


def test_openai_rows(preprocess, expected):
    columns = preprocess("OpenAIInstructionHandler", [{"messages": messages} for messages, _ in OPENAI])
    assert sft(columns) == [expected(*pieces) for _, pieces in OPENAI]


def test_openai_reasoning_content_becomes_a_thought(preprocess, expected):
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "reasoning_content": "hm"}]
    columns = preprocess("OpenAIInstructionHandler", [{"messages": messages}], template="qwen3")
    read = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
    assert sft(columns) == [expected(read, Trained("<think>\nhm\n</think>\n\nA<|im_end|>\n"))]


def test_hunyuan_uses_the_tokenizers_chat_template(preprocess, expected, chat_tokenizer_folder):
    folder = chat_tokenizer_folder("chatml", eos_token="<|im_end|>")
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user", "assistant")]
    columns = preprocess("HunyuanInstructionHandler", [{"messages": messages}], template=None, folder=folder)
    assert sft(columns) == [
        expected(
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n",
            Trained("a<|im_end|>"),
            "\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n",
            Trained("a<|im_end|>"),
            "\n",
        )
    ]


def test_hunyuan_wants_its_roles_in_turn(preprocess, chat_tokenizer_folder):
    folder = chat_tokenizer_folder("chatml", eos_token="<|im_end|>")
    messages = [{"role": role, "content": "x"} for role in ("user", "user", "assistant")]
    error = preprocess("HunyuanInstructionHandler", [{"messages": messages}], template=None, folder=folder)
    assert "row 1: assistant must speak at turn 1, not 'user'" in error


PAIRS = [
    ({"instruction": "Q", "input": "i", "chosen": "good", "rejected": "bad"}, "Human: Q\ni\nAssistant:"),
    ({"instruction": "Q", "chosen": ["good"], "rejected": ["bad"], "system": "S"}, "S\nHuman: Q\nAssistant:"),
    (
        {"instruction": "Q", "chosen": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "good"}],
         "rejected": {"from": "gpt", "value": "bad"}},
        "Human: Q\nAssistant:",
    ),
    (
        {"instruction": "Q", "chosen": "good", "rejected": "bad", "history": [["h", "a"]]},
        "Human: h\nAssistant:a</s>\nHuman: Q\nAssistant:",
    ),
]  # fmt: skip


def pairs(columns):
    chosen = zip(columns["chosen_input_ids"], columns["chosen_labels"], strict=True)
    rejected = zip(columns["rejected_input_ids"], columns["rejected_labels"], strict=True)
    return list(zip(chosen, rejected, strict=True))


def test_alpaca_pairs_train_the_last_answer_only(preprocess, expected):
    columns = preprocess("AlpacaStylePairwiseHandler", [row for row, _ in PAIRS])
    assert sorted(set(columns) - {"summary"}) == ["chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"]
    wanted = [(expected(prompt, Trained("good</s>")), expected(prompt, Trained("bad</s>"))) for _, prompt in PAIRS]
    assert pairs(columns) == wanted


def test_sharegpt_pairs(preprocess, expected):
    rows = [
        {
            "conversations": [{"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": {"from": "gpt", "value": "bad"},
        },
        {
            "conversations": [{"from": "human", "value": "1"}, {"from": "gpt", "value": "2"}, {"from": "human", "value": "Q"}],
            "chosen": {"from": "gpt", "value": "good"},
            "rejected": "bad",
        },
    ]
    prompts = ["Human: Q\nAssistant:", "Human: 1\nAssistant:2</s>\nHuman: Q\nAssistant:"]
    wanted = [(expected(prompt, Trained("good</s>")), expected(prompt, Trained("bad</s>"))) for prompt in prompts]
    assert pairs(preprocess("SharegptStylePairwiseHandler", rows)) == wanted


def test_pairs_with_efficient_eos_end_with_one_trained_end_token(preprocess, expected):
    rows = [{"instruction": "Q", "chosen": "good", "rejected": "bad", "history": [["h", "a"]]}]
    columns = preprocess("AlpacaStylePairwiseHandler", rows, template="baichuan2")
    prompt = "<reserved_106>h<reserved_107>a<reserved_106>Q<reserved_107>"
    assert pairs(columns) == [(expected(prompt, Trained("good</s>")), expected(prompt, Trained("bad</s>")))]


def test_answers_with_a_label_are_read_in_the_forms_of_other_projects(preprocess, expected):
    rows = [
        {"prompt": "Q", "completion": [{"role": "assistant", "content": "good"}], "label": True},
        {"prompt": "Q", "completion": "bad", "label": 0},
        {"prompt": "Q", "completion": " ", "label": False},
    ]
    keys = '{"prompt": "prompt", "query": "", "response": "completion"}'
    columns = preprocess("AlpacaStyleUnpairedHandler", rows, "--map-keys", keys)
    prompt = "Human: Q\nAssistant:"
    wanted = [expected(prompt, Trained("good</s>")), expected(prompt, Trained("bad</s>"))]
    assert list(zip(columns["input_ids"], columns["labels"], strict=True)) == wanted
    assert columns["desirable"] == [[1], [0]] and "dropped, empty answer: 1" in columns["summary"]
    turns = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "good"}]
    columns = preprocess(
        "SharegptStyleUnpairedHandler", [{"conversations": turns, "kto_tag": False}], "--map-keys", '{"label": "kto_tag"}'
    )
    assert [(columns["input_ids"][0], columns["labels"][0])] == wanted[:1] and columns["desirable"] == [[0]]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"instruction": "Q", "output": "A", "label": "maybe"}, "column 'label' must be true or false, not 'maybe'"),
        ({"instruction": "Q", "output": "A"}, "has no column 'label'"),
    ],
)
def test_answers_without_a_clear_label_are_refused(preprocess, row, problem):
    assert problem in preprocess("AlpacaStyleUnpairedHandler", [row])


def test_equal_or_empty_answers_are_dropped_and_counted(preprocess):
    rows = [
        {"instruction": "Q", "chosen": "same", "rejected": "same"},
        {"instruction": "Q", "chosen": "good", "rejected": " "},
        {"instruction": "Q", "chosen": "good", "rejected": "bad"},
    ]
    columns = preprocess("AlpacaStylePairwiseHandler", rows)
    assert len(columns["chosen_input_ids"]) == 1
    assert "rows read 3, kept 1, dropped 2" in columns["summary"]
    assert "dropped, chosen equals rejected: 1" in columns["summary"] and "dropped, empty answer: 1" in columns["summary"]


def test_ppo_writes_prompts_only(preprocess):
    rows = [{"prompt": "Q"}, {"prompt": "R"}]
    keys = '{"prompt":"prompt", "query":"", "response": "prompt", "system":""}'
    columns = preprocess("PPOAlpacaStyleInstructionHandler", rows, "--map-keys", keys, template="llama3")
    head = "<s><|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    assert columns["input_ids"] == [ids(head.format("Q")), ids(head.format("R"))]
    assert sorted(set(columns) - {"summary"}) == ["attention_mask", "input_ids"]


def test_r1_writes_prompts_answers_and_additional_columns(preprocess):
    rows = [{"problem": "1+1", "answer": "2", "source": {"book": 3}}]
    keys = '{"prompt":"problem","query":"","response":"answer","system":""}'
    flags = ["--map-keys", keys, "--dataset-additional-keys", "labels", "source"]
    columns = preprocess("R1AlpacaStyleInstructionHandler", rows, *flags)
    assert columns["input_ids"] == [ids("Human: 1+1\nAssistant:")]
    assert columns["attention_mask"] == [[1] * len(columns["input_ids"][0])]
    assert columns["labels"] == [ids("2")]
    assert columns["source"] == [ids('{"book": 3}')]


def test_ppo_keeps_labels_when_asked_and_rows_without_an_answer_are_dropped(preprocess):
    rows = [{"instruction": "Q", "output": 7}, {"instruction": "R", "output": None}]
    columns = preprocess("PPOAlpacaStyleInstructionHandler", rows, "--dataset-additional-keys", "labels")
    assert columns["labels"] == [ids("7")]
    assert "dropped, empty answer: 1" in columns["summary"]


def test_math17k_takes_the_message_and_the_ground_truth(preprocess):
    rows = [
        {"prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2", "style": "rule"}},
        {
            "prompt": [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}],
            "reward_model": {"ground_truth": "7"},
        },
    ]
    columns = preprocess("Math17kAlpacaStyleInstructionHandler", rows, template="default")
    assert columns["input_ids"] == [ids("Human: 1+1?\nAssistant:"), ids("S\nHuman: Q\nAssistant:")]
    assert columns["labels"] == [ids("2"), ids("7")]


def test_process_reward_labels_sit_on_the_placeholders(preprocess):
    rows = [{"input": "2+2 ки 4 ки", "value": ["＋", "－"]}]
    flags = ["--placeholder-token", "ки", "--reward-tokens", "＋", "－"]
    columns = preprocess("AlpacaStyleProcessRewardHandler", rows, *flags, template=None)
    tokens = ids("2+2 ки 4 ки")
    (step,), (good,), (bad,) = ids("ки"), ids("＋"), ids("－")
    labels = [-100] * len(tokens)
    first, second = [place for place, token in enumerate(tokens) if token == step]
    labels[first], labels[second] = good, bad
    assert columns["input_ids"] == [tokens] and columns["labels"] == [labels]
    assert columns["attention_mask"] == [[1] * len(tokens)]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input": "x ки", "value": ["＋", "－"]}, "has 1 placeholders 'ки', but 2 rewards"),
        ({"input": "x ки", "value": "＋"}, "must be a list of reward tokens"),
        ({"input": "x ки", "value": ["no"]}, "reward 'no' is none of reward_tokens"),
        ({"value": ["＋"]}, "has no column 'input'"),
    ],
)
def test_wrong_process_reward_rows_are_errors(row, problem, preprocess):
    flags = ["--reward-tokens", "＋", "－"]
    assert problem in preprocess("AlpacaStyleProcessRewardHandler", [row], *flags, template=None)


def test_a_placeholder_of_several_tokens_is_an_error(preprocess):
    error = preprocess("AlpacaStyleProcessRewardHandler", [{}], "--placeholder-token", "step", template=None)
    assert "placeholder_token: 'step' is 4 tokens" in error


@pytest.fixture
def pretrain(tmp_path, tokenizer_folder, write_jsonl):
    """Write a pretraining dataset; return the documents of a key."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    def run(handler, rows, *flags, key="text"):
        prefix = str(tmp_path / "pre")
        command = ["--input", write_jsonl(rows), "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", prefix]
        assert main([*command, "--handler-name", handler, *flags]) == 0
        dataset = IndexedDataset(f"{prefix}_{key}_document")
        assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
        return [dataset[k].tolist() for k in range(len(dataset))]

    return run


def test_pretrain_documents_and_end_tokens(pretrain):
    rows = [{"text": "one\ntwo"}, {"text": "三"}]
    assert pretrain("GeneralPretrainHandler", rows) == [ids("one\ntwo"), ids("三")]
    assert pretrain("GeneralPretrainHandler", rows, "--append-eod") == [ids("one\ntwo</s>"), ids("三</s>")]


OPENAI_PAIR = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        ("empty", ["Q", Trained("A</s>")]),  # ends no turn itself
        ("default", ["Human: Q\nAssistant:", Trained("A</s>")]),  # ends with the end token already: no second one
        ("chatglm3", ["[gMASK]sop<|user|>\nQ<|assistant|>", Trained("\nA</s>")]),
    ],
)
def test_append_eod_closes_a_supervised_sample_with_one_trained_end_token(template, pieces, preprocess, expected):
    got = preprocess("OpenAIInstructionHandler", [OPENAI_PAIR], "--append-eod", template=template)
    assert sft(got) == [expected(*pieces)]


def test_append_eod_adds_no_second_end_token_where_the_tokenizer_appends_one(preprocess, expected, tmp_path):
    ends = build_tokenizer()
    ends.backend_tokenizer.post_processor = processors.TemplateProcessing(
        "$A </s>", special_tokens=[("</s>", ends.eos_token_id)]
    )
    ends.save_pretrained(tmp_path / "ends")
    folder = str(tmp_path / "ends")
    for flags in ((), ("--append-eod",)):
        handler = handler_class("GeneralPretrainHandler")(HandlerSettings(tokenizer=ends, append_eod=bool(flags)))
        assert [row.columns["text"] for row in handler.encode([(1, {"text": "one"})]).rows] == [ids("one</s>")]
        columns = preprocess("OpenAIInstructionHandler", [OPENAI_PAIR], *flags, folder=folder)
        assert columns["input_ids"][0].count(ends.eos_token_id) == 1


def test_append_eod_closes_both_answers_of_a_pair(preprocess, expected):
    row = {"instruction": "Q", "chosen": "A", "rejected": "B"}
    got = preprocess("AlpacaStylePairwiseHandler", [row], "--append-eod", template="empty")
    for side, answer in (("chosen", "A"), ("rejected", "B")):
        assert (got[f"{side}_input_ids"][0], got[f"{side}_labels"][0]) == expected("Q", Trained(answer + "</s>"))


def test_the_appended_end_token_counts_in_the_length(preprocess):
    row = {"instruction": "Q", "output": "A" * 6}
    assert len(preprocess("AlpacaStyleInstructionHandler", [row], "--seq-length", "8", template="empty")["input_ids"][0]) == 7
    error = preprocess("AlpacaStyleInstructionHandler", [row], "--append-eod", "--seq-length", "8", template="empty")
    assert "too long: 1" in error


@pytest.mark.parametrize("handler", ["R1AlpacaStyleInstructionHandler", "AlpacaStyleProcessRewardHandler"])
def test_append_eod_is_refused_where_no_sample_ends(handler, preprocess):
    error = preprocess(handler, [{"instruction": "Q", "output": "A"}], "--append-eod", template=None)
    assert f"append_eod has no meaning for {handler}" in error


def test_pretrain_padding_fills_up_to_the_multiple_and_no_further(pretrain):
    rows = [{"text": "12345678"}, {"text": "123456789"}]
    got = pretrain("GeneralPretrainHandler", rows, "--pad-to-multiple-of", "4")
    assert got == [ids("12345678"), ids("123456789<pad><pad><pad>")]


def test_pretrain_keys_each_get_a_file(pretrain):
    rows = [{"title": "T", "body": "B"}]
    flags = ["--json-keys", "title", "body"]
    assert pretrain("GeneralPretrainHandler", rows, *flags, key="title") == [ids("T")]
    assert pretrain("GeneralPretrainHandler", rows, *flags, key="body") == [ids("B")]


def test_pretrain_keys_can_stand_for_other_columns(pretrain):
    rows = [{"title": "T", "body": "B"}]
    assert pretrain("GeneralPretrainHandler", rows, "--map-keys", '{"text": "body"}') == [ids("B")]


def test_alpaca_and_sharegpt_pretraining_texts(pretrain):
    (alpaca,) = pretrain("AlpacaPretrainHandler", [{"instruction": "Add", "input": "1 2", "output": "3"}])
    assert BYTES.decode(alpaca).endswith("questions. USER: Add\n1 2 ASSISTANT: 3")
    turns = [{"from": "human", "value": "Q"}, {"role": "assistant", "content": "A"}]
    assert pretrain("SharegptPretrainHandler", [{"conversations": turns}]) == [ids("Q\nA")]


@pytest.mark.parametrize(
    ("handler", "row", "problem"),
    [
        ("AlpacaStyleInstructionHandler", {"instruction": "Q"}, "has no column 'output' (for 'response'); it has instruction"),
        ("AlpacaStyleInstructionHandler", {"instruction": ["Q"], "output": "A"}, "column 'instruction' must be text, not list"),
        ("AlpacaStyleInstructionHandler", {"instruction": "Q", "output": "A", "history": ["x"]}, "[question, answer] pairs"),
        ("SharegptStyleInstructionHandler", {"conversations": []}, "must be a list of turns"),
        (
            "SharegptStyleInstructionHandler",
            {"conversations": [{"from": "gpt", "value": "A"}]},
            "message 0 is from 'assistant', but user or observation must be there",
        ),
        (
            "SharegptStyleInstructionHandler",
            {
                "conversations": [
                    {"from": "human", "value": "Q"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                    {"from": "observation", "value": "5"},
                    {"from": "human", "value": "And now?"},
                    {"from": "gpt", "value": "A"},
                ]
            },
            "a message of the user ('And now?') comes directly after a tool's result; an answer of the assistant must be",
        ),
        ("SharegptStyleInstructionHandler", {"conversations": [{"from": "human", "value": "Q"}]}, "not from the assistant"),
        ("SharegptStyleInstructionHandler", {"conversations": [{"from": "bob", "value": "Q"}]}, "turn 0 is from 'bob'"),
        (
            "SharegptStyleInstructionHandler",
            {"conversations": [{"from": "human", "value": "Q"}, {"from": "function_call", "value": "{oops"}]},
            "a function call turn is not JSON",
        ),
        ("OpenAIInstructionHandler", {"messages": [{"role": "robot", "content": "x"}]}, "message 0 is from 'robot'"),
        ("OpenAIInstructionHandler", {"messages": [{"role": "user", "content": {"a": 1}}]}, "content that is not text"),
        ("R1AlpacaStyleInstructionHandler", {"instruction": "Q"}, "has no column 'output'"),
        ("Math17kAlpacaStyleInstructionHandler", {"prompt": "Q", "reward_model": {}}, "has no ground_truth"),
        (
            "AlpacaStylePairwiseHandler",
            {"instruction": "Q", "chosen": 3, "rejected": "b"},
            "column 'chosen' must hold an answer",
        ),
    ],
)
def test_a_malformed_row_is_an_error_that_names_file_and_row(handler, row, problem, preprocess):
    good = {
        "instruction": "Q", "output": "A", "chosen": "g", "rejected": "b", "prompt": "Q", "reward_model": {"ground_truth": "1"},
        "conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}],
        "messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}],
    }  # fmt: skip
    error = preprocess(handler, [good, row, good])
    assert "rows.jsonl, row 2: " in error and problem in error
    columns = preprocess(handler, [good, row, good], "--on-bad-row", "skip")
    assert "rows read 3, kept 2, dropped 1" in columns["summary"] and "dropped, malformed: 1" in columns["summary"]
    assert "rows.jsonl, row 2: " in columns["summary"]


def test_empty_answers_are_dropped_and_counted(preprocess):
    rows = [{"instruction": "Q", "output": ""}, {"instruction": " ", "output": "A"}, {"instruction": "Q", "output": "A"}]
    columns = preprocess("AlpacaStyleInstructionHandler", rows)
    assert len(columns["input_ids"]) == 1
    assert "dropped, empty answer: 1" in columns["summary"] and "dropped, empty prompt: 1" in columns["summary"]


@pytest.mark.parametrize("name", sorted(set(HANDLERS) - {"HunyuanInstructionHandler"}))
def test_an_unknown_map_key_is_an_error_that_lists_those_read(name, preprocess):
    template = "default" if handler_class(name).needs_template else None
    error = preprocess(name, [{}], "--map-keys", '{"promt": "x"}', template=template)
    assert "map_keys has 'promt', which" in error and name in error


def test_an_unknown_handler_is_an_error_that_lists_all(preprocess):
    error = preprocess("AlpacaStyleInstructHandler", [{}])
    assert "did you mean AlpacaStyleInstructionHandler?" in error
    assert all(name in error for name in HANDLERS)


def test_a_handler_of_the_users_own_is_named_by_module_and_class():
    assert handler_class("mindspeed_rl.data.handlers.prompt:PPOAlpacaStyleInstructionHandler").__name__.startswith("PPO")
    with pytest.raises(ValueError, match="cannot be imported"):
        handler_class("mindspeed_rl.data.handlers.prompt:Nothing")


def llamafactory_folder(tmp_path, write_jsonl):
    write_jsonl([{"instruction": f"a{k}", "output": "A"} for k in range(4)], "alpaca.jsonl")
    write_jsonl([{"conversations": [{"from": "human", "value": "s0"}, {"from": "gpt", "value": "A"}]}], "share.jsonl")
    write_jsonl([{"messages": [{"role": "user", "content": "o0"}, {"role": "assistant", "content": "A"}]}], "openai.jsonl")
    info = {
        "alpaca": {"file_name": "alpaca.jsonl"},
        "share": {"file_name": "share.jsonl", "formatting": "sharegpt", "columns": {"messages": "conversations"}},
        "openai": {
            "file_name": "openai.jsonl",
            "formatting": "sharegpt",
            "columns": {"messages": "messages"},
            "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
        },
        "ranked": {"file_name": "alpaca.jsonl", "ranking": True},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    return str(tmp_path)


@pytest.fixture
def mix(tmp_path, tokenizer_folder, write_jsonl, read_columns, capsys):
    def run(names, *flags):
        folder = llamafactory_folder(tmp_path, write_jsonl)
        prefix = str(tmp_path / "mixed")
        command = [
            "--input",
            names,
            "--dataset-dir",
            folder,
            "--tokenizer-name-or-path",
            tokenizer_folder,
            "--output-prefix",
            prefix,
        ]
        if main([*command, "--handler-name", "LlamaFactoryInstructionHandler", "--prompt-type", "default", *flags]):
            return capsys.readouterr().err
        return [BYTES.decode(row)[len("Human: ") : len("Human: ") + 2] for row in read_columns(prefix)["input_ids"]]

    return run


def test_datasets_of_dataset_info_follow_each_other(mix):
    assert mix("alpaca,share,openai") == ["a0", "a1", "a2", "a3", "s0", "o0"]
    assert mix("share,alpaca", "--max-samples", "2") == ["s0", "a0", "a1"]


def test_datasets_interleave_until_one_or_all_are_used_up(mix):
    assert mix("alpaca,share", "--mix-strategy", "interleave_under") == ["a0", "s0"]
    taken = ["a0", "s0", "a1", "s0", "a2", "s0", "a3"]
    assert mix("alpaca,share", "--mix-strategy", "interleave_over") == taken


def test_interleaving_with_shares_is_repeatable_and_depends_on_the_seed(mix):
    flags = ["--mix-strategy", "interleave_over", "--interleave-probs", "0.5", "0.5", "--seed"]
    draws = [mix("alpaca,share", *flags, seed) for seed in ("1", "1", "2", "3")]
    assert draws[0] == draws[1] and len({tuple(draw) for draw in draws}) > 1
    assert all({"a0", "a1", "a2", "a3", "s0"} <= set(draw) for draw in draws)


def test_wrong_mixtures_are_errors(mix):
    assert "input='alpaka' is not in" in mix("alpaka") and "did you mean 'alpaca'" in mix("alpaka")
    assert "ranking dataset" in mix("ranked")
    assert "a positive value for each of the 2 datasets" in mix(
        "alpaca,share", "--mix-strategy", "interleave_under", "--interleave-probs", "1"
    )


LABELS_OF_ALL_KINDS = ["  2 ", "a\n\nb", " .5 , ok ?", "<unk></s>", "½ \u200b𝟙 é", "[1, 2]", "\t", 7, {"a": [1.5, None]}]


def test_labels_of_rl_come_back_as_the_row_has_them_whatever_the_tokenizer(tmp_path, write_jsonl):
    """With a tokenizer that lowers, strips and cannot write most characters."""
    built = build_tokenizer()
    built.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Strip()])
    built.save_pretrained(tmp_path / "lossy")
    rows = [{"instruction": f"Q{k}", "output": label, "source": label} for k, label in enumerate(LABELS_OF_ALL_KINDS)]
    rows = [row for row in rows if str(row["output"]).strip()]
    raw = write_jsonl(rows)
    keys = ["labels", "source"]
    command = ["--input", raw, "--tokenizer-name-or-path", str(tmp_path / "lossy"), "--output-prefix", str(tmp_path / "rl")]
    command += ["--handler-name", "R1AlpacaStyleInstructionHandler", "--prompt-type", "empty"]
    command += ["--dataset-additional-keys", *keys]
    assert main(command) == 0
    tokenizer = load_tokenizer(tmp_path / "lossy")
    expected = [row["output"] if isinstance(row["output"], str) else json.dumps(row["output"]) for row in rows]
    for path in (str(tmp_path / "rl"), raw):
        prompts = open_prompts(path, tokenizer, max_prompt_length=100, dataset_additional_keys=keys)
        assert [prompts[index]["label"] for index in range(len(rows))] == expected
    stored = open_prompts(str(tmp_path / "rl"), tokenizer, max_prompt_length=100, dataset_additional_keys=keys)
    assert [stored[index]["columns"]["source"] for index in range(len(rows))] == expected


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"]),
        (["gsm8k_train.jsonl", "gsm8k_test.jsonl", "gsm8k-dev.jsonl"], ["gsm8k_train.jsonl"]),
        (["train/a.jsonl", "train/b.jsonl", "validation/a.jsonl"], ["a.jsonl", "b.jsonl"]),
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "eval-00000-of-00001.jsonl"], 2),
        (["part1.jsonl", "part2.jsonl"], ["part1.jsonl", "part2.jsonl"]),
        (["test.jsonl"], ["test.jsonl"]),
        (["train.jsonl", "more.jsonl"], ["more.jsonl", "train.jsonl"]),
        (["contest.jsonl", "trained.jsonl"], ["contest.jsonl", "trained.jsonl"]),
    ],
)
def test_of_a_folder_with_splits_train_is_read_and_a_note_says_so(tmp_path, names, read):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text('{"text": "a"}\n')
    source = open_source(str(tmp_path / "data"))
    found = [path.rpartition("/")[2] for path in source.paths]
    assert found == read or len(found) == read
    assert len(found) + len(source.ignored) == len(names)
    assert (source.note is not None) == (len(found) < len(names))
    assert source.note is None or "the split train is taken" in source.note


def test_tokens_that_a_model_has_not_are_found_by_file_and_row(write_jsonl):
    built = build_tokenizer()
    built.add_tokens(["<new>"])
    new = len(built) - 1
    rows = [{"instruction": "a", "output": "1"}, {"instruction": "a<new>", "output": "1"}]
    prompts = open_prompts(write_jsonl(rows), built, max_prompt_length=100)
    prompts.check_token_ids(new + 1, "data_path")
    with pytest.raises(ValueError, match=rf"data_path: .*rows.jsonl, row 2: .* token {new}, .* vocabulary has {new}"):
        prompts.check_token_ids(new, "data_path")
    end = BYTES.eos_token_id
    with pytest.raises(ValueError, match=f"its eos_token is token {end}, but the model's vocabulary has {end}"):
        check_vocabulary(BYTES, {"model": end}, "folder")


def test_a_vocabulary_that_is_smaller_than_the_tokenizer_is_an_error_where_any_text_may_need_it():
    """By counts: the tokens of text have the first ids, two added ones the last."""
    tokenizer = build_tokenizer()
    text = len(tokenizer)
    assert check_vocabulary(tokenizer, {"model": text}, "folder") == []
    tokenizer.add_tokens(["<image>", "<video>"])
    assert check_vocabulary(tokenizer, {"model": text + 2, "padded": 2 * text}, "folder") == []
    (warning,) = check_vocabulary(tokenizer, {"actor": text + 2, "critic": text}, "folder")
    sizes = f"the tokenizer has {text + 2} tokens, but the model's vocabulary has"
    assert f"{sizes} {text} (critic): it lacks 2 added tokens, such as {text} ('<image>')" in warning
    (warning,) = check_vocabulary(tokenizer, {"model": text + 1}, "folder")
    assert f"it lacks 1 added tokens, such as {text + 1} ('<video>')" in warning
    last = tokenizer.convert_ids_to_tokens(text - 1)
    with pytest.raises(ValueError, match="lacks 1 tokens of text") as error:
        check_vocabulary(tokenizer, {"model": text - 1}, "folder")
    assert f"tokenizer_name_or_path='folder': {sizes} {text - 1} (model): it" in str(error.value)
    assert f"such as {text - 1} ({last!r}); give the tokenizer of the model" in str(error.value)


def test_rows_without_a_label_are_dropped_and_counted(write_jsonl):
    rows = [{"instruction": "a", "output": "1", "solution": "x"}]
    rows += [{"instruction": "b", "output": None, "solution": "x"}, {"instruction": "c", "output": "1", "solution": None}]
    prompts = open_prompts(write_jsonl(rows), BYTES, max_prompt_length=100, dataset_additional_keys=["labels", "solution"])
    assert len(prompts) == 1 and prompts.dropped == {"empty answer": 2}


def test_an_entry_with_columns_reads_no_other_ones(tmp_path):
    # LLaMA-Factory's `firefly`: the prompt is the column `input`, which is not the second part of a prompt too
    (tmp_path / "rows.jsonl").write_text('{"input": "x", "target": "y", "system": "S"}\n')
    info = {"named": {"file_name": "rows.jsonl", "columns": {"prompt": "input", "response": "target"}}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (entry,) = llamafactory._dataset_entries("named", str(tmp_path))
    assert entry.map_keys == {"query": "", "system": "", "history": "", "tools": "", "prompt": "input", "response": "target"}
    handler = entry.handler(HandlerSettings(build_tokenizer(), load_template("default"), map_keys=entry.map_keys))
    conversation = handler.conversation({"input": "x", "target": "y", "system": "S"})
    assert (conversation.messages, conversation.system) == ([user("x"), assistant("y")], None)
