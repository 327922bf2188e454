"""Speculative decoding of vLLM (0.32; looked up in 0.23) with the tokens, seeds and log-probs of rollouts without it.

| patch | symbol | platform | why |
|---|---|---|---|
| values of a draft token | `expand_batch_to_tokens` | cpu | the CPU's kernel converts its output first and fills the copy: temperature and cut-offs of draft tokens are whatever the memory held, and a temperature of 0.7 is read as 0 |
| which draft tokens stay | `rejection_sample` | cpu | see below |
| cut-offs of a step without drafts | `apply_top_k_top_p` | cpu | top_k without top_p takes the largest k of the step's draft tokens, and the largest of none is an error |
| log-probs | `RejectionSampler._get_logprobs_tensors` | all | they are those at temperature 1; it also counts drafts |
| suffix drafts | `SuffixDecodingProposer`, `has_arctic_inference` | all | vLLM's own needs a package with compiled code; see `_SuffixDrafts` |
| weights of a draft model | `DraftModelProposer._create_draft_vllm_config` | all | `draft_load_config` is not looked at: with the policy's format, which a weight sync fills, the draft model has random weights |

On the CPU each position of a draft is sampled from the target's distribution, with the seed that the same token would have
without drafts; the draft stays up to the first position where it is not what was sampled. For a draft that is not sampled
itself the probability of this, p(draft), is the one of rejection sampling (arXiv:2211.17192), so as many tokens stay. But
responses are the same as without drafts, token by token at every temperature, whatever the drafts are: a shared cache of
drafts, another batch or a resumed run changes none. Seeds of positions that were not reached go back to the request.
Other devices keep vLLM's own rejection sampling: the same distribution, from the request's own generator, but other tokens
than without drafts.

The first two can go when vLLM's CPU kernel fills its output, the third when its top-k takes an empty batch; `tests/unit/adaptors` compares with unadapted sampling.
"""  # noqa: E501

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.vllm_cpu_steps import return_seeds, take_seeds

_PLACEHOLDER = -1
#: attribute of a step's metadata: of each request, its generator and the seeds of its draft tokens and of the one after them
_SEEDS = "_seeds_of_drafts"
#: attribute of the sampler: temperatures of a step's requests, None where log-probs are at temperature 1
_TEMPERATURE = "_temperature_of_step"

_applied = False


@dataclass
class DraftCounts:
    """Draft tokens of the engines of this process since the last `take`.

    Attributes:
        proposed: draft tokens that were checked.
        accepted: draft tokens that became tokens of a response; each is a token without a step of its own.
        steps: number of steps of responses; up to vLLM 0.23 without the steps in which no response has a draft.
    """

    proposed: int = 0
    accepted: int | Tensor = 0
    steps: int = 0

    def take(self) -> tuple[int, int, int]:
        """Return proposed tokens, accepted tokens and steps, and count from 0 again."""
        result = self.proposed, int(self.accepted), self.steps
        self.proposed = self.accepted = self.steps = 0
        return result


#: counts of this process
counts = DraftCounts()


def apply() -> None:
    """Correct speculative decoding in every engine of this process. Imports vLLM; idempotent."""
    global _applied
    if _applied:
        return
    from vllm.config import speculative
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode import draft_model, suffix_decoding

    if platform.current().name == "cpu":
        replaced: Any = rejection_sampler
        replaced.expand_batch_to_tokens = _expand
        replaced.rejection_sample = _keep_matching_drafts
        replaced.apply_top_k_top_p = _cut_off_drafts(rejection_sampler.apply_top_k_top_p)
    _wrap_sampler(rejection_sampler.RejectionSampler)
    settings: Any = speculative
    settings.has_arctic_inference = lambda: True
    _load_draft_models(draft_model.DraftModelProposer)
    proposer: Any = suffix_decoding.SuffixDecodingProposer
    proposer.__init__, proposer.propose = _build_suffix_drafts, _propose_suffixes
    _applied = True


def _load_draft_models(proposer: Any) -> None:
    """Load the weights of a draft model as `draft_load_config` says."""
    create = proposer._create_draft_vllm_config

    def create_draft_vllm_config(self: Any) -> Any:
        config = create(self)
        config.load_config = self.speculative_config.draft_load_config or config.load_config
        return config

    proposer._create_draft_vllm_config = create_draft_vllm_config


# ---------------------------------------------------------------------- the target's own tokens


