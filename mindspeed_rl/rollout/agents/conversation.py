"""A conversation with the model that is held in tokens: what it drew stays as it drew it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mindspeed_rl.data.turns import ChatMessage, ChatTurns
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling, turn_seed
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Limits:
    """Of one trajectory.

    Attributes:
        max_tokens: behind the prompt, over all turns: drawn, told, and what the template writes again.
        max_prompt_tokens: of the prompt.
        max_context_tokens: that the engine can read, the answer included.
        max_turns: of the model; None: as many as fit.
    """

    max_tokens: int
    max_prompt_tokens: int
    max_context_tokens: int
    max_turns: int | None = None


@dataclass(frozen=True)
class Turn:
    """A turn of the model.

    Attributes:
        text: decoded with special tokens, without the one that ended it.
        token_ids: with that one.
        ended: by an end token; otherwise for lack of room, and no other turn follows.
        prompt_ids: what the model read.
        log_probs: of each token.
    """

    text: str
    token_ids: tuple[int, ...]
    ended: bool
    prompt_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


class Dialogue:
    """One trajectory on its way.

    Attributes:
        messages: what was said since the prompt, in OpenAI's form.
        metrics: figures that the trajectory is to have.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        engine: RolloutEngine,
        turns: ChatTurns,
        tokenizer: PreTrainedTokenizerBase,
        limits: Limits,
    ) -> None:
        self._prompt_ids, self._sampling, self._seed, self._engine = tuple(prompt_ids), sampling, seed, engine
        self._turns, self._tokenizer, self._limits = turns, tokenizer, limits
        self._done: list[TokenSequence] = []  # sequences that are over
        self._begins = self._prompt_ids
        self._segments: list[Segment] = []  # of the sequence that goes on
        self._used = 0
        self._rewards: list[float | None] = []  # of each turn
        self._has_thought = False
        self._truncated = False
        self.messages: list[dict[str, Any]] = []
        self.metrics: dict[str, float] = {}

    @property
    def num_turns(self) -> int:
        """Turns of the model so far."""
        return len(self._rewards)

    def may_go_on(self, turn: Turn) -> bool:
        """Another turn of the model may follow this one."""
        most = self._limits.max_turns
        return turn.ended and (most is None or self.num_turns < most)

    def begin(self, prompt_ids: Sequence[int], turns: ChatTurns | None = None) -> bool:
        """The conversation begins with another prompt than the task's, or anew; False where it has no room.

        Args:
            turns: of the chat template from now on, where prompts with tools and without differ.

        Raises:
            ValueError: the first prompt is too long.
        """
        most = self._limits.max_prompt_tokens
        if not self._rewards and len(prompt_ids) > most:
            raise ValueError(f"the first messages are {len(prompt_ids)} tokens, and rl_config.max_prompt_length is {most}")
        self._turns = self._turns if turns is None else turns
        if self._rewards and not self._begin_sequence(tuple(prompt_ids), [], has_thought=False):
            return False
        self._prompt_ids = self._begins = tuple(prompt_ids)
        return True

    async def reply(self, max_tokens: int | None = None) -> Turn:
        """The model's next turn.

        Args:
            max_tokens: of this turn, where the run allows as many.

        Raises:
            ValueError: the engine cannot answer: the prompt is too long.
        """
        context = self._context(self._segments)
        limits = self._limits
        room = min(self._sampling.max_tokens, limits.max_tokens - self._used, limits.max_context_tokens - len(context))
        room = room if max_tokens is None else min(room, max_tokens)
        # without any room the engine is asked all the same, and says that the prompt is too long
        sampling = replace(self._sampling, max_tokens=max(1, room))
        found = await _whole(self._engine, context, sampling, turn_seed(self._seed, self.num_turns))
        self._segments.append(Segment.drawn(found))
        self._used += len(found.token_ids)
        self._rewards.append(None)
        ended = found.finish == "stop"
        self._truncated = not ended
        spoken = found.token_ids[:-1] if ended else found.token_ids
        # cleaning up would take away spaces that the model drew
        text = self._tokenizer.decode(list(spoken), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        self._has_thought |= "</think>" in text
        if self.messages and self.messages[-1]["role"] == "assistant":  # it was reopened
            text = self.messages.pop()["content"] + text
        self.messages.append({"role": "assistant", "content": text})
        return Turn(text, found.token_ids, ended, context, found.log_probs)

    def tell(self, messages: Sequence[ChatMessage]) -> bool:
        """The model has been told these messages, and is to answer; False where there is no room for an answer.

        Where the chat template writes earlier turns otherwise now, a new sequence begins with what it writes.

        Raises:
            BadRow: the template cannot write them.
        """
        last = self._context(self._segments)[-1]
        num_before = sum(message["role"] == "assistant" for message in self.messages) - 1
        between = self._turns.between(messages, last, num_before=num_before, has_thought=self._has_thought)
        told = [dict(message) for message in messages]
        if between is None:
            return self._write_anew([*self.messages, *told])
        if not self._has_room(len(between), len(self._context(self._segments)) + len(between)):
            return False
        self.messages += told
        self._used += len(between)
        self._segments.append(Segment.told(between))
        return True

    def replace(self, messages: Sequence[ChatMessage]) -> bool:
        """The conversation since the prompt has become this one, and the model is to answer; False where it has no room.

        What only adds to what was said is told; anything else begins a new sequence.
        """
        said = len(self.messages)
        new = messages[said:]
        is_told = bool(new) and all(message["role"] != "assistant" for message in new)
        if is_told and [dict(message) for message in messages[:said]] == self.messages:
            return self.tell(new)
        return self._write_anew([dict(message) for message in messages])

    def reopen(self, content: str) -> bool:
        """The model's last turn is this text, and goes on behind it; False where there is no room.

        It was drawn otherwise, or at least not without its end token: a new sequence begins.
        """
        begins = (*self._context(self._segments[:-1]), *self._tokenizer.encode(content, add_special_tokens=False))
        said = [*self.messages[:-1], {"role": "assistant", "content": content}]
        return self._begin_sequence(begins, said, has_thought=self._has_thought)

    def amend(self, token_ids: Sequence[int], trains: Sequence[bool], content: str) -> bool:
        """The model's last turn reads so from now on, in these tokens; False where there is no room.

        Tokens behind those that were drawn are told. Where one of those is changed or left out, a new sequence begins, and what
        was drawn stays as it was drawn in the one before.

        Args:
            trains: False for drawn tokens that shall not train: they count as told.
            content: the turn as text.

        Raises:
            ValueError: a token shall train that was not drawn there.
        """
        *before, drawn = self._segments
        same = len(os.path.commonprefix([drawn.token_ids, tuple(token_ids)]))  # takes any sequences
        for place, token in enumerate(token_ids):
            if place >= same and trains[place]:
                raise ValueError(f"token {place} of the turn ({token}) shall train, but the model did not draw it there")
        said = [*self.messages[:-1], {"role": "assistant", "content": content}]
        is_whole = same == len(drawn.token_ids)
        added = tuple(token_ids[same:])
        context = (*self._context(before), *token_ids)
        if is_whole and added and not self._has_room(len(added), len(context)):
            return False
        drawn_parts = _parts(drawn, [*trains[:same], *(True for _ in drawn.token_ids[same:])])
        if not is_whole:
            kept, self._segments = self._segments, [*before, *drawn_parts]
            if not self._begin_sequence(context, said, has_thought=self._has_thought):
                self._segments = kept
                return False
            return True
        self._segments = [*before, *drawn_parts, *([Segment.told(added)] if added else [])]
        self._used += len(added)
        self.messages = said
        return True

    def _write_anew(self, messages: list[dict[str, Any]]) -> bool:
        # what the template dropped is gone, and what it kept it keeps
        return self._begin_sequence(self._turns.rewritten(self._prompt_ids, messages), messages, has_thought=False)

    def _begin_sequence(self, begins: tuple[int, ...], messages: list[dict[str, Any]], *, has_thought: bool) -> bool:
        if not self._has_room(len(begins), len(begins)):
            return False
        self._done.append(TokenSequence(self._begins, tuple(self._segments)))
        self._begins, self._segments, self.messages = begins, [], messages
        self._used += len(begins)
        self._has_thought = has_thought
        return True

    def _context(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        """What the model reads up to the end of these segments of the sequence that goes on."""
        return (*self._begins, *(token for segment in segments for token in segment.token_ids))

    def _has_room(self, num_tokens: int, context: int) -> bool:
        """At least one token may be drawn behind so many new ones, which make the context so long."""
        fits = self._used + num_tokens < self._limits.max_tokens and context < self._limits.max_context_tokens
        self._truncated |= not fits
        return fits

    def reward(self, value: float | None) -> None:
        """The model's last turn got this, besides what it has got."""
        if value is not None:
            self._rewards[-1] = (self._rewards[-1] or 0.0) + float(value)

    def count(self, name: str, value: float = 1.0) -> None:
        """Adds to a figure of the trajectory."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    def end(self, *, final_reward: float | None = None, failure: str = "") -> Trajectory:
        """The trajectory."""
        segments = list(self._segments)
        while segments and not segments[-1].sampled:
            segments.pop()  # what nobody answered
        last = [TokenSequence(self._begins, tuple(segments))] if segments or not self._done else []
        return Trajectory(
            sequences=(*self._done, *last),
            finish="length" if self._truncated else "stop",
            turn_rewards=tuple(self._rewards),
            final_reward=final_reward,
            metrics={"turns": float(self.num_turns), **self.metrics},
            failure=failure,
        )


def _parts(drawn: Segment, trains: Sequence[bool]) -> list[Segment]:
    """A drawn segment as those of its tokens that train and those that count as told, in their order."""
    found, start = [], 0
    for does, run in itertools.groupby(trains):
        part = slice(start, start + len(list(run)))
        ids = drawn.token_ids[part]
        found.append(Segment(ids, drawn.log_probs[part], drawn.versions[part], sampled=True) if does else Segment.told(ids))
        start = part.stop
    return found


async def _whole(engine: RolloutEngine, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int) -> Generated:
    """A response that has ended: new weights may interrupt it, and it goes on with them."""
    found: Generated | None = None
    while found is None or found.finish == "aborted":
        found = await engine.generate(prompt_ids, sampling, seed, found)
    return found


def row_of(columns: Mapping[str, Any], label: str | None) -> dict[str, Any]:
    """The data set's row as plug-ins see it; its answer is both `label` and, where there is no such column, `solution`."""
    return {"label": label, "solution": label, **columns}
