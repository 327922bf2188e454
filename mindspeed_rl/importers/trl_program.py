"""Programs that call a trainer of TRL: its arguments as options, read from the syntax tree; nothing of them is imported or run.

Values are literals, names that are bound to them, arithmetic, f-strings, `os.environ.get` and attributes of parsed arguments.
What cannot be read is an error with its line; `--set NAME=VALUE` gives a value by the name of its option.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import read_scalar
from mindspeed_rl.importers.python_source import Names, UnreadableError, name_call

#: trainer of TRL -> program
TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto",
            "RewardTrainer": "reward", "GKDTrainer": "gkd"}  # fmt: skip
#: option of the teacher of GKD
_TEACHER = "teacher_model_name_or_path"
#: arguments of a trainer that change nothing of what is trained here
_HARMLESS = ("eval_dataset", "compute_metrics", "reward_processing_classes")
#: callbacks of transformers and TRL that write, count or show; others may end the training or change weights
_SHOWING = frozenset(
    "PrinterCallback ProgressCallback RichProgressCallback LogCompletionsCallback WinRateCallback WeaveCallback "
    "TensorBoardCallback WandbCallback SwanLabCallback MLflowCallback CometCallback ClearMLCallback NeptuneCallback "
    "TrackioCallback DefaultFlowCallback".split()
)
#: packages that have them
_OF_CALLBACKS = frozenset("transformers trl swanlab wandb weave mlflow comet_ml clearml neptune trackio".split())
#: functions that leave a list as it is
_READING = ("print", "len", "list", "tuple", *TRAINERS)
#: argument of LoraConfig -> option
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
         "use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
_LORA_PLAIN = {"bias": ("none",), "task_type": ("CAUSAL_LM", "SEQ_CLS", "TaskType.CAUSAL_LM"), "inference_mode": (False,)}
#: arguments of from_pretrained that change only the format of weights in memory
_MODEL_PLAIN = frozenset(
    "torch_dtype dtype device_map attn_implementation trust_remote_code low_cpu_mem_usage use_cache".split()
)
#: arguments of load_dataset that do not choose rows
_DATA_PLAIN = frozenset("trust_remote_code cache_dir num_proc token data_files split name path".split())
#: arguments of a reward function that are not columns, and those that only TRL's trainer has
_OF_REWARDS = frozenset("prompts completions completion_ids".split())
_OF_TRAINER = frozenset("trainer_state log_extra log_metric environments".split())
#: function of TRL that makes a reward -> ours, and for each argument, in its order, the key and the value without it; None
#: for one that must be there
_MADE: dict[str, tuple[str, dict[str, tuple[str, float | None]]]] = {
    "get_soft_overlong_punishment": (
        "soft_overlong", {"max_completion_len": ("soft_max_length", None), "soft_punish_cache": ("soft_cache_length", None)},
    ),
    "get_repetition_penalty_reward": (
        "trl_repetition", {"ngram_size": ("repetition_n_grams", 3), "max_penalty": ("repetition_max_penalty", -1.0)},
    ),
    "get_cosine_scaled_reward": (
        "trl_cosine",
        {"max_len": ("cosine_max_len", None),
         "min_value_wrong": ("cosine_min_len_value_wrong", -1.0), "max_value_wrong": ("cosine_max_len_value_wrong", -0.5),
         "min_value_correct": ("cosine_max_len_value_correct", 0.5),
         "max_value_correct": ("cosine_min_len_value_correct", 1.0)},
    ),
}  # fmt: skip
#: keys of all of them
MADE_KEYS = " ".join(key for _, arguments in _MADE.values() for key, _ in arguments.values())


@dataclass
class Program:
    """What a program trains.

    Attributes:
        trainer: program of TRL, such as "grpo".
        options: name -> value, as a command of TRL has them.
        columns: columns of the data that own reward functions read.
        made: function of TRL that makes a reward -> our reward, and the keys of its numbers.
        unread: sentences about what cannot be read.
    """

    trainer: str
    options: dict[str, object] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    made: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)


def read_program(path: Path, given: Mapping[str, object], variables: Mapping[str, str]) -> Program:
    """Return the trainer of a program with its arguments.

    Args:
        given: options of the command line, which the program's parser reads.
        variables: values that the user gives, of options and of the environment.

    Raises:
        ConfigError: the file is not a program, calls no trainer of TRL or several, or a value cannot be read.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError([f"the program {path} cannot be read: {error}"]) from None
    reader = _Reader(tree, path, given, variables)
    program = reader.read()
    if program.unread:
        raise ConfigError(program.unread)
    return program


