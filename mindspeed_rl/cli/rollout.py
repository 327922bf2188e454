"""`mindspeed-rl rollout`: a standalone rollout server for runs on other machines."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mindspeed_rl.cli.options import Parser, print_status, report_failure
from mindspeed_rl.config import GenerateConfig, SamplingConfig
from mindspeed_rl.config.quantized_formats import QUANTIZATIONS
from mindspeed_rl.config.run import PLATFORMS
from mindspeed_rl.config.threads import WAITING
from mindspeed_rl.data.media_limits import NO_LIMITS, MediaLimits
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.observability.run_files import ServerFolder, ServerOffer
from mindspeed_rl.run.draft import load_run

if TYPE_CHECKING:
    import argparse

_DESCRIPTION = (
    "Serve a model for rollouts: OpenAI-compatible paths (/v1/...), /health, and /rollout/... by which a run generates and "
    "pushes weights. A run uses it by generate_config.vllm_server_host and vllm_server_port."
)
_TOKEN_VARIABLE = "MINDSPEED_RL_SERVER_TOKEN"
#: between two looks whether the run goes
_CHECK_S = 2.0


class _Shared(TypedDict):
    """Limits of images, and slices of exact log-probs, as `serve` takes them."""

    limits: MediaLimits
    exact_slices: int


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(prog="mindspeed-rl rollout", description=_DESCRIPTION, allow_abbrev=False)
    add = parser.add_argument
    add("--model", help="Hugging Face folder, or owner/name, ms://owner/name on a hub; default: the actor's of --config-name")
    add("--join", type=Path, metavar="RUN", help="folder of a run that goes: serve it, with its settings, until either ends")
    add("--config-name", "--config", help="run file whose generate_config the engine has")
    add("--config-dir", help="folder of the run file; default: the project's configs/")
    add("--host", default="127.0.0.1", help="address to listen on; 127.0.0.1 is reached from this machine only")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--token-file", type=Path, help=f"file with the token of all calls; default: {_TOKEN_VARIABLE}, else a new one")
    add("--served-model-name", nargs="+", help="names in the OpenAI-compatible paths; default: the folder's")
    add("--tensor-parallel-size", "--vllm-tensor-parallel-size", "--vllm_tensor_parallel_size", type=int)
    add(
        "--data-parallel-size",
        *("--vllm-data-parallel-size", "--vllm_data_parallel_size"),
        type=int,
        help="engines that share the experts of the model (infer_expert_parallel_size); 1 for other models",
    )
    add(
        "--max-model-len", "--vllm-max-model-len", "--vllm_max_model_len", type=int, help="longest prompt + response, in tokens"
    )
    add("--max-num-seqs", "--vllm-max-num-seqs", "--vllm_max_num_seqs", type=int, help="responses at the same time")
    add("--dtype", choices=("bfloat16", "float32"), help="data type of the weights")
    add("--quantization", choices=QUANTIZATIONS, help="format of the matrices; weights that are quantized come from the run")
    add("--speculative-config", "--vllm-speculative-config", "--vllm_speculative_config", metavar="JSON", help="drafts")
    add("--gpu-memory-utilization", "--vllm-gpu-memory-utilization", "--vllm_gpu_memory_utilization", type=float)
    add("--kv-cache-memory-gib", type=float, help="CPU: KV cache, in GiB")
    add("--platform", choices=PLATFORMS, default="auto", help="device kind")
    add("overrides", nargs="*", metavar="key=value", help="of the run file")
    return parser


def main(argv: list[str]) -> int:
    """Serve until an interrupt; return 0 then, 2 for a wrong command line, 1 when the engine failed."""
    try:
        args = make_parser().parse_intermixed_args(argv)
        generate, folder, shared = _engine_keys(args)
        token, is_new = _token(args)
        listening = _listen(args.host, args.port)
    except ValueError as error:
        return report_failure(error)
    if is_new:
        print_status(f"token of this server, for {_TOKEN_VARIABLE} of its clients: {token}")
    names = args.served_model_name or [folder.name]
    try:
        with _joined(args, listening, token):
            return _serve(args, generate, folder, token, listening, names, shared)
    except KeyboardInterrupt:
        print_status("interrupted; the engine was stopped.")
        return 0
    except (ValueError, RuntimeError, OSError) as error:
        return report_failure(error)
    finally:
        listening.close()


def _check_replicas(generate: GenerateConfig, copies: int | None) -> GenerateConfig:
    """Return the keys with as many engines as the command line has, which share the experts of one replica.

    Args:
        generate: keys of the run file.
        copies: engines by the command line.

    Raises:
        ValueError: the engines of the server would share nothing, and be several replicas; names the key.
    """
    shares, arguments = generate.enable_expert_parallel, generate.engine_kwargs or {}
    reason = (
        "a server is one replica, whose engines share experts (generate_config.enable_expert_parallel). For several replicas "
        "start a server each, with its own devices and port. Name them all in generate_config.vllm_server_host, which balances "
        "requests"
    )
    if copies is not None and copies < 1:
        raise ValueError(f"--data-parallel-size {copies} must be above 0")
    if copies is not None and copies > 1 and not shares:
        raise ValueError(f"--data-parallel-size {copies}: {reason}")
    sharing = generate.infer_expert_parallel_size if copies is None else copies
    if sharing > 1 and not shares:
        raise ValueError(f"generate_config.infer_expert_parallel_size ({sharing}): {reason}")
    if names := sorted(name for name in arguments if name.startswith("data_parallel")):
        key = f"generate_config.engine_kwargs.{names[0]} ({arguments[names[0]]})"
        raise ValueError(f"{key} cannot be set, infer_expert_parallel_size says how many engines share experts: {reason}")
    return replace(generate, infer_expert_parallel_size=sharing)


def _engine_keys(args: argparse.Namespace) -> tuple[GenerateConfig, Path, _Shared]:
    """Return the keys of the engine, the model's folder, and what the server has in common with the run's trainer."""
    if args.join is not None and args.config_name is not None:
        raise ValueError("--join and --config-name exclude one another: the settings come from the run")
    if args.join is not None:
        generate, model, shared, args.platform = _read_joined_run(args.join)
        key = f"--join {args.join}"
    elif args.config_name is not None:
        generate, model, shared, key = _read_run_file(args)
    else:
        generate = GenerateConfig(infer_tensor_parallel_size=1, max_num_seqs=256)
        model, shared, key = None, _Shared(limits=NO_LIMITS, exact_slices=0), "--model"
    if args.model:
        model, key = args.model, "--model"
    given: dict[str, Any] = {
        "infer_tensor_parallel_size": args.tensor_parallel_size,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "kv_cache_memory_gib": args.kv_cache_memory_gib,
    }
    for name, value in given.items():
        if value is not None:
            if not isinstance(value, str) and value <= 0:
                raise ValueError(f"--{name.removeprefix('infer_').replace('_', '-')} {value} must be above 0")
    generate = replace(generate, **{name: value for name, value in given.items() if value is not None})
    generate = _check_replicas(generate, args.data_parallel_size)
    if args.speculative_config is not None:
        generate = replace(generate, speculative_config=_read_drafts(args.speculative_config))
    return generate, _find_folder(model, key, has_weights=generate.quantization is None), shared


def _find_folder(model: str | None, key: str, *, has_weights: bool) -> Path:
    """Return the folder of the model to serve, which is fetched where its name is one of a hub.

    Args:
        key: what names the model.
        has_weights: the engine loads weights; otherwise they come from the run.

    Raises:
        ValueError: the folder has no config.json, or the model is not on the hub.
    """
    if model is None:
        raise ValueError(f"{key}: no model is named; give a folder with config.json, or a name on a hub")
    name = parse_hub_name(model)
    folder = Path(model).expanduser() if name is None else fetch(name, key, "model" if has_weights else "tokenizer")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{key} {model}: no folder with config.json")
    return folder.resolve()


def _read_joined_run(join: Path) -> tuple[GenerateConfig, str, _Shared, str]:
    """Return the settings that a run has written for servers that join it: engine, model, trainer and platform."""
    settings = ServerFolder(join.expanduser()).read_settings()
    try:
        shared = _Shared(limits=MediaLimits(**settings["limits"]), exact_slices=settings["exact_slices"])
        sampling = SamplingConfig(**settings["generate"].pop("sampling_config"))
        generate = GenerateConfig(**settings["generate"], sampling_config=sampling)
        return generate, str(settings["hf_folder"]), shared, settings["platform"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--join {join}: servers/run.json is not of a run of this release ({error})") from None


def _read_run_file(args: argparse.Namespace) -> tuple[GenerateConfig, str | None, _Shared, str]:
    """Return the settings of a run file, with the key that names its model; the model is None where it names none."""
    cfg = load_run(args.config_name, args.config_dir, args.overrides).config
    if cfg.generate_config is None:
        raise ValueError(f"--config-name {args.config_name} has no group generate_config")
    actor = cfg.actor_config
    key = "tokenizer_name_or_path" if actor.tokenizer_name_or_path else "load"
    shared = _Shared(limits=MediaLimits.from_keys(actor), exact_slices=cfg.exact_slices)
    return cfg.generate_config, getattr(actor, key), shared, f"actor_config.{key}"


def _read_drafts(text: str) -> dict[str, Any]:
    """Return the value of --speculative-config."""
    try:
        drafts = json.loads(text)
    except ValueError:
        drafts = None
    if not isinstance(drafts, dict) or "method" not in drafts:
        example = json.dumps({"method": "suffix", "num_speculative_tokens": 8})
        raise ValueError(f"--speculative-config {text}: must be a JSON object with a method: {example}")
    return drafts


def _token(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the token, and True when it is new."""
    if args.token_file is not None:
        try:
            token = args.token_file.expanduser().read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ValueError(f"--token-file {args.token_file} cannot be read ({error.strerror})") from None
        if not token:
            raise ValueError(f"--token-file {args.token_file} is empty")
        return token, False
    given = os.environ.get(_TOKEN_VARIABLE, "").strip()
    return (given, False) if given else (secrets.token_urlsafe(32), True)


