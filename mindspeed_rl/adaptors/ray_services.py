"""A Ray cluster of one machine, of one run, without the services that nobody would ask.

Each is a Python process that imports Ray: together half of the processor time of a cluster's start, and `ray.init` waits for
the last of them. Ray has options for them on its command line alone.

| patch | symbol | why |
|---|---|---|
| parameters | ray._private.parameter.RayParams | no monitor, which would ask an autoscaler for machines; no log monitor, \
which has nobody to send lines to under `log_to_driver=False` |
| dashboard | ray._private.node.Node.start_api_server | `include_dashboard=False` starts it all the same, for usage statistics |

It can go when `ray.init` has arguments for them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

from ray._private import node, parameter

_LEFT_OUT = {"no_monitor": True, "include_log_monitor": False}


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Leave these services out of a cluster that `ray.init` starts in the block; everything else of Ray stays as it is."""
    module: Any = parameter
    head: Any = node.Node
    parameters, start = module.RayParams, head.start_api_server
    known = {name: value for name, value in _LEFT_OUT.items() if name in inspect.signature(parameters).parameters}
    module.RayParams, head.start_api_server = functools.partial(parameters, **known), _no_address
    try:
        yield
    finally:
        module.RayParams, head.start_api_server = parameters, start


def _no_address(head: Any, **_: object) -> None:
    head._webui_url = None
