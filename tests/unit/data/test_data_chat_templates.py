"""`--prompt-type hf` over many chat templates: text and tokens are the template's own, answers are trained and nothing else is.

`CHAT_TEMPLATES=folder` adds every *.jinja of a folder: templates of published models, for example (see tests/data/README.md).
"""

import json
import os
import random
import re
from pathlib import Path

import pytest
from byte_tokenizer import SPECIAL_TOKENS, TEST_DATA, build_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from mindspeed_rl.data.conversation import Conversation, MalformedRowError, Message, ToolCall, assistant, user
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.messages import openai_messages
from mindspeed_rl.data.templates import join_text, load_template

FOLDER = TEST_DATA / "chat_templates"
TOKENS = json.loads((FOLDER / "tokens.json").read_text(encoding="utf-8"))
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
OTHERS = sorted(map(str, Path(os.environ["CHAT_TEMPLATES"]).rglob("*.jinja"))) if "CHAT_TEMPLATES" in os.environ else []
LOOKS_SPECIAL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|</?seed:\w+>|\[\|\w+\|\]|<SPECIAL_\d+>|\]~b\]|\[e~\[|\[/?[A-Z_]{3,}\]"
    r"|<_\w+>|<AI>|<用户>|<\|?turn\|?>"
)
PROPERTIES = {"city": {"type": "string"}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
ROME = Message("function", ("",), (ToolCall("get_weather", {"city": "Rome"}),))
BOTH = Message("function", ("",), (*ROME.calls, ToolCall("get_weather", {"city": "Oslo", "days": 2})))
# Each text of a speaker holds a mark that nothing else holds: U for the user, A for the assistant, R for a tool's result.
WORDS = "</s> <|im_end|>\n<|end|>\n<|return|> <|user|> <|im_start|>user\n [/INST] <end_of_turn>\n### User:\nUser: USER: "
CASES = {
    "one": Conversation([user("U1 hello"), assistant("A1 hi")]),
    "system": Conversation([user("U1 hello"), assistant("A1 hi")], "Be short."),
    "two": Conversation([user("U1"), assistant("A1"), user("U2"), assistant("A2")]),
    "three": Conversation([user("U1"), assistant("A1"), user("U2"), assistant("A2"), user("U3"), assistant("A3")], "Be short."),
    "same": Conversation([user("U1"), assistant("A1"), user("U1"), assistant("A1")]),
    "blanks": Conversation([user("  U1 \n"), assistant("\n A1 \n\n"), user("\n\nU2  "), assistant(" A2\n")]),
    "words": Conversation([user("U1" + WORDS), assistant("A1" + WORDS), user(WORDS + "U2"), assistant(WORDS + "A2")]),
    "roles": Conversation([user("user"), assistant("assistant"), user("assistant"), assistant("user")]),
    "empty": Conversation([user("U1"), assistant(""), user("U2"), assistant("A2")]),
    "thoughts": Conversation(
        [user("U1"), assistant("<think>\nhm\n</think>\n\nA1"), user("U2"), assistant("<think>\nso\n</think>\n\nA2")]
    ),
    "reasoning": Conversation(
        [user("U1"), Message("assistant", ("A1",), reasoning="hm"), user("U2"), Message("assistant", ("A2",), reasoning="so")]
    ),
    "tools": Conversation(
        [user("U1"), ROME, Message("observation", ("R1 21 C",)), assistant("A2"), user("U3"), assistant("A3")], None, [WEATHER]
    ),
    "parallel": Conversation(
        [user("U1"), BOTH, Message("observation", ("R1 21 C", "R2 3 C")), assistant("A2")], None, [WEATHER]
    ),
    "prompt": Conversation([user("U1"), assistant("A1"), user("U2")]),
}


def stand_in(template: str, **roles: str):
    """A tokenizer with this chat template, and as special tokens what looks like one in it."""
    built = build_tokenizer(**roles)
    found = {*LOOKS_SPECIAL.findall(template), *roles.values()} - set(SPECIAL_TOKENS)
    built.add_special_tokens({"additional_special_tokens": sorted(found)})
    built.chat_template = template
    return built


def messages_of(conversation):
    """The conversation in OpenAI's form."""
    messages = [{"role": "system", "content": conversation.system}] if conversation.system is not None else []
    for message in conversation.messages:
        if message.role == "observation":
            messages += [{"role": "tool", "content": content} for content in message.contents]
            continue
        entry = {"role": "user" if message.role == "user" else "assistant", "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.calls:
            calls = [{"name": call.name, "arguments": call.arguments} for call in message.calls]
            entry["tool_calls"] = [{"type": "function", "function": call} for call in calls]
        messages.append(entry)
    return messages


def marks(text, speakers):
    return re.findall(rf"[{speakers}]\d", text)


def check(tokenizer, conversation):
    """Render and encode the conversation, and hold the turns against the template's own text."""
    rendering = load_template("hf", tokenizer).render(conversation)
    prompts = len(conversation.messages) % 2 == 1
    whole = tokenizer.apply_chat_template(
        messages_of(conversation), tools=list(conversation.tools) or None, tokenize=False, add_generation_prompt=prompts
    )
    assert "".join(piece for turn in rendering.turns for piece in (*turn.source, *turn.target)) == whole
    (turns,) = TextEncoder(tokenizer).encode_renderings([rendering])
    if isinstance(turns, MalformedRowError):
        raise turns
    ids = [token for source, target in turns for token in (*source, *target)]
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    for number in range(0, len(conversation.messages), 2):
        source, target = (tokenizer.decode(side) for side in turns[number // 2])
        asked = "".join(conversation.messages[number].contents)
        assert marks(source, "UR") == marks(asked, "UR")
        assert marks(target, "UR") == []
        assert marks(source, "A") == []
        if number + 1 == len(conversation.messages):
            assert target == ""
            continue
        reply = conversation.messages[number + 1]
        answer = reply.content.rpartition("</think>")[2].strip()
        assert target.count(answer) == 1 or answer in ("", "user", "assistant")
        assert all(call.name in target for call in reply.calls)
        if answer and number + 2 < len(conversation.messages) and not reply.calls:
            # It ends as the last answer does, or with one token of its own.
            end = target.rpartition(answer)[2]
            final = tokenizer.decode([target for _, target in turns if target][-1])
            assert len(re.findall(LOOKS_SPECIAL, end)) <= 1 or prompts or final.endswith(end.lstrip())


def outcomes(tokenizer):
    """case -> why it was refused."""
    refused = {}
    for case, conversation in CASES.items():
        try:
            check(tokenizer, conversation)
        except MalformedRowError as error:
            refused[case] = str(error)
    return refused


def test_there_are_fifty_templates_and_each_says_its_tokens():
    assert len(NAMES) >= 50
    assert sorted(TOKENS) == NAMES


NO_TOOLS = "does not write tools|Only system, user and assistant may speak|Roles must alternate|Only user and assistant"
NO_SYSTEM = dict.fromkeys(("system", "three"), "System role not supported|Only user(, assistant and tool| and assistant)")
NO_THOUGHTS = {"reasoning": "drops the reasoning_content"}
PLAIN = {**NO_THOUGHTS, **dict.fromkeys(("tools", "parallel"), NO_TOOLS)}
ASKS_FOR_A_THOUGHT = r"opens an answer with '[^']*<think[^']*', but writes this one as"
# case -> what the refusal says; of templates that are not here, PLAIN.
REFUSED = {
    "deepseek_r1": dict.fromkeys(CASES, ASKS_FOR_A_THOUGHT),
    "gemma2": PLAIN | NO_SYSTEM,
    "gpt_oss": {"parallel": "one call at a time"},
    "hermes3": NO_THOUGHTS,
    "kimi_k2": NO_THOUGHTS,
    "llama31": NO_THOUGHTS | {"parallel": "only supports single tool-calls"},
    "mistral": PLAIN | NO_SYSTEM,
    "mistral_v3": NO_THOUGHTS | NO_SYSTEM | {"tools": "writes earlier turns differently"},
    "mixtral": PLAIN | NO_SYSTEM,
    "qwen25": NO_THOUGHTS | {"empty": r"writes this one as '<\|im_start\|>assistant<\|im_end\|>"},
    "qwen3": {},
    "qwen38": {},
    "qwen3_coder": NO_THOUGHTS,
    "qwen3_thinking": dict.fromkeys({*CASES} - {"one", "system", "parallel"}, ASKS_FOR_A_THOUGHT) | {"parallel": NO_TOOLS},
    "glm45": {},
    # handlers make rows of earlier answers: test_thought_templates.py
    **dict.fromkeys(
        ("hy3", "qwen35", "step35"), dict.fromkeys({*CASES} - {"one", "system", "parallel"}, ASKS_FOR_A_THOUGHT)
    ),
    **dict.fromkeys(("glm47", "minimax_m2", "nemotron3"), dict.fromkeys(CASES, ASKS_FOR_A_THOUGHT)),
}


@pytest.mark.parametrize("name", NAMES)
def test_turns_are_the_templates_own_text_and_only_answers_are_trained(name):
    refused = outcomes(stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name]))
    wanted = REFUSED.get(name, PLAIN)
    assert sorted(refused) == sorted(wanted), refused
    for case, reason in wanted.items():
        assert re.search(reason, refused[case]), (case, refused[case])


@pytest.mark.parametrize("name", ["glm4", "glm45"])
def test_a_template_that_ends_no_answer_is_an_error_without_an_end_token(name):
    tokenizer = stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name])
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="writes nothing after an answer"):
        load_template("hf", tokenizer)