def _listen(host: str, port: int) -> socket.socket:
    """Return a bound socket: a port in use is an error before the model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    # a server that has just ended leaves its port in TIME_WAIT for a minute
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ValueError(f"--host {host} --port {port}: {error}") from None
    return listening


@contextlib.contextmanager
def _joined(args: argparse.Namespace, listening: socket.socket, token: str) -> Iterator[None]:
    """Offer the server to the run of --join while the block runs, and interrupt the block when the run has ended."""
    if args.join is None:
        yield
        return
    folder = ServerFolder(args.join.expanduser())
    # until the engine is built the address refuses calls, and the run asks again at its next weight sync
    host, port, *_ = listening.getsockname()
    offer = folder.offer(ServerOffer(host, port, token))
    print_status(f"joins {args.join} with the next weight sync; Ctrl-C leaves, and the run goes on without this server.")
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_CHECK_S):
            if not folder.is_open:
                print_status(f"the run in {args.join} has ended.")
                os.kill(os.getpid(), signal.SIGINT)
                return

    threading.Thread(target=watch, name="run-watch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        offer.unlink(missing_ok=True)


def _serve(
    args: argparse.Namespace,
    generate: GenerateConfig,
    folder: Path,
    token: str,
    listening: socket.socket,
    names: list[str],
    shared: _Shared,
) -> int:
    # the engine's process is ended, not asked: Python's tracker then frees its semaphores, and would warn that it has
    quiet = {"PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker", **WAITING}
    os.environ.update({**quiet, **os.environ, **build_quiet_environment(os.environ)})
    # it imports torch, which reads the environment
    from mindspeed_rl.serving.standalone import serve

    limits, slices = shared["limits"], shared["exact_slices"]
    serve(folder, generate, names, listening, token, platform_name=args.platform, limits=limits, exact_slices=slices)
    return 0
