"""Turns in tokens: what a model drew is never changed, and what it is told is what the chat template would write."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from byte_tokenizer import SPECIAL_TOKENS, build_tokenizer
from test_data_chat_templates import FOLDER, LOOKS_SPECIAL, NAMES, TOKENS, stand_in

from mindspeed_rl.data.conversation import MalformedRowError
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.templates import (
    HfTemplate,
    Template,
    _list_template_names,
    _load_own_templates,
    load_template,
)
from mindspeed_rl.data.turns import ChatTurns, _build_conversation
from mindspeed_rl.rollout.agents.conversation import AgentConversation, TrajectoryLimits, _turn_seed
from mindspeed_rl.rollout.protocol import Generated
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.rollout.trajectory import NO_VERSION

ROOM = 10**6
NAMED = [name for name in _list_template_names() if name != "hf"]
#: these write nothing behind an answer, and are refused
ENDLESS = ("glm4", "glm45", "last_only")
HF_NAMES = [name for name in NAMES if name not in ENDLESS]
CASES = [("hf", name) for name in HF_NAMES] + [("file", name) for name in NAMED]


def template_and_tokenizer(kind: str, name: str) -> tuple[Template | HfTemplate, Any]:
    if kind == "hf":
        tokenizer = stand_in((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), **TOKENS[name])
        return load_template("hf", tokenizer), tokenizer
    template, tokenizer = load_template(name), build_tokenizer()
    assert isinstance(template, Template)
    entry = _load_own_templates()[name]
    slots = [slot for value in entry.values() if isinstance(value, dict) for slot in value.get("slots", [])]
    found = {*LOOKS_SPECIAL.findall(json.dumps(entry, ensure_ascii=False)), *template.stop_words}
    found |= {slot["token"] for slot in slots if isinstance(slot, dict)}
    tokenizer.add_special_tokens({"additional_special_tokens": sorted(found - set(SPECIAL_TOKENS))})
    if template.eos_token is not None:
        tokenizer.eos_token = template.eos_token
    return template, tokenizer


@dataclass
class Scripted:
    """An engine that draws what it is told to, and notes what it was asked."""

    answers: list[tuple[int, ...]]
    asked: list[tuple[int, ...]] = field(default_factory=list)
    given: list[Generated] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, begun: Generated | None = None
    ) -> Generated:
        self.asked.append(prompt_ids)
        self.seeds.append(seed)
        tokens = self.answers[len(self.given)]
        number = len(self.given)
        log_probs = tuple(-0.5 - number - place / 1000 for place in range(len(tokens)))
        self.given.append(Generated(tokens, log_probs, (number,) * len(tokens), "stop"))
        return self.given[-1]


def dialogue_of(turns: ChatTurns, tokenizer: Any, prompt: Iterable[int], engine: Any, most: int = ROOM) -> AgentConversation:
    limits = TrajectoryLimits(max_tokens=most, max_prompt_tokens=ROOM, max_context_tokens=ROOM)
    return AgentConversation(tuple(prompt), Sampling(1.0, ROOM, ()), 7, engine, turns, tokenizer, limits)


async def talked(conversation: AgentConversation, told: Sequence[Sequence[dict[str, Any]]]) -> None:
    for messages in told:
        await conversation.reply()
        assert conversation.add_messages(messages)
    await conversation.reply()


def words(source: random.Random, nasty: bool) -> str:
    letters = string.ascii_letters + string.digits
    plain = "".join(source.choice(letters) for _ in range(source.randint(1, 12)))
    if not nasty:
        return plain
    odd = source.choice(["", "\n", "  ", "<|im_end|>", "</s>", "{{ messages }}", '"}', "é漢", "<tool_response>", "user:"])
    return plain + odd + plain[::-1]


def news(source: random.Random, roles: Sequence[tuple[str, ...]], nasty: bool) -> list[dict[str, Any]]:
    return [{"role": role, "content": words(source, nasty)} for role in source.choice(roles)]


def writable(turns: ChatTurns, tokenizer: Any) -> list[tuple[str, ...]]:
    """Roles that may follow an answer in this template."""
    found = []
    for roles in (("user",), ("tool",), ("tool", "tool"), ("tool", "user")):
        try:
            turns.render_next([{"role": role, "content": "x1"} for role in roles], tokenizer.eos_token_id)
            found.append(roles)
        except MalformedRowError:
            continue
    return found


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_no_drawn_token_is_ever_changed_and_masks_and_log_probs_line_up(kind: str, name: str) -> None:
    template, tokenizer = template_and_tokenizer(kind, name)
    size = len(tokenizer)
    for number in range(4):
        source = random.Random(f"{kind}{name}{number}")
        turns = ChatTurns(template, tokenizer, has_tools=False)
        roles = writable(turns, tokenizer)
        assert roles, "a template that writes nobody's answer to the model"
        count = source.randint(1, 4)
        answers = []
        for _ in range(count + 1):
            drawn = [source.randrange(size) for _ in range(source.randint(0, 8))]
            thought = tokenizer.encode("<think>\nhm\n</think>\n\n", add_special_tokens=False) if source.random() < 0.3 else []
            answers.append((*thought, *drawn, tokenizer.eos_token_id))
        engine = Scripted(answers)
        prompt = turns.render([{"role": "user", "content": words(source, nasty=True)}])
        conversation = dialogue_of(turns, tokenizer, prompt, engine)
        asyncio.run(talked(conversation, [news(source, roles, nasty=True) for _ in range(count)]))
        trajectory = conversation.end()
        # every turn was asked for with exactly the tokens that stand before it in its sequence, and stands there as drawn
        place = 0
        for sequence in trajectory.sequences:
            context = sequence.prompt_ids
            for segment in sequence.segments:
                if segment.sampled:
                    assert engine.asked[place] == context
                    given = engine.given[place]
                    assert (segment.token_ids, segment.log_probs, segment.versions) == (
                        given.token_ids,
                        given.log_probs,
                        given.versions,
                    )
                    place += 1
                else:
                    assert segment.token_ids
                context += segment.token_ids
        assert place == count + 1
        assert trajectory.sequences[0].prompt_ids == prompt
        drawn = [token for answer in answers for token in answer]
        assert [token for token, sampled in zip(trajectory.token_ids, trajectory.sampled) if sampled] == drawn
        values = [value for given in engine.given for value in given.log_probs]
        assert [value for value, sampled in zip(trajectory.log_probs, trajectory.sampled) if sampled] == values
        told = [place for place, sampled in enumerate(trajectory.sampled) if not sampled]
        assert all(trajectory.log_probs[place] == 0.0 and trajectory.versions[place] == NO_VERSION for place in told)
        lengths = trajectory.sequence_lengths
        assert sum(lengths) == len(trajectory.input_ids) and sum(lengths[1::2]) == len(trajectory.token_ids)
        assert engine.seeds == [_turn_seed(7, turn) for turn in range(count + 1)]
        assert len(set(engine.seeds)) == count + 1


def rendered(template: Template | HfTemplate, tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[int]:
    """The whole conversation as the template writes it, without turns."""
    if isinstance(template, HfTemplate):
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)
    encoded = TextEncoder(tokenizer).encode_renderings([template.render(_build_conversation(messages, ()))])[0]
    assert not isinstance(encoded, MalformedRowError)
    return [token for source, target in encoded for token in (*source, *target)]


@pytest.mark.parametrize("thinks", [False, True], ids=["plain", "thoughts"])
@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_the_model_is_told_what_the_template_writes_of_the_whole_conversation(kind: str, name: str, thinks: bool) -> None:
    template, tokenizer = template_and_tokenizer(kind, name)
    turns = ChatTurns(template, tokenizer, has_tools=False)
    roles = [one for one in writable(turns, tokenizer) if one in (("user",), ("tool",))]
    source = random.Random(name)
    asked = {"role": "user", "content": words(source, nasty=False)}
    texts = [words(source, nasty=False) for _ in range(3)]
    spoken = [f"<think>\n{words(source, nasty=False)}\n</think>\n\n{text}" if thinks else text for text in texts]
    answers = [(*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in spoken]
    engine = Scripted([*answers, (tokenizer.eos_token_id,)])
    told = [news(source, roles, nasty=False) for _ in texts]
    conversation = dialogue_of(turns, tokenizer, turns.render([asked]), engine)
    asyncio.run(talked(conversation, told))
    messages = [asked]
    for number, (text, new) in enumerate(zip(texts, told)):
        messages += [{"role": "assistant", "content": spoken[number]}, *new]
        before, read = (*engine.asked[number], *answers[number]), engine.asked[number + 1]
        wanted = tokenizer.decode(rendered(template, tokenizer, messages))
        if read[: len(before)] != before:  # the template writes earlier turns otherwise now, so all is as it writes it
            assert tokenizer.decode(list(read)) == wanted
            continue
        behind = tokenizer.decode(list(read[len(before) :]))
        assert wanted.endswith(behind) and all(message["content"] in behind for message in new)
        # and nothing but the end of the answer lies between the answer and that
        end = wanted[: -len(behind)].removesuffix(tokenizer.eos_token).rstrip()
        assert end.endswith(text)


@pytest.mark.parametrize(("kind", "name"), [("file", "deepseek4"), ("hf", "deepseek_r1")])
def test_dropped_thoughts_begin_a_new_sequence(kind: str, name: str) -> None:
    template, tokenizer = template_and_tokenizer(kind, name)
    turns = ChatTurns(template, tokenizer)
    answers = ["<think>\nhm\n</think>\n\nfirst", "second"]
    engine = Scripted([(*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id) for text in answers])
    conversation = dialogue_of(turns, tokenizer, turns.render([{"role": "user", "content": "q"}]), engine)
    asyncio.run(talked(conversation, [[{"role": "user", "content": "more"}]]))
    trajectory = conversation.end()
    one, two = trajectory.sequences
    assert "hm" in tokenizer.decode(list(one.segments[0].token_ids))
    again = tokenizer.decode(list(two.prompt_ids))
    assert "hm" not in again and "first" in again and "more" in again


def test_prompts_of_a_template_with_the_same_marks_go_on_in_the_tokenizers_own() -> None:
    _, tokenizer = template_and_tokenizer("hf", "qwen25")
    asked = ChatTurns(load_template("qwen_retool"), tokenizer).render([{"role": "user", "content": "q"}])
    own = ChatTurns(load_template("hf", tokenizer), tokenizer)
    own.check_prompt(asked)
    assert "answer format" in tokenizer.decode(list(asked))
    told = own.render_next([{"role": "tool", "content": "42"}], tokenizer.eos_token_id)
    assert told is not None and "<tool_response>\n42\n</tool_response>" in tokenizer.decode(list(told))


def test_prompts_of_another_template_are_told_apart() -> None:
    template, tokenizer = template_and_tokenizer("file", "qwen")
    turns = ChatTurns(template, tokenizer)
    turns.check_prompt(turns.render([{"role": "user", "content": "q"}]))
    with pytest.raises(ValueError, match="prompt_type"):
        turns.check_prompt(tokenizer.encode("q", add_special_tokens=False))
