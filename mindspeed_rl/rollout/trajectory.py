"""A sample of a prompt as it trains: sampled tokens, context tokens between them, rewards, metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

from mindspeed_rl.bounds import MAX_METRICS, check_token_ids, read_number, show
from mindspeed_rl.redaction import hide_in_text
from mindspeed_rl.rollout.protocol import Finish, Generated, continue_routing

if TYPE_CHECKING:
    import numpy as np

#: of one trajectory, of all its tools, its program and its loop
_MAX_METRICS = 2 * MAX_METRICS
#: weight version of tokens that were not sampled
NO_VERSION = -1


@dataclass(frozen=True)
class Segment:
    """Tokens of one origin.

    Attributes:
        log_probs: log-prob of each token under the distribution it was sampled from; 0.0 where it was not sampled.
        versions: version of the weights that each token was sampled with; NO_VERSION where it was not sampled.
        sampled: True where the actor sampled them. Others are context, and never train.
        routing: after sampled tokens, the routing of all tokens before the last of them; see `Generated`.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    versions: tuple[int, ...]
    sampled: bool
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.log_probs) == len(self.versions):
            raise ValueError(
                f"a segment of {len(self.token_ids)} tokens has {len(self.log_probs)} log-probs and "
                f"{len(self.versions)} weight versions"
            )

    @classmethod
    def from_generated(cls, response: Generated) -> Segment:
        """Return the segment of an engine's response."""
        return cls(response.token_ids, response.log_probs, response.versions, True, response.routing)

    @classmethod
    def from_context(cls, token_ids: Iterable[int]) -> Segment:
        """Return the segment of tokens from tools, environments or templates."""
        ids = tuple(token_ids)
        return cls(ids, (0.0,) * len(ids), (NO_VERSION,) * len(ids), False)


@dataclass(frozen=True)
class TokenSequence:
    """Tokens that the model reads as one context.

    Attributes:
        prompt_ids: tokens before the first one that is sampled here.
        images: references of its images, in the order of their tokens.
        role: named role whose context it is, in an episode of several; "" in others.
    """

    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]
    images: tuple[str, ...] = ()
    role: str = ""

    @property
    def is_sampled(self) -> bool:
        """True where the model sampled a token of it."""
        return any(segment.sampled and segment.token_ids for segment in self.segments)

    @property
    def routing(self) -> np.ndarray | None:
        """Experts of each token up to the last sampled one, [tokens, layers, k]; None where the engine reports none."""
        routing = None
        for segment in self.segments:
            routing = continue_routing(routing, segment.routing)
        return routing


@dataclass(frozen=True)
class TurnEvent:
    """A turn of the model, or a call of a tool, for readers of a trajectory.

    Attributes:
        name: "model", or the tool's name.
        parent: index of the event that it follows; None for the first of a conversation.
        start, stop: its tokens in the row's response; equal for a tool.
        start_s, end_s: since the epoch; not compared.
        reward: reward of the turn; None for none.
        failed: the call failed.
        role: named role whose turn it is, in an episode of several; "" in others.
    """

    name: str
    parent: int | None
    start: int
    stop: int
    start_s: float = field(compare=False)
    end_s: float = field(compare=False)
    reward: float | None = None
    failed: bool = False
    role: str = ""


