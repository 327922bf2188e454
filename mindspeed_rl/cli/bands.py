"""Curves that a run may be expected to follow: of earlier runs of its run file, and of its recipe."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rl import registry
from mindspeed_rl.observability.earlier_runs import find_band
from mindspeed_rl.observability.expected_curve import ExpectedCurve
from mindspeed_rl.run import Run


def find_bands(run: Run) -> tuple[ExpectedCurve, ...]:
    """Return the curves that a run may be expected to follow: of earlier runs of its run file, and of its recipe."""
    cfg = run.config
    written = {group: keys for group, keys in cfg.as_written().items() if group != "run"}
    earlier = find_band(run.folder, cfg.config_name, written)
    bands = (earlier, _find_recipe_curve(cfg.config_name, cfg.config_dir))
    return tuple(band for band in bands if band is not None)


def _find_recipe_curve(name: str, folder: str | None) -> ExpectedCurve | None:
    """Return the curve of the recipe that a run file is part of; None for other run files."""
    if folder is None or not (Path(folder) / "recipe.yaml").is_file():
        return None
    # by name: recipes read tables of data, which a plan of keys does without
    recipe = registry.load("mindspeed_rl.cli.recipe.record:load_recipe", "the curve of a recipe")(str(folder))
    path = (Path(folder) / f"{Path(name).name}.yaml").resolve()
    ends = (machine for machine in recipe.machines if recipe.list_run_files(machine)[-1].resolve() == path)
    return next((recipe.find_curve(machine) for machine in ends), None)
