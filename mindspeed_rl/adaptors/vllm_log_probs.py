"""vLLM's `raw_logprobs` at the temperature of each request: log-probs of the full distribution, which a trainer can compute.

| patch | symbol | why |
|---|---|---|
| temperature | `Sampler.forward` | `raw_logprobs` are those at temperature 1; `processed_logprobs` have penalties in them, and are renormalised over the tokens that top_k, top_p and min_p leave |
| form of a response | `apply_grammar_bitmask` | it removes tokens from the logits before the sampler sees them; a copy of all of them is kept |
| model runner | VLLM_USE_V2_MODEL_RUNNER | the second runner has another sampler; 0.18 to 0.32 have both, and vllm-ascend up to 0.23 has only the first |

Requests with temperature 0 are greedy: their log-probs are those at temperature 1, as in the trainer. A sampler whose
`tempers_log_probs` is False keeps temperature 1 for all. Looked up in 0.18 to 0.32.
It can go when vLLM has such a mode; `tests/unit/adaptors` compares it with transformers.
"""  # noqa: E501

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor

from mindspeed_rl import adaptors

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
#: vLLM samples greedily below it
_GREEDY = 1e-5

#: modules of model runners that may be loaded already
_RUNNERS = ("worker.gpu_model_runner", "worker.model_runner_v1")
#: attribute of the settings of a step's sampling, in which a grammar removed tokens from logits: a copy with all of them
_ALL_TOKENS = "_logits_of_all_tokens"

_applied = False


def apply() -> None:
    """Divide the logits of raw log-probs by the temperature, in every engine of this process. Imports vLLM; idempotent.

    Raises:
        ValueError: the environment asks for the other model runner.
    """
    global _applied
    if _applied:
        return
    if os.environ.setdefault(_RUNNER, "0") != "0":
        raise ValueError(
            f"{_RUNNER}: {os.environ[_RUNNER]} is a model runner whose log-probs are at temperature 1; leave it out, or set it "
            "to 0."
        )
    from vllm.v1.sample.sampler import Sampler

    sampler: Any = Sampler
    sample = sampler.forward

    def forward(self: Any, logits: Tensor, sampling_metadata: Any, *others: object, **keywords: object) -> object:
        full = sampling_metadata.__dict__.pop(_ALL_TOKENS, None)
        temperature = sampling_metadata.temperature  # None where all requests are greedy
        if self.logprobs_mode != "raw_logprobs" or not self.tempers_log_probs:
            return sample(self, logits, sampling_metadata, *others, **keywords)
        divisor = 1.0 if temperature is None else torch.where(temperature < _GREEDY, 1.0, temperature)[:, None]
        # its one use in this mode is on the logits before penalties and cut-offs
        self.compute_logprobs = lambda raw: adaptors.log_softmax(
            (raw if full is None else full.to(raw.device)).float() / divisor
        )
        try:
            return sample(self, logits, sampling_metadata, *others, **keywords)
        finally:
            del self.compute_logprobs

    sampler.forward, sampler.tempers_log_probs = forward, True
    from vllm.v1.structured_output import utils

    remove_tokens = utils.apply_grammar_bitmask

    def apply_grammar_bitmask(step: Any, grammar: Any, batch: Any, logits: Tensor) -> None:
        full = logits.clone()
        remove_tokens(step, grammar, batch, logits)
        # not on the logits: vllm-ascend hands a copy of them in, on the host, and samples from another one
        setattr(batch.sampling_metadata, _ALL_TOKENS, full)

    # runners import it by name, from here on this one; importing one here would be before a platform's own patches
    modules: list[Any] = [utils, *(module for name, module in sys.modules.items() if name.endswith(_RUNNERS))]
    for module in modules:
        module.apply_grammar_bitmask = apply_grammar_bitmask
    _applied = True