def turns_of(name, conversation, **options):
    tokenizer = stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name])
    rendering = load_template("hf", tokenizer).render(conversation, **options)
    return ["".join(side) for turn in rendering.turns for side in (turn.source, turn.target)]


# What earlier answers and the last one end with, where they differ; read off the templates by hand.
ENDS = [
    ("phi3", "<|end|>", "<|end|>\n<|endoftext|>"),
    ("phi4_mini", "<|end|>", "<|end|><|endoftext|>"),
    ("gpt_oss", "<|end|>", "<|return|>"),
    ("olmo2", "<|endoftext|>", "<|endoftext|>"),
    ("last_only", "", "<|endoftext|>"),
    ("deepseek_coder", "\n<|EOT|>", "\n<|EOT|>"),
]


@pytest.mark.parametrize(("name", "earlier", "last"), ENDS)
def test_answers_end_with_what_ends_them_at_their_place(name, earlier, last):
    turns = turns_of(name, CASES["three"])
    before = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    assert turns[1:6:2] == [f"{before}A1{earlier}", f"{before}A2{earlier}", f"{before}A3{last}"]


def test_a_call_ends_with_its_own_token():
    turns = turns_of("gpt_oss", CASES["tools"])
    assert turns[1] == ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
    assert turns[3] == "<|channel|>final<|message|>A2<|end|>"


