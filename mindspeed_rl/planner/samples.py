"""What is known or assumed of the samples of a run: lengths, turns, waiting for tools."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.config.keys.turns import agent_loop_of, response_limit
from mindspeed_rl.config.run import RunConfig
from mindspeed_rl.planner.lengths import Lengths

#: mean lengths where nobody says them: of the limit of responses, of that of prompts
MEAN_RESPONSE, MEAN_PROMPT = 0.5, 0.25


@dataclass(frozen=True)
class SampleMeans:
    """What somebody knows of the samples; None where nobody does.

    Attributes:
        response, prompt: tokens; those behind the prompt over all turns.
        turns: of the model.
        tool_seconds: that a sample waits for its tools or its environment, over all turns.
    """

    response: float | None = None
    prompt: float | None = None
    turns: float | None = None
    tool_seconds: float | None = None


UNKNOWN = SampleMeans()


@dataclass(frozen=True)
class Samples:
    """What a plan counts with.

    Attributes:
        lengths: of responses.
        prompt: tokens in the mean.
        notes: what of it is assumed.
    """

    lengths: Lengths
    prompt: float
    turns: float = 1.0
    tool_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def tokens(self) -> float:
        """Of a sequence in the mean."""
        return self.lengths.mean + self.prompt

    @property
    def squared_tokens(self) -> float:
        """Mean of the squared number of tokens of a sequence."""
        return self.lengths.mean_square + 2 * self.lengths.mean * self.prompt + self.prompt**2


def longest_response(cfg: RunConfig) -> float:
    """Return the most tokens behind the longest prompt."""
    rl, generate = cfg.rl_config, cfg.generate_config
    assert rl is not None and generate is not None
    return float(max(1, min(response_limit(cfg), generate.max_model_len - rl.max_prompt_length)))


def expected_samples(cfg: RunConfig, known: SampleMeans) -> Samples:
    """Return the samples of a run, assumed where nothing is known.

    Raises:
        ValueError: a number is out of its bounds, or turns and tools are given for a run that has none.
    """
    rl = cfg.rl_config
    assert rl is not None
    notes, limit = [], longest_response(cfg)
    mean = MEAN_RESPONSE * limit if known.response is None else known.response
    if not 0 < mean <= limit:
        raise ValueError(f"--mean-response: {mean:g} must be above 0 and at most the longest response, {limit:g}.")
    if known.response is None:
        notes.append(f"responses of {mean:.0f} tokens in the mean, half of the limit; --mean-response says it")
    prompt = max(1.0, MEAN_PROMPT * rl.max_prompt_length) if known.prompt is None else known.prompt
    if not prompt > 0:
        raise ValueError(f"--mean-prompt: {prompt:g} must be above 0.")
    if known.prompt is None:
        notes.append(f"prompts of {prompt:.0f} tokens in the mean, a quarter of the limit; --mean-prompt says it")
    turns, tool_seconds = known.turns or 1.0, known.tool_seconds or 0.0
    if agent_loop_of(rl) == "single_turn":
        if known.turns not in (None, 1.0) or known.tool_seconds:
            raise ValueError("--mean-turns, --tool-seconds: the run file has no tools, environment or scheduler to wait for.")
    elif turns < 1 or tool_seconds < 0:
        raise ValueError(f"--mean-turns {turns:g} must be at least 1, --tool-seconds {tool_seconds:g} at least 0.")
    else:
        if known.turns is None:
            notes.append("one turn of the model in a sample; --mean-turns says it")
        if known.tool_seconds is None:
            notes.append("tools and environments answer at once; --tool-seconds says how long a sample waits for them")
    return Samples(Lengths(mean, limit), prompt, turns, tool_seconds, tuple(notes))
