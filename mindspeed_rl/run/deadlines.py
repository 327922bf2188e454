"""The deadlines of a run."""

from __future__ import annotations

from dataclasses import fields

from mindspeed_rl.config.keys.deadlines import DEFAULTS, DeadlineKeys, Deadlines
from mindspeed_rl.config.run import RunConfig


def resolve_deadlines(cfg: RunConfig) -> Deadlines:
    """Return the deadlines of the run file, over the defaults and over the two older keys with the same meaning."""
    rl, generate = cfg.rl_config, cfg.generate_config
    keys = DeadlineKeys() if rl is None else rl.deadlines
    set_s = {item.name: value for item in fields(keys) if (value := getattr(keys, item.name)) is not None}
    older = {} if rl is None else {"rows": rl.wait_timeout_s}
    if generate is not None:
        older["server"] = generate.vllm_server_timeout
    return Deadlines({**DEFAULTS, **older, **set_s}, frozenset(older) | frozenset(set_s))
