"""Trial of a run's judges on one response: a judge that does not reply, or not with a score, is found at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from mindspeed_rl.loop_thread import LoopThread
from mindspeed_rl.rewards.judge import JudgeClient, JudgeError, JudgeForm, JudgeRequest, Opinion, ask_or_fail, describe_failure
from mindspeed_rl.rewards.judge_addresses import JudgeAddress, list_judges
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rewards.scorer import ScorerError, read_score


def try_judges(settings: RewardSettings, sample: RewardSample) -> list[str]:
    """Ask each judge once about a response; return a sentence for each that gives no score and is not needed.

    All are asked at the same time, so that it takes `judge_timeout_s` at most.

    Raises:
        ValueError: the judges that reply have fewer votes than a response needs.
    """
    judges = list_judges(
        settings.judge_url, settings.judge_model, settings.judge_panel, key_variables=settings.judge_key_variables
    )
    form = JudgeForm(settings)
    try:
        request = form.write_request(sample)
    except JudgeError as error:
        raise ValueError(f"{judges[0].where}: the judge cannot be asked about the first row: {error}") from error
    loop = LoopThread("judges")
    try:
        opinions = loop.run(_ask(judges, form, settings.judge_timeout_s, request))
    finally:
        loop.close()
    failures = [
        f"{judge.where}: the judge {judge.name} gives no score for a response to the first row: {failure}"
        for judge, opinion in zip(judges, opinions, strict=True)
        if (failure := _find_failure(opinion))
    ]
    votes, all_votes = (settings.judge_repeats * count for count in (len(judges) - len(failures), len(judges)))
    if failures and votes < (all_votes if settings.judge_quorum is None else settings.judge_quorum):
        raise ValueError("; ".join(failures))
    return [f"{failure}; until it does the other judges decide (rl_config.judge_quorum)" for failure in failures]


async def _ask(
    judges: Sequence[JudgeAddress], form: JudgeForm, limit_s: float, request: JudgeRequest
) -> list[Opinion | Exception]:
    clients = [JudgeClient(judge, form, limit_s=limit_s) for judge in judges]
    return await asyncio.gather(*(ask_or_fail(client, request) for client in clients))


def _find_failure(opinion: Opinion | Exception) -> str:
    """Return why an opinion is no score; a parser may have none about a response."""
    if isinstance(opinion, Exception):
        return describe_failure(opinion)
    try:
        if opinion.score is not None:
            read_score(opinion.score)
    except ScorerError as error:
        return f"judge_parser: {error}"
    return ""
