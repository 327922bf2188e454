"""Generation with a Megatron model: passes with a KV cache, the logits of the next token on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from mindspeed_rl.engine.built_model import BuiltModel
from mindspeed_rl.engine.policy_model import NextTokenRequest


class CachedModel:
    """A model with a KV cache, for one batch of sequences at a time.

    Methods are collective over the tensor- and pipeline-parallel ranks of a replica.
    All sequences are at the same position, as Megatron's static inference context has them; see `logits_at_ends` for prompts
    of different lengths.
    """

    def __init__(self, model: BuiltModel) -> None:
        """Wrap a model.

        Args:
            model: built without sequence parallelism and virtual stages; it does not train.
        """
        (self._model,) = model.models
        self._vocab_size = model.plan.model_config.vocab_size
        self._hidden_size = model.plan.model_config.hidden_size
        self._dtype = model.transformer_config.params_dtype
        self._device = next(self._model.parameters()).device
        self._stages = cast(dist.ProcessGroup, parallel_state.get_pipeline_model_parallel_group())
        self._context: StaticInferenceContext | None = None
        self._model.eval()

    def reset(self, batch_size: int, max_length: int) -> None:
        """Empty the cache and make room for this many sequences of this length."""
        self._context = StaticInferenceContext(batch_size, max_length)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, *, everywhere: bool = False) -> Tensor:
        """Read the next tokens of all sequences.

        Args:
            tokens: [b, s] int64, after the tokens of earlier calls; more than one only in the first call.
            everywhere: logits after each of the tokens, not only the last one; of one sequence.

        Returns:
            [b, vocabulary] float32, or [s, vocabulary] everywhere; the same on every rank.
        """
        context = self._context
        assert context is not None, "reset comes first"
        first, (rows, width) = context.sequence_len_offset, tokens.shape
        tokens = tokens.to(self._device)
        positions = torch.arange(first, first + width, device=self._device).expand(rows, width)
        if not self._model.pre_process:
            received = torch.empty(width, rows, self._hidden_size, dtype=self._dtype, device=self._device)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            self._model.set_input_tensor(received)
        output = self._model(tokens, positions, None, labels=NextTokenRequest(everywhere), inference_context=context)
        context.sequence_len_offset += width
        context.enable_decode_mode()
        logits = torch.empty(rows * width if everywhere else rows, self._vocab_size, device=self._device)
        if self._model.post_process:
            # without the vocabulary's padding, which must not be sampled
            logits = gather_from_tensor_model_parallel_region(output)[:, : self._vocab_size].float().contiguous()
        else:
            dist.send(output.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
        # every rank samples the next token, so that no token has to go back to the first stage
        if self._stages.size() > 1:
            dist.broadcast(logits, parallel_state.get_pipeline_model_parallel_last_rank(), group=self._stages)
        return logits

    def generate(
        self, prompts: Sequence[Sequence[int]], max_len: int, choose: Callable[[int, Tensor], tuple[int, bool]]
    ) -> Iterator[int]:
        """Generate all sequences in step, and yield the row after each of its tokens.

        A shorter prompt has answers while a longer one is still read: one pass reads what all prompts have.

        Args:
            prompts: token ids.
            max_len: tokens of the longest prompt and answer.
            choose: returns the next token of a row, of its logits [vocabulary] on the host, and whether it is the last one.
        """
        self.reset(len(prompts), max_len)
        read, lasts = min(map(len, prompts)), [0] * len(prompts)
        open_rows = set(range(len(prompts)))
        logits = self.next_logits(torch.tensor([list(prompt[:read]) for prompt in prompts]))
        while True:
            # chosen on the host: every rank chooses for itself, and must get the same token
            on_host = logits.cpu()
            for row in sorted(open_rows):
                if read >= len(prompts[row]):
                    lasts[row], is_done = choose(row, on_host[row])
                    open_rows -= {row} if is_done else set()
                    yield row
            if not open_rows:
                return
            # rows that are done continue with their last token, and the results are ignored
            column = [prompt[read] if read < len(prompt) else last for prompt, last in zip(prompts, lasts)]
            logits = self.next_logits(torch.tensor(column)[:, None])
            read += 1

    def logits_at_ends(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return [b, vocabulary] after each prompt; the cache is then at the end of the one with the maximum length.

        Sequences cannot continue from here, because shorter prompts are padded while longer ones are read.
        """
        lengths = [len(prompt) for prompt in prompts]
        read = min(lengths)
        logits = self.next_logits(torch.tensor([list(prompt[:read]) for prompt in prompts]))
        ends = logits.clone()
        while read < max(lengths):
            # a prompt that has ended reads its last token again; those logits are not used
            column = [prompt[read] if read < len(prompt) else prompt[-1] for prompt in prompts]
            logits = self.next_logits(torch.tensor(column)[:, None])
            read += 1
            at_end = torch.tensor([length == read for length in lengths], device=logits.device)
            ends[at_end] = logits[at_end]
        return ends