class _Reader:
    """The trainer of a program with its arguments."""

    def __init__(self, tree: ast.Module, path: Path, given: Mapping[str, object], variables: Mapping[str, str]) -> None:
        self.tree, self.path, self.given, self.variables = tree, path, given, variables
        self.call = self._find_trainer()
        self.names = Names(tree, self.call, given, variables)
        self._ask_package(self.call, "trl")

    def _ask_package(self, call: ast.expr, package: str) -> None:
        """Refuse a class or function of the same name that is another one.

        Raises:
            ConfigError: the program defines it, or imports it from elsewhere.
        """
        name = name_call(call)
        if not self.names.is_of(name, package):
            place = f"{self.path.name}, line {call.lineno}"
            raise ConfigError([f"{place}: {name} does not come from {package}, and what it changes is in its code"])

    def _find_trainer(self) -> ast.Call:
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and name_call(node) in TRAINERS]
        if len(calls) == 1:
            return calls[0]
        lines = ", ".join(str(call.lineno) for call in calls)
        none = f"it calls none of {', '.join(TRAINERS)}"
        problem = f"it calls several trainers in lines {lines}; keep one" if calls else none
        raise ConfigError([f"{self.path} is a program of its own: {problem}"])

    def read(self) -> Program:
        """Return the arguments of the trainer, and what of the program cannot be read."""
        call = self.call
        program = Program(TRAINERS[name_call(call)])
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        positions = {"grpo": "model reward_funcs args", "rloo": "model reward_funcs args", "dpo": "model ref_model args"}
        positions["gkd"] = "model teacher_model args"
        names = positions.get(program.trainer, "model args").split()
        if len(call.args) > len(names) or any(keyword.arg is None for keyword in call.keywords):
            program.unread.append(f"{self._at(call)}: write the arguments of the trainer by their names")
        arguments = dict(zip(names, call.args, strict=False)) | arguments
        readers: dict[str, Callable[[Program, ast.expr, int], None]] = {
            "model": self._read_model, "teacher_model": partial(self._read_model, option=_TEACHER),
            "args": self._read_config, "train_dataset": self._read_data,
            "peft_config": self._read_adapters, "reward_funcs": self._read_rewards,
            "processing_class": self._read_tokenizer, "tokenizer": self._read_tokenizer, "callbacks": self._read_callbacks,
        }  # fmt: skip
        if self._reads_command(arguments):
            program.options |= self.given
        for name in sorted(arguments, key=lambda name: list(readers).index(name) if name in readers else 0):
            value = arguments[name]
            if name in readers:
                try:
                    readers[name](program, value, call.lineno)
                except UnreadableError as error:
                    program.unread.append(f"{self._at(value)}: {name} is {error}, which a branch, a loop or a call decides")
            elif name == "quantization_config" and name_call(value) == "get_quantization_config":
                continue  # of load_in_4bit and load_in_8bit, which are options
            elif name not in _HARMLESS and not (isinstance(value, ast.Constant) and value.value is None):
                program.unread.append(f"{self._at(value)}: {name} of the trainer is code that no run file has")
        for node in self._list_added(arguments.get("callbacks")):
            self._read_callbacks(program, node, node.lineno)
        for name in ("model_name_or_path", "dataset_name", *([_TEACHER] if "teacher_model" in arguments else [])):
            if name in self.variables:
                program.options[name] = self.variables[name]
        args = arguments.get("args")
        own = {*self.names.parsed, *([args.id] if isinstance(args, ast.Name) else [])}
        for line, text in self.names.changed:
            if text.partition(".")[0] not in own or text.count(".") != 1:
                program.unread.append(f"{self.path.name}, line {line}: {text} is set by code, which no run file has")
        return program

    def _read_tokenizer(self, program: Program, node: ast.expr, line: int) -> None:
        """Ask for a tokenizer that is the model's."""
        node, line = self.names.follow(node, line)
        if isinstance(node, ast.Call) and name_call(node) == "from_pretrained" and node.args:
            try:
                same = self.names.evaluate(node.args[0], line) == program.options.get("model_name_or_path")
            except UnreadableError:
                same = False
            if same or "model_name_or_path" in self.variables:
                return
        program.unread.append(f"{self._at(node)}: the tokenizer is {ast.unparse(node)[:80]}, and not the model's")

    def _reads_command(self, arguments: Mapping[str, ast.expr]) -> bool:
        args = arguments.get("args")
        return isinstance(args, ast.Name) and args.id in self.names.parsed

    def _at(self, node: ast.expr | ast.keyword) -> str:
        return f"{self.path.name}, line {node.lineno}"

    def _take(self, program: Program, name: str, node: ast.expr, line: int) -> None:
        """Set an option to the value of an expression, or of --set."""
        if name in self.variables:
            program.options[name] = read_scalar(self.variables[name])
            return
        try:
            program.options[name] = self.names.evaluate(node, line)
        except UnreadableError as error:
            program.unread.append(f"{self._at(node)}: {name} is {error}, which only a run knows; write --set {name}=VALUE")

    def _read_model(self, program: Program, node: ast.expr, line: int, *, option: str = "model_name_or_path") -> None:
        if option in self.variables:
            return
        node, line = self.names.follow(node, line)
        if not isinstance(node, ast.Call) or name_call(node) == "get":
            self._take(program, option, node, line)
            return
        name = name_call(node)
        if name == "get_peft_model" and len(node.args) > 1:
            self._read_model(program, node.args[0], line)
            self._read_adapters(program, node.args[1], line)
        elif name == "from_pretrained" and "Auto" in ast.unparse(node.func) and node.args:
            self._take(program, option, node.args[0], line)
            for keyword in node.keywords:
                if keyword.arg not in _MODEL_PLAIN:
                    program.unread.append(f"{self._at(node)}: {keyword.arg or '**'} of from_pretrained is not available here")
        else:
            program.unread.append(f"{self._at(node)}: the model is made by {ast.unparse(node.func)}; "
                                  f"write --set {option}=FOLDER where it is an unchanged one")  # fmt: skip

    def _read_config(self, program: Program, node: ast.expr, line: int) -> None:
        name = node.id if isinstance(node, ast.Name) else ""
        if name not in self.names.parsed:
            node, at = self.names.follow(node, line)
            expected = f"{name_call(self.call).removesuffix('Trainer')}Config"
            if not isinstance(node, ast.Call) or name_call(node) != expected:
                text = ast.unparse(node)[:80]
                program.unread.append(f"{self._at(node)}: the trainer's args are {text}; write them as {expected}(...)")
                return
            self._ask_package(node, "trl")
            if node.args:
                self._take(program, "output_dir", node.args[0], at + 1)
            if len(node.args) > 1:
                program.unread.append(f"{self._at(node)}: write the arguments of {expected} by their names")
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._take(program, keyword.arg, keyword.value, at + 1)
                    continue
                try:
                    unpacked = self.names.evaluate(keyword.value, at)
                except UnreadableError as error:
                    unpacked = None
                    program.unread.append(f"{self._at(node)}: ** {error} cannot be read; write its values by their names")
                program.options |= unpacked if isinstance(unpacked, dict) else {}
                if not isinstance(unpacked, dict) and unpacked is not None:
                    program.unread.append(f"{self._at(node)}: ** of {ast.unparse(keyword.value)} is not a mapping")
        # attributes that are set afterwards
        for dotted, values in self.names.bound.items():
            place, value = values[-1]
            option = dotted.removeprefix(f"{name}.")
            if not name or option == dotted or "." in option:
                continue
            if place > line:
                program.unread.append(f"{self.path.name}, line {place}: {dotted} is set after the trainer is made")
            elif value is not None or option in self.variables:
                self._take(program, option, node if value is None else value, place)
            else:
                where = f"{self.path.name}, line {place}"
                program.unread.append(f"{where}: {dotted} is set in a branch or a loop; write --set {option}=VALUE")

    def _read_data(self, program: Program, node: ast.expr, line: int) -> None:
        if "dataset_name" in self.variables:
            return
        changes: list[str] = []
        while True:
            node, line = self.names.follow(node, line)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.Attribute)):
                self._take(program, "dataset_train_split", node.slice, line)
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and name_call(node) != "load_dataset":
                if node.func.attr != "shuffle":
                    changes.append(f".{node.func.attr} (line {node.lineno})")
                node = node.func.value
            else:
                break
        if changes or not isinstance(node, ast.Call) or name_call(node) != "load_dataset" or not node.args:
            made = f"changed by {', '.join(reversed(changes))}" if changes else f"made by {ast.unparse(node)[:80]}"
            way = "write them to a file (dataset.to_json) and give --set dataset_name=FILE"
            program.unread.append(f"{self._at(node)}: the rows are {made}: {way}")
            return
        self._ask_package(node, "datasets")
        if other := [keyword.arg or "**" for keyword in node.keywords if keyword.arg not in _DATA_PLAIN]:
            program.unread.append(f"{self._at(node)}: {', '.join(other)} of load_dataset is not available here")
        keywords = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        is_file = isinstance(node.args[0], ast.Constant) and node.args[0].value in ("json", "parquet", "csv")
        if is_file and "data_files" in keywords:
            self._take(program, "dataset_name", keywords["data_files"], line)
        else:
            self._take(program, "dataset_name", node.args[0], line)
            if len(node.args) > 1 or "name" in keywords:
                self._take(program, "dataset_config", keywords.get("name", node.args[-1]), line)
        if "split" in keywords:
            self._take(program, "dataset_train_split", keywords["split"], line)

    def _read_adapters(self, program: Program, node: ast.expr, line: int) -> None:
        node, at = self.names.follow(node, line)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if isinstance(node, ast.Call) and name_call(node) == "get_peft_config":
            return  # of the command line's model arguments
        if not isinstance(node, ast.Call) or name_call(node) != "LoraConfig":
            program.unread.append(f"{self._at(node)}: adapters are {ast.unparse(node)}; LoraConfig(...) is read")
            return
        self._ask_package(node, "peft")
        program.options["use_peft"] = True
        # PEFT's own defaults
        program.options |= {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        if node.args:
            program.unread.append(f"{self._at(node)}: write the arguments of LoraConfig by their names")
        for keyword in node.keywords:
            if keyword.arg in _LORA:
                self._take(program, _LORA[keyword.arg], keyword.value, at)
                continue
            try:
                value = self.names.evaluate(keyword.value, at)
            except UnreadableError as error:
                value = str(error)
            if value is not None and value not in _LORA_PLAIN.get(keyword.arg or "", ()):
                program.unread.append(f"{self._at(keyword)}: {keyword.arg or '**'} of LoraConfig is not available here")

    def _follow_made(self, node: ast.expr, line: int) -> tuple[ast.expr, int]:
        """Return what a name stands for: of one that is set in a branch, what it is set to there."""
        try:
            return self.names.follow(node, line)
        except UnreadableError:
            name = ast.unparse(node)
            values = [item.value for item in ast.walk(self.tree) if isinstance(item, ast.Assign) and len(item.targets) == 1
                      and ast.unparse(item.targets[0]) == name]  # fmt: skip
            return (values[0], line) if len(values) == 1 else (node, line)

    def _list_added(self, given: ast.expr | None) -> Iterator[Any]:
        """Yield the callbacks that a program adds to its trainer, or to the list that the trainer is given."""
        own = given.id if isinstance(given, ast.Name) else None
        for node in ast.walk(self.tree):
            if isinstance(node, ast.AugAssign) and ast.unparse(node.target).rpartition(".")[2] in (own, "callbacks"):
                yield node.value
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Subscript) and ast.unparse(target.value) == own for target in targets):
                yield node  # an item of the list
            if not isinstance(node, ast.Call) or node is self.call:
                continue
            words = [*node.args, *(keyword.value for keyword in node.keywords)]
            place = ast.unparse(node.func.value).rpartition(".")[2] if isinstance(node.func, ast.Attribute) else ""
            if name_call(node) == "add_callback" or (place in (own, "callbacks") and name_call(node) in ("append", "extend")):
                yield from words
            elif place in (own, "callbacks") and name_call(node) in ("insert", "__setitem__", "__iadd__"):
                yield from words[-1:]
            elif own is not None and name_call(node) not in _READING:  # which may change the list
                yield from [node] if any(isinstance(word, ast.Name) and word.id == own for word in words) else []

    def _only_shows(self, made: ast.expr) -> bool:
        """Return whether a callback is one of a package that writes, counts or shows."""
        function = made.func if isinstance(made, ast.Call) else made
        names, text = self.names, ast.unparse(function)
        if isinstance(function, ast.Name):
            if text in names.classes or text in names.functions or text in names.bound:
                return False
            package, name = names.modules.get(text, "transformers").partition(".")[0], names.originals.get(text, text)
        else:
            package, name = text.partition(".")[0], text.rpartition(".")[2]
        return name in _SHOWING and package in _OF_CALLBACKS

    def _read_callbacks(self, program: Program, node: ast.expr, line: int) -> None:
        """Name callbacks but for those that only write, count or show."""
        node, line = self._follow_made(node, line)
        for item in node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]:
            made, _ = self._follow_made(item, line)
            name = name_call(made) if isinstance(made, ast.Call) else ast.unparse(made)
            if not self._only_shows(made) and name != "None":
                program.unread.append(f"{self._at(item)}: the callback {name} may end the training or change weights; remove "
                                      "it if it does neither")  # fmt: skip

    def _read_rewards(self, program: Program, node: ast.expr, line: int) -> None:
        node, line = self.names.follow(node, line)
        items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        names: list[str] = []
        models: list[int] = []
        for place, item in enumerate(items):
            item, at = self.names.follow(item, line)
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                program.options["reward_model_name_or_path"] = item.value
                models.append(place)
                continue
            if isinstance(item, ast.Call) and name_call(item) in _MADE:
                names.append(self._read_made(program, item, at))
                continue
            name = item.id if isinstance(item, ast.Name) else ""
            module = self.names.modules.get(name, "")
            if name in self.names.functions:
                self._read_own(program, item, name)
                names.append(f"{self.path.stem}:{name}")
            elif module.partition(".")[0] == "trl":
                names.append(self.names.originals[name])
            elif module:
                self._read_module(program, module, self.names.originals[name])
                names.append(f"{module}:{self.names.originals[name]}")
            else:
                program.unread.append(f"{self._at(item)}: the reward {ast.unparse(item)} is not a function of a module")
        if len(models) > 1:
            program.unread.append(f"{self._at(node)}: several reward models; one is read")
        weights = program.options.get("reward_weights")
        if models and isinstance(weights, list) and len(weights) == len(items):  # a command has the model first
            program.options["reward_weights"] = [weights.pop(models[0]), *weights]
        if names:
            program.options["reward_funcs"] = names

    def _read_own(self, program: Program, item: ast.expr, name: str) -> None:
        """Read a reward function of the program."""
        function = self.names.functions[name]
        if not self._has_guard():
            way = "importing it would start the training: move it to a module of its own"
            program.unread.append(f"{self._at(item)}: {name} is in a program without `if __name__ ==`, and {way}")
        elif function not in self.tree.body:
            way = "which no other program can import: move it to the top of the file"
            program.unread.append(f"{self._at(item)}: {name} is defined inside a function, a class or a branch, {way}")
        read_reward_function(program, function, self.path)

    def _read_made(self, program: Program, call: ast.Call, line: int) -> str:
        """Keep our reward for one that a function of TRL makes, with its numbers; return the function's name."""
        name = name_call(call)
        self._ask_package(call, "trl")
        reward, arguments = _MADE[name]
        given: dict[str, ast.expr] = dict(zip(arguments, call.args, strict=False))
        given |= {keyword.arg or "**": keyword.value for keyword in call.keywords}
        numbers: dict[str, object] = {}
        for argument in given.keys() - arguments.keys():
            program.unread.append(f"{self._at(call)}: {argument} of {name} is not available here")
        for argument, (key, default) in arguments.items():
            try:
                value = self.names.evaluate(given[argument], line) if argument in given else default
            except UnreadableError as error:
                program.unread.append(f"{self._at(call)}: {argument} of {name} is {error}, which only a run knows")
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or (key in ("soft_cache_length", "cosine_max_len", "repetition_n_grams") and not value > 0):
                sentence = f"{argument} of {name} is {value}; it must be a number, lengths above 0"
                program.unread.append(f"{self._at(call)}: {sentence}")
            numbers[key] = value
        if program.made.setdefault(name, (reward, numbers)) != (reward, numbers):
            program.unread.append(f"{self._at(call)}: {name} twice with other numbers; one is available")
        return name

    def _has_guard(self) -> bool:
        """Return True where the trainer is called in a function, or only as the main program."""
        top = next(node for node in self.tree.body if any(inner is self.call for inner in ast.walk(node)))
        return isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef)) or "__name__" in ast.unparse(getattr(top, "test", top))

    def _read_module(self, program: Program, module: str, name: str) -> None:
        """Read a reward function of another file, where that is next to the program."""
        read_reward_file(program, self.path.parent / f"{module.replace('.', '/')}.py", name)


