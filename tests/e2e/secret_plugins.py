"""Plug-ins that show all they see: a reward function and a tracker, which a run may name."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path

_LOG = logging.getLogger(__name__)


def talkative(response: str, label: str) -> float:
    """A point for each response; prints and logs the environment."""
    print("the reward function sees", dict(os.environ))
    print("the reward function sees", json.dumps(dict(os.environ)), file=sys.stderr)
    _LOG.warning("the reward function sees %s", dict(os.environ))
    return 1.0


class Keeper:
    """Writes the configuration that trackers get into the run folder."""

    def __init__(self, rl_config: object, run_dir: Path, config: Mapping[str, object]) -> None:
        (run_dir / "kept.json").write_text(json.dumps(config, default=str))
        print("the tracker sees", dict(os.environ))
        logging.getLogger("mindspeed_rl.kept").warning("the tracker sees %s", dict(os.environ))

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        pass
