"""Every chat template against texts written by hand, and against chat templates that transformers renders."""

import importlib.util
import json

import pytest
from byte_tokenizer import Trained

from mindspeed_rl.data.conversation import Conversation, MalformedRowError, Message, ToolCall, assistant, user
from mindspeed_rl.data.encoding import TextEncoder, join_turns
from mindspeed_rl.data.templates import _list_template_names, join_text, load_template
from mindspeed_rl.data.tokenizer import set_eos_token

T = Trained
TWO_TURNS = [user("Q1"), assistant("A1"), user("Q2"), assistant("A2")]
R1 = (
    "A conversation between User and Assistant. The user asks a question, and the Assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags, respectively, i.e., "
    "<think> reasoning process here </think><answer> answer here </answer>. Put your final answer within \\boxed{}."
)
SYS = "<|im_start|>system\n{}<|im_end|>\n"
USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
HEAD = "<|start_header_id|>{}<|end_header_id|>\n\n"


def chatml(system, joint="\n", end="<|im_end|>"):
    lead = SYS.format(system) if system else ""
    return [lead + USER.format("Q1"), T("A1" + end), joint + USER.format("Q2"), T("A2" + end)]


EOS_LABEL = "(the label of this piece's first token is the end token)"

# Two turns without a system prompt: what the model reads, and (Trained) what it must answer.
RENDERED = {
    "default": ["Human: Q1\nAssistant:", T("A1</s>"), "\nHuman: Q2\nAssistant:", T("A2</s>")],
    "empty": ["Q1", T("A1"), "Q2", T("A2")],
    "completion": ["Q1", T("A1</s>"), "Q2", T("A2</s>")],
    "trl": ["<s>Q1", T("A1"), "Q2", T("A2")],
    "alpaca": [
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nQ1\n\n### Response:\n",
        T("A1</s>"),
        "\n\n### Instruction:\nQ2\n\n### Response:\n",
        T("A2</s>"),
    ],
    "chatml": chatml(""),
    "chatml_de": chatml("Du bist ein freundlicher und hilfsbereiter KI-Assistent."),
    "qwen": chatml("You are a helpful assistant."),
    "qwen_lf": chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", "", "<|im_end|>\n"),
    "qwen3_nothink": chatml("", "", "<|im_end|>\n"),
    "plm": chatml("You are a helpful assistant.", "", "<|im_end|>\n"),
    "qwen_r1": [
        SYS.format("You are a helpful assistant.") + USER.format(R1 + "\nQ1"),
        T("A1<|im_end|>"),
        "\n" + USER.format(R1 + "\nQ2"),
        T("A2<|im_end|>"),
    ],
    "qwen_math_r1": chatml("Please reason step by step, and put your final answer within \\boxed{}."),
    "qwen3": [
        USER.format("Q1"),
        T("A1<|im_end|>\n"),
        USER.format("Q2") + "<think>\n\n</think>\n\n",
        T("A2<|im_end|>\n"),
    ],
    "llama2": ["<s>[INST] Q1 [/INST]", T("A1</s>"), "<s>[INST] Q2 [/INST]", T("A2</s>")],
    "llama3": [
        "<s>" + HEAD.format("user") + "Q1<|eot_id|>" + HEAD.format("assistant"),
        T("A1<|eot_id|>"),
        HEAD.format("user") + "Q2<|eot_id|>" + HEAD.format("assistant"),
        T("A2<|eot_id|>"),
    ],
    "mistral": ["<s>[INST] Q1 [/INST]", T("A1</s>"), "[INST] Q2 [/INST]", T("A2</s>")],
    "mixtral": ["<s>[INST] Q1 [/INST]", T("A1</s>"), "[INST] Q2 [/INST]", T("A2</s>")],
    "magistral": ["<s>[INST]Q1[/INST]", T("A1</s>"), "[INST]Q2[/INST]", T("A2</s>")],
    "gemma": [
        "<s><start_of_turn>user\nQ1<end_of_turn>\n<start_of_turn>model\n",
        T("A1"),
        EOS_LABEL,
        "<end_of_turn>\n<start_of_turn>user\nQ2<end_of_turn>\n<start_of_turn>model\n",
        T("A2</s>"),
    ],
    "deepseek2": ["<s>User: Q1\n\nAssistant:", T("A1</s>"), "User: Q2\n\nAssistant:", T("A2</s>")],
    "deepseek2-lite": ["<s>User: Q1\n\nAssistant:", T("A1</s>"), "User: Q2\n\nAssistant:", T("A2</s>")],
    "minicpm3": ["<s>User: Q1\n\nAssistant:", T("A1</s>"), "User: Q2\n\nAssistant:", T("A2</s>")],
    "deepseek3": ["<s><｜User｜>Q1<｜Assistant｜>", T("A1</s>"), "<｜User｜>Q2<｜Assistant｜>", T("A2</s>")],
    "deepseek3_r1": [f"<s>{R1} <｜User｜>Q1<｜Assistant｜>", T("A1</s>"), f"{R1} <｜User｜>Q2<｜Assistant｜>", T("A2</s>")],
    "deepseek4": ["<s><｜User｜>Q1<｜Assistant｜></think>", T("A1</s>"), "<｜User｜>Q2<｜Assistant｜></think>", T("A2</s>")],
    "chatglm2": ["[gMASK]sop[Round 0]\n\n问：Q1\n\n答：", T("A1"), EOS_LABEL, "\n\n[Round 1]\n\n问：Q2\n\n答：", T("A2</s>")],
    "chatglm3": [
        "[gMASK]sop<|user|>\nQ1<|assistant|>",
        T("\nA1"),
        EOS_LABEL,
        "<|user|>\nQ2<|assistant|>",
        T("\nA2</s>"),
    ],
    "chatglm3_system": [
        "[gMASK]sop<|system|>\nYou are ChatGLM3, a large language model trained by Zhipu.AI. Follow the user's instructions "
        "carefully. Respond using markdown.<|user|>\nQ1<|assistant|>",
        T("\nA1"),
        EOS_LABEL,
        "<|user|>\nQ2<|assistant|>",
        T("\nA2</s>"),
    ],
    "glm4": ["[gMASK]<sop><|user|>\nQ1<|assistant|>", T("\nA1"), EOS_LABEL, "<|user|>\nQ2<|assistant|>", T("\nA2</s>")],
    "glm4_moe": [
        "[gMASK]<sop><|user|>\nQ1<|assistant|>\n<think></think>",
        T("\nA1"),
        EOS_LABEL,
        "<|user|>\nQ2<|assistant|>\n<think></think>",
        T("\nA2</s>"),
    ],
    "cpm": ["<s><用户>Q1<AI>", T("A1</s>"), "<用户>Q2<AI>", T("A2</s>")],
    "baichuan2": ["<reserved_106>Q1<reserved_107>", T("A1"), EOS_LABEL, "<reserved_106>Q2<reserved_107>", T("A2</s>")],
    "intern2": ["<s>" + USER.format("Q1"), T("A1<|im_end|>\n"), USER.format("Q2"), T("A2<|im_end|>\n")],
    "bailing_mini": [
        "<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>Q1<|role_end|><role>ASSISTANT</role>",
        T("A1<|role_end|>"),
        "<role>HUMAN</role>Q2<|role_end|><role>ASSISTANT</role>",
        T("A2<|role_end|>"),
    ],
    "gpt_oss": [
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.<|end|>"
        "<|start|>user<|message|>Q1<|end|><|start|>assistant<|channel|>final<|message|>",
        T("A1<|end|>"),
        "<|start|>user<|message|>Q2<|end|><|start|>assistant<|channel|>final<|message|>",
        T("A2</s>"),
    ],
    "hunyuan": ["You are a helpful assistant.Q1", T("A1"), "Q2", T("A2")],
}
TOOL_PROMPT_TEMPLATES = {"qwen_retool", "qwen_search_tool"}


