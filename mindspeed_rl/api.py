"""The commands `explain` and `train` as functions, for notebooks and programs: `from mindspeed_rl import Run, explain, train`.

    run = Run.load("own.yaml", {"actor_config.lr": 1e-5})
    run.explain()
    result = train(run, reward=my_function, on_iteration=lambda iteration, metrics: print(metrics["rewards/total_mean"]))
    print(result.metrics[-1], result.model)

Nothing is decided here: a run does what the command does with the same run file, and writes the same files.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import cloudpickle
import numpy as np

from mindspeed_rl import registry
from mindspeed_rl.cli.explain import build_report
from mindspeed_rl.cli.train import prepare_run
from mindspeed_rl.config import RunConfig, build_run_config
from mindspeed_rl.config.run_files import apply_values, compose, locate
from mindspeed_rl.files import write_file
from mindspeed_rl.observability.observer import AttemptObserver, EndingObserver
from mindspeed_rl.observability.run_files import read_lines
from mindspeed_rl.rewards import REWARDS, RewardFunction
from mindspeed_rl.run import Run as ResolvedRun
from mindspeed_rl.run.draft import draft
from mindspeed_rl.run.explain.plan_page import Report, render
from mindspeed_rl.service.backend import (
    AdamParams,
    AdapterSpec,
    Datum,
    LossCall,
    LossName,
    PassResult,
    Sample,
    SampleCall,
    sample_together,
)
from mindspeed_rl.service.local_backend import LocalBackend

_Result = TypeVar("_Result")

#: function of a user: gets the index of the iteration and its metrics; False ends the run after this iteration
Callback = Callable[[int, Mapping[str, float]], object]

_PLUGIN = '''"""Reward functions that a program gave to `mindspeed_rl.train`; written by it."""

import base64
import pickle
import sys

from mindspeed_rl.rewards import register

sys.path += [folder for folder in {folders!r} if folder not in sys.path]
for name, function in pickle.loads(base64.b85decode({content!r})).items():
    register(name)(function)
'''


@dataclass(frozen=True)
class Result:
    """The files and metrics of a run.

    Attributes:
        folder: run folder: report.html, metrics.jsonl, logs.
        metrics: metrics of each iteration, in order, as in metrics.jsonl; from the first iteration on, also in a resumed run.
        checkpoint: folder that holds the checkpoints; None if the run saves none.
        model: Hugging Face folder of the newest checkpoint; None without `save_hf`.
        ended_early: `on_iteration` returned False.
    """

    folder: Path
    metrics: list[dict[str, float]]
    checkpoint: Path | None = None
    model: Path | None = None
    ended_early: bool = False

    @property
    def report(self) -> Path:
        """The page of the run."""
        return self.folder / "report.html"


@dataclass(frozen=True)
class Run:
    """A run file with its overrides; `config` is read-only.

    Attributes:
        config: all keys, typed.
        num_nodes: machines that the devices are spread over.
        tree: the keys that the run file and the overrides set.
    """

    config: RunConfig
    num_nodes: int = 1
    tree: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, config_name: str | Path, overrides: Mapping[str, object] | None = None, *, num_nodes: int = 1) -> Run:
        """Read a run file.

        Args:
            config_name: path of the run file, or name of one that is included.
            overrides: values by dotted key, such as {"actor_config.lr": 1e-5}.

        Raises:
            ValueError: no such file, an unknown key, a wrong type; all violations at once.
        """
        if num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes}, but must be at least 1")
        folder, name = locate(str(config_name), None)
        tree = apply_values(compose(folder, name, []), overrides or {})
        cfg = build_run_config(tree, config_name=name, config_dir=str(folder))
        return cls(draft(cfg, num_nodes).config, num_nodes, tree)

    def with_values(self, values: Mapping[str, object]) -> Run:
        """Return the run with other values of some keys.

        Raises:
            ValueError: an unknown key or a wrong type.
        """
        tree, cfg = apply_values(self.tree, values), self.config
        cfg = build_run_config(tree, config_name=cfg.config_name, config_dir=cfg.config_dir)
        return Run(draft(cfg, self.num_nodes).config, self.num_nodes, tree)

    def explain(self, *, shows: bool = True) -> Report:
        """Print the plan as `mindspeed-rl explain` does, and return it; "errors" has what `train` would refuse.

        Args:
            shows: print it.
        """
        with _as_command():
            report = build_report(self.config, self.num_nodes, checks_files=True)
        if shows:
            print(render(report), flush=True)
        return report


class Trainer:
    """A model that trains and samples call by call in this process, for your own loops, with the calls of the Tinker API.

        with Trainer("serve_tiny_cpu", rank=8) as trainer:
            samples = trainer.sample([prompt], num_samples=8, max_tokens=16)[0]
            batch = [trainer.make_datum(prompt, sample, advantage) for sample, advantage in zip(samples, advantages)]
            trainer.forward_backward(batch, "importance_sampling")
            trainer.optim_step(learning_rate=1e-4)

    A process can have one at a time. Engines run in a thread, so that a notebook's event loop does not matter.
    """

    _MODEL = "model"

    def __init__(
        self,
        run_file: str | Path | Run,
        overrides: Mapping[str, object] | None = None,
        *,
        rank: int | None = None,
        seed: int = 0,
    ) -> None:
        """Load the base model, and make an adapter.

        Args:
            run_file: a run file with `serve_config`, or a `Run` of one.
            overrides: values by dotted key.
            rank: rank of the adapter; None for `lora_r`, and for full weights, which a run file without adapters trains.
            seed: seed of the adapter's first weights.

        Raises:
            ValueError: the run file is wrong; all violations are named.
        """
        run = run_file if isinstance(run_file, Run) else Run.load(run_file)
        run = run.with_values(overrides) if overrides else run
        if rank is not None and not run.config.actor_config.lora_target_modules:
            raise ValueError(f"rank is {rank}, but a run file without actor_config.lora_target_modules trains full weights")
        self._backend = LocalBackend.open(run.config, run.num_nodes)
        self.capabilities = self._backend.capabilities()
        spec = None if self.capabilities.full_weights else AdapterSpec(rank or self.capabilities.max_rank, seed=seed)
        self._do(lambda tenants: tenants.create_model(self._MODEL, spec))
        self._sampler: str | None = None
        self.tokenizer: Any = self._do(lambda tenants: tenants.tokenizer)

    def _do(self, function: Callable[[Any], _Result]) -> _Result:
        return self._backend.submit(function).result()

    def forward_backward(self, batch: Sequence[Datum], loss: LossName = "cross_entropy", **config: float) -> PassResult:
        """Compute a loss and add its gradient to the one of earlier calls since the last step; a sum over tokens, no mean.

        Args:
            batch: sequences with the inputs of the loss.
            loss: cross_entropy, importance_sampling, ppo, cispo, dro or gspo.
            config: thresholds of the loss, such as clip_high_threshold.

        Raises:
            ValueError: a datum, the loss or a threshold is wrong; the gradient is as before.
        """
        return self._pass(batch, loss, config, forward_only=False)

    def forward(self, batch: Sequence[Datum], loss: LossName = "cross_entropy", **config: float) -> PassResult:
        """Compute a loss without a gradient."""
        return self._pass(batch, loss, config, forward_only=True)

    def _pass(self, batch: Sequence[Datum], loss: LossName, config: Mapping[str, float], *, forward_only: bool) -> PassResult:
        call = LossCall(loss, config)
        return self._do(lambda tenants: tenants.forward_backward(self._MODEL, batch, call, forward_only=forward_only))

    def optim_step(self, learning_rate: float, **others: float) -> Mapping[str, float]:
        """Make a step of AdamW with the sum of gradients; for further arguments see `AdamParams`."""
        params = AdamParams(learning_rate, **others)
        metrics = self._do(lambda tenants: tenants.optim_step(self._MODEL, params))
        self._drop_sampler()
        return metrics

    def sample(self, prompts: Sequence[str | Sequence[int]], **settings: Any) -> list[tuple[Sample, ...]]:
        """Sample every prompt with the weights as they are now; for further arguments see `SampleCall`.

        Args:
            prompts: texts, or ids of tokens.
        """
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        calls = [SampleCall(prompt, **settings) for prompt in ids]
        if self._sampler is None:
            self._sampler = self._do(lambda tenants: tenants.make_sampler(self._MODEL))
        sampler = self._sampler
        return [result.samples for result in self._do(lambda tenants: sample_together(tenants, sampler, calls))]

    def make_datum(self, prompt: str | Sequence[int], sample: Sample, advantage: float) -> Datum:
        """Return a sample as a datum of a loss of sampled tokens: every token of it has the advantage."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        before = len(ids) - 1
        tokens = np.array([*ids, *sample.tokens], np.int64)
        sampled = np.zeros(len(tokens) - 1, np.float32)
        sampled[before:] = 1.0
        log_probs = np.concatenate([np.zeros(before, np.float32), np.array(sample.log_probs, np.float32)])
        inputs = {"target_tokens": tokens[1:], "logprobs": log_probs, "advantages": advantage * sampled}
        return Datum(tokens[:-1].tolist(), inputs)

    def save(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Write the model into a new folder, from which `load` resumes exactly; `adapter/` in it is a PEFT folder."""
        self._do(lambda tenants: tenants.save_state(self._MODEL, Path(folder), with_optimizer=with_optimizer))

    def load(self, folder: str | Path, *, with_optimizer: bool = True) -> None:
        """Go on with the model of a folder of `save`; gradients that wait for a step are dropped."""
        self._do(lambda tenants: tenants.load_state(self._MODEL, Path(folder), with_optimizer=with_optimizer))
        self._drop_sampler()

    def save_merged(self, folder: str | Path) -> None:
        """Write the base with the adapter added into a new folder, which transformers and vLLM load."""
        self._do(lambda tenants: tenants.export_merged(self._MODEL, Path(folder)))

    def _drop_sampler(self) -> None:
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            self._do(lambda tenants: tenants.drop_sampler(sampler))

    def close(self) -> None:
        """End all work; the memory of the engines is the process's until it ends."""
        self._backend.stop()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def explain(run: Run, *, shows: bool = True) -> Report:
    """Print and return the plan of a run; see `Run.explain`."""
    return run.explain(shows=shows)


def train(
    run: Run,
    *,
    reward: RewardFunction | str | Sequence[RewardFunction | str] | None = None,
    on_iteration: Callback | None = None,
) -> Result:
    """Train as `mindspeed-rl train` does, to the end of the run.

    Args:
        run: from `Run.load`.
        reward: reward functions in place of the run file's: functions of this program (a closure or one of a notebook, too), or
            names. Each counts with weight 1. They run in processes of their own, as the functions of plug-in files do.
        on_iteration: called after each iteration, when its files are written; if it returns False, the run saves and ends.

    Raises:
        ValueError: a key, a file or a reward function is wrong; nothing was started.
        RuntimeError: a worker died or raised.
        KeyboardInterrupt: Ctrl-C, or "interrupt" in a notebook; all workers were ended.
    """
    if reward is not None:
        run = set_rewards(run, [reward] if isinstance(reward, str) or callable(reward) else list(reward))
    return run_to_end(run, _CallbackObserver(on_iteration))


def run_to_end(run: Run, observer: EndingObserver) -> Result:
    """Train to the end of the run, or until the observer ends it; raises what `train` raises."""
    with _as_command(), prepare_run(run.config, run.num_nodes) as resolved:
        # by name: these import torch and Ray, which read the environment
        launch, recovery_class, terminated, termination_class, predict = (
            registry.load(f"mindspeed_rl.{target}", "train")
            for target in (
                "trainers.launch:launch",
                "trainers.recovery:Recovery",
                "trainers.termination:Terminated",
                "trainers.termination:Termination",
                "planner.prediction:predict",
            )
        )
        recovery, attempts = recovery_class(resolved), AttemptObserver(observer)
        try:
            with termination_class().handled():  # also between two attempts
                for attempt in recovery.attempts():
                    with recovery.retry_on_fault(), launch(attempt, predict, [attempts, *recovery.observers]) as trainer:
                        recovery.follow(trainer.termination)
                        observer.end = lambda termination=trainer.termination: setattr(termination, "requested", True)
                        attempts.on_loop(trainer.train_iters)
                        trainer.fit()
        except terminated as error:
            if error.signum == signal.SIGINT:
                raise KeyboardInterrupt(str(error)) from None
            if not observer.has_ended:
                raise
        finally:
            attempts.end()
    return _read_result(resolved, ended_early=observer.has_ended)


def evaluate(run: Run) -> dict[str, float]:
    """Evaluate the weights that a run starts from on its held-out data; nothing trains.

    Returns:
        The figures of the evaluation, such as eval/reward or eval/loss.

    Raises:
        ValueError: a key or a file is wrong, or there is nothing to evaluate on.
        RuntimeError: a worker died or raised.
        KeyboardInterrupt: Ctrl-C, or "interrupt" in a notebook; all workers were ended.
    """
    if not run.config.actor_config.has_held_out_data:
        raise ValueError("megatron_training.eval_data_path: there is nothing to evaluate on; set it, or split")
    with _as_command(), prepare_run(run.config, run.num_nodes) as resolved:
        launch = registry.load("mindspeed_rl.trainers.launch:launch", "evaluate")
        terminated = registry.load("mindspeed_rl.trainers.termination:Terminated", "evaluate")
        try:
            with launch(resolved) as trainer:
                return trainer.evaluate()
        except terminated as error:
            raise KeyboardInterrupt(str(error)) from None


class _CallbackObserver(EndingObserver):
    """Give the figures of each iteration to a user's function."""

    def __init__(self, callback: Callback | None) -> None:
        super().__init__()
        self._callback = callback

    def on_figures(self, iteration: int, results: Mapping[str, float]) -> None:
        """Call the function; iteration 0 is the evaluation before the first one."""
        if self._callback is not None and self._callback(iteration, dict(results)) is False and iteration:
            self.end_run()


def set_rewards(run: Run, rewards: list[RewardFunction | str], weights: Sequence[float] | None = None) -> Run:
    """Return the run with these reward functions; functions of this program go to a plug-in file next to the run folder.

    Args:
        run: from `Run.load`.
        rewards: functions or names.
        weights: weight of each; 1 when not given.

    Raises:
        ValueError: the run has no reward functions, or a function cannot be written.
    """
    cfg = run.config
    if cfg.rl_config is None or cfg.is_supervised:
        raise ValueError(f"reward: stage {cfg.stage} has no reward functions")
    if weights is not None and len(weights) != len(rewards):
        raise ValueError(f"reward_weights: {len(weights)} weights for {len(rewards)} reward functions")
    functions: dict[str, RewardFunction] = {}
    names: list[str] = []
    for reward in rewards:
        name = reward if isinstance(reward, str) else getattr(reward, "__name__", type(reward).__name__).strip("<>")
        names.append(name)
        if not isinstance(reward, str):
            if name in REWARDS or name in functions:
                raise ValueError(f"reward: '{name}' is the name of another reward function; rename the function")
            functions[name] = reward
    plugins = list(cfg.rl_config.external_plugins)
    if functions:
        folder = Path(cfg.run_dir or f"runs/{cfg.config_name}").expanduser().absolute()
        path = folder.parent / f".{folder.name}_rewards.py"
        write_file(path, _PLUGIN.format(folders=[str(Path.cwd())], content=_pickle_functions(functions)), makes_folder=True)
        plugins.append(str(path))
    numbers = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]
    values = {"verifier_function": names, "verifier_weight": numbers, "external_plugins": plugins}
    values |= {"rule_reward": True, "reward_funcs": None, "reward_weights": None}
    return run.with_values({f"rl_config.{name}": value for name, value in values.items()})


