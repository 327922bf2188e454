"""What a Ray cluster of one machine is told before Ray is imported; this module therefore does not import it."""

from __future__ import annotations

from collections.abc import Mapping

#: read by Ray when it is imported; "0" makes it bind to 127.0.0.1, as it does on Windows and macOS
_SEVERAL_MACHINES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def local_ray_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables under which a cluster of our own binds to loopback alone; none where the run joins a cluster."""
    if environ.get("RAY_ADDRESS") or _SEVERAL_MACHINES in environ:
        return {}
    return {_SEVERAL_MACHINES: "0"}
