"""Device kinds. `select(name)` once at process start, `current()` everywhere else."""

from __future__ import annotations

from mindspeed_rl import registry
from mindspeed_rl.platform.base import MemoryStats, Platform, ProfileSettings

#: name -> module:class; modules are imported only when chosen, so that no process needs another kind's packages
PLATFORMS: dict[str, str] = {
    "npu": "mindspeed_rl.platform.npu:NpuPlatform",
    "cuda": "mindspeed_rl.platform.cuda:CudaPlatform",
    "cpu": "mindspeed_rl.platform.cpu:CpuPlatform",
}

_current: Platform | None = None


def platform_class(name: str) -> type[Platform]:
    """Return the class of a platform by name.

    Raises:
        ValueError: no platform has this name.
    """
    if name not in PLATFORMS:
        raise ValueError(f"platform: '{name}' is not one of auto, {', '.join(PLATFORMS)}.")
    return registry.load(PLATFORMS[name], f"platform: '{name}'")


def resolve_name(name: str) -> str:
    """Return the name itself; for "auto" the first platform in `PLATFORMS` order that this process can use."""
    if name != "auto":
        return name
    return next(known for known in PLATFORMS if platform_class(known).is_available())


def select(name: str = "auto") -> Platform:
    """Make a platform the current one of this process and return it.

    Raises:
        ValueError: the name is unknown, or the device is not usable in this process.
    """
    global _current
    chosen = resolve_name(name)
    cls = platform_class(chosen)
    if not cls.is_available():
        raise ValueError(
            f"platform: '{chosen}' was requested, but no such device is usable in this process "
            f"(usable: {resolve_name('auto')})."
        )
    if _current is None or _current.name != chosen:
        _current = cls()
    return _current


def current() -> Platform:
    """Return the platform chosen by `select`, or the detected one without such a call."""
    return _current if _current is not None else select("auto")
