"""`mindspeed-rl launch --write KIND RUN -o FILE`: the file with which a cluster's scheduler starts a run.

    mindspeed-rl launch --write volcano grpo_qwen3_8b_A3 --machine a3 --image IMAGE -o job.yaml
    mindspeed-rl launch --write slurm grpo_qwen25_32b_A3 --machine a3 -o job.sh actor_config.lr=1e-6

Devices and nodes follow from the run's placement. On every node the file runs `mindspeed-rl launch`, but for rayjob, whose
operator starts Ray. Nothing is submitted.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mindspeed_rl.cli.options import Parser, print_status, report_failure
from mindspeed_rl.config import RunConfig, load_run_config
from mindspeed_rl.config.keys import PATH_KEYS
from mindspeed_rl.files import write_file

#: name of a device in Kubernetes (Ascend Device Plugin of MindCluster) and in Slurm's gres
_RESOURCES = {"volcano": "huawei.com/Ascend910", "rayjob": "huawei.com/Ascend910", "slurm": "npu", "docker-compose": ""}
#: what a container needs of its host: driver, tools, and the addresses of the devices' RoCE ports
_HOST_PATHS = {
    "/usr/local/Ascend/driver": "Directory",
    "/usr/local/bin/npu-smi": "File",
    "/etc/ascend_install.info": "File",
    "/etc/hccn.conf": "File",
}
_CONTROL_DEVICES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
#: tokens of hubs and trackers
_HANDED_ON = ("HF_TOKEN", "WANDB_API_KEY", "SWANLAB_API_KEY")
_TOKEN = "/run/mindspeed-rl/token"
#: exit code of a run file that is refused, which no restart mends
_REFUSED = 2
#: machine -> its devices (0: a run on CPUs, whose processes share one machine)
_MACHINES = {"a2": 8, "a3": 16, "a5": 8, "cpu": 0}
#: start of a word in the name of a run file -> machine
_NAMED = (("a2", "a2"), ("a3", "a3"), ("a5", "a5"), ("950", "a5"))
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?")
_FIND_ADDRESS = "getent ahostsv4 {host} | awk 'NR==1 {{print $1}}'"


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a file says.

    Attributes:
        name: name of the job, of letters, digits and hyphens.
        nodes, npus: machines, and devices that the run has on each.
        train: arguments of `mindspeed-rl train`.
        grace_s: seconds that the run has to save after SIGTERM.
        resource: name of a device for the scheduler.
        image, workdir: container, and the folder in it where the command runs.
        set_env: script with the variables of CANN, below the checkout; "" on CPUs.
        shm_gib: size of /dev/shm.
        mounts: (path or claim, folder in the container).
        queue: queue or partition; "" for the scheduler's default.
        retries: restarts after a failure.
        port, socket_ifname: as for `launch`.
        time_limit: Slurm's limit, "" for the partition's.
        ray_version: version of Ray in the image.
        has_token: the nodes authenticate each other by a secret.
    """

    name: str
    nodes: int
    npus: int
    train: tuple[str, ...]
    grace_s: float
    resource: str
    image: str
    workdir: str
    set_env: str
    shm_gib: int
    mounts: tuple[tuple[str, str], ...]
    queue: str
    retries: int
    port: int
    socket_ifname: str
    time_limit: str
    ray_version: str
    has_token: bool

    @property
    def host_paths(self) -> Mapping[str, str]:
        """Paths of the host that a container of this job mounts, by their paths there; none on CPUs."""
        return _HOST_PATHS if self.npus else {}

    def build_launch(self, master: str, rank: str, token: str = _TOKEN) -> str:
        """Return the shell command of a node; the arguments are shell words."""
        words = ["mindspeed-rl", "launch", "--nodes", str(self.nodes), "--npus-per-node", str(self.npus)]
        words += ["--port", str(self.port)]
        words += ["--socket-ifname", self.socket_ifname] if self.socket_ifname else []
        command = f"{shlex.join(words)} --master-addr {master} --node-rank {rank}"
        command += f" --token-file {token}" if self.has_token else ""
        return f"{command} -- {shlex.join(self.train)}"

    def list_variables(self) -> dict[str, str]:
        """Return variables of a container: bash reads the file of the first before any command, so that CANN is found."""
        variables = {"BASH_ENV": f"{self.workdir}/{self.set_env}"} if self.set_env else {}
        names = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
        return variables | (dict.fromkeys(names, self.socket_ifname) if self.socket_ifname else {})

    @property
    def secret(self) -> str:
        """Name of the Kubernetes secret with the cluster's token."""
        return f"{self.name}-token"