def _pickle_functions(functions: Mapping[str, RewardFunction]) -> str:
    """Return the functions as text, with their modules unless those are installed: other processes may not find them."""
    own = {
        module
        for function in functions.values()
        if (module := sys.modules.get(getattr(function, "__module__", "") or "")) is not None
        and (file := getattr(module, "__file__", None)) is not None
        and not file.startswith((sys.prefix, sys.base_prefix))
    }
    try:
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        return base64.b85encode(cloudpickle.dumps(dict(functions))).decode()
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(f"reward: {', '.join(functions)} cannot be sent to another process: {error}") from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


@contextlib.contextmanager
def _as_command() -> Iterator[None]:
    """Let the block run as a command does, without a notebook's event loop; environment and threads are restored."""
    environment = dict(os.environ)
    loop = asyncio._get_running_loop()
    # the caller waits for the block, so that its loop does not run meanwhile
    asyncio._set_running_loop(None)
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)
        os.environ.clear()
        os.environ.update(environment)
        if torch is not None and threads is not None:
            torch.set_num_threads(threads)


def _read_result(run: ResolvedRun, *, ended_early: bool) -> Result:
    """Read what the run has left."""
    save = run.config.actor_config.save
    checkpoint = None if save is None else Path(save).expanduser()
    model = None if checkpoint is None else checkpoint / "hf" / "latest"
    lines = read_lines(run.folder / "metrics.jsonl")  # iteration 0 is the evaluation before them
    metrics = [cast("dict[str, float]", line) for line in lines if line["iteration"]]
    return Result(
        run.folder.absolute(),
        metrics,
        checkpoint if checkpoint is not None and checkpoint.is_dir() else None,
        model.resolve() if model is not None and model.is_dir() else None,
        ended_early,
    )
