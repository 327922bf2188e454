"""Samples of a model for `mindspeed-rl audit`: the engine of the inference commands, with a run's sampling and rewards.

Imports torch, which audits without a model do without.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mindspeed_rl.audit.cheats import Case
from mindspeed_rl.audit.pass_rates import PassRates, Sampler, list_prompts, measure_pass_rates
from mindspeed_rl.audit.reward import select_functions
from mindspeed_rl.audit.rows import AuditRow, RowPart
from mindspeed_rl.cli.inference_options import add_model_options, add_prompt_options, open_session, running_engine
from mindspeed_rl.cli.options import Parser
from mindspeed_rl.inference.engine_interface import Request, collect
from mindspeed_rl.inference.session import Session
from mindspeed_rl.rewards.pool import RewardPool
from mindspeed_rl.rewards.samples import RewardSample, RewardSettings
from mindspeed_rl.rollout.requests import sample_seed
from mindspeed_rl.run import Run
from mindspeed_rl.workers.responses import build_sampling
from mindspeed_rl.workers.reward_group import SampleReader


def open_model(run: Run, model: str, dtype: str | None) -> Session:
    """Return a model whose samples the run's rewards can score; weights are loaded with its engine.

    Args:
        run: the run.
        model: folder of the model.
        dtype: format of the weights; None for the run's.

    Raises:
        ValueError: the run has responses of several turns, or the model cannot be opened.
    """
    if run.rl.multi_turn_enable:
        raise ValueError("--model: the run has responses of several turns, and an audit samples one")
    parser = Parser(prog="mindspeed-rl audit", allow_abbrev=False)
    add_prompt_options(parser)
    add_model_options(parser)
    words = ["--load", model, "--no-chat-template", "--platform", run.config.platform, "--dtype", dtype or run.generate.dtype]
    try:
        return open_session(parser.parse_args(words))
    except ValueError as error:  # it names the option of the inference commands
        raise ValueError(str(error).replace("--load", "--model")) from error


@contextlib.contextmanager
def _open_sampler(run: Run, session: Session, longest: int, largest_id: int) -> Iterator[Sampler]:
    """Open the engine of a model with the run's sampling and reward functions; it ends with the block.

    Args:
        longest: tokens of the longest prompt.
        largest_id: largest token id of the prompts.

    Raises:
        ValueError: the model reads other tokens than the run's prompts have.
    """
    names, weights, _ = select_functions(run)
    if largest_id >= (size := session.model.model_config.vocab_size):
        raise ValueError(f"--model: it has {size} tokens, and a prompt of the run has token {largest_id}")
    limit = run.generate.sampling_config.max_tokens
    sampling = build_sampling(run.generate.sampling_config, session.model.hf_folder, session.tokenizer)
    reader = SampleReader(session.tokenizer, "response", limit)

    def read_sample(row: AuditRow, token_ids: list[int], is_cut: bool) -> RewardSample:
        return reader.read(list(row.tokens), token_ids, row.label, dict(row.columns), is_cut)

    def decode(token_ids: list[int]) -> str:
        return reader.read([], token_ids, None, {}, False).response

    # failures are counted here
    settings = replace(RewardSettings.from_config(run.rl, max_tokens=limit), reward_failure_limit=1.0)
    length = session.needed_length(longest, limit)
    with running_engine(session, max_model_len=length) as engine, RewardPool(names, weights, settings=settings) as pool:
        seed = run.config.actor_config.seed
        yield Sampler(engine, sampling, read_sample, decode, pool, run.rl.prompt_pass_reward, seed)


def sample_cases(run: Run, cases: Sequence[Case], session: Session, *, num_samples: int) -> dict[str, list[str]]:
    """Return responses of a model to each of some rows, by the place of the row."""
    longest, largest = max(len(case.prompt_ids) for case in cases), max(max(case.prompt_ids) for case in cases)
    with _open_sampler(run, session, longest, largest) as sampler:
        requests = [
            Request(list(case.prompt_ids), sample_seed(sampler.seed, 0, place, sample), label=case.label)
            for place, case in enumerate(cases)
            for sample in range(num_samples)
        ]
        answers = collect(sampler.engine.stream(requests, sampler.sampling), len(requests))
    texts = [sampler.decode(answer.token_ids) for answer in answers]
    return {case.where: texts[place * num_samples : (place + 1) * num_samples] for place, case in enumerate(cases)}


def sample_run(
    run: Run,
    train: RowPart,
    session: Session,
    *,
    num_samples: int,
    max_prompts: int | None,
    report: Callable[[str], None],
) -> PassRates:
    """Return the pass rates of a run's prompts from samples of a model.

    Raises:
        ValueError: there are no prompts, or the model reads other tokens than they have.
    """
    longest, largest = 0, 0
    for _, row in list_prompts(train, run, max_prompts):
        longest, largest = max(longest, len(row.tokens)), max(largest, *row.tokens)
    if not longest:
        raise ValueError(f"--model: {train.stream.data_path} has no prompt to sample from")
    with _open_sampler(run, session, longest, largest) as sampler:
        return measure_pass_rates(list_prompts(train, run, max_prompts), sampler, num_samples, report=report)
