"""The stricter check of a run as the keys of rewards: what scores beside the reward, and trains nothing."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from mindspeed_rl.config import RLConfig
from mindspeed_rl.config.keys.audit import AuditKeys
from mindspeed_rl.rewards.judge_addresses import API_KEY_VARIABLE
from mindspeed_rl.rewards.samples import RewardSettings
from mindspeed_rl.tools.environment_check import ENVIRONMENT_CHECK

#: environment variable with the key of the judge at `audit.judge_url`
_AUDIT_KEY_VARIABLE = "AUDIT_JUDGE_API_KEY"


def derive_audit_rewards(rl: RLConfig, audit: AuditKeys) -> RLConfig:
    """Return the keys of the run's rewards with the functions, the judge and the environment of the audit in their place."""
    weights = list(audit.verifier_weight) or [1.0] * len(audit.verifier_function)
    played = [] if audit.environment is None else [ENVIRONMENT_CHECK]
    return replace(
        rl,
        rule_reward=True,
        verifier_function=[*audit.verifier_function, *played],
        verifier_weight=[*weights, *[1.0] * len(played)],
        environment=audit.environment,
        judge_url=audit.judge_url,
        judge_model=audit.judge_model,
        judge_prompt=audit.judge_prompt,
        judge_parser=audit.judge_parser,
        # one judge, asked once
        judge_panel=[],
        judge_repeats=1,
        judge_temperature=0.0,
        judge_quorum=None,
        judge_weight=1.0,
        # the check is of the answer, not of its length
        overlong_buffer_enable=False,
        missing_eos_penalty=0.0,
    )


def derive_audit_settings(rl: RLConfig, audit: AuditKeys, *, max_tokens: int) -> RewardSettings:
    """Return the settings of the stricter check; its judge has a key of its own, or the run's at the run's server.

    Args:
        max_tokens: the generation limit.
    """
    settings = RewardSettings.from_config(derive_audit_rewards(rl, audit), max_tokens=max_tokens)
    variables = [_AUDIT_KEY_VARIABLE]
    if rl.judge_url is not None and audit.judge_url is not None:
        own, other = urlsplit(audit.judge_url), urlsplit(rl.judge_url)
        variables += [API_KEY_VARIABLE] if (own.scheme, own.netloc) == (other.scheme, other.netloc) else []
    return replace(settings, judge_key_variables=tuple(variables))
