"""A conversation with the model in tokens: sampled tokens are never tokenized again."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mindspeed_rl.data.images import ImageReader, check_images, check_media_limits, has_videos, read_parts
from mindspeed_rl.data.turns import ChatMessage, ChatTurns
from mindspeed_rl.rollout.protocol import Generated, RolloutEngine
from mindspeed_rl.rollout.requests import Sampling, derive_seed
from mindspeed_rl.rollout.trajectory import Segment, TokenSequence, Trajectory, TurnEvent
from mindspeed_rl.thoughts import closes_thought

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TrajectoryLimits:
    """Limits of one trajectory.

    Attributes:
        max_tokens: after the prompt, over all turns: sampled tokens, messages, and what the template renders again.
        max_prompt_tokens: largest number of tokens of the prompt.
        max_context_tokens: that the engine can read, the answer included.
        max_turns: largest number of turns of the model; None: as many as fit.
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
        prompt_ids: the context that the model read.
        log_probs: log-prob of each token.
    """

    text: str
    token_ids: tuple[int, ...]
    ended: bool
    prompt_ids: tuple[int, ...]
    log_probs: tuple[float, ...]


def strip_end(token_ids: tuple[int, ...], sampling: Sampling, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens of a turn that has stopped, without the token that ended it; the last one of a stop text is text."""
    end_ids = (*sampling.stop_token_ids, tokenizer.eos_token_id)
    return token_ids[:-1] if token_ids[-1] in end_ids else token_ids


