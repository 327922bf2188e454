"""Trainers that take objects. Each writes a run file, and trains as `mindspeed-rl train` does with it."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import yaml

from mindspeed_rl import api
from mindspeed_rl.checkpoint.model_folder import copy_model
from mindspeed_rl.cli.doctor.checks import computes_bfloat16
from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.config.run_files import apply_values
from mindspeed_rl.data.prompts import PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.files import write_file
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.importers import trl
from mindspeed_rl.importers.importer import translate
from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.result import Import, ImportSettings
from mindspeed_rl.objects.arguments import DistillationConfig, DPOConfig, GRPOConfig, PPOConfig, SFTConfig, TrainerConfig
from mindspeed_rl.objects.callbacks import (
    CallbackObserver,
    NotebookProgress,
    TrainerCallback,
    TrainerState,
    is_notebook,
)
from mindspeed_rl.objects.rows import Dataset, find_prompt_columns, has_messages, read_first, write_rows
from mindspeed_rl.rewards import RewardFunction
from mindspeed_rl.run.explain.plan_page import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

#: iterations between two evaluations that no run reaches: the first one and the last one are left
_NEVER = 10**9
#: function of the run file that is translated; the caller's take its place
_PLACEHOLDER = "caller:reward"
#: tokens of a prompt that is measured
_ANY_LENGTH = 10**8


class Adapters(Protocol):
    """The attributes that are read of `peft.LoraConfig`."""

    r: int
    lora_alpha: int
    lora_dropout: float
    target_modules: Any


class _Trainer:
    """What all trainers do: write the run file of their objects, train, evaluate, generate, save.

    Attributes:
        args: arguments.
        run: run of the arguments; `run.config` has every key.
        run_file: the run file, which `mindspeed-rl train --config` takes too.
        state: figures and samples so far.
        result: folder, metrics and model of the last `train`; None before.
    """

    config_class: ClassVar[type[TrainerConfig]]
    args: TrainerConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: TrainerConfig | None,
        train_dataset: Dataset,
        eval_dataset: Dataset | None,
        processing_class: PreTrainedTokenizerBase | None,
        callbacks: Sequence[TrainerCallback],
        peft_config: Adapters | None,
    ) -> None:
        self.name_of_config = self.config_class.__name__
        args = self.config_class() if args is None else args
        if type(args) is not self.config_class:
            raise ValueError(f"args of {type(self).__name__} are a {type(args).__name__}, but must be a {self.name_of_config}")
        self.args, self.state = args, TrainerState()
        self.callbacks = [*callbacks]
        self.result: api.Result | None = None
        self.folder = Path(args.output_dir).expanduser().absolute()
        self._tokenizer = processing_class
        self._model = self._write_model(model, "model")
        self._peft = peft_config
        data = write_rows(train_dataset, self.folder / "data/train.jsonl", "train_dataset")
        held_out = None if eval_dataset is None else write_rows(eval_dataset, self.folder / "data/eval.jsonl", "eval_dataset")
        self._import = self._translate(data)
        self.run_file = self.folder / "run.yaml"
        self._tree = self._build_tree(data, held_out)
        self.run = self._write_run(self.run_file, self._tree)

    # ------------------------------------------------------------------ the run file

    def _write_model(self, model: str | Path | PreTrainedModel, name: str) -> str:
        """Return the folder or the name of a model; one of this program is saved, with its tokenizer.

        Raises:
            ValueError: it is not a model, or it has no tokenizer.
        """
        if isinstance(model, (str, Path)):
            is_folder = parse_hub_name(str(model)) is None
            return str(Path(model).expanduser().absolute() if is_folder else model)
        save = getattr(model, "save_pretrained", None)  # an object of another library
        if save is None or not hasattr(model, "config"):
            raise ValueError(f"{name} is a {type(model).__name__}; give a folder, a name on a hub or a model of transformers")
        folder = self.folder / name
        tokenizer = self._tokenizer
        if tokenizer is None:
            source = str(getattr(model.config, "name_or_path", "") or "")
            if not source:
                raise ValueError(f"{name} is an object without a tokenizer: give it as processing_class")
            tokenizer = load_tokenizer(source)
        save(folder)
        tokenizer.save_pretrained(folder)
        return str(folder)

    def _translate(self, data: str) -> Import:
        """Return the run file of TRL's command with these arguments.

        Raises:
            ConfigError: an argument has no counterpart here.
        """
        options = {"output_dir": str(self.folder), "model_name_or_path": self._model, "dataset_name": data}
        options |= self.args.list_options() | self._list_options(data)
        if self._peft is not None:
            targets = self._peft.target_modules
            options |= {"use_peft": True, "lora_r": self._peft.r, "lora_alpha": self._peft.lora_alpha}
            options |= {"lora_dropout": self._peft.lora_dropout}
            options |= {"lora_target_modules": [targets] if isinstance(targets, str) else sorted(targets)} if targets else {}
        options["bf16"] = computes_bfloat16() if self.args.bf16 is None else self.args.bf16
        program = self.args.program
        command = SourceCommand(program, options, devices=self.args.num_devices, table=trl.PROJECT.tables[program])
        try:
            return translate(trl.PROJECT, command, ImportSettings())[0]
        except ConfigError as error:
            # arguments have no dashes
            raise ConfigError(text.replace("--", "") for text in error.errors) from None

    def _list_options(self, data: str) -> dict[str, object]:
        """Return further options of TRL's command."""
        return {}

    def _build_tree(self, data: str, held_out: str | None) -> dict[str, Any]:
        """Return the run file."""
        args, save = self.args, str(self.folder / "checkpoints")
        keys: dict[str, object] = {
            "platform": args.platform,
            # a run goes on from its own checkpoints
            "actor_config.pretrained_checkpoint": self._model,
            "actor_config.load": save,
            "actor_config.save": save,
            "actor_config.save_hf": True,
            "actor_config.finetune": None,
            "megatron_training.tokenizer_name_or_path": self._write_tokenizer(),
            "megatron_training.data_path": data,
            **self._list_held_out(held_out),
        }
        tree = apply_values(self._import.tree, keys)
        tree = apply_values(tree, self._list_keys(data, tree))
        return apply_values(tree, {**args.list_keys(), **args.keys})

    def _list_held_out(self, path: str | None) -> dict[str, object]:
        """Return the keys of the held-out rows."""
        if path is None:
            return {}
        interval = self.args.eval_steps or _NEVER
        return {"megatron_training.eval_data_path": path, "megatron_training.eval_interval": interval}

    def _write_run(self, path: Path, tree: Mapping[str, Any]) -> api.Run:
        """Write a run file, and return its run.

        Raises:
            ConfigError: a value is wrong; it is named by its argument too.
        """
        write_file(path, yaml.safe_dump(_drop_unset(tree), sort_keys=False, allow_unicode=True, width=120), makes_folder=True)
        with self._naming_arguments():
            return api.Run.load(path, num_nodes=self.args.num_nodes)

    def _list_keys(self, data: str, tree: Mapping[str, Any]) -> dict[str, object]:
        """Return the keys of the stage."""
        first = read_first(data, "train_dataset")
        # a text is followed by its answer and the end token, as in TRL
        return {"megatron_training.prompt_type": "hf" if has_messages(first) else "completion"}

    def _write_tokenizer(self) -> str:
        """Return the folder of the tokenizer: the model's, or the folder of the tokenizer that the caller gave."""
        if self._tokenizer is None or self._model == str(self.folder / "model"):
            return self._model
        self._tokenizer.save_pretrained(self.folder / "tokenizer")
        return str(self.folder / "tokenizer")

    @contextmanager
    def _naming_arguments(self) -> Iterator[None]:
        """Add the names of arguments to errors that name the keys which they become."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError(map(self._name_argument, error.errors)) from None

    def _name_argument(self, text: str) -> str:
        key = text.partition(" ")[0].rstrip(":")
        option = self._import.find_option(key)
        return text if option is None else f"{text} ({option.lstrip('-')} of {self.name_of_config})"

    # ------------------------------------------------------------------ what a caller does

    def add_callback(self, callback: TrainerCallback) -> None:
        """Let a callback see the runs that follow."""
        self.callbacks.append(callback)

    def explain(self, *, shows: bool = True) -> Report:
        """Print the plan of the run as `mindspeed-rl explain` does, and return it."""
        return self.run.explain(shows=shows)

    def train(self, resume_from_checkpoint: bool | None = None) -> api.Result:
        """Train to the end of the run, or until a callback ends it.

        Args:
            resume_from_checkpoint: None goes on from the newest checkpoint in output_dir where there is one; True needs one,
                False needs a folder without.

        Returns:
            Folder, metrics of every iteration and model of the run.

        Raises:
            ValueError: a value, a file or a reward function is wrong; nothing was started.
            RuntimeError: a worker died or raised.
            KeyboardInterrupt: Ctrl-C, or "interrupt" in a notebook; all workers were ended.
        """
        checkpoints = self.folder / "checkpoints"
        has_any = any(checkpoints.glob("iter_*"))
        if resume_from_checkpoint is True and not has_any:
            raise ValueError(f"resume_from_checkpoint: {checkpoints} has no checkpoint")
        if resume_from_checkpoint is False and has_any:
            raise ValueError(
                f"resume_from_checkpoint is False, but {checkpoints} has checkpoints of an earlier run; choose another"
                " output_dir, or remove them"
            )
        callbacks = [*self.callbacks]
        if is_notebook() and not any(isinstance(callback, NotebookProgress) for callback in callbacks):
            callbacks.append(NotebookProgress())
        self.state.log_history.clear()
        with self._naming_arguments():
            self.result = api.run_to_end(self.run, CallbackObserver(callbacks, self.args, self.state))
        return self.result

    def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]:
        """Evaluate the trained model, or the start where nothing has been trained.

        Args:
            eval_dataset: held-out rows; None takes the trainer's eval_dataset.

        Returns:
            eval/loss of supervised trainers; eval/reward, eval/<function> and, where the first function tells right from
            wrong, eval/accuracy of the others.

        Raises:
            ValueError: there is nothing to evaluate on.
        """
        values: dict[str, object] = {
            "run_dir": str(self.folder / "evaluation"),
            "actor_config.pretrained_checkpoint": self._find_trained(),
            **dict.fromkeys(("actor_config.load", "actor_config.save", "actor_config.save_hf"), None),
            # the weights have the adapters in them
            **{f"megatron_training.lora_{name}": None for name in ("target_modules", "r", "alpha", "dropout")},
        }
        if eval_dataset is not None:
            path = write_rows(eval_dataset, self.folder / "data/evaluate.jsonl", "eval_dataset")
            values |= self._list_held_out(path)
        run = self._write_run(self.folder / "evaluation/run.yaml", apply_values(self._tree, values))
        with self._naming_arguments():
            return api.evaluate(run)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[Mapping[str, str]]],
        *,
        max_new_tokens: int = 128,
        num_return_sequences: int = 1,
        temperature: float = 0.0,
        seed: int = 1234,
    ) -> list[list[str]]:
        """Return the responses of the trained model to each prompt, by the command `generate` in a process of its own.

        Args:
            prompts: texts, or lists of messages.
            max_new_tokens: longest response.
            num_return_sequences: responses to a prompt; more than 1 needs a temperature.
            temperature: 0 is greedy.
            seed: seed of the samples.

        Raises:
            ValueError: a value is wrong.
            RuntimeError: the command failed; with its text.
        """
        listed = [prompts] if isinstance(prompts, str) else list(prompts)
        if not listed:
            raise ValueError("prompts is empty")
        model = self._find_trained()
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="generate-", dir=self.folder) as folder:
            source, target = Path(folder, "prompts.jsonl"), Path(folder, "responses.jsonl")
            rows = [{"prompt": item} if isinstance(item, str) else {"messages": list(item)} for item in listed]
            source.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
            words = ["generate", "--load", str(model), "--input", str(source), "--output", str(target)]
            words += ["--max-new-tokens", str(max_new_tokens), "--num-return", str(num_return_sequences), "--seed", str(seed)]
            words += ["--temperature", str(temperature)] if temperature else ["--task", "greedy"]
            words += ["--platform", self.args.platform]
            words += ["--hf-chat-template"] if self._tree["megatron_training"]["prompt_type"] == "hf" else []
            done = subprocess.run(
                [sys.executable, "-m", "mindspeed_rl.cli.main", *words], capture_output=True, text=True, check=False
            )
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["it printed nothing"]
                error = ValueError if done.returncode == 2 else RuntimeError
                raise error(f"generate: {lines[-1].removeprefix('error: ')}")
            answers: list[list[str]] = [[] for _ in listed]
            for line in target.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                answers[row["prompt_index"]].append(row["response"])
        return answers

    def save_model(self, output_dir: str | Path | None = None) -> Path:
        """Copy the trained model, a Hugging Face folder, and return where it is.

        Files of an earlier model in the folder go; other files stay. A copy that is killed does not look complete.

        Args:
            output_dir: folder; None is `final` in the folder of the trainer.

        Raises:
            ValueError: nothing has been trained.
        """
        trained = self._find_export()
        if trained is None:
            raise ValueError(f"{self.folder} has no trained model: call train first")
        target = self.folder / "final" if output_dir is None else Path(output_dir).expanduser().absolute()
        copy_model(trained, target)
        return target

    def _find_export(self) -> Path | None:
        """Return the Hugging Face folder of the newest checkpoint; None without one."""
        newest = self.folder / "checkpoints/hf/latest"
        return newest.resolve() if newest.is_dir() else None

    def _find_trained(self) -> str:
        """Return the trained model, or the start where nothing has been trained."""
        return str(self._find_export() or self._model)


def _drop_unset(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file without keys that are None."""
    return {
        name: _drop_unset(value) if isinstance(value, Mapping) else value for name, value in tree.items() if value is not None
    }