def test_the_text_of_an_end_in_an_answer_does_not_end_it():
    answer = assistant("a<|end|>\n<|endoftext|><|user|>\nb")
    turns = turns_of("phi3", Conversation([user("Q"), answer, user("c"), assistant("d")]))
    assert turns == [
        "<s><|user|>\nQ<|end|>\n<|assistant|>\n",
        "a<|end|>\n<|endoftext|><|user|>\nb<|end|>",
        "\n<|user|>\nc<|end|>\n<|assistant|>\n",
        "d<|end|>\n<|endoftext|>",
    ]


def test_thinking_off_is_a_prompt_that_the_template_writes_too():
    turns = turns_of("smollm3", CASES["two"], thinking="false")
    assert turns[0].endswith("<|im_start|>assistant\n<think>\n\n</think>\n")
    assert turns[1:4:2] == ["A1<|im_end|>", "A2<|im_end|>"]


def test_a_template_that_drops_a_text_is_refused():
    text = "{% for m in messages %}{{ m.role + ':' + (m.content if m.role != 'system' else '') + '</s>' }}{% endfor %}"
    text += "{{ 'assistant:' if add_generation_prompt }}"
    with pytest.raises(MalformedRowError, match="drops or changes 'Be short.'"):
        load_template("hf", stand_in(text)).render(CASES["system"])
    shouts = text.replace("m.content if", "(m.content | upper if m.role == 'user' else m.content) if")
    with pytest.raises(MalformedRowError, match="drops or changes 'U1 hello'"):
        load_template("hf", stand_in(shouts)).render(CASES["one"])
    empties = text.replace("m.content if", "('' if m.role == 'assistant' and m.content == 'A1 hi' else m.content) if")
    with pytest.raises(MalformedRowError, match="drops or changes the answer 'A1 hi'"):
        load_template("hf", stand_in(empties)).render(CASES["one"])