def _expand(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat the value of each request for each of its draft tokens; `replace_from` becomes `replace_to`."""
    values = torch.where(x == replace_from, replace_to, x).to(x.dtype)
    return values.repeat_interleave(cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)), output_size=num_tokens)


def _cut_off_drafts(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return vLLM's cut-offs for steps that have draft tokens; those without have no logits to change."""

    def apply_top_k_top_p(logits: Tensor, k: Tensor | None, p: Tensor | None) -> Tensor:
        return original(logits, k, p) if len(logits) else logits

    return apply_top_k_top_p


def _reserve_seeds(metadata: Any, sampling_metadata: Any) -> list[tuple[torch.Generator | None, list[int]]]:
    """Take the seeds of each request's draft tokens; the one of the token after them is left for vLLM's own call."""
    reserved = []
    for index, count in enumerate(metadata.num_draft_tokens):
        generator = sampling_metadata.generators.get(index)
        seeds = take_seeds(generator, count + 1)
        return_seeds(generator, seeds[count:])
        reserved.append((generator, seeds))
    return reserved


def _keep_matching_drafts(
    draft_token_ids: Tensor,
    num_draft_tokens: Sequence[int],
    max_spec_len: int,
    cu_num_draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    sampling_metadata: Any,
    *others: object,
    **keywords: object,
) -> Tensor:
    """Sample every position of the drafts from the target, and keep those up to the first that differs from its draft.

    Args:
        draft_token_ids: [tokens] of all requests.
        target_logits: [tokens, vocab], divided by the temperature, with cut-offs and penalties.
        bonus_token_ids: [requests, 1], sampled for the position after each draft.

    Returns:
        [requests, max_spec_len + 1], -1 after the kept tokens.
    """
    sampled = target_logits.argmax(-1)
    if not sampling_metadata.all_greedy:
        seeds = [seed for _, given in getattr(sampling_metadata, _SEEDS) for seed in given[:-1]]
        random_tokens = torch.ops._C.fused_gumbel_argmax(target_logits.float(), torch.tensor(seeds, dtype=torch.int64))
        greedy = _expand(sampling_metadata.temperature, cu_num_draft_tokens, len(sampled)) == 0
        sampled = torch.where(greedy, sampled, random_tokens.view(-1))
    tokens = torch.full((len(num_draft_tokens), max_spec_len + 1), _PLACEHOLDER, dtype=torch.int32)
    matches = (sampled == draft_token_ids).tolist()
    start = 0
    for row, count in enumerate(num_draft_tokens):
        given = matches[start : start + count]
        kept = count if all(given) else given.index(False)
        tokens[row, : min(kept + 1, count)] = sampled[start : start + min(kept + 1, count)]
        if kept == count:
            tokens[row, count] = bonus_token_ids[row, 0]
        start += count
    return tokens


# ---------------------------------------------------------------------- log-probs and counts


def _wrap_sampler(sampler: Any) -> None:
    """Divide the logits of reported log-probs by the temperature, as `vllm_log_probs` does for single tokens; count drafts.

    vllm-ascend has a sampler of its own, which inherits both methods. On the CPU seeds go with the tokens, too.
    """
    gather, sample = sampler._get_logprobs_tensors, sampler.__call__
    has_seeds = platform.current().name == "cpu"

    def get_logprobs_tensors(
        self: Any, num: int, metadata: Any, logits: Tensor, target: Tensor, bonus: Tensor, sampled: Tensor
    ) -> Any:
        proposed = sum(metadata.num_draft_tokens)
        counts.proposed += proposed
        counts.accepted += (sampled != _PLACEHOLDER).sum() - len(sampled)
        counts.steps += len(sampled)
        temperature = getattr(self, _TEMPERATURE)
        if temperature is not None:
            divisor = torch.where(temperature < 1e-5, 1.0, temperature)
            target = target / _expand(divisor, metadata.cu_num_draft_tokens, proposed)[:, None]
            bonus = bonus / divisor[:, None]
        return gather(self, num, metadata, logits, target, bonus, sampled)

    def call(self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any) -> Any:
        tempers = self.sampler.logprobs_mode == "raw_logprobs" and getattr(self.sampler, "tempers_log_probs", False)
        setattr(self, _TEMPERATURE, sampling_metadata.temperature if tempers else None)
        reserved = _reserve_seeds(metadata, sampling_metadata) if has_seeds and not sampling_metadata.all_greedy else []
        setattr(sampling_metadata, _SEEDS, reserved)
        output = sample(self, metadata, draft_probs, logits, sampling_metadata)
        if reserved:
            lengths = (output.sampled_token_ids != _PLACEHOLDER).sum(1).tolist()
            for (generator, seeds), length in zip(reserved, lengths, strict=True):
                return_seeds(generator, seeds[length:])
        return output

    sampler._get_logprobs_tensors, sampler.__call__ = get_logprobs_tensors, call


# ---------------------------------------------------------------------- prediction layers

#: weights that a policy and its prediction layers have in common
_COMMON = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight", "lm_head.weight")


class ModelWithDrafts(nn.Module):
    """A policy in the engine with its multi-token-prediction layers, which vLLM has as a model of its own, for weight syncs."""

    def __init__(self, policy: nn.Module, drafts: nn.Module, num_layers: int) -> None:
        super().__init__()
        self.policy, self.drafts = policy, drafts
        self._num_layers = num_layers

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Give each tensor, under its name in a checkpoint, to the model that has it."""
        drafted: list[tuple[str, Tensor]] = []

        def of_policy() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in named:
                layer = re.search(r"\.layers\.(\d+)\.", name)
                is_predicted = name.startswith("mtp.") or layer is not None and int(layer[1]) >= self._num_layers
                if is_predicted or name in _COMMON:
                    drafted.append((name, tensor.clone()))  # its memory is used for the next ones
                if not is_predicted:
                    yield name, tensor

        loads: Any = self.policy, self.drafts
        loads[0].load_weights(of_policy())
        loads[1].load_weights(drafted)


def join_drafts(model: nn.Module, runner: Any) -> nn.Module:
    """Return the model of vLLM's runner with the prediction layers that make its drafts; only the model without such."""
    settings = runner.speculative_config
    if settings is None or settings.method != "mtp":
        return model
    return ModelWithDrafts(model, runner.drafter.model, runner.model_config.hf_text_config.num_hidden_layers)


# ---------------------------------------------------------------------- suffix drafts

#: tokens that a match has at least
_MIN_MATCH = 2
#: latest places of a pair of tokens that are compared
_MAX_PLACES = 16
#: tokens of all prompts and responses that are kept, whatever vLLM's number of requests allows: about 0.3 GiB
_MAX_TOKENS = 1 << 20


@dataclass
class _Corpus:
    """A prompt with its responses, of which each can continue the others.

    Attributes:
        places: (two tokens) -> the latest places after them, as (response, index).
        responses: prompt first, then responses; one that is being generated grows.
    """

    places: dict[tuple[int, int], list[tuple[list[int], int]]] = field(default_factory=dict)
    responses: OrderedDict[str, list[int]] = field(default_factory=OrderedDict)

    def extend(self, name: str, tokens: Sequence[int]) -> int:
        """Add tokens to a response; return how many."""
        text = self.responses.setdefault(name, [])
        for token in tokens:
            text.append(token)
            if len(text) >= _MIN_MATCH:
                places = self.places.setdefault((text[-2], token), [])
                places.append((text, len(text)))
                if len(places) > _MAX_PLACES:
                    del places[0]
        return len(tokens)


@dataclass
class _SuffixDrafts:
    """Drafts from what follows the longest match of a response's last tokens (suffix decoding, arXiv:2411.04975).

    Only texts of the same prompt are looked at: the response itself, the other samples of its group, also while they
    are generated, and samples of earlier rollouts. Settings are vLLM's own keys of `speculative_config`.

    Attributes:
        max_tokens: largest number of tokens of a draft.
        max_depth: tokens of a match and its draft.
        max_factor: tokens of a draft for each token of the match.
        min_probability: smallest probability of a draft's token among the texts that match as well.
        max_responses: number of responses that are kept; 0 uses only the prompt and the response itself.
    """

    max_tokens: int
    max_depth: int = 24
    max_factor: float = 1.0
    min_probability: float = 0.1
    max_responses: int = 10_000
    _corpora: OrderedDict[tuple[int, ...], _Corpus] = field(default_factory=OrderedDict, init=False)
    _running: dict[str, tuple[_Corpus, tuple[int, ...]]] = field(default_factory=dict, init=False)
    _num_tokens: int = field(default=0, init=False)
    _num_responses: int = field(default=0, init=False)

    def start(self, name: str, prompt: Sequence[int]) -> None:
        """Begin a response to a prompt."""
        key = tuple(prompt) if self.max_responses else (*prompt, *name.encode())
        corpus = self._corpora.get(key)
        if corpus is None:
            corpus = self._corpora[key] = _Corpus()
            self._num_tokens += corpus.extend("", prompt)
        self._corpora.move_to_end(key)
        self._running[name] = corpus, key
        # a response continues its prompt: a match may begin there
        corpus.responses[name] = list(prompt[-self.max_depth :])
        self._num_tokens += len(corpus.responses[name])
        self._num_responses += 1
        while len(self._corpora) > 1 and (self._num_responses > max(self.max_responses, 1) or self._num_tokens > _MAX_TOKENS):
            oldest = next(iter(self._corpora))
            if oldest == key or any(running_key == oldest for _, running_key in self._running.values()):
                break
            gone = self._corpora.pop(oldest)
            self._num_responses -= len(gone.responses) - 1
            self._num_tokens -= sum(map(len, gone.responses.values()))

    def extend(self, name: str, tokens: Sequence[int]) -> None:
        """Add sampled tokens to a running response."""
        self._num_tokens += self._running[name][0].extend(name, tokens)

    def end_all_but(self, names: set[str]) -> None:
        """Mark the other responses as complete."""
        for name in self._running.keys() - names:
            corpus, key = self._running.pop(name)
            if not self.max_responses:
                del self._corpora[key]
                self._num_responses -= 1
                self._num_tokens -= sum(map(len, corpus.responses.values()))

    def propose(self, name: str, limit: int) -> list[int]:
        """Return the draft of a running response, at most `limit` tokens."""
        corpus, _ = self._running[name]
        text = corpus.responses[name]
        if len(text) < _MIN_MATCH:
            return []
        best, matches = 0, []
        for other, end in reversed(corpus.places.get((text[-2], text[-1]), ())):
            if end == len(other):  # nothing follows, as at the end of this text itself
                continue
            length = _MIN_MATCH
            max_length = min(end, len(text), self.max_depth - 1)
            while length < max_length and other[end - length - 1] == text[-length - 1]:
                length += 1
            if length > best:
                best, matches = length, []
            if length == best:
                matches.append((other, end))
        limit = min(limit, self.max_tokens, self.max_depth - best, int(self.max_factor * best))
        draft: list[int] = []
        num_matches = len(matches)
        while len(draft) < limit:
            following = Counter(other[end + len(draft)] for other, end in matches if end + len(draft) < len(other))
            if not following:
                break
            token, count = following.most_common(1)[0]
            if count < self.min_probability * num_matches:
                break
            matches = [(other, end) for other, end in matches if other[end + len(draft) : end + len(draft) + 1] == [token]]
            draft.append(token)
        return draft


def _build_suffix_drafts(self: Any, vllm_config: Any) -> None:
    """Build vLLM's proposer on `_SuffixDrafts`."""
    keys = vllm_config.speculative_config
    self.num_speculative_tokens, self.max_model_len = keys.num_speculative_tokens, vllm_config.model_config.max_model_len
    self.drafts = _SuffixDrafts(
        keys.num_speculative_tokens,
        keys.suffix_decoding_max_tree_depth,
        keys.suffix_decoding_max_spec_factor,
        keys.suffix_decoding_min_token_prob,
        keys.suffix_decoding_max_cached_requests,
    )


def _propose_suffixes(self: Any, *arguments: Any, **keywords: object) -> list[list[int]]:
    """Return a draft for each request of the batch.

    Args:
        arguments: the number of tokens (from about 0.30 on), the runner's batch, and the tokens that each request has sampled.
    """
    batch, sampled = arguments[-2:] if len(arguments) < 4 else arguments[1:3]
    drafts: _SuffixDrafts = self.drafts
    result: list[list[int]] = []
    for row, tokens in enumerate(sampled):
        name, count = batch.req_ids[row], int(batch.num_tokens_no_spec[row])
        if not len(tokens) or count >= self.max_model_len:
            result.append([])
            continue
        if name not in drafts._running:
            num_prompt = int(batch.num_prompt_tokens[row])
            ids: np.ndarray = batch.token_ids_cpu[row]
            drafts.start(name, ids[:num_prompt].tolist())
            # a request that was put back keeps all that it had sampled
            drafts.extend(name, ids[num_prompt : count - len(tokens)].tolist())
        drafts.extend(name, [int(token) for token in tokens])
        result.append(drafts.propose(name, self.max_model_len - count - 1))
    drafts.end_all_but(set(batch.req_id_to_index))
    return result