class SFTTrainer(_Trainer):
    """Supervised fine-tuning: answers of messages, or of prompts with completions, train."""

    config_class = SFTConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: SFTConfig | None = None,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: Adapters | None = None,
    ) -> None:
        """Write the run file.

        Args:
            model: folder, name on a hub, or a model of transformers, which is saved.
            args: arguments; None has all defaults.
            train_dataset: rows with messages, or with prompt and completion: a list, a `datasets.Dataset`, a file, a name on
                a hub; docs/data.md lists further forms.
            eval_dataset: held-out rows.
            processing_class: tokenizer; None takes the model's.
            callbacks: see `TrainerCallback`.
            peft_config: `peft.LoraConfig` of adapters that train in place of the weights.

        Raises:
            ValueError: an argument is wrong, or has no counterpart here.
        """
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)

    def _list_options(self, data: str) -> dict[str, object]:
        """Only answers train, whatever form the rows have."""
        is_chat = has_messages(read_first(data, "train_dataset"))
        return {"assistant_only_loss" if is_chat else "completion_only_loss": True}


class DPOTrainer(_Trainer):
    """Preference training on pairs of a chosen and a rejected answer; the reference is the start of the model."""

    config_class = DPOConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        args: DPOConfig | None = None,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: Adapters | None = None,
        ref_model: str | Path | PreTrainedModel | None = None,
    ) -> None:
        """Write the run file.

        Args:
            model, args, eval_dataset, processing_class, callbacks, peft_config: as `SFTTrainer` has them.
            train_dataset: rows with prompt, chosen and rejected.
            ref_model: reference; None is the model that training starts from.

        Raises:
            ValueError: an argument is wrong, or has no counterpart here.
        """
        self._reference = ref_model
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)

    def _list_keys(self, data: str, tree: Mapping[str, Any]) -> dict[str, object]:
        keys = super()._list_keys(data, tree)
        if self._reference is not None:
            keys["megatron_training.ref_model"] = self._write_model(self._reference, "ref_model")
        return keys


