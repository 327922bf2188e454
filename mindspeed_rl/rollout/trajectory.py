"""What becomes of one sample of a prompt: the tokens that were drawn, those that were told to the model, rewards, figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mindspeed_rl.rollout.protocol import Finish, Generated, continued_routing

if TYPE_CHECKING:
    import numpy as np

#: version of the weights that a token which was not drawn comes from
NO_VERSION = -1


@dataclass(frozen=True)
class Segment:
    """Tokens of one origin.

    Attributes:
        log_probs: of each token under the distribution it was drawn from; 0.0 where it was not drawn.
        versions: of the weights that each token was drawn with; NO_VERSION where it was not drawn.
        sampled: the actor drew them. Otherwise they were told to it, and never train.
        routing: of tokens that were drawn, that of everything before the last of them; see `Generated`.
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
    def drawn(cls, found: Generated) -> Segment:
        """What an engine drew."""
        return cls(found.token_ids, found.log_probs, found.versions, True, found.routing)

    @classmethod
    def told(cls, token_ids: Iterable[int]) -> Segment:
        """What others say: tools, environments, templates."""
        ids = tuple(token_ids)
        return cls(ids, (0.0,) * len(ids), (NO_VERSION,) * len(ids), False)


@dataclass(frozen=True)
class TokenSequence:
    """Tokens that the model reads as one context.

    Attributes:
        prompt_ids: what stands before the first token that is drawn here.
    """

    prompt_ids: tuple[int, ...]
    segments: tuple[Segment, ...]

    @property
    def num_response_tokens(self) -> int:
        """Tokens behind the prompt."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def is_drawn(self) -> bool:
        """True where the model drew a token of it."""
        return any(segment.sampled and segment.token_ids for segment in self.segments)

    @property
    def routing(self) -> np.ndarray | None:
        """[tokens up to the last that was drawn, layers, k], the experts of each; None where nobody has said."""
        found = None
        for segment in self.segments:
            found = continued_routing(found, segment.routing)
        return found


@dataclass(frozen=True)
class Trajectory:
    """One row of a batch: a single response, or the turns of an agent.

    The row's response is what stands behind the prompts of its sequences, one after the other.

    Attributes:
        sequences: several where the chat template writes earlier turns otherwise once later ones follow: what was drawn in
            one context must be trained in it. The first begins with the prompt of the data set, as a rule.
        finish: "stop": it ended by itself; "length": there was no room for more; "aborted": it may go on.
        turn_rewards: what tools and environments gave for each turn of the model; None for nothing.
        final_reward: of the state in the end; None for none.
        metrics: figures by name, such as tool_call_num. A name with a slash counts events, which a batch adds up; of the
            others it has mean, largest and smallest.
        failure: why it broke off, in words; "" where it did not. It then has no score.
    """

    sequences: tuple[TokenSequence, ...]
    finish: Finish
    turn_rewards: tuple[float | None, ...] = ()
    final_reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def single(cls, prompt_ids: Sequence[int], response: Generated) -> Trajectory:
        """A prompt and the one response to it."""
        return cls((TokenSequence(tuple(prompt_ids), (Segment.drawn(response),)),), response.finish)

    def without_routing(self) -> Trajectory:
        """The same for those who only read it: routing is many times as long as the tokens."""
        sequences = [
            replace(one, segments=tuple(replace(segment, routing=None) for segment in one.segments)) for one in self.sequences
        ]
        return replace(self, sequences=tuple(sequences))

    @property
    def response(self) -> Generated:
        """The one response, which may go on where it was aborted.

        Raises:
            ValueError: it is no single response.
        """
        segments = self.segments
        if len(self.sequences) != 1 or len(segments) != 1:
            raise ValueError(
                f"a trajectory of {len(self.sequences)} sequences and {len(segments)} segments is no single response"
            )
        (segment,) = segments
        return Generated(segment.token_ids, segment.log_probs, segment.versions, self.finish, segment.routing)

    @property
    def segments(self) -> list[Segment]:
        """Of all sequences."""
        return [segment for sequence in self.sequences for segment in sequence.segments]

    @property
    def token_ids(self) -> list[int]:
        """The row's response."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def log_probs(self) -> list[float]:
        """Of each token of the response."""
        return [value for segment in self.segments for value in segment.log_probs]

    @property
    def versions(self) -> list[int]:
        """Of each token of the response."""
        return [version for segment in self.segments for version in segment.versions]

    @property
    def sampled(self) -> list[bool]:
        """Which tokens of the response the actor drew: the row's response_mask."""
        return [segment.sampled for segment in self.segments for _ in segment.token_ids]

    @property
    def sampled_versions(self) -> list[int]:
        """Of each token that was drawn."""
        return [version for segment in self.segments if segment.sampled for version in segment.versions]

    @property
    def input_ids(self) -> list[int]:
        """All tokens of all sequences."""
        found: list[int] = []
        for sequence in self.sequences:
            found += sequence.prompt_ids
            for segment in sequence.segments:
                found += segment.token_ids
        return found

    @property
    def sequence_lengths(self) -> list[int]:
        """Tokens of prompt and response of each sequence, alternating: p1, r1, p2, r2 ..."""
        return [length for one in self.sequences for length in (len(one.prompt_ids), one.num_response_tokens)]

    def facts(self) -> dict[str, Any]:
        """What reward functions may read of it, as columns of the row."""
        if not (self.metrics or self.turn_rewards or self.final_reward is not None or self.failure):
            return {}
        return {
            **self.metrics,
            "last_turn_start": sum(len(segment.token_ids) for segment in self.segments[:-1]),
            "turn_rewards": list(self.turn_rewards),
            "final_reward": self.final_reward,
            "trajectory_failure": self.failure,
        }
