"""vLLM's asynchronous engine, 0.18 to 0.33, behind the few calls that a server needs.

Differences between releases are found by the signatures of the installed one: `pause_generation` counts by
`wait_for_inflight_requests` before 0.18 and by `mode` since; 0.32 dropped the older word. `AsyncEngineArgs` loses and gains
fields, and a prompt may be a plain mapping in all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import inspect
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import psutil

_Result = TypeVar("_Result")
#: seconds between two checks that an engine is alive which has not replied
_CHECK_S = 0.5
#: how names of memory that an engine's processes share begin: of the CPU's communicator, and of message queues
COMMUNICATOR, QUEUES = "vllm_dist", "psm_"


def build_async_engine(arguments: Mapping[str, Any]) -> Any:
    """Start an `AsyncLLM`; its workers are processes of its own.

    A request without a seed gets one where several workers sample its tokens: they would use generators of their own,
    and on the CPU, where each samples for itself, disagree about the response.

    Args:
        arguments: keyword arguments, as `vllm.LLM` takes them.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = inspect.signature(AsyncEngineArgs).parameters
    extra: dict[str, Any] = {"enable_log_requests": False} if "enable_log_requests" in known else {}
    if arguments.get("data_parallel_size", 1) > 1:
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        process, target = cast("Any", DPCoordinatorProc), cast("Any", run_coordinator)
        if not hasattr(target, "__wrapped__"):
            target.__wrapped__ = process.run_coordinator
        process.run_coordinator = staticmethod(functools.partial(run_coordinator, os.getpid()))
    engine = AsyncLLM if arguments.get("tensor_parallel_size", 1) == 1 else _with_seeds(AsyncLLM)
    return engine.from_engine_args(AsyncEngineArgs(**arguments, **extra))


def run_coordinator(parent: int, *arguments: object, **keywords: object) -> None:
    """Run vLLM's process between the engines of a server, which else outlives a server that is killed.

    It is the target of that process, so it has to be found by its name.

    Args:
        parent: process id of the server, which may have ended before this process runs.
        arguments, keywords: of vLLM's own function.
    """

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)  # sys.exit would end only this thread

    threading.Thread(target=end_with_parent, name="owner-watch", daemon=True).start()
    run: Any = getattr(run_coordinator, "__wrapped__", None)
    if run is None:  # this process was not forked, and nothing is patched in it
        from vllm.v1.engine.coordinator import DPCoordinatorProc

        run = DPCoordinatorProc.run_coordinator
    run(*arguments, **keywords)


def unlink_segments(prefix: str) -> None:
    """Remove the names of the memory that this engine's processes share from /dev/shm; all of them have mapped it by now.

    vLLM leaves segments of the CPU communicator behind, however it ends. Message queues' are unlinked in `__del__`, and
    else by Python's resource tracker, which misses them when they are gone: they are for engines that end, with their tracker,
    by being killed.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            for line in Path("/proc", str(process.pid), "maps").read_text().splitlines():
                path = Path(line.split(maxsplit=5)[-1])
                if str(path.parent) == "/dev/shm" and path.name.startswith(prefix):
                    path.unlink(missing_ok=True)


def _with_seeds(engine: type[Any]) -> type[Any]:
    """Return the engine's class, with a seed for every request."""

    class SeededEngine(engine):
        """See `build_async_engine`."""

        def generate(self, prompt: object, sampling_params: Any, *others: object, **keywords: object) -> object:
            """Generate as vLLM does, for sampling parameters that have a seed."""
            if getattr(sampling_params, "seed", 0) is None:
                sampling_params.seed = secrets.randbits(31)
            return super().generate(prompt, sampling_params, *others, **keywords)

    return SeededEngine