def encode(template, tokenizer, conversation, thinking="none", **options):
    if template.eos_token is not None:
        set_eos_token(tokenizer, template.eos_token)
    encoder = TextEncoder(tokenizer)
    rendering = template.render(conversation, thinking, **options)
    (turns,) = encoder.encode_renderings([rendering])
    input_ids, labels, truncated = join_turns(
        turns, eos_id=encoder.eos_id, efficient_eos=rendering.efficient_eos, budget=100_000, keeps_fitting_half=False
    )
    assert not truncated
    return input_ids.tolist(), labels.tolist()


def test_every_template_is_covered_here():
    assert {*RENDERED, *TOOL_PROMPT_TEMPLATES, "hf"} == set(_list_template_names())


@pytest.mark.parametrize("name", sorted(RENDERED))
def test_two_turns_render_as_written_by_hand(name, tokenizer, expected):
    pieces = [piece for piece in RENDERED[name] if piece is not EOS_LABEL]
    input_ids, labels = expected(*pieces)
    if EOS_LABEL in RENDERED[name]:
        before = expected(*pieces[:2])[0]
        labels[len(before)] = tokenizer.eos_token_id
    assert encode(load_template(name), tokenizer, Conversation(TWO_TURNS)) == (input_ids, labels)


SYSTEM_RENDERED = {
    "default": "S\nHuman: Q1\nAssistant:",
    "alpaca": "S### Instruction:\nQ1\n\n### Response:\n",
    "qwen": SYS.format("S") + USER.format("Q1"),
    "qwen3": SYS.format("S") + USER.format("Q1") + "<think>\n\n</think>\n\n",
    "llama2": "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ1 [/INST]",
    "llama3": "<s>" + HEAD.format("system") + "S<|eot_id|>" + HEAD.format("user") + "Q1<|eot_id|>" + HEAD.format("assistant"),
    "magistral": "<s>[SYSTEM_PROMPT]S[/SYSTEM_PROMPT][INST]Q1[/INST]",
    "deepseek2": "<s>S\n\nUser: Q1\n\nAssistant:",
    "deepseek3": "<s>S<｜User｜>Q1<｜Assistant｜>",
    "glm4": "[gMASK]<sop><|system|>\nS<|user|>\nQ1<|assistant|>",
    "chatglm3": "[gMASK]sop<|system|>\nS<|user|>\nQ1<|assistant|>",
    "baichuan2": "S<reserved_106>Q1<reserved_107>",
    "gpt_oss": "<|start|>system<|message|>S<|end|><|start|>user<|message|>Q1<|end|>"
    "<|start|>assistant<|channel|>final<|message|>",
}


