"""vLLM's asynchronous engine as a `RolloutEngine`: its workers receive weights from a group with the trainers.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl import adaptors
from mindspeed_rl.adaptors import vllm_async
from mindspeed_rl.bounds import check_token_ids
from mindspeed_rl.data.images import ImageRules
from mindspeed_rl.models.costs import read_kv_bytes
from mindspeed_rl.rollout.arguments import (
    SOCKET_PREFIX,
    EngineArguments,
    build_engine_arguments,
    build_prompt,
    build_sampling_params,
    check_prompt,
    check_texts,
    use_socket_folder,
)
from mindspeed_rl.rollout.protocol import Continuation, Finish, Generated, GrowingResponse, PauseMode
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.placement import RolloutLayout
from mindspeed_rl.scratch import make_owned_folder
from mindspeed_rl.serving.engine_extension import OWNER_VARIABLE, PLATFORM_VARIABLE, EngineExtension
from mindspeed_rl.serving.rollout_service import ResponseChunk, WakePart
from mindspeed_rl.serving.server_process import ServerSettings

if TYPE_CHECKING:
    from vllm.logprobs import Logprob

#: part of an engine -> vLLM's name of it
_WAKE_TAGS: Mapping[WakePart, str] = {"weights": "weights", "cache": "kv_cache"}
_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


class AsyncEngine:
    """One vLLM engine of a server. All methods are coroutines of one event loop.

    Attributes:
        version: version of the weights; -1 before the first.
        llm: vLLM's own object, for other interfaces.
    """

    def __init__(self, arguments: Mapping[str, object], image_rules: ImageRules | None = None) -> None:
        """Start the engine's processes and wait until they are ready.

        Args:
            arguments: from `build_engine_arguments`, with executor and worker extension.
            image_rules: image rules of a model of images.
        """
        self._image_rules = image_rules
        # until the first result has arrived: the engine reports that it is ready before it opens the socket of its results
        folder, self._remove_folder = make_owned_folder(self, SOCKET_PREFIX)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self._remove_folder)
            with use_socket_folder(str(folder)):
                self.llm: Any = vllm_async.build_async_engine(arguments)
            unless_ready.pop_all()
        self._has_answered = False
        self.version = -1
        self._request_ids = itertools.count()

    # ------------------------------------------------------------------ requests

    async def stream(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[ResponseChunk]:
        """Yield the tokens after `partial`, as they are sampled; the last chunk has a finish.

        Raises:
            ValueError: the request is invalid.
        """
        request = Continuation.build(prompt_ids, sampling, seed, partial)
        if request is None:
            yield ResponseChunk((), (), self.version, "length")
            return
        # vLLM checks ids only with a tokenizer; one outside of the vocabulary would end the engine
        model = self.llm.vllm_config.model_config
        num_ids, num_tokens = model.get_vocab_size(), len(request.prompt_ids)
        if num_tokens > model.max_model_len:  # before any work that grows with it
            raise ValueError(f"prompt_ids has {num_tokens} tokens, but the context has {model.max_model_len}")
        check_token_ids(request.prompt_ids, num_ids, "prompt_ids")
        check_token_ids(request.sampling.stop_token_ids, num_ids, "stop_token_ids")
        check_texts(request.sampling, self.llm.vllm_config)
        params = build_sampling_params(request.sampling, request.seed, output_kind=RequestOutputKind.DELTA)
        prompt = build_prompt(request.prompt_ids, request.sampling.images, self._image_rules)
        unchecked = bool(request.sampling.images)
        async for output in self.llm.generate(prompt, params, f"rollout-{next(self._request_ids)}"):
            self._remove_sockets()
            if unchecked:
                check_prompt(request.prompt_ids, output.prompt_token_ids or ())
                unchecked = False
            sample = output.outputs[0]
            finish = _FINISHES.get(sample.finish_reason, "aborted") if output.finished else None
            tokens = tuple(sample.token_ids)
            yield ResponseChunk(tokens, _read_log_probs(sample.logprobs, tokens), self.version, finish)

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """Return the full response; see `RolloutEngine.generate`."""
        response = GrowingResponse(partial or Generated())
        async for chunk in self.stream(prompt_ids, sampling, seed, partial):
            response.add(chunk.token_ids, chunk.log_probs, chunk.version, chunk.finish)
        return response.freeze()

    # ------------------------------------------------------------------ weights and memory

    async def pause(self, mode: PauseMode) -> None:
        """Pause the engine; see `RolloutEngine.pause`."""
        await vllm_async.finish_or_fail(self.llm, vllm_async.pause(self.llm, mode))

    async def resume(self) -> None:
        """Resume the engine; see `RolloutEngine.resume`."""
        await vllm_async.finish_or_fail(self.llm, vllm_async.resume(self.llm))

    async def sleep(self) -> None:
        """Offload the weights to host memory and free the KV cache, where the engine was built to sleep; nothing is running."""
        if self.llm.vllm_config.model_config.enable_sleep_mode:
            await vllm_async.finish_or_fail(self.llm, self.llm.sleep(level=1))

    async def wake(self, part: WakePart | None = None) -> None:
        """Load what `sleep` has offloaded onto the device again: the weights, then the cache, or both at once."""
        if self.llm.vllm_config.model_config.enable_sleep_mode:
            tags = None if part is None else [_WAKE_TAGS[part]]
            await vllm_async.finish_or_fail(self.llm, self.llm.wake_up(tags=tags))

    async def join(self, rendezvous: str, first_rank: int) -> None:
        """Make the engine's workers members of a new group; see `EngineExtension.weights_join`."""
        await vllm_async.call_workers(self.llm, "weights_join", rendezvous, first_rank)
        self._remove_sockets()

    async def leave(self) -> None:
        """Remove the engine's workers from their group."""
        await vllm_async.call_workers(self.llm, "weights_leave")

    async def receive(self, version: int) -> list[str]:
        """Receive the weights from the group's trainers while the engine is paused; return a report of each worker as JSON."""
        reports = await vllm_async.call_workers(self.llm, "weights_receive")
        await vllm_async.finish_or_fail(self.llm, vllm_async.reset_prefix_cache(self.llm))
        if self._image_rules is not None:
            await vllm_async.finish_or_fail(self.llm, self.llm.reset_encoder_cache())
        self.version = version
        return reports

    async def check(self) -> None:
        """Raise vLLM's error when the engine's processes are dead."""
        await self.llm.check_health()

    def close(self) -> None:
        """End the engine's processes."""
        self.llm.shutdown()
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        """Remove the sockets' files after the first result: all of them are open."""
        if not self._has_answered:
            self._has_answered = True
            self._remove_folder()


