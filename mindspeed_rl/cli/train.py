"""`mindspeed-rl train`: run what a run file says."""

from __future__ import annotations

import argparse
import os
import sys

from mindspeed_rl.config import ConfigError, load_run_config


def main(argv: list[str]) -> int:
    """Trains; returns 0 on success, 1 when the run failed, 2 for a wrong run file, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="mindspeed-rl train", description="Train as a run file says.")
    parser.add_argument("--config-name", required=True, help="run file, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example rl_config.clip_ratio=0.1")
    arguments = parser.parse_intermixed_args(argv)
    try:
        cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
    except ConfigError as error:
        return _wrong(error)
    _prepare_environment()
    if cfg.is_supervised:
        from mindspeed_rl.trainers.run_supervised import run_supervised as run
    else:
        from mindspeed_rl.trainers.run import run_rl as run
    try:
        run_dir = run(cfg, num_nodes=arguments.nodes)
    except ConfigError as error:
        return _wrong(error)
    except KeyboardInterrupt:
        print("interrupted; all workers were ended.", file=sys.stderr)
        return 130
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, TimeoutError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"finished: {run_dir}")
    return 0


def _wrong(error: ConfigError) -> int:
    for text in error.errors:
        print(f"error: {text}", file=sys.stderr)
    return 2


def _prepare_environment() -> None:
    """The driver needs no device and no library chatter; set before torch, Ray and transformers are imported."""
    from mindspeed_rl.observability.logging import quiet_environment

    os.environ.update(quiet_environment(os.environ))
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