class GRPOTrainer(_Trainer):
    """GRPO and related algorithms: responses to a prompt are compared by reward functions."""

    config_class = GRPOConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str],
        args: GRPOConfig | None = None,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: Adapters | None = None,
    ) -> None:
        """Write the run file, and the reward functions next to it.

        Args:
            model, args, eval_dataset, processing_class, callbacks, peft_config: as `SFTTrainer` has them.
            reward_funcs: functions of this program (also closures and functions of a notebook) or names of docs/rewards.md. A
                function gets the response and columns of its row by the names of its parameters; with the parameter
                `completions` it gets lists, one entry per response, as in TRL.
            train_dataset: rows with a prompt, a text or messages; all other columns reach the reward functions.

        Raises:
            ValueError: an argument is wrong, or has no counterpart here.
        """
        is_one = isinstance(reward_funcs, str) or callable(reward_funcs)
        self._rewards: list[RewardFunction | str] = [reward_funcs] if is_one else list(reward_funcs)
        super().__init__(model, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config)

    def _list_options(self, data: str) -> dict[str, object]:
        options: dict[str, object] = {"reward_funcs": [_PLACEHOLDER], "use_vllm": True}
        # the correction of log-probs is for engines that compute in another format; keys switch it on
        options["vllm_importance_sampling_correction"] = False
        if self._sampling.log_completions is None:
            options["log_completions"] = True
        return options

    @property
    def _sampling(self) -> GRPOConfig:
        """The arguments of a trainer that samples."""
        assert isinstance(self.args, GRPOConfig), "checked when the trainer is made"
        return self.args

    def _list_keys(self, data: str, tree: Mapping[str, Any]) -> dict[str, object]:
        keys = find_prompt_columns(read_first(data, "train_dataset"), "train_dataset").list_keys()
        longest = self._sampling.max_prompt_length or self._measure_prompts(data, apply_values(tree, keys))
        response = tree["generate_config"]["sampling_config"]["max_tokens"]
        keys |= {"rl_config.max_prompt_length": longest + 1}
        keys |= {"generate_config.max_model_len": self._sampling.vllm_max_model_length or longest + response + 1}
        return keys

    def _measure_prompts(self, data: str, tree: Mapping[str, Any]) -> int:
        """Return the tokens of the longest prompt."""
        training = tree["megatron_training"]
        path = str(training["tokenizer_name_or_path"])
        name = parse_hub_name(path)
        tokenizer = load_tokenizer(path if name is None else fetch(name, "model", "tokenizer"))
        settings = PromptSettings(prompt_type=training["prompt_type"], map_keys=training["map_keys"])
        columns = training["dataset_additional_keys"]
        prompts = open_prompts(
            data, tokenizer, max_prompt_length=_ANY_LENGTH, dataset_additional_keys=columns, settings=settings
        )
        return prompts.longest

    def _write_run(self, path: Path, tree: Mapping[str, Any]) -> api.Run:
        """Write the run file, with the reward functions."""
        run = super()._write_run(path, tree)
        if not self._rewards:
            return run
        has_messages = tree["megatron_training"]["prompt_type"] == "hf"
        functions: list[RewardFunction | str] = []
        for function in self._rewards:
            if has_messages and not isinstance(function, str) and _takes_completions(function):
                function = _with_messages(function)
            functions.append(function)
        run = api.set_rewards(run, functions, self._sampling.reward_weights)
        return super()._write_run(path, run.tree)


