"""vLLM's asynchronous engine as a `RolloutEngine`: its workers are processes of its own, which take weights from a group.

Importing this imports vLLM, so `adaptors.apply("rollout")` must have run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from mindspeed_rl import adaptors
from mindspeed_rl.adaptors import vllm_async
from mindspeed_rl.config.placement import RolloutLayout
from mindspeed_rl.rollout.arguments import SOCKET_PREFIX, build_engine_arguments, build_sampling_params, use_socket_folder
from mindspeed_rl.rollout.protocol import EMPTY_RESPONSE, Finish, Generated, PauseMode, build_continuation
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.serving.engine_extension import OWNER_VARIABLE, PLATFORM_VARIABLE, owner_of_engines
from mindspeed_rl.serving.rollout_service import RolloutService
from mindspeed_rl.serving.server_process import ServerSettings

if TYPE_CHECKING:
    from torch import Tensor

_FINISHES: dict[str | None, Finish] = {"stop": "stop", "length": "length", "abort": "aborted"}


@dataclass(frozen=True)
class Piece:
    """Some tokens of a response, as they come.

    Attributes:
        finish: None while more follow.
    """

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    version: int
    finish: Finish | None


class AsyncEngine:
    """One vLLM engine on devices of its own. All methods are coroutines of one event loop.

    Attributes:
        version: of the weights; -1 before the first.
        llm: vLLM's own object, for whoever serves other interfaces with it.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Starts the engine's processes; returns when they are ready.

        Args:
            arguments: from `build_engine_arguments`, with executor and worker extension.
        """
        # until the first answer has come: the engine says that it is ready before it opens the socket of its answers
        self._sockets = TemporaryDirectory(prefix=SOCKET_PREFIX)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(self._sockets.cleanup)
            with use_socket_folder(self._sockets.name):
                self.llm: Any = vllm_async.build_async_engine(arguments)
            unless_ready.pop_all()
        self._answers = False
        self.version = -1
        self._numbers = itertools.count()

    # ------------------------------------------------------------------ requests

    async def pieces(
        self, prompt_ids: Iterable[int], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> AsyncIterator[Piece]:
        """The tokens behind `partial`, as they are drawn; the last piece has a finish.

        Raises:
            ValueError: the request cannot be answered.
        """
        asked = build_continuation(prompt_ids, sampling, seed, partial)
        if asked is None:
            yield Piece((), (), self.version, "length")
            return
        params = build_sampling_params(asked.sampling, asked.seed, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": list(asked.prompt_ids)}
        async for output in self.llm.generate(prompt, params, f"rollout-{next(self._numbers)}"):
            self._has_answered()
            sample = output.outputs[0]
            ended = bool(output.finished)
            finish = _FINISHES.get(sample.finish_reason, "aborted") if ended else None
            tokens = tuple(sample.token_ids)
            yield Piece(tokens, _log_probs(sample.logprobs, tokens), self.version, finish)

    async def generate(
        self, prompt_ids: tuple[int, ...], sampling: Sampling, seed: int, partial: Generated | None = None
    ) -> Generated:
        """See `RolloutEngine.generate`."""
        whole = partial or EMPTY_RESPONSE
        async for piece in self.pieces(prompt_ids, sampling, seed, partial):
            whole = extended(whole, piece)
        return whole

    # ------------------------------------------------------------------ weights and memory

    async def pause(self, mode: PauseMode) -> None:
        """See `RolloutEngine.pause`."""
        await vllm_async.pause(self.llm, mode)

    async def resume(self) -> None:
        """See `RolloutEngine.resume`."""
        await vllm_async.resume(self.llm)

    async def join(self, meeting: str, first_rank: int) -> None:
        """The engine's workers are members of the group that meets there."""
        await self.llm.collective_rpc("weights_join", args=(meeting, first_rank))
        self._has_answered()

    async def leave(self) -> None:
        """The engine's workers are in no group."""
        await self.llm.collective_rpc("weights_leave")

    async def receive(self, version: int) -> list[str]:
        """The workers hold what the group's trainers send; what each says of it, as JSON. The engine is paused."""
        deliveries = await self.llm.collective_rpc("weights_receive")
        await vllm_async.drop_cached_prefixes(self.llm)
        self.version = version
        return list(deliveries)

    async def update_weights(self, version: int, named: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """See `RolloutEngine.update_weights`; the workers take the tensors from their group."""
        if named is not None:
            raise ValueError("an engine with processes of its own takes weights from a group; join one and pass none here.")
        await self.receive(version)

    async def release(self) -> None:
        """The devices are the engine's own: nobody waits for their memory."""

    async def restore(self) -> None:
        """See `release`."""

    async def check(self) -> None:
        """Raises when the engine's processes are gone."""
        await self.llm.check_health()

    def close(self) -> None:
        """The engine's processes are ended."""
        self.llm.shutdown()
        self._has_answered()

    def _has_answered(self) -> None:
        """All sockets are open, so that nobody needs their files any more."""
        if not self._answers:
            self._answers = True
            self._sockets.cleanup()


def extended(whole: Generated, piece: Piece) -> Generated:
    """The response with what came last."""
    versions = (piece.version,) * len(piece.token_ids)
    return whole.concat(Generated(piece.token_ids, piece.log_probs, versions, piece.finish or "aborted"))


def _log_probs(found: Any, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Of each drawn token, from either form in which vLLM hands them out."""
    if not tokens:
        return ()
    if isinstance(found, FlatLogprobs):
        return tuple(found.logprobs[index] for index in found.start_indices)[-len(tokens) :]
    return tuple(entry[token].logprob for entry, token in zip(found[-len(tokens) :], tokens))


_EXTENSION = "mindspeed_rl.serving.engine_extension.EngineExtension"


def open_engine(settings: ServerSettings) -> AsyncEngine:
    """The engine of a server; its processes end with this one, however it ends."""
    os.environ[OWNER_VARIABLE], os.environ[PLATFORM_VARIABLE] = owner_of_engines(), settings.platform
    generate = settings.generate
    changes = {
        "distributed_executor_backend": "mp" if generate.infer_tensor_parallel_size > 1 else "uni",
        "worker_extension_cls": _EXTENSION,
        # nobody else is on the devices, so nothing is to be given back
        "enable_sleep_mode": False,
    }
    if settings.with_tokenizer:
        changes["skip_tokenizer_init"] = False
    if settings.load_weights:
        changes["load_format"] = "auto"
    engine = AsyncEngine(
        build_engine_arguments(
            settings.hf_folder,
            generate,
            adaptors.engine_hooks(),
            RolloutLayout.from_config(generate, generate.infer_tensor_parallel_size),
            full_distribution=settings.full_distribution,
            kv_bytes_per_token=CacheShape.of(settings.hf_folder).bytes_per_token(2 if generate.dtype == "bfloat16" else 4),
            changes=changes,
        )
    )
    vllm_async.unlink_segments(vllm_async.COMMUNICATOR)
    if settings.load_weights:
        engine.version = 0
    return engine


def open_service(settings: ServerSettings, engine: AsyncEngine | None = None) -> RolloutService:
    """The service of a server.

    Args:
        engine: that it shares with other interfaces; None for one of its own.
    """
    generate = settings.generate
    facts = {
        "num_workers": generate.infer_tensor_parallel_size,
        "dtype": generate.dtype,
        "max_model_len": generate.max_model_len,
        "whole_distribution": settings.full_distribution,
    }
    return RolloutService(engine or open_engine(settings), facts)


@dataclass(frozen=True)
class CacheShape:
    """Of the keys and values of one token."""

    num_layers: int
    kv_heads: int
    head_size: int

    @classmethod
    def of(cls, folder: str | Path) -> CacheShape:
        """Of the model in a Hugging Face folder."""
        keys = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        heads = keys["num_attention_heads"]
        size = keys.get("head_dim") or keys["hidden_size"] // heads
        return cls(keys["num_hidden_layers"], keys.get("num_key_value_heads") or heads, size)

    def bytes_per_token(self, bytes_per_number: int) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.kv_heads * self.head_size * bytes_per_number
