"""The launch and the end of every run: checks, run folder, Ray, workers, loop; and all of it closed afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import platform as machine
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from mindspeed_rl.config import MegatronConfig, RLConfig
from mindspeed_rl.files import write_file
from mindspeed_rl.observability import heartbeat
from mindspeed_rl.observability.alerts import LiveAlerts
from mindspeed_rl.observability.console import IterationProgress, StartSteps, format_table
from mindspeed_rl.observability.folder_locks import hold_folders
from mindspeed_rl.observability.history import History
from mindspeed_rl.observability.observer import RunObserver
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.observability.trackers import make_trackers
from mindspeed_rl.redaction import hide_in_configuration, hide_in_environment
from mindspeed_rl.run import Run
from mindspeed_rl.run.explain.effects import find_warnings
from mindspeed_rl.run.machine import wait_for_servers
from mindspeed_rl.runtime.cluster import connect_cluster
from mindspeed_rl.trainers.rl import RLTrainer
from mindspeed_rl.trainers.rl_setup import RLInputs, build_trainer, check_rl, start_services
from mindspeed_rl.trainers.run_folder import RunAdvisor, report_outcome
from mindspeed_rl.trainers.run_logger import LogOutputs
from mindspeed_rl.trainers.sft_setup import SupervisedInputs, build_supervised_trainer, check_supervised, start_workers
from mindspeed_rl.trainers.supervised import SupervisedTrainer
from mindspeed_rl.trainers.termination import Termination


def _dump_configuration(run: Run) -> None:
    """Write `configurations.json` of the dump where it is asked for: run file, all keys, versions and environment.

    Values that may be secrets are left out, see `redaction`.
    """
    config = run.config.msprobe_config
    if not (config.msprobe and config.configurations_dump):
        return
    content = {
        "run_file": hide_in_configuration(run.config.as_written()),
        "configuration": hide_in_configuration(dataclasses.asdict(run.config)),
        "versions": {dist.metadata["Name"]: dist.version for dist in metadata.distributions()},
        "machine": {"python": sys.version, "system": machine.platform(), "torch": torch.__config__.show()},
        "environment": hide_in_environment(os.environ),
    }
    text = json.dumps(content, indent=1, default=str, sort_keys=True)
    write_file(Path(config.dump_path, "configurations.json"), text + "\n", makes_folder=True)


@contextlib.contextmanager
def launch(
    run: Run, advisor: RunAdvisor | None = None, observers: Sequence[RunObserver] = ()
) -> Iterator[RLTrainer | SupervisedTrainer]:
    """Yield a trainer with all its processes running.

    All errors in files and keys are found before Ray starts. When the block ends, however it ends, all processes are gone and
    the run folder has a report of the outcome. Signals are handled in the block; see `Termination`.

    Args:
        advisor: adds its plan to console and report, for example `planner.prediction.predict(run)`.
        observers: follow the figures of the iterations.

    Raises:
        ValueError: a key or file is wrong.
        WorkerError: a worker died or raised.
        Terminated: SIGTERM, SIGHUP or Ctrl-C came.
    """
    torch.set_num_threads(1)  # the cores are the workers'
    steps, roles = StartSteps(), {"actor_config": run.config.actor_config, "critic_config": run.config.critic_config}
    folders = {f"{name}.save": Path(role.save) for name, role in roles.items() if role is not None and role.save}
    folders["run_dir"] = run.folder
    folders = {name: path.expanduser() for name, path in folders.items()}
    there = {name: path for name, path in folders.items() if path.is_dir() and os.access(path, os.W_OK)}
    with contextlib.ExitStack() as held:
        # first: no other run writes a checkpoint while it is decided where this one resumes
        held.enter_context(hold_folders(there))
        wait_for_servers(run)
        inputs = check_supervised(run) if run.config.is_supervised else check_rl(run)
        # made only now: a wrong key leaves no run folder behind
        held.enter_context(hold_folders({name: path for name, path in folders.items() if name not in there}))
        yield held.enter_context(_start(inputs, advisor, observers, steps))


@contextlib.contextmanager
def _start(
    inputs: RLInputs | SupervisedInputs, advisor: RunAdvisor | None, observers: Sequence[RunObserver], steps: StartSteps
) -> Iterator[RLTrainer | SupervisedTrainer]:
    """Yield a trainer with all its processes running, for inputs that were checked; see `launch`."""
    run, cfg = inputs.run, inputs.run.config  # with the length of the run, where the prompts decide it
    rl, actor = cfg.rl_config or RLConfig(), cfg.actor_config
    termination = Termination(actor.sigterm_grace_s)
    outcome = report_outcome(run, advisor)
    with termination.handled(), outcome as report, termination.explain_failures(), contextlib.ExitStack() as stack:
        beat = heartbeat.start(run.folder, "driver", interval_s=run.fault_tolerance.heartbeat_interval_s)
        stack.callback(beat.end)
        _dump_configuration(run)
        shown = hide_in_configuration(dataclasses.asdict(cfg))
        trackers = make_trackers(rl, run.folder, shown, last_iteration=inputs.resume.iteration)
        steps.done("files and keys are checked")
        rows = _plan_rows(run, inputs.num_devices)
        if advisor is not None:
            rows["planned"] = advisor.summary
        print(format_table(f"run folder: {run.folder}", rows), flush=True)
        if advisor is not None and advisor.lines:
            print("\n".join(["promise", *(f"  {line}" for line in advisor.lines)]), flush=True)
        print(inputs.summary, flush=True)
        for text in find_warnings(run):
            print(f"warning: {text}", flush=True)
        cpus, logs = rl.num_cpus_for_placement_group, run.folder / "logs" / "ray"
        stack.enter_context(connect_cluster(inputs.num_devices, run.platform, cpus_per_device=cpus, logs=logs))
        termination.install()
        steps.done("Ray runs")

        def open_outputs(resumed: Mapping[str, Any], every: int) -> LogOutputs:
            assert run.plan.train_iters is not None  # resolve refuses a run without a length
            start, title = resumed.get("iteration", 0), Path(cfg.config_name).stem
            progress = stack.enter_context(IterationProgress(
                run.plan.train_iters, title, start=start, every=every, activity=partial(heartbeat.describe_counts, run.folder)
            ))
            metrics = list(read_lines(run.folder / "metrics.jsonl"))
            alerts = LiveAlerts(History(metrics), progress.note)
            watches = [] if advisor is None else [advisor.watch(History(metrics), progress.note)]
            return LogOutputs(run.folder, trackers, progress, steps, (alerts, report, *watches, *observers))

        trainer: RLTrainer | SupervisedTrainer
        if isinstance(inputs, RLInputs):
            services = start_services(inputs, stack, steps)
            trainer = build_trainer(inputs, services, open_outputs(services.resumed, 1), termination)
        else:
            workers = start_workers(inputs, stack, steps)
            outputs = open_outputs(workers.resumed, actor.log_interval)
            trainer = build_supervised_trainer(inputs, workers, outputs, termination)
        stack.callback(trainer.logger.close)
        # what is here lives as long as the trainer, 230,000 objects of modules most of all: no collection visits it again,
        # which took 0.13 s of each full one, and more of them the more rows an iteration has
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        yield trainer


def _plan_rows(run: Run, num_devices: int) -> dict[str, str]:
    """Return the plan of a run as rows of a table for the console; `mindspeed-rl explain` shows all of it.

    Args:
        num_devices: number of devices of all roles.
    """
    cfg, plan, actor = run.config, run.plan, run.config.actor_config
    rows = {
        "stage": run.stage,
        "model": str(actor.pretrained_checkpoint or actor.load or actor.model or "fresh weights"),
        "devices": f"{num_devices} x {run.platform} on {run.num_nodes} node(s), {_describe_layout(actor)}"
        + ("" if run.threads is None else f", {run.threads.count} thread(s) each"),
        "length": f"{plan.train_iters} iterations",
    }
    if run.attention is not None:
        rows["attention"] = run.attention.reason
    if cfg.is_supervised:
        rows["batch"] = f"{plan.num_samples} samples a step, micro-batches of {plan.micro_batch_size}"
    else:
        sampling, steps = run.generate.sampling_config, plan.num_optimizer_steps
        limits = f"at most {sampling.max_tokens} tokens, temperature {sampling.temperature:g}"
        rows["rollout"] = f"{plan.num_prompts} prompts x {plan.n_samples_per_prompt} responses, {limits}"
        rows["update"] = (
            f"{steps} optimizer step(s) of {plan.mini_batch_size} responses, micro-batches of {plan.micro_batch_size}"
        )
        rows["rewards"] = ", ".join(
            [*(run.rl.verifier_function if run.rl.rule_reward else []), *(["reward model"] if run.rl.reward_model else [])]
            + (["judge"] if run.rl.judge_url or run.rl.served_judge else [])
        )
    rows["learning rate"] = f"{actor.lr:g}, {actor.lr_decay_style}" if actor.lr is not None else ""
    rows["adapters"] = f"{', '.join(actor.adapted_parts)}, rank {actor.lora_r}" if actor.lora_target_modules else ""
    path = actor.data_path
    rows["data"] = ", ".join(map(str, path)) if isinstance(path, list) else path or ""
    rows["saves to"] = f"{actor.save}, every {actor.save_interval or plan.train_iters} iterations" if actor.save else "nowhere"
    return rows


def _describe_layout(actor: MegatronConfig) -> str:
    sizes = {
        "TP": actor.tensor_model_parallel_size,
        "PP": actor.pipeline_model_parallel_size,
        "CP": actor.context_parallel_size,
        "EP": actor.expert_model_parallel_size,
    }
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return ", ".join([*parts, "bf16" if actor.bf16 else "fp32"])