@pytest.mark.parametrize("name", sorted(SYSTEM_RENDERED))
def test_a_system_prompt_replaces_the_default_one(name, tokenizer):
    template = load_template(name)
    input_ids, labels = encode(template, tokenizer, Conversation(TWO_TURNS[:2], system="S"))
    read = tokenizer(SYSTEM_RENDERED[name], add_special_tokens=False)["input_ids"]
    assert input_ids[: len(read)] == read
    assert labels[: len(read)] == [-100] * len(read)
    assert labels[len(read)] != -100


# (our template, the chat template of the same family, its end token, a system prompt that both take)
FAMILIES = [
    ("qwen_lf", "qwen25", "<|im_end|>", None),
    ("qwen_lf", "qwen25", "<|im_end|>", "Be short."),
    ("qwen3", "qwen3", "<|im_end|>", "Be short."),
    ("chatml", "chatml", "<|im_end|>", "Be short."),
    ("llama3", "llama3", "<|eot_id|>", "Be short."),
    ("deepseek3", "deepseek3", "</s>", "Be short."),
    ("mistral", "mistral", "</s>", None),
    ("glm4_moe", "glm45", "</s>", "Be short."),
]


@pytest.mark.parametrize(("name", "chat_template", "eos", "system"), FAMILIES)
def test_a_template_and_the_chat_template_of_its_family_give_the_same_tokens(
    name, chat_template, eos, system, with_chat_template
):
    tokenizer = with_chat_template(chat_template, eos_token=eos)
    input_ids, _ = encode(load_template(name), tokenizer, Conversation(TWO_TURNS, system))
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": message.role, "content": message.content} for message in TWO_TURNS]
    theirs = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    if load_template(name).efficient_eos:
        theirs = [*theirs, tokenizer.eos_token_id]
    ours = list(input_ids)
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    if theirs[-1:] == newline and ours[-1:] != newline:
        ours += newline  # chatml without a trailing newline: it would be the next turn's first token
    assert ours == theirs


@pytest.mark.parametrize(("name", "chat_template", "eos", "system"), FAMILIES)
def test_a_prompt_and_the_chat_template_with_generation_prompt_give_the_same_tokens(
    name, chat_template, eos, system, with_chat_template
):
    tokenizer = with_chat_template(chat_template, eos_token=eos)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "Q1"})
    ours, _ = encode(load_template(name), tokenizer, Conversation([user("Q1")], system))
    if load_template(name).efficient_eos:
        ours = ours[:-1]
    assert ours == tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLS = (ToolCall("get_weather", {"city": "Rome"}), ToolCall("get_weather", {"city": "Oslo", "days": 2}))
