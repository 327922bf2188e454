"""Several decoding steps of vLLM's CPU build (0.32) for one turn of its scheduler, and the seeds of several tokens at once.

| patch | symbol | why |
|---|---|---|
| steps ahead | CPUModelRunner.sample_tokens | a turn of scheduler and outputs takes as long as a step of a small model |
| their count | Scheduler.update_from_output | it counts one computed token a turn |
| room | Scheduler.num_lookahead_tokens | blocks for the tokens of a whole turn |
| seeds | TopKTopPSampler.forward_cpu | each token's seed is a call of its request's generator, and a tensor read back |
| ranks of tokens | sampler.batched_count_greater_than | sums of truth values take five times as long as of numbers |

After a turn of one token for each request, the runner continues with the tokens it has just sampled, up to _STEPS of them, as
long as few requests have finished; the scheduler takes a turn's tokens as in speculative decoding, and
cuts off the tokens after a request's end. Requests, tokens and log-probs are the same as with single steps: nothing but the
request's own generator and its own tokens enters them. Turns with prompts stay single, and so does everything that looks back
at a request's tokens (penalties, grammars, stop strings, all of which a server may be asked for), hands out more than tokens
(routed experts) or has to step with others (replicas that share experts; workers apart from their scheduler).

It can go when vLLM's CPU runner has steps of its own between turns; `tests/unit/adaptors` compares both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

#: tokens of a request in a turn
_STEPS = 16
#: executors whose workers are where their scheduler is
_ONE_PROCESS = ("uni", "external_launcher")
#: a turn ends when so large a part of its requests has ended: what they compute beyond is thrown away
_MAX_ENDED = 1 / 8
#: seeds of a request that are drawn at once
_SEEDS_AT_ONCE = 32

_applied = False


def apply() -> None:
    """Let engines of this process step ahead, and draw seeds in bulk. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.sample import sampler as sampling
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner: Any = CPUModelRunner
    sample = runner.sample_tokens

    def sample_tokens(self: Any, *others: object, **keywords: object) -> object:
        state = self.execute_model_state
        output = sample(self, *others, **keywords)
        if state is not None and _steps_ahead(self.vllm_config) and _goes_ahead(self, state.scheduler_output):
            return _Turn(self, output).finish()
        return output

    scheduler: Any = Scheduler
    build, update = scheduler.__init__, scheduler.update_from_output

    def build_with_room(self: Any, *others: object, **keywords: object) -> None:
        build(self, *others, **keywords)
        if _steps_ahead(self.vllm_config):
            self.num_lookahead_tokens = _STEPS - 1

    def update_from_output(self: Any, scheduled: object, output: Any) -> object:
        if _steps_ahead(self.vllm_config):
            for name, tokens in zip(output.req_ids, output.sampled_token_ids):
                # a request that was given up meanwhile is gone
                if len(tokens) > 1 and name in self.requests:
                    self.requests[name].num_computed_tokens += len(tokens) - 1
        return update(self, scheduled, output)

    sampler: Any = TopKTopPSampler
    runner.sample_tokens = sample_tokens
    scheduler.__init__, scheduler.update_from_output = build_with_room, update_from_output
    sampler.forward_cpu = _sample_in_bulk(sampler.forward_cpu)
    sampling.batched_count_greater_than = _count_at_least
    _applied = True


def _count_at_least(x: Tensor, values: Tensor) -> Tensor:
    """Return how many of each row of [n, v] are at least its value [n, 1], [n] int64."""
    return torch.ge(x, values, out=torch.empty_like(x)).sum(-1).long()  # exact below 2^24 in float32


def _steps_ahead(config: Any) -> bool:
    """Return True for engines whose scheduler and runner are in one process, without steps of any other kind than plain ones.

    Args:
        config: vLLM's, of the engine.
    """
    parallel = config.parallel_config
    return (
        parallel.distributed_executor_backend in _ONE_PROCESS
        and parallel.data_parallel_size == 1
        and not config.scheduler_config.async_scheduling
        and not config.aux_output_config.enabled
        and config.speculative_config is None
        and not config.model_config.logits_processors
    )


def _goes_ahead(runner: Any, scheduled: Any) -> bool:
    """Return True where the turn that was just made is one token more of each request, and the next ones are sampled alike."""
    names = runner.input_batch.req_ids
    if scheduled.scheduled_new_reqs or scheduled.total_num_scheduled_tokens != len(names) or runner.uses_mrope:
        return False
    return all(_is_plain(runner.requests[name].sampling_params) for name in names)


def _is_plain(params: Any) -> bool:
    """Return True where a token is sampled from the model's distribution, independent of earlier tokens, and ends by itself.

    Rollouts need nothing else; clients of a server may.
    """
    return (
        params.repetition_penalty == 1.0
        and not (params.presence_penalty or params.frequency_penalty or params.min_tokens or params.stop)
        and not (params.bad_words or params.structured_outputs or params.thinking_token_budget or params.logprob_token_ids)
    )


