"""The module of transformers as a rollout engine, for models that vLLM does not serve on this platform: slow and exact.

Each response is computed by itself, a token at a time with the keys and values of the tokens before it, so that it depends on
its prompt, its seed and the weights, and on no other request. Samples of one prompt read the prompt once.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mindspeed_rl import platform
from mindspeed_rl.adaptors.engine_hooks import EngineHooks
from mindspeed_rl.config import GenerateConfig
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.models.hf_module import LoadableModule
from mindspeed_rl.rollout.requests import Completion, Sampling
from mindspeed_rl.rollout.token_sampling import sample_token
from mindspeed_rl.run.placement import RolloutLayout


@dataclass
class _Response:
    """A response in progress.

    Attributes:
        generator: random generator of this response.
        max_tokens: limit of its tokens.
        cache: transformers' cache of all its tokens but the last; None before the first.
    """

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    generator: torch.Generator
    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cache: Any = None

    def list_unread(self) -> Sequence[int]:
        """Return the tokens that the cache lacks: the last one, or all where the model has no cache."""
        return (*self.prompt_ids, *self.token_ids) if self.cache is None else self.token_ids[-1:]

    def sample(self, logits: Tensor) -> None:
        """Add the next token."""
        token, log_prob = sample_token(
            logits,
            self.sampling,
            self.generator,
            self.prompt_ids,
            self.token_ids,
            temperature=self.sampling.temperature or 1.0,
        )
        self.token_ids.append(token)
        self.log_probs.append(log_prob)

    def complete(self, *, truncated: bool) -> Completion:
        """Return the tokens that there are."""
        return Completion(list(self.token_ids), list(self.log_probs), truncated)


class ModuleEngine:
    """A full model on each rank; see `StepEngine`."""

    def __init__(self, hf_folder: str | Path, config: GenerateConfig, sampling: Sampling, *, world_size: int = 1) -> None:
        """Build the model with undefined weights; `load_weights` must come before the first request.

        Args:
            hf_folder: folder with config.json (no weights are read).
            config: the engine's keys.
            sampling: sampling parameters of training responses.
            world_size: ranks of all engines.

        Raises:
            ValueError: the installed transformers has no such model.
        """
        self.sampling, self.hooks = sampling, EngineHooks()
        self.layout = RolloutLayout.from_config(config, world_size)
        self.image_rules: ImageRules | None = None
        self.list_replaced: Callable[[nn.Module], Sequence[Tensor]] | None = None
        self.weight_version, self.syncs_drafts, self.fell_back_to_eager = -1, False, False
        self._max_len, self._max_rows = config.max_model_len, config.max_num_seqs
        self._device = platform.current().current_device()
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self._model = LoadableModule(
            Path(hf_folder),
            dtype,
            self._device,
            float32_head=bool(config.fp32_lm_head),
            trusts_code=config.trust_remote_code,
        )
        # classes without attention name their states otherwise
        arguments = inspect.signature(self._model.model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in arguments else "past_key_values"
        self._responses: dict[str, _Response] = {}  # in the order in which they came

    # ------------------------------------------------------------------ responses

    def add_request(self, name: str, prompt_ids: Sequence[int], sampling: Sampling, seed: int) -> None:
        if self.weight_version < 0:
            raise RuntimeError("the rollout engine has no weights yet; push weights before generating.")
        limit = min(sampling.max_tokens, self._max_len - len(prompt_ids))
        self._responses[name] = _Response(tuple(prompt_ids), sampling, torch.Generator().manual_seed(seed), limit)

    def has_unfinished(self, busy: bool = False) -> bool:
        return busy or bool(self._responses)

    @torch.no_grad()
    def step(self) -> list[tuple[str, Completion]]:
        running = dict(list(self._responses.items())[: self._max_rows])
        read: dict[tuple[int, ...], tuple[Tensor, Any]] = {}  # prompts of this step
        ended = []
        for name, response in running.items():
            if response.token_ids:
                logits, response.cache = self.read(response.list_unread(), response.cache)
            else:
                prompt = response.prompt_ids
                if prompt not in read:
                    read[prompt] = self.read(prompt, None)
                logits, response.cache = read[prompt][0], copy.deepcopy(read[prompt][1])
            response.sample(logits)
            if response.token_ids[-1] in response.sampling.stop_token_ids:
                ended.append((name, response.complete(truncated=False)))
            elif len(response.token_ids) == response.max_tokens:
                ended.append((name, response.complete(truncated=True)))
        for name, _ in ended:
            del self._responses[name]
        return ended

    @torch.no_grad()
    def read(self, token_ids: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """Return the logits after the last of some tokens, [vocabulary] float32 on the host, and the cache with them.

        Args:
            token_ids: the tokens after the cached ones.
            cache: from an earlier call; None for the start of a sequence.
        """
        tokens = torch.tensor([list(token_ids)], device=self._device)
        output = self._model.model(input_ids=tokens, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        return output.logits[0, -1].float().cpu(), getattr(output, self._cache_name)

    @torch.no_grad()
    def read_all(self, token_ids: Sequence[int]) -> Tensor:
        """Return the logits after each token of a sequence, [tokens, vocabulary] float32 on the host."""
        tokens = torch.tensor([list(token_ids)], device=self._device)
        return self._model.model(input_ids=tokens, use_cache=False).logits[0].float().cpu()

    def partial_completion(self, name: str) -> Completion:
        return self._responses[name].complete(truncated=False)

    def abort(self, names: Iterable[str]) -> None:
        for name in names:
            self._responses.pop(name, None)

    def check_request(self, num_tokens: int, sampling: Sampling) -> None:
        if sampling.stop or sampling.structured_output:
            what = "stop texts" if sampling.stop else "a form"
            raise ValueError(
                f"generate_config.engine: transformers sees no text, and a request has {what}; leave them out, or set the "
                "engine to vllm"
            )
        if num_tokens >= self._max_len:
            raise ValueError(
                f"a prompt of {num_tokens} tokens, with those that were generated, leaves no room for another in "
                f"generate_config.max_model_len ({self._max_len})"
            )

    def check_freezable(self) -> None:
        """Accept every request: each has keys and values of its own."""

    # ------------------------------------------------------------------ weights

    def load_weights(self, weights: Iterable[tuple[str, Tensor]] | Callable[[nn.Module], None], version: int) -> None:
        if callable(weights):
            weights(self._model)
        else:
            filled = set(self._model.load_weights(weights))
            if missing := [name for name, _ in self._model.named_parameters() if name not in filled]:
                raise RuntimeError(
                    f"weight push: {len(missing)} parameters of the rollout engine got no tensor, for example {min(missing)}."
                )
        self._model.finish_load()
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        """Do nothing: no prefix outlives a response."""

    def load_adapter(self, folder: Path, version: int) -> None:
        raise AssertionError("a rule excludes generate_config.lora_push: adapter")

    def load_named_adapters(self, folders: Mapping[str, Path], *, changed: Collection[str] = ()) -> None:
        assert not folders, "a rule excludes generate_config.lora_push: adapter"

    def find_adapter_slot(self, name: str = "") -> int:
        raise AssertionError("a rule excludes generate_config.lora_push: adapter")

    def get_model(self) -> nn.Module:
        return self._model

    # ------------------------------------------------------------------ memory

    def release_memory(self) -> None:
        """Do nothing: weights stay, and caches end with their responses."""

    def restore_memory(self, part: Literal["weights", "cache"]) -> None:
        """Do nothing; see `release_memory`."""

    def resident_bytes(self) -> dict[str, int]:
        weights = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().size() for tensor in self._model.parameters()}
        return {"rollout weights": sum(weights.values()), "packed weights": 0, "KV cache": 0}

    def absent_bytes(self) -> int:
        return 0
