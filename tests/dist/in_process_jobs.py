"""Jobs that ask the rollout engine in this process for responses, one request at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from rollout_jobs import Pair, my_rows, pair_of, policy_gradient, sampled_rows  # applies the adaptors
from training_jobs import Setting, all_rows

# isort: split
import torch
import torch.distributed as dist
from vllm import SamplingParams

from mindspeed_rl.rollout.in_process import InProcessEngine
from mindspeed_rl.rollout.protocol import Generated, _continuation_seed
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.rollout.vllm_engine import GenerationRequest

SAMPLING = Sampling(0.9, 24, (1,))


def _requests() -> list[tuple[tuple[int, ...], int]]:
    """Two requests for each of the eight prompts: (prompt, seed)."""
    rows = all_rows()
    prompts = [tuple(ids[:length].tolist()) for ids, length in zip(rows.input_ids, rows.prompt_lengths)]
    return [(prompts[number // 2], 1000 + number) for number in range(16)]


def _build_engine(pair: Pair, infer_tp: int) -> InProcessEngine:
    groups = [dist.new_group(ranks, backend="gloo") for ranks in pair.rollout.layout.replica_groups()]
    group = groups[dist.get_rank() // infer_tp]
    assert isinstance(group, dist.ProcessGroup)  # a number for groups of others
    return InProcessEngine(pair.rollout, group, dist.get_rank() // infer_tp * infer_tp)


def _by_vllm(pair: Pair) -> list[Completion]:
    """The responses as vLLM's own loop makes them."""
    params = [
        SamplingParams(
            temperature=0.9, max_tokens=24, stop_token_ids=[1], ignore_eos=True, seed=seed, logprobs=0, detokenize=False
        )
        for _, seed in _requests()
    ]
    prompts: Any = [{"prompt_token_ids": list(ids)} for ids, _ in _requests()]
    results = []
    for output in pair.rollout._llm.generate(prompts, params, use_tqdm=False):
        sample = output.outputs[0]
        assert sample.logprobs is not None
        log_probs = [at[token].logprob for token, at in zip(sample.token_ids, sample.logprobs)]
        results.append(Completion(list(sample.token_ids), log_probs, sample.finish_reason == "length"))
    return results


async def _all(engine: InProcessEngine, begun: list[Generated] | None = None) -> list[Generated]:
    kept = begun or [None] * 16
    return list(
        await asyncio.gather(
            *(
                engine.generate(ids, SAMPLING, seed, response)
                if response is None or response.finish == "aborted"
                else _same(response)
                for (ids, seed), response in zip(_requests(), kept)
            )
        )
    )


async def _same(response: Generated) -> Generated:
    return response


async def _turns(count: int) -> None:
    """About so many turns of the engine go by; the same number every time. The second has most of a response's tokens."""
    for _ in range(4 * count):
        await asyncio.sleep(0)


async def _interrupted(engine: InProcessEngine) -> list[Generated]:
    work = asyncio.ensure_future(_all(engine))
    await _turns(2)
    await engine.pause("abort")
    result = await work
    await engine.resume()
    return result


def compare(setting: Setting, infer_tp: int) -> dict[str, Any]:
    """Responses of vLLM's own loop and of ours, taken in turn."""
    with pair_of(setting, infer_tp) as pair:
        pair.push()
        engine = _build_engine(pair, infer_tp)
        for _ in range(4):
            theirs = _by_vllm(pair)
            state = torch.get_rng_state()
            ours = engine.run(lambda: _all(engine))
            assert torch.equal(state, torch.get_rng_state())
        return {"theirs": theirs, "ours": ours}


def interrupt(setting: Setting, infer_tp: int) -> dict[str, Any]:
    """Responses that are cut and go on under other weights; the rest of each, asked for on its own."""
    with pair_of(setting, infer_tp) as pair:
        pair.push()
        engine = _build_engine(pair, infer_tp)
        whole = engine.run(lambda: _all(engine))
        cut = engine.run(lambda: _interrupted(engine))
        rows = sampled_rows(pair.generate())
        pair.engine.train_step(my_rows(rows), setting.batching, policy_gradient)
        pair.version += 1
        engine.load(pair.stream.named_tensors(torch.float32), pair.version)
        ended = engine.run(lambda: _all(engine, cut))
        again = engine.run(lambda: _all(engine, cut))
        box = [cut]
        dist.broadcast_object_list(box, src=dist.get_rank() // infer_tp * infer_tp, group=engine.group)
        rest = [
            pair.rollout.generate(
                [GenerationRequest([*ids, *response.token_ids], _continuation_seed(seed, len(response.token_ids)))],
                Sampling(0.9, 24 - len(response.token_ids), (1,)),
            )[0]
            for (ids, seed), response in zip(_requests(), box[0] or [])
            if response.finish == "aborted"
        ]
        return {"whole": whole, "cut": cut, "ended": ended, "again": again, "rest": rest}


def freeze(setting: Setting, infer_tp: int) -> dict[str, Any]:
    """Responses that are frozen while the weights change."""
    with pair_of(setting, infer_tp) as pair:
        pair.push()
        engine = _build_engine(pair, infer_tp)
        whole = engine.run(lambda: _all(engine))
        waiting: list[asyncio.Future[list[Generated]]] = []

        async def begin() -> None:
            waiting.append(asyncio.ensure_future(_all(engine)))
            await _turns(2)
            await engine.pause("keep")

        async def go_on() -> list[Generated]:
            await engine.resume()
            return await waiting[0]

        engine.run(begin)
        pair.version += 1
        engine.load(pair.stream.named_tensors(torch.float32), pair.version)  # the same numbers under another version
        return {"whole": whole, "ended": engine.run(go_on)}