async def finish_or_fail(llm: Any, call: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of a call to an engine, whose process may die before it replies: vLLM then leaves the call waiting.

    Raises:
        Exception: vLLM's own; the engine is dead.
    """
    task = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait({task}, timeout=_CHECK_S))[0]:
            if llm.errored:
                raise llm.dead_error
        return task.result()
    finally:
        task.cancel()


async def call_workers(llm: Any, method: str, *arguments: object) -> list[Any]:
    """Return the result of a method of each worker, of every engine that shares the experts of the model.

    vLLM's own call returns the results of the first engine.
    """
    if llm.vllm_config.parallel_config.data_parallel_size == 1:
        return list(await finish_or_fail(llm, llm.collective_rpc(method, args=arguments)))
    core = llm.engine_core

    async def call_engine(engine: object) -> list[Any]:
        return await core._call_utility_async("collective_rpc", method, None, arguments, None, engine=engine)

    calls = [finish_or_fail(llm, call_engine(engine)) for engine in core.core_engines]
    return [result for results in await asyncio.gather(*calls) for result in results]


def find_worker_index(worker: Any) -> int:
    """Return the index of a worker among those of all engines that share the experts of the model."""
    parallel = worker.vllm_config.parallel_config
    # the rank says which engine it is only where the model has experts
    return getattr(parallel, "data_parallel_index", parallel.data_parallel_rank) * parallel.world_size + worker.rank


async def pause(llm: Any, mode: Literal["wait", "keep", "abort"]) -> None:
    """Schedule nothing until `resume`; "keep" freezes running requests, "abort" ends it, "wait" lets it end.

    Raises:
        RuntimeError: the installed vLLM cannot do this.
    """
    known = inspect.signature(llm.pause_generation).parameters
    # what is kept goes on with the keys and values it has; only prefixes that others would share are dropped
    options: dict[str, Any] = {"clear_cache": mode != "keep"} if "clear_cache" in known else {}
    if "mode" in known:
        await llm.pause_generation(mode=mode, **options)
    elif mode != "keep":
        await llm.pause_generation(wait_for_inflight_requests=mode == "wait", **options)
    else:
        raise RuntimeError("this vLLM cannot freeze requests while weights are pushed; partial_rollout needs 0.18 or later.")


async def reset_prefix_cache(llm: Any) -> None:
    """Drop cached keys and values of the old weights; requests that continue compute theirs again.

    vLLM leaves the cache as it is while requests hold some of it, and returns False. Without prefix caching it is empty.

    Raises:
        RuntimeError: the cache could not be dropped.
    """
    if not llm.vllm_config.cache_config.enable_prefix_caching or await llm.reset_prefix_cache() is not False:
        return
    if await llm.reset_prefix_cache(reset_running_requests=True) is False:
        raise RuntimeError("weight push: the prefix cache could not be dropped, so later responses would mix weights.")


async def resume(llm: Any) -> None:
    """Schedule again."""
    await llm.resume_generation()


async def openai_app(llm: Any, model: str, names: list[str]) -> Any:
    """Build vLLM's own FastAPI application for a running engine that has a tokenizer.

    Module, signature and order of its parts moved between releases; what exists is asked for by name.

    Args:
        model: folder of the model.
        names: under which clients know it.
    """
    parsers = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")  # 0.32, before
    make_parser = first_of(parsers, "make_arg_parser")
    flexible = first_of(("vllm.utils.argparse_utils", "vllm.utils"), "FlexibleArgumentParser")
    server = importlib.import_module("vllm.entrypoints.openai.api_server")
    args = make_parser(flexible()).parse_args(["--model", model, "--served-model-name", *names])
    tasks = {"supported_tasks": await llm.get_supported_tasks()} if hasattr(llm, "get_supported_tasks") else {}
    app = server.build_app(args, **_select_known(server.build_app, tasks | {"model_config": llm.model_config}))
    config = {"vllm_config": llm.vllm_config}
    await server.init_app_state(
        **_select_known(server.init_app_state, {"engine_client": llm, "state": app.state, "args": args} | config | tasks)
    )
    return app


def _select_known(function: Callable[..., object], arguments: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments that a function of this release takes."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}


def first_of(modules: tuple[str, ...], attribute: str) -> Any:
    """Return the attribute of the first of these modules that has it."""
    for name in modules:
        with contextlib.suppress(ImportError):
            module = importlib.import_module(name)
            if hasattr(module, attribute):
                return getattr(module, attribute)
    raise ImportError(f"this vLLM has {attribute} in none of {', '.join(modules)}; 0.18 to 0.33 were looked at.")
