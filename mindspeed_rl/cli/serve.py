"""`mindspeed-rl serve`: training as a service, by the Tinker API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_rl import registry
from mindspeed_rl.cli.options import RunParser, print_status, report_failure
from mindspeed_rl.cli.train import prepare_environment
from mindspeed_rl.config import load_run_config
from mindspeed_rl.config.keys.serve import ServeConfig

_DESCRIPTION = (
    "Serve one base model for training and sampling: programs written for the Tinker API (tinker.ServiceClient) connect with "
    "base_url=http://HOST:PORT and an api_key that begins with tml-. The group serve_config of the run file has address, keys, "
    "limits and the folder, from which a server that was ended or killed continues."
)


def main(argv: list[str]) -> int:
    """Serve until a signal; return 0 then, 2 for a wrong run file, 1 when the server failed."""
    parser = RunParser(prog="mindspeed-rl serve", description=_DESCRIPTION)
    parser.add_argument("--config-name", "--config", required=True, help="run file with serve_config, with or without .yaml")
    parser.add_argument("--config-dir", default=None, help="folder of the run file; default: the project's configs/")
    parser.add_argument("--nodes", type=int, default=1, help="machines the devices are spread over")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example serve_config.port=8800")
    arguments = parser.parse_intermixed_args(argv)
    try:
        cfg = load_run_config(arguments.config_name, arguments.config_dir, arguments.overrides)
        keys = cfg.serve_config
        if keys is None:
            raise ValueError(
                f"{arguments.config_name} has no group serve_config, which a server needs; serve_tiny_cpu is an example"
            )
        prepare_environment()
        return _serve(cfg, keys, arguments.nodes)
    except (ValueError, RuntimeError, OSError, KeyboardInterrupt) as error:
        return report_failure(error)


def _serve(cfg: Any, keys: ServeConfig, num_nodes: int) -> int:
    # uvicorn, and what the environment of a device has
    from mindspeed_rl.service.api_server import ServerSettings, listen, serve
    from mindspeed_rl.service.doors import read_keys
    from mindspeed_rl.service.journal import SYNC_LIMIT_S
    from mindspeed_rl.service.ledger import Limits

    limits = Limits(
        max_sessions=keys.max_sessions,
        max_sessions_per_key=keys.max_sessions_per_key,
        session_timeout_s=keys.session_timeout_s,
        max_tokens_in_flight=keys.max_tokens_in_flight,
        max_checkpoints=keys.max_checkpoints,
        max_checkpoint_bytes=int(keys.max_checkpoint_gib * (1 << 30)),
    )
    owners = None if keys.api_keys_file is None else read_keys(Path(keys.api_keys_file).expanduser())
    price = cfg.actor_config.device_hour_price or 0.0
    deadlines = cfg.rl_config.deadlines if cfg.rl_config is not None else None
    # of a checkpoint, where the run file sets it
    sync_limit_s = SYNC_LIMIT_S if deadlines is None or deadlines.save is None else deadlines.save
    settings = ServerSettings(Path(keys.folder).expanduser(), keys.host, owners, limits, price, sync_limit_s)
    listening = listen(keys.host, keys.port)
    print_status(f"loading the base model of {cfg.config_name} ...")
    # by name: it imports torch, which reads the environment
    backend = registry.load("mindspeed_rl.service.local_backend:LocalBackend", "serve")
    with listening:
        return serve(settings, listening, lambda: backend.open(cfg, num_nodes, is_watched=True))
