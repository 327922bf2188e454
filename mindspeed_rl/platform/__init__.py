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
    """The class of a platform by name.

    Raises:
        ValueError: no platform has this name.
    """
    if name not in PLATFORMS:
        raise ValueError(f"platform: '{name}' is not one of auto, {', '.join(PLATFORMS)}.")
    return registry.load(PLATFORMS[name], f"platform: '{name}'")


def detect() -> str:
    """Name of the first platform in `PLATFORMS` order that this process can use."""
    return next(name for name in PLATFORMS if platform_class(name).is_available())


def named(name: str) -> str:
    """The name itself; for "auto" that of what `detect` finds."""
    return detect() if name == "auto" else name


def select(name: str = "auto") -> Platform:
    """Makes a platform the current one of this process and returns it.

    Raises:
        ValueError: the name is unknown, or the device is not usable in this process.
    """
    global _current
    chosen = named(name)
    cls = platform_class(chosen)
    if not cls.is_available():
        raise ValueError(
            f"platform: '{chosen}' was asked for, but no such device is usable in this process (found: {detect()})."
        )
    if _current is None or _current.name != chosen:
        _current = cls()
    return _current


def current() -> Platform:
    """The platform chosen by `select`, or the detected one when nobody has chosen."""
    return _current if _current is not None else select("auto")
