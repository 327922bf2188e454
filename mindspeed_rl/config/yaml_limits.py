"""What is looked at in a YAML file before it is read: text, size, depth, and what its aliases make of it."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl.config.errors import ConfigError

#: no run file comes near any of these
_MAX_BYTES, _MAX_DEPTH, _MAX_NODES = 1 << 20, 60, 100_000


def check_yaml(path: Path) -> None:
    """Raises ConfigError for a file that is no text, or would take reading without end.

    Raises:
        ConfigError: it is binary or of another encoding than UTF-8, too large, nested too deeply, or an alias bomb; or no YAML.
    """
    import yaml  # as in run_files: the package itself loads without it

    try:
        size = path.stat().st_size
        if not path.is_file() or size > _MAX_BYTES:
            raise ConfigError([f"{path} is no run file: it has {size} bytes, more than {_MAX_BYTES}, or is no plain file"])
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        place = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError([f"{path} is not UTF-8 text ({place}); save it as UTF-8"]) from None
    # sizes of the open collections, aliases counted as what they stand for; and of what has an anchor
    open_sizes: list[int] = [0]
    open_anchors: list[str | None] = []
    anchored: dict[str, int] = {}
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                open_sizes.append(1)
                open_anchors.append(event.anchor)
            elif isinstance(event, yaml.CollectionEndEvent):
                size, anchor = open_sizes.pop(), open_anchors.pop()
                if anchor is not None:
                    anchored[anchor] = size
                open_sizes[-1] += size
            elif isinstance(event, yaml.AliasEvent):
                open_sizes[-1] += anchored.get(event.anchor, 1)
            elif isinstance(event, yaml.ScalarEvent):
                open_sizes[-1] += 1
                if event.anchor is not None:
                    anchored[event.anchor] = 1
            if len(open_sizes) > _MAX_DEPTH:
                raise ConfigError([f"{path} is nested more than {_MAX_DEPTH} levels deep"])
            if open_sizes[-1] > _MAX_NODES:
                raise ConfigError([f"{path} stands for more than {_MAX_NODES} values (aliases count as what they repeat)"])
    except (yaml.YAMLError, ValueError) as error:
        lines = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError([f"{path.name} cannot be read: {lines[:500]}"]) from None
    except RecursionError:
        raise ConfigError([f"{path} is nested too deeply"]) from None