def read_reward_function(program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> None:
    """Keep the columns that a reward function reads, and what of its form is not available."""
    for place in _list_messages(function):
        way = "here they are texts: read the completion itself"
        program.unread.append(f"{path.name}, line {place}: {function.name} reads completions as messages; {way}")
    names = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    rest = function.args.kwarg.arg if function.args.kwarg else ""
    names += [str(key) for node in ast.walk(function) if (key := _find_key(node, rest)) is not None]
    for name in names:
        if name in _OF_TRAINER:
            place = f"{path.name}, line {function.lineno}"
            program.unread.append(f"{place}: {function.name} reads {name}, which is not available")
        elif name not in _OF_REWARDS and name not in program.columns:
            program.columns.append(name)


def read_reward_file(program: Program, path: Path, name: str) -> bool:
    """Read a reward function of a file as `read_reward_function` does; return False where the file does not define it."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    found = [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name]
    for function in found[-1:]:
        read_reward_function(program, function, path)
    return bool(found)


def _find_key(node: ast.AST, mapping: str) -> object:
    """Return the key that is read of a mapping: kwargs["x"] or kwargs.get("x"); None for something else."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == mapping:
        return node.slice.value if isinstance(node.slice, ast.Constant) else None
    if isinstance(node, ast.Call) and mapping and ast.unparse(node.func) == f"{mapping}.get" and node.args:
        return node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return None


def _list_messages(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the line where a reward function first reads the content of a message."""
    read = (
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and node.slice.value in ("content", "role")
    )
    yield from sorted(read)[:1]
