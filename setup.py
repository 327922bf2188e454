"""Declares run files and recipes as data of the package; everything else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

#: where an installed package finds configs/ and recipes/ beside it, as `config.run_files.find_project_configs` does
TARGET = "share/mindspeed_rl"
files = sorted(path for top in ("configs", "recipes") for path in Path(top).rglob("*") if path.is_file())
folders = dict.fromkeys(path.parent for path in files)
setup(data_files=[(f"{TARGET}/{folder}", [str(path) for path in files if path.parent == folder]) for folder in folders])