def _takes_completions(function: RewardFunction) -> bool:
    return "completions" in inspect.signature(function).parameters


def _with_messages(function: RewardFunction) -> RewardFunction:
    """Return a function of a batch that gets each response as a list of one message, as in TRL where prompts are messages."""

    def read(columns: dict[str, Any]) -> dict[str, Any]:
        texts = columns["completions"]
        return {**columns, "completions": [[{"role": "assistant", "content": text}] for text in texts]}

    @functools.wraps(function)
    def score(**columns: Any) -> Any:
        return function(**read(columns))

    @functools.wraps(function)
    async def score_later(**columns: Any) -> Any:
        return await function(**read(columns))

    return score_later if inspect.iscoroutinefunction(function) else score


class PPOTrainer(GRPOTrainer):
    """PPO: a critic learns the values of states, from which advantages follow."""

    config_class = PPOConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        reward_funcs: RewardFunction | str | Sequence[RewardFunction | str],
        args: PPOConfig | None = None,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: Adapters | None = None,
        value_model: str | Path | PreTrainedModel | None = None,
    ) -> None:
        """Write the run file, and the reward functions next to it.

        Args:
            model, reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks, peft_config: as `GRPOTrainer`
                has them.
            value_model: weights that the critic starts from; None takes the actor's, with a new head.

        Raises:
            ValueError: an argument is wrong, or has no counterpart here.
        """
        self._critic = value_model
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            peft_config=peft_config,
        )

    def _list_keys(self, data: str, tree: Mapping[str, Any]) -> dict[str, object]:
        save = str(self.folder / "critic")
        source = self._model if self._critic is None else self._write_model(self._critic, "value_model")
        assert isinstance(self.args, PPOConfig), "checked when the trainer is made"
        rate = self.args.value_learning_rate or tree["actor_config"]["lr"]
        values = {"pretrained_checkpoint": source, "load": save, "save": save, "lr": rate}
        return {**super()._list_keys(data, tree), **{f"critic_config.{name}": value for name, value in values.items()}}


