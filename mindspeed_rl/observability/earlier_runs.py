"""Bands of the reward curve of earlier runs: folders beside the run's own that were made with the same run file."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mindspeed_rl.config.keys import PATH_KEYS
from mindspeed_rl.observability.alerts import REWARDS
from mindspeed_rl.observability.expected_curve import ExpectedCurve, Window
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.run_files import read_run

#: iterations of a window, and half of the band's least width, as a fraction of the largest mean
_WINDOW, _TOLERANCE = 10, 0.05
#: keys in which runs of the same recipe may differ: places, seed and length; files that a run writes, and of its access
_FREE = frozenset(
    "run_dir save load seed train_iters data_path eval_data_path tokenizer_name_or_path platform dump_path profile_save_path "
    "wandb_save_dir swanlab_save_dir optimizer_offload_path eplb_token_save_path vllm_server_token_file "
    "runtime_env_path".split()
)
#: keys with paths; a rubric is one, or a column of the rows
_PATHS = PATH_KEYS | {"judge_rubric"}


def find_band(folder: Path, title: str, written: Mapping[str, Any]) -> ExpectedCurve | None:
    """Return the band of the reward curve of the earlier runs beside a run folder; None where there are none.

    Args:
        folder: run folder, which need not exist; its siblings are searched.
        title: name of the run file.
        written: keys that the run file sets, by group; runs with other keys than places, seed and length are left out.
    """
    histories = dict(_read_earlier(folder, title, written))
    metric = next((name for name in REWARDS for history in histories.values() if history.finite(name).x), None)
    if metric is None:
        return None
    curves = [history.finite(metric) for history in histories.values()]
    last = max((curve.x[-1] for curve in curves if curve.x), default=0)
    windows = []
    for first in range(1, max(2, last - _WINDOW + 2), _WINDOW):
        end = min(first + _WINDOW - 1, last)  # shorter runs are one window
        values = [[y for x, y in zip(curve.x, curve.y) if first <= x <= end] for curve in curves]
        means = [statistics.fmean(value) for value in values if value]
        if means:
            spread = _TOLERANCE * max(map(abs, means))
            windows.append(Window(first, end, min(means) - spread, max(means) + spread))
    names = ", ".join(sorted(path.name for path in histories))
    return ExpectedCurve(metric, f"earlier runs: {names}", tuple(windows)) if windows else None


def _read_earlier(folder: Path, title: str, written: Mapping[str, Any]) -> Iterator[tuple[Path, History]]:
    """Yield the folders of finished runs of the same run file, with their metrics."""
    own = _keep_decisive({group: _resolve(group, keys) for group, keys in written.items()})
    for path in sorted(folder.parent.glob("*/report.json")):
        if path.parent == folder:
            continue
        try:
            run = read_run(path.parent)
        except ValueError:  # a damaged folder is not an earlier run
            continue
        report = run.report
        if report.get("outcome") == "finished" and report.get("title") == title:
            if _keep_decisive(report.get("config_set", {})) == own:
                yield path.parent, run.history


def _keep_decisive(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a run file that decide its curve, as report.json has them."""
    kept: dict[str, Any] = {}
    for group, keys in written.items():
        if isinstance(keys, Mapping):
            kept[group] = {name: value for name, value in keys.items() if name not in _FREE}
    return json.loads(json.dumps({group: keys for group, keys in kept.items() if keys}, default=str))


def _resolve(name: str, value: Any) -> Any:
    """Return the value of a key with absolute paths of what is on this machine, as the report of a run has them.

    Two judges or reward models whose files have the same name in other folders are not the same. A name on a hub stays.
    """
    if isinstance(value, Mapping):
        return {inner: _resolve(inner, one) for inner, one in value.items()}
    if isinstance(value, list):
        return [_resolve(name, one) for one in value]
    if name not in _PATHS or not isinstance(value, str) or not os.path.exists(path := os.path.expanduser(value)):
        return value
    return os.path.realpath(path)
