"""The models of a service on several devices: the calls of `Tenants`, made on all ranks.

The ranks are processes that Ray places, as those of a training run. A call that every rank refuses, or in which every rank
fails, leaves them in step. Where a rank dies or hangs, or only some fail, the server ends: started again, it continues from its
journal.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import RayError

from mindspeed_rl.checkpoint.model_source import load_tokenizer_of
from mindspeed_rl.config import RLConfig
from mindspeed_rl.platform.environment import HEAD_ADAPTERS_VARIABLE
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phase
from mindspeed_rl.runtime.cluster import connect_cluster
from mindspeed_rl.runtime.futures import LATE_PEER, LOST_PEER, WaitMonitor, WorkerError
from mindspeed_rl.service.backend import (
    REQUESTS,
    AdamParams,
    AdapterSpec,
    BrokenBackendError,
    CallError,
    Capabilities,
    Datum,
    LossCall,
    PassCall,
    PassResult,
    SampleCall,
    SampleResult,
    count_tokens,
)
from mindspeed_rl.service.call_limits import CallLimits
from mindspeed_rl.workers.remote_group import WorkerKind, start_group

_LOG = logging.getLogger(__name__)
_KIND = WorkerKind(
    "mindspeed_rl.service.rank_worker:RankWorker",
    ("train", "rollout"),
    title="service worker",
    built="the base is loaded, the rollout engines are built",
    env={HEAD_ADAPTERS_VARIABLE: "1"},
)
_CALL, _STEP = Phase("call_tenants"), Phase("step_tenants")
#: of the error of a call that has not ended in its seconds
_LATE = "did not end within"
#: steps of the rollout engines between two looks at what else waits
_NUM_STEPS = 4


class TenantGroup:
    """`Tenants` on several ranks; methods are those of `Tenants`, called from one thread."""

    def __init__(self, run: Run) -> None:
        """Start the processes, load the base and build the engines.

        Args:
            run: a run file's run with `serve_config`, with its models planned.
        """
        serve, model = run.config.serve_config, run.models["actor"]
        assert serve is not None
        # logs of the ranks are with the server's files; a rank may start in another folder
        folder = Path(serve.folder).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        run = replace(run, folder=folder, config=replace(run.config, serve_config=replace(serve, folder=str(folder))))
        self.tokenizer: Any = load_tokenizer_of(model.config, model.source)
        self._stack, self._is_broken = contextlib.ExitStack(), False
        #: replica of each call that samples
        self._calls: dict[str, int] = {}
        self._limits, self._folder = CallLimits(run.deadlines), folder
        # a rank that hangs is given up, whether or not a training run would be resumed
        self._tolerance = replace(run.fault_tolerance, enabled=True)
        count, cpus = run.placement.num_devices, (run.config.rl_config or RLConfig()).num_cpus_for_placement_group
        with contextlib.ExitStack() as stack:
            logs = folder / "logs" / "ray"
            stack.enter_context(connect_cluster(count, run.platform, cpus_per_device=cpus, logs=logs))
            self._group = start_group(_KIND, run, run.config.actor_config, count)
            stack.callback(self._group.close)
            self._group.start_workers(run, f"service-{uuid.uuid4().hex[:12]}")
            self.capabilities: Capabilities = self._call("capabilities")
            self._num_replicas: int = self._call("num_replicas")
            self._stack = stack.pop_all()

    # ------------------------------------------------------------------ calls of all ranks

    def _call(self, method: str, *arguments: Any, num_tokens: int = 1, **keywords: Any) -> Any:
        outcomes, seconds = self._run(_CALL, method, num_tokens, method, arguments, keywords)
        result = self._read(method, outcomes)
        self._limits.note(method, num_tokens, seconds, result if isinstance(result, list) else ())
        return result

    def _run(self, phase: Phase, method: str, num_tokens: int, *arguments: Any) -> tuple[list[Any], float]:
        """Return the results of all ranks, and the seconds that they have taken."""
        start_s = time.monotonic()
        self._group.monitor = WaitMonitor(self._folder, self._limits.find(method, num_tokens), self._tolerance)
        try:
            results = self._group.call(phase, *arguments)
        except (WorkerError, RayError) as error:
            self._is_broken = True
            raise BrokenBackendError(str(error), REQUESTS.get() if _LATE in str(error) else ()) from error
        return results, time.monotonic() - start_s

    def _read(self, method: str, outcomes: Sequence[tuple[str, Any]]) -> Any:
        """Return the result of the first rank, or raise what all ranks have raised."""
        kind, value = outcomes[0]
        if not _are_in_step(outcomes):
            text = "; ".join(f"rank {rank} {other}" for rank, (other, _) in enumerate(outcomes))
            # a rank that waited in vain for another one names no cause
            reasons = [str(value) for other, value in outcomes if other != "done"]
            reason = next((reason for reason in reasons if not _waited_in_vain(reason)), reasons[0])
            self._is_broken = True
            raise BrokenBackendError(f"the ranks of the service are no longer in step after {method} ({text}): {reason}")
        if kind == "refused":
            raise CallError(value)
        if kind == "failed":
            raise RuntimeError(value)
        return value

    # ------------------------------------------------------------------ models

    def create_model(self, model_id: str, spec: AdapterSpec | None) -> None:
        """See `Backend.create_model`."""
        self._call("create_model", model_id, spec)

    def unload(self, model_id: str) -> None:
        """See `Backend.unload`."""
        self._call("unload", model_id)

    def run_passes(self, calls: Sequence[PassCall]) -> list[PassResult | Exception]:
        """See `Tenants.run_passes`."""
        try:
            return self._call("run_passes", calls, num_tokens=count_tokens(list(calls)))
        except BrokenBackendError:
            raise
        except RuntimeError as error:  # on all ranks
            if len(calls) < 2:
                raise
            _LOG.warning("joint passes of %d models failed (%s); each is computed alone", len(calls), error)
        return [self._run_alone(call) for call in calls]

    def _run_alone(self, call: PassCall) -> PassResult | Exception:
        try:
            return self._call("run_passes", [call], num_tokens=count_tokens(call))[0]
        except BrokenBackendError:
            raise
        except RuntimeError as error:  # raised where this call waits
            return error

    def forward_backward(
        self, model_id: str, data: Sequence[Datum], loss: LossCall, *, forward_only: bool = False
    ) -> PassResult:
        """See `Backend.forward_backward`."""
        tokens = count_tokens(list(data))
        return self._call("forward_backward", model_id, data, loss, forward_only=forward_only, num_tokens=tokens)

    def optim_step(self, model_id: str, params: AdamParams) -> dict[str, float]:
        """See `Backend.optim_step`."""
        return self._call("optim_step", model_id, params)

    def save_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.save_state`."""
        self._call("save_state", model_id, folder.absolute(), with_optimizer=with_optimizer)

    def load_state(self, model_id: str, folder: Path, *, with_optimizer: bool) -> None:
        """See `Backend.load_state`."""
        self._call("load_state", model_id, folder.absolute(), with_optimizer=with_optimizer)

    def export_adapter(self, source: str | Path, folder: Path) -> None:
        """See `Backend.export_adapter`."""
        self._call("export_adapter", _make_absolute(source), folder.absolute())

    def export_merged(self, model_id: str, folder: Path) -> None:
        """See `Backend.export_merged`."""
        self._call("export_merged", model_id, folder.absolute())

    @property
    def num_joined_passes(self) -> int:
        """Return the number of passes that had tokens of several models."""
        return self._call("num_joined_passes")

    # ------------------------------------------------------------------ samplers

    def make_sampler(self, source: str | Path | None) -> str:
        """See `Backend.make_sampler`."""
        return self._call("make_sampler", _make_absolute(source))

    def drop_sampler(self, sampler: str) -> None:
        """See `Backend.drop_sampler`; none of its calls is running."""
        self._call("drop_sampler", sampler)

    def start_sampling(self, sampler: str, call: SampleCall) -> str:
        """Add a call to the rollout engine with the fewest calls; see `Tenants.start_sampling`."""
        if call.seed is None:  # one for all ranks of an engine
            call = replace(call, seed=secrets.randbits(31))
        busy = Counter(self._calls.values())
        replica = min(range(self._num_replicas), key=lambda index: busy[index])
        name: str = self._call("start_sampling", sampler, call, replica)
        self._calls[name] = replica
        return name

    @property
    def is_sampling(self) -> bool:
        """Return whether calls are in the engines."""
        return bool(self._calls)

    def step_sampling(self) -> list[tuple[str, SampleResult | Exception]]:
        """Compute steps of all engines; return the calls that have ended."""
        results, seconds = self._run(_STEP, _STEP.name, 1, _NUM_STEPS)
        self._read("step_sampling", [outcome for outcome, _ in results])
        ended = [item for _, own in results for item in own]
        self._limits.note(_STEP.name, 1, seconds, [result for _, result in ended])
        for name, _ in ended:
            del self._calls[name]
        return ended

    def abort_sampling(self, name: str) -> None:
        """Abort a call."""
        self._calls.pop(name, None)
        self._call("abort_sampling", name)

    def close(self) -> None:
        """End the processes."""
        with self._stack:
            if not self._is_broken:
                with contextlib.suppress(RuntimeError, CallError):  # they end all the same
                    self._call("close")


def _are_in_step(outcomes: Sequence[tuple[str, Any]]) -> bool:
    """Return True where a call has ended on all ranks in the same way.

    Ranks may have failed together, as all of them lack memory for a pass, or each because of another one.
    """
    if len({kind for kind, _ in outcomes}) > 1:
        return False
    failures = [str(value) for kind, value in outcomes if kind == "failed"]
    return len({text.partition(":")[0] for text in failures}) < 2 and not any(map(_waited_in_vain, failures))


def _waited_in_vain(text: str) -> bool:
    """Return True for the error of a rank that another one has left alone in a collective."""
    return any(part in text for part in (*LOST_PEER, *LATE_PEER))


def _make_absolute(source: str | Path | None) -> str | Path | None:
    """Return a folder as ranks on other machines find it; anything else is as it is."""
    return source.absolute() if isinstance(source, Path) else source