class DistillationTrainer(GRPOTrainer):
    """On-policy distillation: the student samples, and a teacher judges its tokens."""

    config_class = DistillationConfig

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        teacher_model: str | Path | PreTrainedModel,
        args: DistillationConfig | None = None,
        *,
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        peft_config: Adapters | None = None,
        reward_funcs: Sequence[RewardFunction | str] = (),
    ) -> None:
        """Write the run file.

        Args:
            model: the student.
            teacher_model: folder, name on a hub, a model of transformers, or the address http(s)://... of a server.
            args, train_dataset, eval_dataset, processing_class, callbacks, peft_config: as `GRPOTrainer` has them.
            reward_funcs: reward functions that train next to the teacher; none by default.

        Raises:
            ValueError: an argument is wrong, or has no counterpart here.
        """
        self._teacher = teacher_model
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=callbacks,
            peft_config=peft_config,
        )

    def _list_keys(self, data: str, tree: Mapping[str, Any]) -> dict[str, object]:
        teacher = self._teacher
        is_address = isinstance(teacher, str) and teacher.startswith(("http://", "https://"))
        keys = super()._list_keys(data, tree)
        keys |= {"rl_config.distillation.teacher_models": [teacher if is_address else self._write_model(teacher, "teacher")]}
        if self._rewards:
            assert isinstance(self.args, DistillationConfig), "checked when the trainer is made"
            return keys | {"rl_config.distillation.distillation_loss_coef": self.args.distillation_loss_coef}
        # the placeholder of the translation
        keys |= dict.fromkeys(("rl_config.reward_funcs", "rl_config.reward_weights"))
        keys |= {"rl_config.rule_reward": False, "rl_config.verifier_function": [], "rl_config.verifier_weight": []}
        return keys | {"rl_config.distillation.use_task_rewards": False}