def _turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn of the model, from its sample's seed and from the turns before it.

    The first turn has the sample's own seed: an agent of one turn samples what a single response would be.
    """
    if not turn:
        return seed
    return derive_seed(f"{seed}#{turn}")


class AgentConversation:
    """One trajectory in progress.

    Attributes:
        messages: the conversation after the prompt, in OpenAI's form.
        metrics: metrics of the trajectory.
        num_turns: turns of the model so far.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        seed: int,
        engine: RolloutEngine,
        turns: ChatTurns,
        tokenizer: PreTrainedTokenizerBase,
        limits: TrajectoryLimits,
        images: ImageReader | None = None,
        max_images: int = 0,
        max_videos: int = 0,
    ) -> None:
        self._prompt_ids, self._sampling, self._seed, self._engine = tuple(prompt_ids), sampling, seed, engine
        self._turns, self._tokenizer, self._limits = turns, tokenizer, limits
        self._reader, self._max_images, self._max_videos = images, max_images, max_videos
        self._prompt_images = self._start_images = sampling.images  # of the prompt, and of the start of the current sequence
        self._added_images: list[tuple[int, tuple[str, ...]]] = []  # index of a segment, and the images in it
        self._finished: list[TokenSequence] = []  # sequences that the current one has replaced
        self._start = self._prompt_ids  # of the current sequence
        self._segments: list[Segment] = []  # of the current sequence
        self._num_used = 0
        self._rewards: list[float | None] = []  # of each turn
        self._events: list[TurnEvent] = []
        self._last_turn: int | None = None  # its event
        self._has_thought = False
        self._truncated = False
        self.messages: list[ChatMessage] = []
        self.metrics: dict[str, float] = {}
        self.num_turns = 0

    def can_continue(self, turn: Turn) -> bool:
        """Return True where another turn of the model may follow this one."""
        max_turns = self._limits.max_turns
        return turn.ended and (max_turns is None or self.num_turns < max_turns)

    def restart(
        self, prompt_ids: Sequence[int], turns: ChatTurns | None = None, images: tuple[str, ...] = ()
    ) -> bool:
        """Start with another prompt than the task's, or start again after turns; return False where it does not fit.

        The images of the task's prompt are not part of it.

        Args:
            images: images of this prompt.
            turns: turns of the chat template from now on, where prompts with tools and without differ.

        Raises:
            ValueError: the first prompt is too long.
        """
        max_tokens = self._limits.max_prompt_tokens
        if not self._rewards and len(prompt_ids) > max_tokens:
            raise ValueError(
                f"the first messages are {len(prompt_ids)} tokens, and rl_config.max_prompt_length is {max_tokens}"
            )
        self._turns = self._turns if turns is None else turns
        if self._rewards and not self._start_sequence([], tuple(prompt_ids)):
            return False
        self._prompt_ids = self._start = tuple(prompt_ids)
        self._prompt_images = self._start_images = images
        self._added_images, self._has_thought = [], False
        return True

    def restart_with(self, messages: Sequence[ChatMessage]) -> bool:
        """Start with messages in place of the task's prompt; see `restart`."""
        plain, images = self._read_messages(messages)
        return self.restart(self._expand(self._turns.render(plain), images, ()), images=images)

    async def decode_videos(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        """Return messages whose videos are decoded, in a thread of its own: the deadlines of all samples are kept meanwhile.

        Raises:
            VideoError: one cannot be decoded, or the model reads no videos.
        """
        if self._reader is None or not has_videos(messages):
            return messages
        return await asyncio.to_thread(self._reader.decode_messages, messages)

    def _read_messages(self, messages: Sequence[ChatMessage]) -> tuple[list[ChatMessage], tuple[str, ...]]:
        """Return messages as text, with marks of images and videos, and all of these in their order."""
        read = [read_parts(message.get("content")) for message in messages]
        plain: list[ChatMessage] = [{**message, "content": content} for message, (content, _) in zip(messages, read)]
        images = tuple(image for _, images in read for image in images)
        return plain, images if self._reader is None else self._reader.decode_videos(images)

    def _expand(self, ids: tuple[int, ...], images: tuple[str, ...], before: tuple[str, ...]) -> tuple[int, ...]:
        """Return ids with all tokens of new images.

        Args:
            before: images and videos that the context has already.

        Raises:
            ValueError: the model reads none or not as many, or one is broken.
        """
        if not images:
            return ids
        if self._reader is None:
            raise ValueError("the model of this run reads no images, and a message has one")
        check_media_limits(before, images, self._max_images, self._max_videos)
        check_images(images)
        ((expanded, _),), _ = self._reader.expand([(list(ids), [])], images)
        return tuple(expanded)

    def _list_images(self, num_segments: int) -> tuple[str, ...]:
        """Return the images of the current sequence up to the end of so many segments."""
        added = (image for index, images in self._added_images if index < num_segments for image in images)
        return (*self._start_images, *added)

    async def reply(self, max_tokens: int | None = None) -> Turn:
        """Return the model's next turn.

        Args:
            max_tokens: largest number of tokens of this turn, where the run allows as many.

        Raises:
            ValueError: the engine cannot answer: the prompt is too long.
        """
        context = self._context(self._segments)
        limits = self._limits
        room = min(self._sampling.max_tokens, limits.max_tokens - self._num_used, limits.max_context_tokens - len(context))
        room = room if max_tokens is None else min(room, max_tokens)
        # without any room the engine raises that the prompt is too long
        sampling = replace(self._sampling, max_tokens=max(1, room), images=self._list_images(len(self._segments)))
        seed = _turn_seed(self._seed, self.num_turns)
        response: Generated | None = None
        start_s = time.time()
        while response is None or response.finish == "aborted":  # new weights may interrupt it; it continues with them
            response = await self._engine.generate(context, sampling, seed, response)
        start = sum(len(segment.token_ids) for sequence in self._finished for segment in sequence.segments)
        start += sum(len(segment.token_ids) for segment in self._segments)
        stop = start + len(response.token_ids)
        self._events.append(TurnEvent("model", self._last_turn, start, stop, start_s, time.time()))
        self._last_turn = len(self._events) - 1
        self._segments.append(Segment.from_generated(response))
        self._num_used += len(response.token_ids)
        self._rewards.append(None)
        self.num_turns += 1
        ended = response.finish == "stop"
        self._truncated = not ended
        visible = strip_end(response.token_ids, self._sampling, self._tokenizer) if ended else response.token_ids
        # cleaning up would remove spaces that the model sampled
        text = self._tokenizer.decode(list(visible), clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        self._has_thought |= closes_thought(text)
        if self.messages and self.messages[-1]["role"] == "assistant":  # it was reopened
            text = self.messages.pop()["content"] + text
        self.messages.append({"role": "assistant", "content": text})
        return Turn(text, response.token_ids, ended, context, response.log_probs)

    def add_messages(self, messages: Sequence[ChatMessage]) -> bool:
        """Add messages that the model answers next; return False where an answer does not fit.

        Where the chat template now renders earlier turns otherwise, a new sequence starts with what it renders. Contents may
        be lists of parts, of which some are images.

        Raises:
            MalformedRowError: the template cannot render them.
            ValueError: the model cannot read their images.
        """
        last = self._context(self._segments)[-1]
        num_before = sum(message["role"] == "assistant" for message in self.messages) - 1
        plain, images = self._read_messages(messages)
        between = self._turns.render_next(plain, last, num_before=num_before, has_thought=self._has_thought)
        added: list[ChatMessage] = [dict(message) for message in messages]
        if between is None:
            return self._start_sequence([*self.messages, *added])
        between = self._expand(between, images, self._list_images(len(self._segments)))
        if not self._has_room(len(between), len(self._context(self._segments)) + len(between)):
            return False
        self.messages += added
        self._num_used += len(between)
        self._added_images.append((len(self._segments), images))
        self._segments.append(Segment.from_context(between))
        return True

    def replace(self, messages: Sequence[ChatMessage]) -> bool:
        """Replace the conversation after the prompt; return False where an answer does not fit.

        Messages that only follow the earlier ones are added; anything else starts a new sequence.
        """
        num_before = len(self.messages)
        new = messages[num_before:]
        follow = bool(new) and all(message["role"] != "assistant" for message in new)
        if follow and [dict(message) for message in messages[:num_before]] == self.messages:
            return self.add_messages(new)
        return self._start_sequence([dict(message) for message in messages])

    def reopen(self, content: str) -> bool:
        """Replace the text of the model's last turn, which continues after it; return False where it does not fit.

        The turn was sampled otherwise, or at least with an end token: a new sequence starts.
        """
        start = (*self._context(self._segments[:-1]), *self._tokenizer.encode(content, add_special_tokens=False))
        messages = [*self.messages[:-1], {"role": "assistant", "content": content}]
        return self._start_sequence(messages, start)

    def amend(self, token_ids: Sequence[int], trains: Sequence[bool], content: str) -> bool:
        """Replace the tokens of the model's last turn; return False where it does not fit.

        Tokens after the sampled ones are context. Where a sampled one is changed or left out, a new sequence starts, and the
        one before keeps what was sampled.

        Args:
            trains: False for sampled tokens that must not train: they count as context.
            content: the turn as text.

        Raises:
            ValueError: a token should train that was not sampled there.
        """
        *before, sampled = self._segments
        same = len(os.path.commonprefix([sampled.token_ids, tuple(token_ids)]))  # takes any sequences
        for index, token in enumerate(token_ids):
            if index >= same and trains[index]:
                raise ValueError(f"token {index} of the turn ({token}) shall train, but the model did not sample it there")
        messages = [*self.messages[:-1], {"role": "assistant", "content": content}]
        is_full = same == len(sampled.token_ids)
        added = tuple(token_ids[same:])
        context = (*self._context(before), *token_ids)
        if is_full and added and not self._has_room(len(added), len(context)):
            return False
        split = _split_by_training(sampled, [*trains[:same], *(True for _ in sampled.token_ids[same:])])
        if not is_full:
            unchanged, self._segments = self._segments, [*before, *split]
            if not self._start_sequence(messages, context):
                self._segments = unchanged
                return False
            return True
        self._segments = [*before, *split, *([Segment.from_context(added)] if added else [])]
        self._num_used += len(added)
        self.messages = messages
        return True

    def _start_sequence(self, messages: list[ChatMessage], start: tuple[int, ...] | None = None) -> bool:
        """Start another sequence; return False where it does not fit.

        Args:
            messages: the conversation after the prompt.
            start: its first tokens; None for what the chat template renders, which drops thoughts.
        """
        before = images = self._list_images(len(self._segments))
        if start is None:
            plain, new = self._read_messages(messages)
            rendered = self._turns.rerender(self._prompt_ids, plain)
            same = len(os.path.commonprefix([self._prompt_ids, rendered]))  # its images have all their tokens
            start_ids = (*rendered[:same], *self._expand(rendered[same:], new, self._prompt_images))
            images = (*self._prompt_images, *new)
        else:
            start_ids = start
        if not self._has_room(len(start_ids), len(start_ids)):
            return False
        self._finished.append(TokenSequence(self._start, tuple(self._segments), before))
        self._start, self._segments, self.messages = start_ids, [], messages
        self._start_images, self._added_images = images, []
        self._num_used += len(start_ids)
        self._has_thought &= start is not None
        return True

    def _context(self, segments: Sequence[Segment]) -> tuple[int, ...]:
        """Return the tokens of the current sequence up to the end of these segments."""
        return (*self._start, *(token for segment in segments for token in segment.token_ids))

    def _has_room(self, num_tokens: int, context: int) -> bool:
        """Return True where a token can be sampled after so many new ones, which make the context so long."""
        fits = self._num_used + num_tokens < self._limits.max_tokens and context < self._limits.max_context_tokens
        self._truncated |= not fits
        return fits

    def reward(self, value: float | None) -> None:
        """Add to the reward of the model's last turn."""
        if value is not None:
            self._rewards[-1] = (self._rewards[-1] or 0.0) + float(value)

    def record_call(self, name: str, seconds: float, reward: float | None, *, failed: bool) -> None:
        """Record a call of a tool after the model's last turn."""
        now, stop = time.time(), self._events[self._last_turn or 0].stop
        self._events.append(TurnEvent(name, self._last_turn, stop, stop, now - seconds, now, reward, failed))

    def count(self, name: str, value: float = 1.0) -> None:
        """Add to a metric of the trajectory."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value

    def end(self, *, final_reward: float | None = None, failure: str = "") -> Trajectory:
        """Return the trajectory."""
        segments = list(self._segments)
        while segments and not segments[-1].sampled:
            segments.pop()  # messages without an answer
        sequence = TokenSequence(self._start, tuple(segments), self._list_images(len(segments)))
        last = [sequence] if segments or not self._finished else []
        return Trajectory(
            sequences=(*self._finished, *last),
            finish="length" if self._truncated else "stop",
            turn_rewards=tuple(self._rewards),
            final_reward=final_reward,
            metrics={"turns": float(self.num_turns), **self.metrics},
            failure=failure,
            events=self._list_events(),
        )

    def _list_events(self) -> tuple[TurnEvent, ...]:
        """Return the events, with the rewards of the turns."""
        rewards = iter(self._rewards)
        return tuple(replace(event, reward=next(rewards)) if event.name == "model" else event for event in self._events)


def _split_by_training(segment: Segment, trains: Sequence[bool]) -> list[Segment]:
    """Split a sampled segment into runs of tokens that train and runs that count as context, in their order."""
    segments, start = [], 0
    for does, run in itertools.groupby(trains):
        part = slice(start, start + len(list(run)))
        ids = segment.token_ids[part]
        sampled = Segment(ids, segment.log_probs[part], segment.versions[part], sampled=True)
        segments.append(sampled if does else Segment.from_context(ids))
        start = part.stop
    return segments
