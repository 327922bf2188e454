"""The trainers' side of a weight sync to rollout servers: process groups of the trainers with servers, and the sending."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray
from ray.exceptions import RayActorError

from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.resharding.rendezvous import Rendezvous
from mindspeed_rl.run import Run
from mindspeed_rl.run.phases import Phases
from mindspeed_rl.runtime.futures import read_error, wait_all
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.serving.weight_sync import WeightSync
from mindspeed_rl.workers.remote_group import RemoteGroup

#: hosts of servers that find a loopback address of the run
_THIS_MACHINE = {"127.0.0.1", "localhost", "::1", "0.0.0.0", "::"}


class WeightSenders:
    """The workers that send weights to one group of servers; they are in a process group with each."""

    def __init__(
        self, run: Run, plane: DataPlane, trainers: RemoteGroup, group: str, list_hosts: Callable[[Sequence[str]], set[str]]
    ) -> None:
        """Keep the workers.

        Args:
            run: the resolved run.
            plane: aborted when a worker fails.
            trainers: see `TrainerWorker`.
            group: name of the process group, of which a trainer has one with each kind of servers.
            list_hosts: returns the hosts of those among these servers that other commands have started.
        """
        self._run, self._plane, self._trainers = run, plane, trainers
        self._group, self._list_hosts = group, list_hosts

    def sync(self, weights: WeightSync, version: int) -> tuple[list[WorkerReport], int]:
        """Send the weights; return the trainers' reports, and how many parameters of a server were proven to have arrived."""
        return weights.run(
            version,
            lambda names, invite: self._join(weights, names, invite),
            lambda: self._send(version),
            lambda: self._trainers.call(Phases.LEAVE_SERVERS, self._group),
        )

    def _join(self, weights: WeightSync, names: Sequence[str], invite: Callable[[Rendezvous], None]) -> None:
        """Make a group of the trainers and the servers of these names."""
        trainers, is_local = self._trainers, self._run.num_nodes == 1
        hosts = self._list_hosts(names)
        # a server that another command has started may not see the run's files
        address = [trainers.processes[0].address.remote(is_local and not hosts)]
        ((host, port),) = wait_all(address, trainers.names[:1], Phases.JOIN_SERVERS.name, self._plane, trainers.monitor)
        # the address of a run on one node is 127.0.0.1, at which servers elsewhere do not find it
        if is_local and hosts - _THIS_MACHINE:
            host = ray.util.get_node_ip_address()
        rendezvous = weights.make_rendezvous(host, port, names)
        # a join ends when all members are there: it starts before servers are invited, and is awaited after that
        joined = trainers.start(Phases.JOIN_SERVERS, rendezvous, self._group)
        invite(rendezvous)
        joined.wait()

    def _send(self, version: int) -> tuple[list[WorkerReport], Exception | None]:
        """Return the reports and None, or no reports and the error that broke the group."""
        trainers, errors = self._trainers, []
        futures = [process.call.remote(Phases.SEND_WEIGHTS.name, version, self._group) for process in trainers.processes]
        for future, name in zip(futures, trainers.names):
            # each is awaited by itself: when the group breaks all of them fail, and none of them is the cause
            waiting = trainers.monitor.start(Phases.SEND_WEIGHTS.name, [name])
            while not ray.wait([future], timeout=1.0)[0]:
                waiting.check([name])
            waiting.finish()
            if (error := read_error(future)) is not None:
                errors.append(error)
        # a dead trainer ends the run; a group that broke around living ones can be made again without a server
        if not errors or any(isinstance(error, RayActorError) for error in errors):
            return trainers.wait(Phases.SEND_WEIGHTS, futures), None
        return [], errors[0]