def _read_log_probs(log_probs: FlatLogprobs | Sequence[Mapping[int, Logprob]], tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Return the log-prob of each sampled token, from either of vLLM's formats."""
    if not tokens:
        return ()
    if isinstance(log_probs, FlatLogprobs):
        return tuple(log_probs.logprobs[index] for index in log_probs.start_indices)[-len(tokens) :]
    return tuple(entry[token].logprob for entry, token in zip(log_probs[-len(tokens) :], tokens))


def build_engine(settings: ServerSettings) -> AsyncEngine:
    """Build the engine of a server; its processes end with this one, however it ends."""
    os.environ[OWNER_VARIABLE] = f"{os.getpid()} {psutil.Process().create_time()}"
    os.environ[PLATFORM_VARIABLE] = settings.platform
    generate, hooks = settings.generate, adaptors.engine_hooks()
    layout = RolloutLayout.from_server(generate)
    changes: EngineArguments = {
        "distributed_executor_backend": "mp" if generate.infer_tensor_parallel_size > 1 else "uni",
        "worker_extension_cls": f"{EngineExtension.__module__}.{EngineExtension.__name__}",
        # on dedicated devices memory is not offloaded
        "enable_sleep_mode": settings.sleeps and hooks.sleeps,
    }
    if layout.sharing > 1:
        # one engine process each: they take requests of their own and compute the layers of experts together
        changes |= {"data_parallel_size": layout.sharing, "data_parallel_backend": "mp"}
    if settings.with_tokenizer:
        changes["skip_tokenizer_init"] = False
    if settings.tokenizer is not None:
        changes["tokenizer"] = settings.tokenizer
    if settings.load_weights:
        changes["load_format"] = "auto"
    rules = ImageRules.read(settings.hf_folder, settings.limits)
    engine = AsyncEngine(
        build_engine_arguments(
            settings.hf_folder,
            generate,
            hooks,
            layout,
            kv_bytes_per_token=read_kv_bytes(settings.hf_folder, generate.cache_itemsize),
            changes=changes,
            image_rules=rules,
        ),
        rules,
    )
    vllm_async.unlink_segments(vllm_async.COMMUNICATOR)
    if settings.load_weights:
        engine.version = 0
    return engine