TOOL_TURNS = [
    user("Weather in Rome and Oslo?"),
    Message("function", ("I look.",), CALLS),
    Message("observation", ("21 C", "3 C")),
    assistant("Rome 21, Oslo 3."),
]
OPENAI_TOOL_TURNS = [
    {"role": "user", "content": "Weather in Rome and Oslo?"},
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}},
        ],
    },
    {"role": "tool", "content": "21 C"},
    {"role": "tool", "content": "3 C"},
    {"role": "assistant", "content": "Rome 21, Oslo 3."},
]


@pytest.mark.parametrize("system", [None, "Be short."])
def test_qwen_tools_render_as_its_chat_template_does(with_chat_template, system):
    tokenizer = with_chat_template("qwen25", eos_token="<|im_end|>")
    ours, labels = encode(load_template("qwen_lf"), tokenizer, Conversation(TOOL_TURNS, system, [WEATHER]))
    messages = ([{"role": "system", "content": system}] if system else []) + OPENAI_TOOL_TURNS
    assert ours == tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=True, return_dict=False)
    trained = tokenizer.decode([label for label in labels if label != -100])
    assert trained == (
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>\n'
        "Rome 21, Oslo 3.<|im_end|>\n"
    )


def test_glm45_tools_render_as_its_chat_template_does(with_chat_template):
    tokenizer = with_chat_template("glm45")
    ours, _ = encode(load_template("glm4_moe"), tokenizer, Conversation(TOOL_TURNS[:2], "Be short.", [WEATHER]))
    messages = [{"role": "system", "content": "Be short."}, *OPENAI_TOOL_TURNS[:2]]
    theirs = tokenizer.apply_chat_template(messages, tools=[WEATHER], tokenize=True, return_dict=False)
    assert ours == [*theirs, tokenizer.eos_token_id]


def test_llama3_call_is_a_json_object_with_parameters(tokenizer, expected):
    call = Message("function", ("",), (ToolCall("get_weather", {"city": "Rome"}),))
    input_ids, labels = encode(load_template("llama3"), tokenizer, Conversation([user("Q"), call], tools=[WEATHER]))
    answer, _ = expected('{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>')
    assert [label for label in labels if label != -100] == answer
    assert '"description": "Weather of a city."' in tokenizer.decode(input_ids)


def test_glm4_call_is_name_and_arguments_on_two_lines(tokenizer):
    call = Message("function", ("",), (ToolCall("get_weather", {"city": "Rome"}),))
    turns = [user("Q"), call, Message("observation", ("21 C",)), assistant("21")]
    input_ids, _ = encode(load_template("glm4"), tokenizer, Conversation(turns, tools=[WEATHER]))
    text = tokenizer.decode(input_ids)
    assert "<|system|>\n# 可用工具\n\n## get_weather\n\n{" in text
    assert text.endswith('<|assistant|>get_weather\n{"city": "Rome"}<|observation|>\n21 C<|assistant|>\n21</s>')


def test_default_tools_are_action_lines(tokenizer):
    turns = [user("Q"), Message("function", ("",), (ToolCall("get_weather", {"city": "Rome"}),))]
    input_ids, _ = encode(load_template("default"), tokenizer, Conversation(turns, tools=[WEATHER]))
    text = tokenizer.decode(input_ids)
    assert json.dumps(WEATHER["function"]) in text
    assert text.endswith('Assistant:Action: get_weather\nAction Input: {"city": "Rome"}</s>')


@pytest.mark.parametrize("name", sorted(set(_list_template_names()) - {"hf"}))
def test_tools_and_calls_are_written_or_refused_never_dropped(name, tokenizer):
    template = load_template(name)
    turns = [user("Q"), Message("function", ("",), (ToolCall("get_weather", {"city": "Rome"}),))]
    if template.tools is None:
        with pytest.raises(MalformedRowError, match="cannot write tools"):
            template.render(Conversation([user("Q"), assistant("A")], tools=[WEATHER]))
        with pytest.raises(MalformedRowError, match="cannot write function calls"):
            template.render(Conversation(turns))
        with pytest.raises(MalformedRowError, match="cannot write tool results"):
            template.render(Conversation([Message("observation", ("x",)), assistant("A")]))
    else:
        text = tokenizer.decode(encode(template, tokenizer, Conversation(turns, tools=[WEATHER]))[0])
        assert "Weather of a city." in text
        assert text.count("Rome") == 1


