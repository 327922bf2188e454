"""The keys of turns and tools: which loop makes the samples, how long they may become, and what these keys ask of others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mindspeed_rl.config.keys.rl import RLConfig
from mindspeed_rl.config.rules.violation import Violation, broken

if TYPE_CHECKING:
    from mindspeed_rl.config.run import RunConfig

#: loop -> the key that it needs
_NEEDS = {"environment": "environment", "scheduler": "multi_turn_scheduler", "tool_agent": "tool_config_path"}


def agent_loop_of(rl: RLConfig) -> str:
    """The loop that makes the samples, by name or "module:Class"."""
    if not rl.multi_turn_enable:
        return "single_turn"
    if rl.agent_loop is not None:
        return rl.agent_loop
    # with nothing to talk to there is one turn
    return next((loop for loop, key in _NEEDS.items() if getattr(rl, key) is not None), "single_turn")


def _has_turns(rl: RLConfig) -> bool:
    return agent_loop_of(rl) != "single_turn"


def earns(rl: RLConfig) -> bool:
    """True where tools or an environment may give rewards."""
    return rl.trajectory_reward != "none" and agent_loop_of(rl) not in ("single_turn", "scheduler")


def response_limit(cfg: RunConfig) -> int:
    """The most tokens behind a prompt, over all turns."""
    assert cfg.rl_config is not None and cfg.generate_config is not None
    one = cfg.generate_config.sampling_config.max_tokens
    return max(one, cfg.rl_config.max_total_response_length) if _has_turns(cfg.rl_config) else one


def response_limit_key(cfg: RunConfig) -> str:
    """The key that says it."""
    assert cfg.rl_config is not None
    several = _has_turns(cfg.rl_config)
    return "rl_config.max_total_response_length" if several else "generate_config.sampling_config.max_tokens"


def turn_rules(cfg: RunConfig) -> Iterator[Violation]:
    """Rules of runs whose samples have several turns."""
    rl, generate = cfg.rl_config, cfg.generate_config
    if rl is None or generate is None or cfg.is_supervised or not rl.multi_turn_enable:
        return
    one, total = generate.sampling_config.max_tokens, rl.max_total_response_length
    if total < one:
        yield broken(
            "tool_response_length",
            {"rl_config.max_total_response_length": total, "generate_config.sampling_config.max_tokens": one},
            f"rl_config.max_total_response_length ({total}) must be at least "
            f"generate_config.sampling_config.max_tokens ({one})",
            {"rl_config.max_total_response_length": one},
        )
    loop = agent_loop_of(rl)
    if loop == "single_turn":
        return
    if rl.partial_rollout_max_split > 1:
        yield broken(
            "partial_rollout_turns",
            {"rl_config.partial_rollout_max_split": rl.partial_rollout_max_split, "rl_config.multi_turn_enable": True},
            f"rl_config.partial_rollout_max_split ({rl.partial_rollout_max_split}) lets a response take several iterations, "
            "and tools and environments of a sample of several turns cannot be put aside so long",
            {"rl_config.partial_rollout_max_split": 1},
            {"rl_config.multi_turn_enable": False},
        )
    if rl.use_dynamic_bsz and not rl.use_remove_padding:
        yield broken(
            "turns_are_packed",
            {"rl_config.use_dynamic_bsz": True, "rl_config.use_remove_padding": False},
            "rl_config.use_dynamic_bsz counts the tokens of a sample of several turns as they are packed, so with "
            "rl_config.multi_turn_enable it needs rl_config.use_remove_padding",
            {"rl_config.use_remove_padding": True},
            {"rl_config.use_dynamic_bsz": False},
        )
    needed = _NEEDS.get(loop)
    if needed is not None and getattr(rl, needed) is None:
        yield broken(
            "agent_loop_needs",
            {"rl_config.agent_loop": loop, f"rl_config.{needed}": None},
            f"rl_config.agent_loop {loop} needs rl_config.{needed}",
        )


def describe_samples(cfg: RunConfig) -> str:
    """How the samples are made, in a sentence; "" where each is one response."""
    rl = cfg.rl_config
    if rl is None or cfg.generate_config is None or not _has_turns(rl):
        return ""
    loop = agent_loop_of(rl)
    by = {"scheduler": rl.multi_turn_scheduler, "environment": rl.environment}.get(loop)
    tools = "" if rl.tool_config_path is None else f", tools of {rl.tool_config_path}"
    calls = f" called as {rl.tool_parser_format} writes it" if tools and rl.tool_parser_format else ""
    most = f", {rl.max_tool_calls} calls at most" if tools and rl.max_tool_calls else ""
    turns = "as many turns as fit" if rl.max_turns is None else f"at most {rl.max_turns} turns"
    one = cfg.generate_config.sampling_config.max_tokens
    return (
        f"{loop}{f' {by}' if by else ''}{tools}{calls}{most}: {turns} of up to {one} tokens, "
        f"{response_limit(cfg)} tokens behind the prompt together"
    )