# ---------------------------------------------------------------- Kubernetes


def _build_pod(job: Job, command: str | None, *, token: bool) -> dict[str, Any]:
    """Return the specification of a pod with the devices of a node; without a command an operator starts Ray in it."""
    mounts: list[dict[str, Any]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[dict[str, Any]] = [
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{job.shm_gib}Gi"}},
    ]
    for index, (path, kind) in enumerate(job.host_paths.items()):
        volumes.append({"name": f"host-{index}", "hostPath": {"path": path, "type": kind}})
        mounts.append({"name": f"host-{index}", "mountPath": path, "readOnly": True})
    for index, (source, target) in enumerate(job.mounts):
        claim = {"persistentVolumeClaim": {"claimName": source}}
        host = {"hostPath": {"path": source, "type": "DirectoryOrCreate"}}
        volumes.append({"name": f"data-{index}", **(host if source.startswith("/") else claim)})
        mounts.append({"name": f"data-{index}", "mountPath": target})
    if token:
        volumes.append({"name": "token", "secret": {"secretName": job.secret, "defaultMode": 0o400}})
        mounts.append({"name": "token", "mountPath": str(Path(_TOKEN).parent), "readOnly": True})
    container: dict[str, Any] = {
        "name": "mindspeed-rl",
        "image": job.image,
        "imagePullPolicy": "IfNotPresent",
        "workingDir": job.workdir,
        # tokens of hubs and trackers: HF_TOKEN, WANDB_API_KEY ...
        "envFrom": [{"secretRef": {"name": f"{job.name}-env", "optional": True}}],
        "volumeMounts": mounts,
    }
    if command is not None:
        container["command"] = ["/bin/bash", "-c", command]
    if variables := job.list_variables():
        container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    if job.npus:
        # as many are requested as are allowed: devices are not shared
        container["resources"] = {part: {job.resource: str(job.npus)} for part in ("requests", "limits")}
    return {
        "restartPolicy": "Never",
        # HCCL and Ray connect to the addresses of the machines
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "terminationGracePeriodSeconds": math.ceil(job.grace_s) + 60,
        "containers": [container],
        "volumes": volumes,
    }


def _describe_secrets(job: Job) -> str:
    """Return the comment lines about what has to be there before a Kubernetes job."""
    create = "kubectl create secret generic"
    lines = [f"# Tokens of hubs and trackers, if needed: {create} {job.name}-env --from-literal=HF_TOKEN=..."]
    if job.has_token:
        lines.append(f'# Secret of the nodes: {create} {job.secret} --from-literal=token="$(openssl rand -hex 32)"')
    return "\n".join(lines)


def _dump(content: object) -> str:
    """Return YAML in the order of the content, with texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True  # head and workers have the same template

    def represent(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    return yaml.dump(content, Dumper=Dumper, sort_keys=False, width=1000, allow_unicode=True)


def _write_volcano(job: Job) -> str:
    host = '"${VC_NODE_HOSTS%%,*}"'  # of the svc plugin; the index is of the env plugin
    wait = f'until MASTER_ADDR="$({_FIND_ADDRESS.format(host=host)})" && [ -n "$MASTER_ADDR" ]; do sleep 1; done'
    command = f"{wait}\nexec {job.build_launch(chr(34) + '$MASTER_ADDR' + chr(34), chr(34) + '$VC_TASK_INDEX' + chr(34))}\n"
    spec: dict[str, Any] = {
        "minAvailable": job.nodes,
        "schedulerName": "volcano",
        "maxRetry": job.retries,
        "plugins": {"env": [], "svc": []},
        "policies": [
            {"action": "AbortJob", "exitCode": _REFUSED},
            {"action": "RestartJob", "event": "PodEvicted"},
            {"action": "RestartJob", "event": "PodFailed"},
        ],
        "tasks": [
            {
                "name": "node",
                "replicas": job.nodes,
                "policies": [{"action": "CompleteJob", "event": "TaskCompleted"}],
                "template": {
                    "metadata": {"labels": {"app": job.name}},
                    "spec": _build_pod(job, command, token=job.has_token),
                },
            }
        ],
    }
    if job.queue:
        spec["queue"] = job.queue
    content = {"apiVersion": "batch.volcano.sh/v1alpha1", "kind": "Job", "metadata": {"name": job.name}, "spec": spec}
    return f"# kubectl create -f FILE\n{_describe_secrets(job)}\n{_dump(content)}"


def _write_rayjob(job: Job) -> str:
    start = {"resources": json.dumps(json.dumps({"NPU": job.npus}))} if job.npus else {}
    template = {"metadata": {"labels": {"app": job.name}}, "spec": _build_pod(job, None, token=False)}
    # its restarts are the operator's
    template["spec"].pop("restartPolicy")
    cluster: dict[str, Any] = {
        "rayVersion": job.ray_version,
        "headGroupSpec": {"rayStartParams": {"dashboard-host": "0.0.0.0", **start}, "template": template},
    }
    if job.nodes > 1:
        workers = job.nodes - 1
        sizes = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        cluster["workerGroupSpecs"] = [{"groupName": "node", **sizes, "rayStartParams": start, "template": template}]
    if job.has_token:
        cluster["authOptions"] = {"mode": "token"}
    spec: dict[str, Any] = {
        "entrypoint": shlex.join(["mindspeed-rl", *job.train]),
        "submissionMode": "K8sJobMode",
        "backoffLimit": job.retries,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "rayClusterSpec": cluster,
    }
    metadata: dict[str, Any] = {"name": job.name}
    if job.queue:
        metadata["labels"] = {"ray.io/scheduler-name": "volcano", "volcano.sh/queue-name": job.queue}
    content = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}
    # the operator makes the secret of the nodes
    secrets = _describe_secrets(replace(job, has_token=False))
    return f"# kubectl create -f FILE   (KubeRay 1.5 or later; the image needs ray[default])\n{secrets}\n{_dump(content)}"


# ---------------------------------------------------------------- machines without Kubernetes


def _write_slurm(job: Job) -> str:
    settings = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "exclusive": None,
        "requeue": None,
        "open-mode": "append",
        "output": f"{job.name}-%j.log",
        # before the time limit, to the steps of the job: the iteration is saved
        "signal": f"TERM@{math.ceil(job.grace_s) + 60}",
        **({"gres": f"{job.resource}:{job.npus}"} if job.npus else {}),
        **({"partition": job.queue} if job.queue else {}),
        **({"time": job.time_limit} if job.time_limit else {}),
    }
    lines = ["#!/bin/bash", *(f"#SBATCH --{name}" + ("" if value is None else f"={value}") for name, value in settings.items())]
    lines += ["# sbatch FILE, from the checkout of the suite", "set -euo pipefail"]
    lines += [f'source "$SLURM_SUBMIT_DIR/{job.set_env}"'] if job.set_env else []
    lines += ['head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"']
    head = '"$head"'
    lines.append(f'MASTER_ADDR="$({_FIND_ADDRESS.format(host=head)})"')
    lines.append("export MASTER_ADDR")
    token = ""
    if job.has_token:
        # on the disk that all nodes share, readable by the user only
        lines.append('export TOKEN_FILE="$SLURM_SUBMIT_DIR/.token-$SLURM_JOB_ID"')
        lines.append('(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d " \\n" > "$TOKEN_FILE")')
        lines.append("trap 'rm -f \"$TOKEN_FILE\"' EXIT")
        token = '"$TOKEN_FILE"'
    command = job.build_launch('"$MASTER_ADDR"', '"$SLURM_NODEID"', token)
    lines.append(f"for attempt in $(seq 0 {job.retries}); do")
    lines.append("    code=0")
    lines.append(f"    srun --kill-on-bad-exit=1 bash -c {shlex.quote(f'exec {command}')} || code=$?")
    # a refused run file, and the signal before the time limit
    lines.append(f'    if [ "$code" -eq 0 ] || [ "$code" -eq {_REFUSED} ] || [ "$code" -ge 128 ]; then break; fi')
    lines += ["done", 'exit "$code"']
    return "\n".join(lines) + "\n"


def _write_compose(job: Job) -> str:
    # compose fills in its variables; a dollar sign that is not one of them is written twice
    command = job.build_launch("MASTER_ADDR", "NODE_RANK", "/run/secrets/token").replace("$", "$$")
    command = command.replace("MASTER_ADDR", "${MASTER_ADDR:-127.0.0.1}", 1).replace("NODE_RANK", "${NODE_RANK:-0}", 1)
    volumes = [f"{path}:{path}:ro" for path in job.host_paths]
    volumes += [f"{source}:{target}" for source, target in job.mounts]
    service: dict[str, Any] = {
        "image": job.image,
        "working_dir": job.workdir,
        "command": ["/bin/bash", "-c", f"exec {command}"],
        "network_mode": "host",
        "ipc": "private",
        "shm_size": f"{job.shm_gib}gb",
        "ulimits": {"nofile": 65536, "memlock": -1},
        "restart": f"on-failure:{job.retries}" if job.retries else "no",
        "stop_grace_period": f"{math.ceil(job.grace_s) + 60}s",
        # those without a value are taken over from the shell, where they are set
        "environment": [*_HANDED_ON, *(f"{name}={value}" for name, value in job.list_variables().items())],
    }
    if job.npus:
        service["devices"] = [*_CONTROL_DEVICES, *(f"/dev/davinci{index}" for index in range(job.npus))]
    if volumes:
        service["volumes"] = volumes
    content: dict[str, Any] = {"name": job.name, "services": {"node": service}}
    if job.has_token:
        service["secrets"] = ["token"]
        content["secrets"] = {"token": {"file": "${TOKEN_FILE:-./token}"}}
    lines = ["# docker compose -f FILE up"]
    if job.nodes > 1:
        lines = ["# On every node, with its rank: NODE_RANK=0 MASTER_ADDR=10.0.0.4 docker compose -f FILE up"]
    if job.has_token:
        lines.append("# Before: (umask 077; openssl rand -hex 32 > token), the same file on every node")
    return "\n".join(lines) + "\n" + _dump(content)


#: kind of file -> its text
WRITERS: dict[str, Callable[[Job], str]] = {
    "volcano": _write_volcano,
    "rayjob": _write_rayjob,
    "slurm": _write_slurm,
    "docker-compose": _write_compose,
}


# ---------------------------------------------------------------- from the run file


def _make_parser() -> Parser:
    parser = Parser(
        prog="mindspeed-rl launch --write",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--write", choices=tuple(WRITERS), required=True, metavar="KIND", help=", ".join(WRITERS))
    add("--config-name", "--config", metavar="RUN", help="the run file as an option, as other commands have it")
    add("words", nargs="*", metavar="RUN key=value", help="run file, as the nodes find it, and overrides as for training")
    add("-o", "--output", type=Path, required=True, help="file to write; - prints it")
    machine = "kind of the machines, as the folders of envs/; default: cpu for a run on CPUs, else that in the run file's name"
    add("--machine", choices=tuple(_MACHINES), help=machine)
    add("--npus-per-node", type=int, help="devices of a machine; default: a2 and a5 8, a3 16")
    add("--nodes", type=int, help="machines; default: as few as have the devices of the run")
    add("--name", help="name of the job; default: from the run file")
    add("--image", help="container image, from envs/<machine>/Dockerfile; default mindspeed-rl:<machine>")
    add("--workdir", default="/opt/mindspeed-rl", help="folder in the container where the command runs; default %(default)s")
    mounted = "folder of the host, or name of a volume claim; may be repeated"
    add("--mount", action="append", default=[], metavar="SOURCE:FOLDER", help=mounted)
    resources = "huawei.com/Ascend910 (default), huawei.com/ascend-1980 (CCE, ModelArts); Slurm: name of the gres (npu)"
    add("--device-resource", help=f"name of a device: {resources}")
    add("--shm-gib", type=int, default=64, help="size of /dev/shm; default %(default)s")
    add("--queue", default="", help="queue of Volcano, or partition of Slurm")
    add("--retries", type=int, default=3, help="restarts after a failure; default %(default)s")
    add("--port", type=int, default=6766, help="port of the head's Ray; default %(default)s")
    add("--socket-ifname", default="", help="network interface between nodes")
    add("--time", default="", help="Slurm: time limit, such as 2-00:00:00")
    add("--no-token", action="store_true", help="nodes that do not authenticate each other; trusted networks only")
    return parser


def _find_machine(platform: str, run: str) -> str:
    """Return the kind of machine of a run on CPUs, or the one that the name of a run file has, such as ..._A3.

    Raises:
        ValueError: the name has none.
    """
    if platform == "cpu":
        return "cpu"
    words = re.split(r"[_.-]", Path(run).stem.lower())
    named = list(dict.fromkeys(machine for word in words for start, machine in _NAMED if word.startswith(start)))
    if len(named) != 1:
        kinds = ", ".join(f"{name} ({count} devices)" for name, count in _MACHINES.items() if count)
        raise ValueError(f"--machine is missing, and the name {Path(run).stem} has none: {kinds}")
    print(f"machines: {named[0]}, which the name of the run file has (--machine)", file=sys.stderr)
    return named[0]


def _build_job(args: argparse.Namespace) -> Job:
    _check(args)
    args.overrides = list(args.words)
    args.run = args.config_name or (args.overrides.pop(0) if args.overrides else None)
    if args.run is None:
        raise ValueError("there is no run file: launch --write KIND RUN -o FILE")
    if misplaced := next((word for word in args.overrides if "=" not in word), None):
        raise ValueError(f"{misplaced!r} is not key=value; one RUN is written at a time")
    cfg = load_run_config(args.run, None, args.overrides)
    # rules and placement do without torch
    from mindspeed_rl.run.resolve import resolve

    args.machine = args.machine or _find_machine(cfg.platform, args.run)
    on_devices = args.machine != "cpu"
    if on_devices == (cfg.platform == "cpu"):
        raise ValueError(f"--machine {args.machine} does not suit {args.run}, which has platform: {cfg.platform}")
    if args.npus_per_node is not None and not on_devices:
        raise ValueError("--npus-per-node: a run on CPUs has no devices")
    platform = "npu" if on_devices else "cpu"
    devices = resolve(cfg, platform=platform).placement.num_devices
    per_node = args.npus_per_node or _MACHINES[args.machine] or devices
    nodes = args.nodes or -(-devices // per_node)
    if nodes * per_node < devices:
        raise ValueError(f"--nodes {nodes} with {per_node} devices each are fewer than the {devices} of {args.run}")
    resolve(cfg, nodes, platform=platform)
    name = args.name or re.sub(r"[^a-z0-9]+", "-", Path(args.run).stem.lower()).strip("-")[:42].rstrip("-")
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"--name {name!r}: letters a to z, digits and hyphens, 42 at most")
    resource = args.device_resource or _RESOURCES[args.write]
    mounts = tuple(_split_mount(text) for text in args.mount)
    _note_paths(cfg, args.write, [target for _, target in mounts])
    return Job(
        name=name,
        nodes=nodes,
        npus=min(per_node, devices) if on_devices else 0,
        train=("train", "--config-name", args.run, "--nodes", str(nodes), *args.overrides),
        grace_s=cfg.actor_config.sigterm_grace_s,
        resource=resource,
        image=args.image or f"mindspeed-rl:{args.machine}",
        workdir=args.workdir.rstrip("/"),
        set_env=f"envs/npu_{args.machine}/set_env.sh" if on_devices else "",
        shm_gib=args.shm_gib,
        mounts=mounts,
        queue=args.queue,
        retries=args.retries,
        port=args.port,
        socket_ifname=args.socket_ifname,
        time_limit=args.time,
        ray_version=_find_ray_version() if args.write == "rayjob" else "",
        has_token=not args.no_token,
    )


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError for options that the file cannot have."""
    wrong = {
        f"--shm-gib is {args.shm_gib}; it must be at least 1": args.shm_gib < 1,
        f"--retries is {args.retries}; it must be at least 0": args.retries < 0,
        f"--npus-per-node is {args.npus_per_node}; it must be at least 1": args.npus_per_node is not None
        and args.npus_per_node < 1,
        f"--port {args.port} must be from 1 to 65535": not 0 < args.port < 65536,
        f"--time belongs to slurm; --write is {args.write}": bool(args.time) and args.write != "slurm",
        "--queue: docker compose has no queues": bool(args.queue) and args.write == "docker-compose",
        "--mount: a Slurm job runs on the machines themselves, without containers": bool(args.mount) and args.write == "slurm",
        "--device-resource: docker compose names the devices one by one": bool(args.device_resource)
        and args.write == "docker-compose",
        f"--nodes is {args.nodes}; it must be at least 1": args.nodes is not None and args.nodes < 1,
    }
    for text, applies in wrong.items():
        if applies:
            raise ValueError(text)


def _split_mount(text: str) -> tuple[str, str]:
    source, separator, target = text.partition(":")
    if not separator or not source or not target.startswith("/") or ":" in target:
        raise ValueError(f"--mount {text!r}: expected /folder/of/host:/folder or name-of-a-claim:/folder")
    return source, target


def _note_paths(cfg: RunConfig, kind: str, targets: Sequence[str]) -> None:
    """Print which absolute paths of the run file no mount brings into the container."""
    if kind == "slurm":
        return
    for group, values in cfg.as_written().items():
        for key, value in values.items():
            for path in value if isinstance(value, list) else [value]:
                is_inside = isinstance(path, str) and any(Path(path).is_relative_to(target) for target in targets)
                if key in PATH_KEYS and isinstance(path, str) and path.startswith("/") and not is_inside:
                    print_status(f"note: {group}.{key} {path} is below no --mount; the image must have it")


def _find_ray_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("ray")
    except PackageNotFoundError:
        raise ValueError("ray is not installed here; a RayJob names the version that its image has") from None


def main(argv: list[str]) -> int:
    """Write the file and return 0; 2 with one line where that is not possible."""
    try:
        args = _make_parser().parse_intermixed_args(argv)
        text = WRITERS[args.write](_build_job(args))
        if str(args.output) == "-":
            print(text, end="", flush=True)
        else:
            write_file(args.output, text)
            print_status(f"wrote {args.output}")
    except (ValueError, OSError) as error:
        return report_failure(error)
    return 0