@pytest.mark.parametrize(("name", "problem"), [("glm4", "one call"), ("llama3", "one call")])
def test_parallel_calls_are_refused_where_the_format_holds_one(name, problem):
    with pytest.raises(MalformedRowError, match=problem):
        load_template(name).render(Conversation(TOOL_TURNS, tools=[WEATHER]))


THOUGHT = Message("assistant", ("<think>\nhm\n</think>\n\nA1",))


@pytest.mark.parametrize(
    ("thinking", "answer", "read_end", "trained"),
    [
        ("none", assistant("A1"), "<think>\n\n</think>\n\n", "A1<|im_end|>\n"),
        ("false", assistant("A1"), "<think>\n\n</think>\n\n", "A1<|im_end|>\n"),
        ("true", assistant("A1"), "", "<think>\n\n</think>\n\nA1<|im_end|>\n"),
        ("none", THOUGHT, "", "<think>\nhm\n</think>\n\nA1<|im_end|>\n"),
        ("true", THOUGHT, "", "<think>\nhm\n</think>\n\nA1<|im_end|>\n"),
        ("false", THOUGHT, "<think>\n\n</think>\n\n", "A1<|im_end|>\n"),
        ("none", Message("assistant", ("A1",), reasoning="hm"), "", "<think>\nhm\n</think>\n\nA1<|im_end|>\n"),
    ],
)
def test_qwen3_thinking(thinking, answer, read_end, trained, tokenizer, expected):
    got = encode(load_template("qwen3"), tokenizer, Conversation([user("Q1"), answer]), thinking)
    assert got == expected(USER.format("Q1") + read_end, T(trained))


