"""`mindspeed-rl diff train rollout`: compare log-probs of trainer and rollout engine on the same tokens."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.checkpoint.newest import newest_checkpoint
from mindspeed_rl.cli.options import report_failure
from mindspeed_rl.cli.train import prepare_environment
from mindspeed_rl.config import RunConfig, load_run_config
from mindspeed_rl.dumps.mismatch_rows import COMPARED_TOKENS, MISMATCH_ROWS, read_rows
from mindspeed_rl.files import write_file

_DEFAULT_PROMPTS = 4
#: keys by which the engine of a run with servers is built beside the trainer
_COLOCATED = (
    "rl_config.use_integrated_worker=true",
    "rl_config.rollout_resource=null",
    "rl_config.trainer_mode=sync",
    "rl_config.async_generate=null",
    "rl_config.elastic_rollout=false",
    "rl_config.elastic_training_devices=0",
    "rl_config.spare_samples_per_prompt=0",
    "generate_config.vllm_server_host=null",
)


def main(argv: list[str]) -> int:
    """Compare; return 0 where the two agree, 1 with a cause or after a failure, 2 for a wrong run file."""
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl diff",
        description="Run the trainer (Megatron) and the rollout engine (vLLM) of a run file layer by layer on the same tokens, "
        "and name the cause of a difference of their log-probs: template, transposed or stale experts, wrong conversion, "
        "temperature, router, precision.",
    )
    parser.add_argument("first", choices=("train",))
    parser.add_argument("second", choices=("rollout",))
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--config-name", "--config", help="run file, with or without .yaml")
    source.add_argument(
        "--run", type=Path,
        help="run folder: its configuration, its newest checkpoint where there is one, and the rows on which the two differed "
        f"beyond a bound ({MISMATCH_ROWS}) where there are any",
    )  # fmt: skip
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("--prompts", type=int, default=None, help="prompts of the run's data; default 4, or the rows of --run")
    parser.add_argument("--tokens", type=int, default=COMPARED_TOKENS, help="max tokens of a response; default %(default)s")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides, as for training")
    arguments = parser.parse_intermixed_args(argv)
    for name in ("prompts", "tokens", "nodes"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            parser.error(f"--{name} {value} must be at least 1")
    try:
        cfg = _config(arguments)
        prepare_environment()
        return _compare(cfg, arguments)
    except (ValueError, KeyboardInterrupt, RuntimeError, OSError) as error:
        return report_failure(error)


def _config(arguments: argparse.Namespace) -> RunConfig:
    if arguments.run is None:
        return load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
    path = arguments.run / "report.json"
    if not path.is_file():
        raise ValueError(f"--run {arguments.run}: its configuration is read from report.json, which is not in it")
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config_set"]
    # without model blocks, whose values config.json has
    groups = {name: group for name, group in config.items() if name not in ("run", "sampling_config")}
    tree = {name: {key: value for key, value in group.items() if key != "model"} for name, group in groups.items()}
    tree |= config.get("run", {})
    with TemporaryDirectory() as folder:
        # a run file, so that overrides work as usual; JSON is YAML
        Path(folder, "run.yaml").write_text(json.dumps(tree), encoding="utf-8")
        changes = _choose_changes(load_run_config("run", folder, []))
        return load_run_config("run", folder, [*changes, *arguments.overrides])


def _choose_changes(cfg: RunConfig) -> list[str]:
    """Return the overrides by which a run that has ended is compared, from its own configuration."""
    save, rl, generate = cfg.actor_config.save, cfg.rl_config, cfg.generate_config
    # only its weights: a run that has ended has no iteration left to resume
    weights = [f"actor_config.load={save}", "actor_config.finetune=true"]
    changes = [] if save is None or newest_checkpoint(save) is None else weights
    # a supervised run has neither group, and is refused later
    has_servers = (rl is not None and rl.rollout_resource is not None) or (
        generate is not None and generate.vllm_server_host is not None
    )
    return [*changes, *_COLOCATED] if has_servers else changes


def _compare(cfg: RunConfig, arguments: argparse.Namespace) -> int:
    # by name: it imports torch, Ray and transformers, which read the environment
    compare_run = registry.load("mindspeed_rl.diagnostics.train_vs_rollout:compare_run", "diff")
    chosen: int | list[list[int]] = arguments.prompts or _DEFAULT_PROMPTS
    if arguments.run is not None and arguments.prompts is None and (path := arguments.run / MISMATCH_ROWS).is_file():
        rows = read_rows(path)
        chosen = [list(context) for context in rows.contexts]
        print(f"rows of iteration {rows.iteration}, up to the tokens of {rows.place}: {len(chosen)}")
    with TemporaryDirectory(prefix="mindspeed-rl-diff-") as folder:
        result, cause, lines = compare_run(cfg, arguments.nodes, Path(folder), chosen, arguments.tokens)
    for line in lines:
        print(line)
    if arguments.json is not None:
        record = asdict(result) | {"cause": None if cause is None else asdict(cause)}
        write_file(arguments.json, json.dumps(record, indent=1) + "\n")
    return 0 if cause is None else 1
