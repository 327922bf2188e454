"""What a Ray cluster of one machine is told before Ray is imported; this module therefore does not import it."""

from __future__ import annotations

from collections.abc import Mapping

#: read by Ray when it is imported; "0" makes it bind to 127.0.0.1, as it does on Windows and macOS
_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
#: read by Ray's raylet: a worker for each of the first logical CPUs, which no actor of a run takes, as each has its own command
_WORKERS_AHEAD = "RAY_prestart_worker_first_driver"
#: how often a process tells the head of the tasks it ran; "0" for never. The head keeps 100,000 of them for Ray's dashboard and
#: state listings, which nobody can ask here: 13 MiB a minute in a run of short iterations
_TASK_EVENTS = "RAY_task_events_report_interval_ms"


def local_ray_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a cluster of our own binds to loopback alone, starts no workers before they are asked for, and has
    no list of what they did; none where the run joins a cluster, and none that are set already."""
    if environ.get("RAY_ADDRESS"):
        return {}
    return {name: "0" for name in (_SEVERAL_MACHINES, _WORKERS_AHEAD, _TASK_EVENTS) if name not in environ}
