"""vLLM's asynchronous engine, 0.18 to 0.33, behind the few calls that a server needs.

What differs between releases is asked of the installed one, by signature: `pause_generation` counts by
`wait_for_inflight_requests` before 0.18 and by `mode` since; 0.32 dropped the older word. `AsyncEngineArgs` loses and gains
fields, and a prompt may be a plain mapping in all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal


def build_async_engine(arguments: Mapping[str, Any]) -> Any:
    """A running `AsyncLLM`; its workers are processes of its own.

    Args:
        arguments: keyword arguments, as `vllm.LLM` takes them.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = inspect.signature(AsyncEngineArgs).parameters
    extra: dict[str, Any] = {"enable_log_requests": False} if "enable_log_requests" in known else {}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments, **extra))


async def pause(llm: Any, mode: Literal["wait", "keep", "abort"]) -> None:
    """The engine schedules nothing until `resume`; "keep" freezes what runs, "abort" ends it, "wait" lets it end.

    Raises:
        RuntimeError: the installed vLLM cannot do this.
    """
    known = inspect.signature(llm.pause_generation).parameters
    # what is kept goes on with the keys and values it has; only prefixes that others would share are dropped
    words: dict[str, Any] = {"clear_cache": mode != "keep"} if "clear_cache" in known else {}
    if "mode" in known:
        await llm.pause_generation(mode=mode, **words)
    elif mode != "keep":
        await llm.pause_generation(wait_for_inflight_requests=mode == "wait", **words)
    else:
        raise RuntimeError("this vLLM cannot freeze requests while weights are pushed; partial_rollout needs 0.18 or later.")


async def resume(llm: Any) -> None:
    """The engine schedules again."""
    await llm.resume_generation()