@dataclass(frozen=True)
class Trajectory:
    """One row of a batch: a single response, or the turns of an agent.

    The row's response is the tokens after the prompts of its sequences, one sequence after the other.

    Attributes:
        sequences: several where the chat template renders earlier turns otherwise once later ones follow: tokens sampled in
            one context must train in it. The first starts with the prompt of the data set, as a rule.
        finish: "stop": it ended by itself; "length": there was no room for more; "aborted": it may be continued.
        turn_rewards: from tools and environments for each turn of the model; None for no reward.
        final_reward: reward of the final state; None for no reward.
        metrics: by name, such as tool_call_num. A name with a slash counts events, which a batch adds up; of the others it
            has mean, largest and smallest.
        failure: the reason why it failed; "" where it did not. A failed trajectory has no score.
        output: output of a program, for reward functions; None where no program ran.
        events: turns and calls, in the order in which they ended; empty for a single response.
    """

    sequences: tuple[TokenSequence, ...]
    finish: Finish
    turn_rewards: tuple[float | None, ...] = ()
    final_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""
    output: str | None = None
    events: tuple[TurnEvent, ...] = ()

    @classmethod
    def from_response(cls, prompt_ids: Sequence[int], response: Generated, images: tuple[str, ...] = ()) -> Trajectory:
        """Return the trajectory of a prompt, with the images in it, and its one response."""
        return cls((TokenSequence(tuple(prompt_ids), (Segment.from_generated(response),), images),), response.finish)

    def drop_routing(self) -> Trajectory:
        """Return it without routing, for readers of its tokens: routing is many times as long."""
        sequences = [
            replace(sequence, segments=tuple(replace(segment, routing=None) for segment in sequence.segments))
            for sequence in self.sequences
        ]
        return replace(self, sequences=tuple(sequences))

    @property
    def response(self) -> Generated:
        """The single response; where it was aborted, it may be continued.

        Raises:
            ValueError: there are several sequences or segments.
        """
        segments = self.segments
        if len(self.sequences) != 1 or len(segments) != 1:
            raise ValueError(
                f"a trajectory of {len(self.sequences)} sequences and {len(segments)} segments is not a single response"
            )
        (segment,) = segments
        return Generated(segment.token_ids, segment.log_probs, segment.versions, self.finish, segment.routing)

    @property
    def segments(self) -> list[Segment]:
        """Segments of all sequences."""
        return [segment for sequence in self.sequences for segment in sequence.segments]

    @property
    def images(self) -> tuple[str, ...]:
        """References of the images of all sequences, one sequence after the other."""
        return tuple(image for sequence in self.sequences for image in sequence.images)

    @property
    def token_ids(self) -> list[int]:
        """Tokens of the row's response."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def log_probs(self) -> list[float]:
        """Log-prob of each token of the response."""
        return [value for segment in self.segments for value in segment.log_probs]

    @property
    def versions(self) -> list[int]:
        """Weight version of each token of the response."""
        return [version for segment in self.segments for version in segment.versions]

    @property
    def sampled(self) -> list[bool]:
        """True for each token of the response that the actor sampled: the row's response_mask."""
        return [segment.sampled for segment in self.segments for _ in segment.token_ids]

    @property
    def sampled_versions(self) -> list[int]:
        """Weight version of each sampled token."""
        return [version for segment in self.segments if segment.sampled for version in segment.versions]

    @property
    def input_ids(self) -> list[int]:
        """All tokens of all sequences."""
        ids: list[int] = []
        for sequence in self.sequences:
            ids += sequence.prompt_ids
            for segment in sequence.segments:
                ids += segment.token_ids
        return ids

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of prompt and response of each sequence, alternating: p1, r1, p2, r2 ..."""
        lengths = []
        for sequence in self.sequences:
            lengths += [len(sequence.prompt_ids), sum(len(segment.token_ids) for segment in sequence.segments)]
        return lengths

    def reward_columns(self) -> dict[str, object]:
        """Return the columns of the row that reward functions may read."""
        if not (self.metrics or self.turn_rewards or self.final_reward is not None or self.failure):
            return {}
        return {
            **self.metrics,
            "last_turn_start": sum(len(segment.token_ids) for segment in self.segments[:-1]),
            "turn_rewards": list(self.turn_rewards),
            "final_reward": self.final_reward,
            "trajectory_failure": hide_in_text(self.failure),
            **({} if self.output is None else {"output": self.output}),
            **({"events": [asdict(event) for event in self.events]} if self.events else {}),
        }


def make_trial_columns() -> dict[str, object]:
    """Return the columns that rewards of a run with several turns get of a made-up sample, in a trial before the run."""
    return Trajectory((), "stop", metrics={"turns": 1.0, "tool_call_num": 0.0}).reward_columns()


def check_trajectory(trajectory: Trajectory, num_ids: int | None) -> None:
    """Check what a loop, a plug-in, a tool or a program has put into a trajectory.

    Args:
        num_ids: number of token ids that the model can read; None: they are not checked.

    Raises:
        ValueError: a token id is not in the vocabulary, or a reward or a metric is not a finite number.
    """
    if num_ids is not None:
        for sequence in trajectory.sequences:
            check_token_ids(sequence.prompt_ids, num_ids, "context")
            for segment in sequence.segments:
                check_token_ids(segment.token_ids, num_ids, "sampled tokens" if segment.sampled else "context")
    for name, value in trajectory.metrics.items():
        read_number(value, f"metric {show(name)}", allows_bool=True)
    if len(trajectory.metrics) > _MAX_METRICS:
        raise ValueError(f"it has {len(trajectory.metrics)} metrics, but may have at most {_MAX_METRICS}")
    for name, value in [("final_reward", trajectory.final_reward), *(("a turn's reward", v) for v in trajectory.turn_rewards)]:
        if value is not None:
            read_number(value, name)