def merging_tokenizer(template):
    """Bytes, with pairs that join: two line breaks, and a blank with the letter behind it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [("Ċ", "Ċ"), ("Ġ", "A"), ("x", "U")]
    names = ["<s>", "</s>", *alphabet, *map("".join, pairs)]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    built = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    built.chat_template = template
    return built


BREAKS = "{% for m in messages %}{{ m.role + ':\\n' + m.content + ('</s>' if m.role == 'assistant' else '\\n') }}{% endfor %}"
BREAKS += "{{ 'assistant:\\n' if add_generation_prompt }}"


def encoded(tokenizer, *texts):
    speakers = [user, assistant]
    conversation = Conversation([speakers[number % 2](text) for number, text in enumerate(texts)])
    (turns,) = TextEncoder(tokenizer).encode_renderings([load_template("hf", tokenizer).render(conversation)])
    whole = tokenizer.apply_chat_template(messages_of(conversation), tokenize=False)
    if not isinstance(turns, MalformedRowError):
        ids = [token for source, target in turns for token in (*source, *target)]
        assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
        return [tokenizer.decode(side) for turn in turns for side in turn]
    return turns


def test_a_token_across_the_beginning_of_an_answer_belongs_to_what_is_read():
    tokenizer = merging_tokenizer(BREAKS)
    assert encoded(tokenizer, "U", "A") == ["user:\nU\nassistant:\n", "A</s>"]
    assert encoded(tokenizer, "U", "\nA") == ["user:\nU\nassistant:\n\n", "A</s>"]
    blank = merging_tokenizer(BREAKS.replace("m.role + ':\\n'", "m.role + ': '").replace("'assistant:\\n'", "'assistant: '"))
    assert encoded(blank, "U", "A!") == ["user: U\nassistant: A", "!</s>"]


def test_a_token_across_the_end_of_an_answer_is_not_trained():
    tokenizer = merging_tokenizer(
        "{% for m in messages %}{{ m.content + ('</s>' if loop.last and m.role != 'user' else '') }}{% endfor %}"
    )
    assert encoded(tokenizer, "U", "ax", "U", "b") == ["U", "a", "xU", "b</s>"]
    turns = encoded(tokenizer, "U", "x", "U", "b")
    assert isinstance(turns, MalformedRowError)
    assert str(turns) == "the answer 'x' has no separate token; it shares its tokens with the text around it"


@pytest.mark.parametrize("texts", [("U", "\nA"), ("é 世界", "\n世 A"), ("e\u0301", "e\u0301 A"), (" A", "A!", "\n", "\n\nA")])
def test_places_from_a_byte_level_vocabulary_and_from_offsets_cut_alike(texts):
    counted, measured = merging_tokenizer(BREAKS), merging_tokenizer(BREAKS)
    # A sequence of one is no other normalizer, but one whose effect on places is not known.
    counted.backend_tokenizer.normalizer = normalizers.NFC()
    measured.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFC()])
    assert encoded(counted, *texts) == encoded(measured, *texts)


def test_a_vocabulary_of_words_that_begin_with_blanks_is_cut_where_the_turns_meet():
    words = ["<s>", "</s>", "▁user:", "▁assistant:", "▁U", "▁A", "▁B"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<s>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    text = "{% for m in messages %}{{ m.role + ': ' + m.content + (' </s>' if m.role == 'assistant' else ' ') }}{% endfor %}"
    tokenizer.chat_template = text + "{{ 'assistant:' if add_generation_prompt }}"
    rendering = load_template("hf", tokenizer).render(Conversation([user("U"), assistant("A B")]))
    ((source, target),) = TextEncoder(tokenizer).encode_renderings([rendering])[0]
    assert tokenizer.convert_ids_to_tokens(source) == ["▁user:", "▁U", "▁assistant:"]
    assert tokenizer.convert_ids_to_tokens(target)[:2] == ["▁A", "▁B"]


def test_a_tokenizer_written_in_python_is_cut_where_its_parts_have_the_same_tokens():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = BREAKS
    assert not tokenizer.is_fast
    assert encoded(tokenizer, "U", "A") == ["user:\nU\nassistant:\n", "A</s>"]


@pytest.mark.parametrize("path", OTHERS)
def test_templates_of_a_given_folder_are_written_exactly_or_refused(path):
    tokenizer = stand_in(Path(path).read_text(encoding="utf-8"))
    try:
        load_template("hf", tokenizer)
    except ValueError as error:
        pytest.skip(str(error))
    refused = outcomes(tokenizer)
    if len(refused) == len(CASES):
        pytest.skip(str(refused["two"]))


TEXTS = (
    "Hello",
    " blanks \n",
    "两个字",
    "a\n\nb",
    '{"a": "b"}',
    "<b>&amp;</b> 'q'",
    "I thought </think> once",
    "x" * 300,
    "<|im_end|>",
)


def random_row(rng):
    """Messages in OpenAI's form, as rows of data have them, and tools; the last message is an answer or a question."""
    messages = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": rng.choice(["", *TEXTS[:4]])})
    tools = [WEATHER] if rng.random() < 0.5 else []
    for turn in range(rng.randint(1, 3)):
        for _ in range(2 if rng.random() < 0.25 else 1):
            messages.append({"role": "user", "content": f"U{turn} {rng.choice(TEXTS)}"})
        if tools and rng.random() < 0.6:
            calls = [
                {
                    "id": f"call{turn}{index:04d}",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": rng.choice(["Rome", "奥斯陆"]), "days": index}},
                }
                for index in range(rng.choice([1, 1, 2]))
            ]
            messages.append({"role": "assistant", "content": rng.choice([None, "", "Let me look."]), "tool_calls": calls})
            for call in calls:
                reply = {"role": "tool", "tool_call_id": call["id"], "name": "get_weather", "content": f"R{turn} 21 C"}
                messages.append(reply)
        answer = {"role": "assistant", "content": f"A{turn} {rng.choice(TEXTS)}"}
        thought = rng.random()
        if thought < 0.2:
            answer["reasoning_content"] = "so"
        elif thought < 0.4:
            answer["content"] = f"<think>\nhm\n</think>\n\n{answer['content']}"
        if rng.random() < 0.2:
            answer["weight"] = rng.choice([0, 1])
        messages.append(answer)
    return (messages[:-1] if rng.random() < 0.2 else messages), tools