HM = Message("assistant", ("A1",), reasoning="hm")
LOOK = Message("function", ("I look.",), (ToolCall("get_weather", {"city": "Rome"}),), reasoning="so")
EARLIER = [
    ("qwen3", {}, ["A1<|im_end|>\n", "<think>\nso\n</think>\n\nI look.", "<think>\nhm\n</think>\n\nA1<|im_end|>\n"]),
    ("glm4_moe", {}, ["\nA1", "\n<think>so</think>\nI look.", "\n<think>hm</think>\nA1"]),
    ("deepseek4", {"tools": ()}, ["A1</s>", None, "hm</think>A1</s>"]),
    (
        "gpt_oss",
        {"tools": ()},
        ["A1<|end|>", None, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>A1eos_token"],
    ),
]


@pytest.mark.parametrize(("name", "options", "targets"), EARLIER, ids=[name for name, *_ in EARLIER])
def test_thoughts_before_the_last_question_are_left_out_and_those_after_it_train(name, options, targets):
    tools = options.get("tools", (WEATHER,))
    loop = [LOOK, Message("observation", ("21 C",))] if tools else []
    turns = load_template(name).render(Conversation([user("Q1"), HM, user("Q2"), *loop, HM], tools=tools)).turns
    written = [join_text(turn.target).replace("eos_token", "</s>") for turn in turns]
    expected = [target.replace("eos_token", "</s>") for target in targets if target is not None]
    assert len(written) == len(expected)
    assert all(text.startswith(target) for text, target in zip(written, expected, strict=True)), written


def test_kept_thoughts_are_written_as_for_the_last_answer():
    template = load_template("qwen3")
    template.drop_thinking = False
    first, second = template.render(Conversation([user("Q1"), HM, *TWO_TURNS[2:]])).turns
    assert join_text(first.target).startswith("<think>\nhm\n</think>\n\nA1")
    first, second = template.render(Conversation(TWO_TURNS)).turns
    assert join_text(first.source).endswith("<think>\n\n</think>\n\n") and join_text(first.target) == "A1<|im_end|>\n"


def test_a_thought_is_refused_by_a_template_without_thoughts():
    with pytest.raises(MalformedRowError, match="reasoning_content"):
        load_template("qwen").render(Conversation([user("Q"), Message("assistant", ("A",), reasoning="hm")]))


def deepseek4_encoder():
    """vLLM's own encoder of this model, loaded only from its file."""
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        pytest.skip("vllm is not installed")
    path = f"{package.submodule_search_locations[0]}/tokenizers/deepseek_v4_encoding.py"
    spec = importlib.util.spec_from_file_location("deepseek_v4_encoding", path)
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except FileNotFoundError:
        pytest.skip("this vllm has no DeepSeek-V4 encoder")
    return module


@pytest.mark.parametrize("thinking", ["false", "true"])
@pytest.mark.parametrize("tools", [(), (WEATHER,)])
def test_deepseek4_renders_as_vllm_encodes_it(thinking, tools, tokenizer):
    module = deepseek4_encoder()
    thoughts = ["one", "two"]
    if tools:
        turns = [user("Q1"), Message("function", ("I look.",), TOOL_TURNS[1].calls, "one"), TOOL_TURNS[2]]
        turns.append(Message("assistant", ("A2",), reasoning="two"))
        messages = [{"role": "user", "content": "Q1"}, {**OPENAI_TOOL_TURNS[1], "reasoning": "one"}, *OPENAI_TOOL_TURNS[2:4]]
        messages[1]["tool_calls"] = [
            {"type": "function", "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in messages[1]["tool_calls"]
        ]
        messages.append({"role": "assistant", "content": "A2", "reasoning": "two"})
    else:
        turns = [user("Q1"), Message("assistant", ("A1",), reasoning=thoughts[0]), user("Q2")]
        turns.append(Message("assistant", ("A2",), reasoning=thoughts[1]))
        messages = [
            {"role": "user", "content": "Q1"},
            {"role": "assistant", "content": "A1", "reasoning": "one"},
            {"role": "user", "content": "Q2"},
            {"role": "assistant", "content": "A2", "reasoning": "two"},
        ]
    system = {"role": "system", "content": "Be short.", **({"tools": list(tools)} if tools else {})}
    theirs = module.encode_messages([system, *messages], thinking_mode="thinking" if thinking == "true" else "chat")
    theirs = theirs.replace(module.bos_token, "<s>").replace(module.eos_token, "</s>")
    ours, _ = encode(load_template("deepseek4"), tokenizer, Conversation(turns, "Be short.", tools), thinking)
    assert tokenizer.decode(ours) == theirs


def test_hf_template_gives_the_chat_templates_tokens_and_trains_the_answers(with_chat_template, expected):
    tokenizer = with_chat_template("qwen25", eos_token="<|im_end|>")
    ours, labels = encode(load_template("hf", tokenizer), tokenizer, Conversation(TWO_TURNS, "S"))
    messages = [{"role": "system", "content": "S"}, *({"role": m.role, "content": m.content} for m in TWO_TURNS)]
    assert ours == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    pieces = [SYS.format("S") + USER.format("Q1"), T("A1<|im_end|>"), "\n" + USER.format("Q2"), T("A2<|im_end|>"), "\n"]
    assert (ours, labels) == expected(*pieces)


def test_hf_template_with_tools_trains_calls_and_answers(with_chat_template):
    tokenizer = with_chat_template("qwen25", eos_token="<|im_end|>")
    ours, labels = encode(load_template("hf", tokenizer), tokenizer, Conversation(TOOL_TURNS, None, [WEATHER]))
    assert ours == tokenizer.apply_chat_template(OPENAI_TOOL_TURNS, tools=[WEATHER], tokenize=True, return_dict=False)
    trained = tokenizer.decode([label for label in labels if label != -100])
    assert trained.startswith("I look.\n<tool_call>") and trained.endswith("</tool_call><|im_end|>Rome 21, Oslo 3.<|im_end|>")


def test_hf_template_follows_a_chat_template_that_rewrites_the_last_turn(with_chat_template, expected):
    tokenizer = with_chat_template("qwen3", eos_token="<|im_end|>")
    got = encode(load_template("hf", tokenizer), tokenizer, Conversation(TWO_TURNS))
    first = [USER.format("Q1"), T("A1<|im_end|>"), "\n" + USER.format("Q2"), T("<think>\n\n</think>\n\nA2<|im_end|>"), "\n"]
    assert got == expected(*first)


def test_hf_template_of_a_prompt_ends_with_the_generation_prompt(with_chat_template):
    tokenizer = with_chat_template("qwen3", eos_token="<|im_end|>")
    template = load_template("hf", tokenizer)
    for thinking, extra in (("none", {}), ("false", {"enable_thinking": False}), ("true", {"enable_thinking": True})):
        ours, _ = encode(template, tokenizer, Conversation([user("Q1")]), thinking)
        messages = [{"role": "user", "content": "Q1"}]
        theirs = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False, **extra)
        assert ours == theirs


def test_hf_template_refuses_what_the_chat_template_would_drop(with_chat_template):
    tokenizer = with_chat_template("chatml", eos_token="<|im_end|>")
    template = load_template("hf", tokenizer)
    with pytest.raises(MalformedRowError, match="does not write tools"):
        template.render(Conversation(TWO_TURNS, tools=[WEATHER]))
    with pytest.raises(MalformedRowError, match="drops function calls"):
        template.render(Conversation(TOOL_TURNS[:2]))
    with pytest.raises(MalformedRowError, match="drops the reasoning_content"):
        template.render(Conversation([user("Q"), Message("assistant", ("A",), reasoning="hm")]))


def test_hf_template_writes_reasoning_content(with_chat_template, expected):
    tokenizer = with_chat_template("qwen3", eos_token="<|im_end|>")
    turns = [user("Q"), Message("assistant", ("A",), reasoning="hm")]
    got = encode(load_template("hf", tokenizer), tokenizer, Conversation(turns))
    assert got == expected(USER.format("Q"), T("<think>\nhm\n</think>\n\nA<|im_end|>"), "\n")


def test_hf_template_passes_on_what_the_chat_template_refuses(with_chat_template):
    template = load_template("hf", with_chat_template("mistral"))
    with pytest.raises(MalformedRowError, match="Only user and assistant roles"):
        template.render(Conversation(TWO_TURNS, "S"))


def test_hf_needs_a_chat_template(tokenizer):
    with pytest.raises(ValueError, match="needs a tokenizer with a chat template"):
        load_template("hf", tokenizer)


def test_text_that_looks_like_a_field_stays_text(tokenizer, expected):
    got = encode(load_template("default"), tokenizer, Conversation([user("{{content}} {{idx}}"), assistant("{{name}}")]))
    assert got == expected("Human: {{content}} {{idx}}\nAssistant:", T("{{name}}</s>"))


def test_an_unknown_template_is_an_error_that_names_the_nearest():
    with pytest.raises(ValueError, match="prompt_type='qwen33' is unknown; there are default, .*did you mean 'qwen3'"):
        load_template("qwen33")


def test_a_users_template_file_in_the_known_form_works(tmp_path, tokenizer, expected):
    path = tmp_path / "mine.json"
    entry = {
        "name": "mine",
        "format_prefix": {"slots": [["bos_token"], {"token": "[gMASK]"}]},
        "format_user": {"slots": ["U:{{content}}|"]},
        "format_function": {"slots": ["{{name}}({{arguments}})", ["eos_token"]]},
        "format_tools": {"tool_format": "default"},
    }
    path.write_text(json.dumps([entry]))
    template = load_template("mine", path=path)
    assert encode(template, tokenizer, Conversation(TWO_TURNS[:2])) == expected("<s>[gMASK]U:Q1|", T("A1</s>"))
    calls = Message("function", ("",), (ToolCall("f", {"a": 1}), ToolCall("g", {})))
    got = encode(template, tokenizer, Conversation([user("Q"), calls]))
    assert got == expected("<s>[gMASK]U:Q|", T('f({"a": 1})</s>g({})</s>'))


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": "m", "format_usr": {}}, "unknown keys format_usr"),
        (
            {"name": "m", "template_class": "Llama2Template", "format_system": {"slots": [["bos_token"], "{{content}}"]}},
            "allows no token slot",
        ),
        ({"name": "m", "template_class": "Other"}, "template_class='Other' is unknown"),
        ({"name": "m", "format_user": {"slots": [["pad_token"]]}}, "a slot is a text"),
        ({"name": "m", "format_tools": {"tool_format": "qwen2"}}, "did you mean 'qwen"),
    ],
)
def test_a_wrong_template_entry_is_an_error(entry, problem, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([entry]))
    with pytest.raises(ValueError, match=problem):
        load_template("m", path=path)


def test_a_template_whose_token_the_tokenizer_lacks_is_an_error():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, "[UNK]"))
    bare = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", unk_token="[UNK]")
    with pytest.raises(ValueError, match=r"no token '<\|im_end\|>'"):
        set_eos_token(bare, "<|im_end|>")
    rendering = load_template("chatglm3").render(Conversation(TWO_TURNS))
    with pytest.raises(ValueError, match=r"needs the token '\[gMASK\]'"):
        TextEncoder(bare).encode_renderings([rendering])