class _Turn:
    """Tokens that a runner has sampled in its scheduler's turn: the first token of each request, and those after it."""

    def __init__(self, runner: Any, output: Any) -> None:
        self._runner, self._output = runner, output
        self._requests = runner.input_batch.num_reqs
        states = [runner.requests[name] for name in runner.input_batch.req_ids]
        self._texts = [state.output_token_ids for state in states]
        params = [state.sampling_params for state in states]
        self._left = np.array([param.max_tokens - len(text) for param, text in zip(params, self._texts)])
        stops = {token for param in params for token in (*param.stop_token_ids, param.eos_token_id) if token is not None}
        self._stops = np.array(sorted(stops), dtype=np.int64)

    def finish(self) -> object:
        """Make the steps; return the output of the whole turn."""
        first = self._output
        tokens = [np.array(first.sampled_token_ids)[:, 0]]
        logprobs = [first.logprobs]
        ended = np.isin(tokens[0], self._stops)
        for number in range(1, self._room()):
            ended |= self._left < number
            if ended.sum() > self._requests * _MAX_ENDED:
                break
            output = self._step(tokens[-1])
            tokens.append(output.sampled_token_ids[:, 0].numpy())
            logprobs.append(output.logprobs_tensors and output.logprobs_tensors.tolists())
            ended |= np.isin(tokens[-1], self._stops)
        if len(tokens) == 1:
            return first
        sampled = np.stack(tokens, 1)
        self._record(sampled)
        return dataclasses.replace(first, sampled_token_ids=sampled.tolist(), logprobs=self._group_by_request(logprobs))

    def _room(self) -> int:
        """Return the number of tokens of this turn: within the model's length, and one request at least has room for all."""
        batch = self._runner.input_batch
        # the last token of a request that has as many as the model takes is not computed
        free = self._runner.max_model_len - int(batch.num_tokens_no_spec[: self._requests].max())
        return 1 + min(_STEPS - 1, int(self._left.max()), free)

    def _step(self, tokens: np.ndarray) -> Any:
        """Sample the next token of each request, after these; what the runner prepares for a turn is moved on by one."""
        from vllm.forward_context import set_forward_context

        runner, count = self._runner, self._requests
        batch = runner.input_batch
        batch.num_computed_tokens_cpu[:count] += 1
        runner.optimistic_seq_lens_cpu[:count] += 1
        runner.seq_lens[:count] += 1
        runner.positions[:count] += 1
        runner.input_ids.np[:count] = tokens
        positions = runner.positions[:count]
        batch.block_table.compute_slot_mapping(count, runner.query_start_loc.gpu[: count + 1], positions)
        by_group, by_layer = runner._get_slot_mappings(count, count, count)
        attention, _ = runner._build_attention_metadata(count, count, 1, slot_mappings=by_group)
        with set_forward_context(attention, runner.vllm_config, num_tokens=count, slot_mapping=by_layer):
            hidden = runner.model(
                input_ids=runner.input_ids.gpu[:count], positions=positions, intermediate_tensors=None, inputs_embeds=None
            )
        return runner._sample(runner.model.compute_logits(hidden), None)

    def _group_by_request(self, logprobs: list[Any]) -> object:
        """Regroup log-probs from steps to requests; None where no request has them."""
        if logprobs[0] is None:
            return None
        steps, fields = len(logprobs), zip(*(step[:3] for step in logprobs))  # token ids, log-probs, ranks
        ids, values, ranks = (np.stack(each, 1).reshape(-1, *each[0].shape[1:]) for each in fields)
        return type(logprobs[0])(ids, values, ranks, list(range(0, len(ranks) + 1, steps)))

    def _record(self, sampled: np.ndarray) -> None:
        """Give the runner the tokens [requests, tokens] after the first of each, as if single turns had sampled them."""
        batch, more = self._runner.input_batch, sampled.shape[1] - 1
        rows = np.arange(self._requests)[:, None]
        places = batch.num_tokens_no_spec[: self._requests, None] + np.arange(more)
        batch.token_ids_cpu[rows, places] = sampled[:, 1:]
        batch.is_token_ids[rows, places] = True
        batch.num_tokens_no_spec[: self._requests] += more
        for text, tokens in zip(self._texts, sampled[:, 1:].tolist()):
            text.extend(tokens)


# ---------------------------------------------------------------------- seeds

#: generator of a request -> seeds that it has given and no token has had yet, the next one last
_seeds: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()


def take_seeds(generator: torch.Generator | None, count: int) -> list[int]:
    """Return the next seeds of a generator: what calls for one at a time would give. None is torch's own generator."""
    if generator is None:
        return torch.randint(0, 2**31, (count,)).tolist()
    waiting = _seeds.setdefault(generator, [])
    while len(waiting) < count:
        waiting[:0] = torch.randint(0, 2**31, (_SEEDS_AT_ONCE,), generator=generator).tolist()[::-1]
    taken, waiting[-count:] = waiting[: -count - 1 : -1], []
    return taken


def return_seeds(generator: torch.Generator | None, seeds: Sequence[int]) -> None:
    """Give back seeds that no token has had; they are the next ones again, in this order."""
    if generator is not None:
        _seeds[generator].extend(reversed(seeds))


def _sample_in_bulk(original: Callable[..., Any]) -> Callable[..., Any]:
    """Run vLLM's `forward_cpu` with seeds in bulk; with noise in float64 there are none, and it is left to itself."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    def forward_cpu(
        self: Any, logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if self.use_fp64_gumbel:
            return original(self, logits, generators, k, p)
        logits = apply_top_k_top_p(logits, k, p)
        given: Tensor | None = None
        if self.logprobs_mode == "processed_logits":
            given = logits
        elif self.logprobs_mode == "processed_logprobs":
            given = logits.log_softmax(dim=-1, dtype=torch.float32)
        seeds = torch.tensor([take_seeds(generators.get(number), 1)[0] for number in range(len(logits))])
        return torch.ops._C.fused_gumbel_argmax(logits.float(), seeds), given

    return forward_cpu