def without_flags(messages):
    """Messages as vLLM gives them to a template: without flags of training, null contents as empty texts."""
    flags = ({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return [{**message, "content": message["content"] or ""} for message in flags]


PUBLISHED = sorted((FOLDER / "vllm").glob("*.jinja"))
PATHS = [*(FOLDER / f"{name}.jinja" for name in NAMES), *PUBLISHED, *map(Path, OTHERS)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_random_rows_are_written_as_apply_chat_template_writes_them(path):
    """Each row, with its names, ids, nulls and empty system prompt, wherever it is accepted."""
    tokenizer = stand_in(Path(path).read_text(encoding="utf-8"), **TOKENS.get(Path(path).stem, {}))
    template = load_template("hf", tokenizer)
    accepted = plain = 0
    for seed in range(80):
        messages, tools = random_row(random.Random(seed))
        system, turns = openai_messages(messages)
        try:
            rendering = template.render(Conversation(turns, system, tools))
        except MalformedRowError:
            continue
        expected = tokenizer.apply_chat_template(
            without_flags(messages),
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=messages[-1]["role"] != "assistant",
        )
        assert "".join(text for turn in rendering.turns for text in (*turn.source, *turn.target)) == expected, seed
        (encoded,) = TextEncoder(tokenizer).encode_renderings([rendering])
        if isinstance(encoded, MalformedRowError):
            continue
        accepted += 1
        ids = [token for source, target in encoded for token in (*source, *target)]
        assert ids == tokenizer(expected, add_special_tokens=False)["input_ids"], seed
        answers = [message for message in turns if message.role in ("assistant", "function")]
        for answer, turn, (_, target) in zip(answers, rendering.turns, encoded):
            assert bool(target) == answer.trains and turn.trains == answer.trains
        plain += not tools
    assert accepted >= 2 and plain >= 1, (accepted, plain)


#: our templates with thoughts, and the chat templates of their models
OWN = [("qwen3", "qwen3", "<|im_end|>"), ("glm4_moe", "glm45", "</s>"), ("gpt_oss", "gpt_oss", "<|return|>")]


def random_row_with_thoughts(rng, *, has_tools):
    """Questions, loops of calls and answers in OpenAI's form; a thought is a field, or a part of the text with tools."""
    messages = [{"role": "system", "content": "Be short."}] if rng.random() < 0.5 else []

    def answer(text, **entries):
        form = rng.choice(["none", "field", "text", "end"] if has_tools else ["none", "field"])
        content = {"text": f"<think>\nhm\n</think>\n\n{text}", "end": f"so</think>\n{text}"}.get(form, text)
        thought = {"reasoning_content": rng.choice(["hm", "\nso\n"] if has_tools else ["hm"])} if form == "field" else {}
        weight = {"weight": rng.choice([0, 1])} if rng.random() < 0.3 else {}
        messages.append({"role": "assistant", "content": content, **thought, **entries, **weight})

    for turn in range(rng.randint(1, 4)):
        text = rng.choice(["Hello", " blanks \n", "两个字", "a\n\nb", "<tool_response>\n21 C\n</tool_response>"])
        messages.append({"role": "user", "content": text})
        for _ in range(rng.choice([0, 0, 1, 2]) if has_tools else 0):
            call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome", "days": turn}}}
            calls = [call] * rng.choice([1, 1, 2])
            answer(rng.choice(["", "Let me look."]), tool_calls=calls)
            messages += [{"role": "tool", "content": "21 C"} for _ in calls]
        answer(f"A{turn} {rng.choice(['Hello', 'a  b', '两个字'])}")
    return (messages[:-1] if rng.random() < 0.2 else messages), [WEATHER] if has_tools else []


@pytest.mark.parametrize(("name", "chat_template", "end"), OWN, ids=[name for name, *_ in OWN])
def test_our_templates_write_thoughts_of_random_rows_as_the_models_own_templates_do(name, chat_template, end):
    """Texts are equal; every trained answer is one target, with its thought only where the model's template writes it."""
    tokenizer = stand_in((FOLDER / f"{chat_template}.jinja").read_text(encoding="utf-8"), eos_token=end)
    several = thoughts = 0
    for seed in range(150):
        rng = random.Random(seed)
        messages, tools = random_row_with_thoughts(rng, has_tools=name != "gpt_oss")
        thinking = rng.choice(["none", "true"]) if name != "gpt_oss" else "none"
        system, turns = openai_messages(messages)
        rendering = load_template(name).render(Conversation(turns, system, tools), thinking)
        written = "".join(join_text((*turn.source, *turn.target)) for turn in rendering.turns).replace("eos_token", end)
        theirs = tokenizer.apply_chat_template(
            without_flags(messages),
            tools=tools or None,
            tokenize=False,
            add_generation_prompt=messages[-1]["role"] != "assistant",
            enable_thinking=True,
        )
        if name == "gpt_oss":  # the system prompt is another message there, see docs/data.md
            written, theirs = (text[text.index("<|start|>user") :] for text in (written, theirs))
        assert written == theirs, seed
        answers = [message for message in turns if message.role in ("assistant", "function")]
        targets = [join_text(turn.target) for turn in rendering.turns[: len(answers)]]
        assert [turn.trains for turn in rendering.turns[: len(answers)]] == [answer.trains for answer in answers]
        result = "<tool_response>" if name == "qwen3" else "no result"
        questions = [index for index, turn in enumerate(turns) if turn.role == "user" and result not in turn.content]
        for index, target in enumerate(targets):
            assert not re.search("hm|so</|so\n", target) or 2 * index + 1 > max(questions, default=0)
            thoughts += bool(re.search("hm|so", target))
        several += sum(answer.trains for answer in answers) > 1
    assert several >= 20 and thoughts >= 10, (several, thoughts)


def test_an_explicit_empty_system_prompt_is_no_default_prompt():
    """Of the templates that have a default system prompt, all write an empty message where the row has one."""
    differ = 0
    for name in NAMES:
        if "one" in REFUSED.get(name, {}):
            continue
        tokenizer = stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name])
        rows = [[user("U1"), assistant("A1")]] * 2
        texts = []
        for system, turns in zip((None, ""), rows):
            try:
                rendering = load_template("hf", tokenizer).render(Conversation(turns, system))
            except MalformedRowError:
                break
            texts.append("".join(text for turn in rendering.turns for text in (*turn.source, *turn.target)))
            assert texts[-1] == tokenizer.apply_chat_template(messages_of(Conversation(turns, system)), tokenize=False)
        differ += len(set(texts)) == 2
    assert differ >= 15
