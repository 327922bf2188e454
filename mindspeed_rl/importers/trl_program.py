"""Programs that call a trainer of TRL: its arguments as options, read from the syntax tree; nothing of them is imported or run.

Values are literals, names that are bound to them, arithmetic, f-strings, `os.environ.get` and attributes of parsed arguments.
What cannot be read is an error with its line; `--set NAME=VALUE` gives a value by the name of its option.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import read_scalar

#: trainer of TRL -> program
TRAINERS = {"GRPOTrainer": "grpo", "RLOOTrainer": "rloo", "SFTTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto",
            "RewardTrainer": "reward"}  # fmt: skip
_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Mod: operator.mod,
}  # fmt: skip
#: arguments of a trainer that change nothing of what is trained here
_HARMLESS = ("eval_dataset", "compute_metrics", "callbacks", "reward_processing_classes")
#: argument of LoraConfig -> option
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "target_modules": "lora_target_modules",
         "use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
_LORA_PLAIN = {"bias": ("none",), "task_type": ("CAUSAL_LM", "SEQ_CLS", "TaskType.CAUSAL_LM"), "inference_mode": (False,)}
#: arguments of from_pretrained that change the format of weights in memory alone
_MODEL_PLAIN = frozenset(
    "torch_dtype dtype device_map attn_implementation trust_remote_code low_cpu_mem_usage use_cache".split()
)
#: arguments of load_dataset that do not choose rows
_DATA_PLAIN = frozenset("trust_remote_code cache_dir num_proc token data_files split name path".split())
#: arguments of a reward function that are no columns, and those that only TRL's trainer has
_OF_REWARDS = frozenset("prompts completions completion_ids".split())
_OF_TRAINER = frozenset("trainer_state log_extra log_metric environments".split())
#: attributes that a program may set without a change of what is trained
_PLAIN_ATTRIBUTES = frozenset("pad_token pad_token_id padding_side use_cache".split())
#: methods that change a list or mapping
_CHANGING = frozenset("update append extend insert pop remove clear setdefault".split())
#: functions of a parser whose results have the options of the command line
_PARSERS = ("parse_args_and_config", "parse_args_into_dataclasses", "parse_args")
#: options of the command line that have a default without their parser
_PARSED: dict[str, object] = {"dataset_train_split": "train", "dataset_test_split": "test", "dataset_config": None,
                              "dataset_streaming": False, "trust_remote_code": False}  # fmt: skip


class _UnreadableError(Exception):
    """A value that only a run of the program has; its text."""


@dataclass
class Program:
    """What a program trains.

    Attributes:
        trainer: program of TRL, such as "grpo".
        options: name -> value, as a command of TRL has them.
        columns: of the data that own reward functions read.
        unread: sentences about what cannot be read.
    """

    trainer: str
    options: dict[str, object] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)


def read_program(path: Path, given: Mapping[str, object], variables: Mapping[str, str]) -> Program:
    """Return the trainer of a program with its arguments.

    Args:
        given: options of the command line, which the program's parser reads.
        variables: values that the user gives, of options and of the environment.

    Raises:
        ConfigError: the file is no program, calls no trainer of TRL or several, or a value cannot be read.
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
    """The names of a program and the values that are bound to them."""

    def __init__(self, tree: ast.Module, path: Path, given: Mapping[str, object], variables: Mapping[str, str]) -> None:
        self.tree, self.path, self.given, self.variables = tree, path, given, variables
        #: name -> line and value, in the order of the file; None for a value that cannot be read
        self.bound: dict[str, list[tuple[int, ast.expr | None]]] = {}
        #: name -> module of an import
        self.modules: dict[str, str] = {}
        self.parsed: set[str] = set()
        #: attributes and functions that code sets: the line and its text
        self.changed: list[tuple[int, str]] = []
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.functions = {node.name: node for node in functions}
        self.call = self._find_trainer()
        # the names of the function that calls the trainer, and of the module
        around = [node for node in functions if any(inner is self.call for inner in ast.walk(node))]
        for function in around:
            for argument in (*function.args.args, *function.args.kwonlyargs):
                self._bind_unknown(argument.arg, function.lineno)
        for body in (tree.body, *(function.body for function in around)):
            self._bind_all(body, always=True)
        for values in self.bound.values():
            values.sort(key=lambda item: item[0])

    def _find_trainer(self) -> ast.Call:
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and _name_call(node) in TRAINERS]
        if len(calls) == 1:
            return calls[0]
        lines = ", ".join(str(call.lineno) for call in calls)
        none = f"it calls none of {', '.join(TRAINERS)}"
        problem = f"it calls several trainers in lines {lines}; keep one" if calls else none
        raise ConfigError([f"{self.path} is a program of its own: {problem}"])

    def _bind_all(self, body: list[ast.stmt], *, always: bool) -> None:
        """Bind what statements set, which a branch or a loop may not do, or do again."""
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            self._bind(node, always=always)
            is_main = isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)
            inner = always and (is_main or isinstance(node, (ast.With, ast.AsyncWith)))
            for name in ("body", "orelse", "finalbody"):
                self._bind_all(getattr(node, name, []), always=inner)
            for handler in getattr(node, "handlers", []):
                self._bind_all(handler.body, always=False)

    def _bind(self, node: ast.stmt, *, always: bool) -> None:
        if isinstance(node, ast.ImportFrom) and node.module:
            self.modules |= {alias.asname or alias.name: node.module for alias in node.names}
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            read = ast.Name(node.target.id, ast.Load(), lineno=node.lineno, col_offset=0)
            pairs = [(node.target, ast.BinOp(read, node.op, node.value, lineno=node.lineno, col_offset=0))]
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            pairs = [(node.target, None)]
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            pairs = [(item.optional_vars, None) for item in node.items if item.optional_vars is not None]
        for target, value in pairs:
            self._bind_target(target, value if always else None, node.lineno)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            self._bind_call(node.value)

    def _bind_target(self, target: ast.expr, value: ast.expr | None, line: int) -> None:
        names = [item.id for item in ast.walk(target) if isinstance(item, ast.Name)]
        if value is not None and _name_call(value) in _PARSERS:
            self.parsed |= set(names)
        elif isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).append((line, value))
        elif isinstance(target, ast.Attribute):
            text = ast.unparse(target)
            self.bound.setdefault(text, []).append((line, value))
            if target.attr not in _PLAIN_ATTRIBUTES:
                self.changed.append((line, text))
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            for item, part in zip(target.elts, value.elts, strict=True):
                self._bind_target(item, part, line)
        elif not (isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ"):
            for name in names:
                self._bind_unknown(name, line)

    def _bind_call(self, call: ast.Call) -> None:
        """Bind what a method changes, and keep functions that set attributes or freeze weights."""
        name, function = _name_call(call), call.func
        if isinstance(function, ast.Attribute) and name in _CHANGING and isinstance(function.value, ast.Name):
            self._bind_unknown(function.value.id, call.lineno)
        if name in ("setattr", "requires_grad_", "resize_token_embeddings", "add_tokens", "add_special_tokens"):
            self.changed.append((call.lineno, ast.unparse(call)[:80]))

    def _bind_unknown(self, name: str, line: int) -> None:
        self.bound.setdefault(name, []).append((line, None))

    def _find(self, name: str, line: int) -> tuple[ast.expr, int] | None:
        """Return what a name is bound to above a line, with the line of the statement; None where it is not bound."""
        found = [(value, place) for place, value in self.bound.get(name, []) if place < line]
        if not found:
            return None
        value, place = found[-1]
        if value is None:
            raise _UnreadableError(name)
        return value, place

    def _follow(self, node: ast.expr, line: int) -> tuple[ast.expr, int]:
        """Return the expression behind names."""
        while isinstance(node, ast.Name) and node.id not in self.parsed and (found := self._find(node.id, line)) is not None:
            node, line = found
        return node, line

    # --- values

    def evaluate(self, node: ast.expr, line: int) -> object:
        """Return the value of an expression that is read above a line.

        Raises:
            _UnreadableError: it is known only when the program runs.
        """
        node, line = self._follow(node, line)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return [self.evaluate(item, line) for item in node.elts]
        if isinstance(node, ast.Dict) and all(node.keys):
            return {str(self.evaluate(key, line)): self.evaluate(value, line)
                    for key, value in zip(node.keys, node.values, strict=True) if key is not None}  # fmt: skip
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            value = self.evaluate(node.operand, line)
            return not value if isinstance(node.op, ast.Not) else -_as_number(value, node)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = self.evaluate(node.left, line), self.evaluate(node.right, line)
            if isinstance(left, str) and isinstance(right, str) and isinstance(node.op, ast.Add):
                return left + right
            try:
                return _OPERATORS[type(node.op)](_as_number(left, node), _as_number(right, node))
            except (ArithmeticError, ValueError):
                raise _UnreadableError(ast.unparse(node)) from None
        if isinstance(node, ast.JoinedStr):
            return "".join(str(self.evaluate(_drop_format(part), line)) for part in node.values)
        if isinstance(node, ast.Attribute):
            return self._read_attribute(node, line)
        if isinstance(node, ast.Call):
            return self._read_environment(node, line)
        raise _UnreadableError(ast.unparse(node))

    def _read_attribute(self, node: ast.Attribute, line: int) -> object:
        text = ast.unparse(node)
        if (found := self._find(text, line)) is not None:
            return self.evaluate(*found)
        if isinstance(node.value, ast.Name) and node.value.id in self.parsed:
            return self._read_given(node.attr, text)
        if text.startswith(("torch.", "TaskType.")):
            return text
        raise _UnreadableError(text)

    def _read_given(self, name: str, text: str) -> object:
        """Return an option of the command line, which the program's parser has read."""
        if name in self.variables:
            return read_scalar(self.variables[name])
        if name not in self.given and name not in _PARSED:
            raise _UnreadableError(text)
        return self.given.get(name, _PARSED.get(name))

    def _read_environment(self, node: ast.Call, line: int) -> object:
        """Return a variable of the environment, or a number or text that is made of a value."""
        name = ast.unparse(node.func)
        if name in ("os.environ.get", "os.getenv", "environ.get", "getenv") and node.args:
            variable = str(self.evaluate(node.args[0], line))
            if variable in self.variables:
                return self.variables[variable]
            return self.evaluate(node.args[1], line) if len(node.args) > 1 else None
        if name in ("int", "float", "str") and len(node.args) == 1:
            value = self.evaluate(node.args[0], line)
            try:
                return {"int": int, "float": float, "str": str}[name](value)  # type: ignore[operator]
            except (TypeError, ValueError):
                raise _UnreadableError(ast.unparse(node)) from None
        raise _UnreadableError(ast.unparse(node))

    # --- the trainer

    def read(self) -> Program:
        """Return the arguments of the trainer, and what of the program cannot be read."""
        call = self.call
        program = Program(TRAINERS[_name_call(call)])
        arguments = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        positions = {"grpo": "model reward_funcs args", "rloo": "model reward_funcs args", "dpo": "model ref_model args"}
        names = positions.get(program.trainer, "model args").split()
        if len(call.args) > len(names) or any(keyword.arg is None for keyword in call.keywords):
            program.unread.append(f"{self._at(call)}: write the arguments of the trainer by their names")
        arguments = dict(zip(names, call.args, strict=False)) | arguments
        readers: dict[str, Callable[[Program, ast.expr, int], None]] = {
            "model": self._read_model, "args": self._read_config, "train_dataset": self._read_data,
            "peft_config": self._read_adapters, "reward_funcs": self._read_rewards,
            "processing_class": self._read_tokenizer, "tokenizer": self._read_tokenizer,
        }  # fmt: skip
        if self._reads_command(arguments):
            program.options |= self.given
        for name in sorted(arguments, key=lambda name: list(readers).index(name) if name in readers else 0):
            value = arguments[name]
            if name in readers:
                try:
                    readers[name](program, value, call.lineno)
                except _UnreadableError as error:
                    program.unread.append(f"{self._at(value)}: {name} is {error}, which a branch, a loop or a call decides")
            elif name not in _HARMLESS and not (isinstance(value, ast.Constant) and value.value is None):
                program.unread.append(f"{self._at(value)}: {name} of the trainer is code that no run file has")
        for name in ("model_name_or_path", "dataset_name"):
            if name in self.variables:
                program.options[name] = self.variables[name]
        args = arguments.get("args")
        own = {*self.parsed, *([args.id] if isinstance(args, ast.Name) else [])}
        for line, text in self.changed:
            if text.partition(".")[0] not in own or text.count(".") != 1:
                program.unread.append(f"{self.path.name}, line {line}: {text} is set by code, which no run file has")
        return program

    def _read_tokenizer(self, program: Program, node: ast.expr, line: int) -> None:
        """Ask for a tokenizer that is the model's."""
        node, line = self._follow(node, line)
        if isinstance(node, ast.Call) and _name_call(node) == "from_pretrained" and node.args:
            try:
                same = self.evaluate(node.args[0], line) == program.options.get("model_name_or_path")
            except _UnreadableError:
                same = False
            if same or "model_name_or_path" in self.variables:
                return
        program.unread.append(f"{self._at(node)}: the tokenizer is {ast.unparse(node)[:80]}, and not the model's")

    def _reads_command(self, arguments: Mapping[str, ast.expr]) -> bool:
        args = arguments.get("args")
        return isinstance(args, ast.Name) and args.id in self.parsed

    def _at(self, node: ast.AST) -> str:
        return f"{self.path.name}, line {node.lineno}"  # type: ignore[attr-defined]

    def _take(self, program: Program, name: str, node: ast.expr, line: int) -> None:
        """Set an option to the value of an expression, or to that of --set."""
        if name in self.variables:
            program.options[name] = read_scalar(self.variables[name])
            return
        try:
            program.options[name] = self.evaluate(node, line)
        except _UnreadableError as error:
            program.unread.append(f"{self._at(node)}: {name} is {error}, which only a run knows; write --set {name}=VALUE")

    def _read_model(self, program: Program, node: ast.expr, line: int) -> None:
        if "model_name_or_path" in self.variables:
            return
        node, line = self._follow(node, line)
        if not isinstance(node, ast.Call) or _name_call(node) == "get":
            self._take(program, "model_name_or_path", node, line)
            return
        name = _name_call(node)
        if name == "get_peft_model" and len(node.args) > 1:
            self._read_model(program, node.args[0], line)
            self._read_adapters(program, node.args[1], line)
        elif name == "from_pretrained" and "Auto" in ast.unparse(node.func) and node.args:
            self._take(program, "model_name_or_path", node.args[0], line)
            for keyword in node.keywords:
                if keyword.arg not in _MODEL_PLAIN:
                    program.unread.append(f"{self._at(node)}: {keyword.arg or '**'} of from_pretrained is not available here")
        else:
            program.unread.append(f"{self._at(node)}: the model is made by {ast.unparse(node.func)}; "
                                  "write --set model_name_or_path=FOLDER where it is an unchanged one")  # fmt: skip

    def _read_config(self, program: Program, node: ast.expr, line: int) -> None:
        name = node.id if isinstance(node, ast.Name) else ""
        if name not in self.parsed:
            node, at = self._follow(node, line)
            if not isinstance(node, ast.Call) or not _name_call(node).endswith(("Config", "Arguments")):
                text = ast.unparse(node)[:80]
                program.unread.append(f"{self._at(node)}: the trainer's args are {text}; write them as GRPOConfig(...)")
                return
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._take(program, keyword.arg, keyword.value, at + 1)
                    continue
                try:
                    unpacked = self.evaluate(keyword.value, at)
                except _UnreadableError as error:
                    unpacked = None
                    program.unread.append(f"{self._at(node)}: ** {error} cannot be read; write its values by their names")
                program.options |= unpacked if isinstance(unpacked, dict) else {}
                if not isinstance(unpacked, dict) and unpacked is not None:
                    program.unread.append(f"{self._at(node)}: ** of {ast.unparse(keyword.value)} is no mapping")
        # attributes that are set afterwards
        for dotted, values in self.bound.items():
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
            node, line = self._follow(node, line)
            if isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Constant, ast.Attribute)):
                self._take(program, "dataset_train_split", node.slice, line)
                node = node.value
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _name_call(node) != "load_dataset":
                if node.func.attr != "shuffle":
                    changes.append(f".{node.func.attr} (line {node.lineno})")
                node = node.func.value
            else:
                break
        if changes or not isinstance(node, ast.Call) or _name_call(node) != "load_dataset" or not node.args:
            made = f"changed by {', '.join(reversed(changes))}" if changes else f"made by {ast.unparse(node)[:80]}"
            way = "write them to a file (dataset.to_json) and give --set dataset_name=FILE"
            program.unread.append(f"{self._at(node)}: the rows are {made}: {way}")
            return
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
        node, at = self._follow(node, line)
        if isinstance(node, ast.Constant) and node.value is None:
            return
        if isinstance(node, ast.Call) and _name_call(node) == "get_peft_config":
            return  # of the command line's model arguments
        if not isinstance(node, ast.Call) or _name_call(node) != "LoraConfig":
            program.unread.append(f"{self._at(node)}: adapters are {ast.unparse(node)}; LoraConfig(...) is read")
            return
        program.options["use_peft"] = True
        # PEFT's own defaults
        program.options |= {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
        for keyword in node.keywords:
            if keyword.arg in _LORA:
                self._take(program, _LORA[keyword.arg], keyword.value, at)
                continue
            try:
                value = self.evaluate(keyword.value, at)
            except _UnreadableError as error:
                value = str(error)
            if value is not None and value not in _LORA_PLAIN.get(keyword.arg or "", ()):
                program.unread.append(f"{self._at(keyword)}: {keyword.arg or '**'} of LoraConfig is not available here")

    def _read_rewards(self, program: Program, node: ast.expr, line: int) -> None:
        node, line = self._follow(node, line)
        items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else [node]
        names: list[str] = []
        for item in items:
            if isinstance(item, ast.Constant) and isinstance(item.value, str):
                program.options["reward_model_name_or_path"] = item.value
                continue
            name = item.id if isinstance(item, ast.Name) else ""
            module = self.modules.get(name, "")
            if module.startswith("trl"):
                names.append(name)
            elif name in self.functions:
                if not self._has_guard():
                    way = "importing it would start the training: move it to a module of its own"
                    program.unread.append(f"{self._at(item)}: {name} is in a program without `if __name__ ==`, and {way}")
                self._read_function(program, self.functions[name], self.path)
                names.append(f"{self.path.stem}:{name}")
            elif module:
                self._read_module(program, module, name)
                names.append(f"{module}:{name}")
            else:
                program.unread.append(f"{self._at(item)}: the reward {ast.unparse(item)} is no function of a module")
        if names:
            program.options["reward_funcs"] = names


    def _has_guard(self) -> bool:
        """Return True where the trainer is called in a function, or only as the main program."""
        top = next(node for node in self.tree.body if any(inner is self.call for inner in ast.walk(node)))
        return isinstance(top, (ast.FunctionDef, ast.AsyncFunctionDef)) or "__name__" in ast.unparse(getattr(top, "test", top))

    def _read_module(self, program: Program, module: str, name: str) -> None:
        """Read a reward function of another file, where that is next to the program."""
        path = self.path.parent / f"{module.replace('.', '/')}.py"
        if not path.is_file():
            return
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            return
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                self._read_function(program, node, path)

    def _read_function(self, program: Program, function: ast.FunctionDef | ast.AsyncFunctionDef, path: Path) -> None:
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


def _find_key(node: ast.AST, mapping: str) -> object:
    """Return the key that is read of a mapping: kwargs["x"] or kwargs.get("x"); None for something else."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == mapping:
        return node.slice.value if isinstance(node.slice, ast.Constant) else None
    if isinstance(node, ast.Call) and mapping and ast.unparse(node.func) == f"{mapping}.get" and node.args:
        return node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return None


def _name_call(node: ast.expr) -> str:
    """Return the last name of a call; empty for something else."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id if isinstance(node.func, ast.Name) else ""


def _drop_format(part: ast.expr) -> ast.expr:
    """Return the value of a part of an f-string that has no format."""
    return part.value if isinstance(part, ast.FormattedValue) and part.format_spec is None else part


def _as_number(value: object, node: ast.expr) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _UnreadableError(ast.unparse(node))
    return value


def _list_messages(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the line where a reward function first reads the content of a message."""
    keys = (node for node in ast.walk(function) if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant))
    yield from sorted({node.lineno for node in keys if node.slice.value in ("content", "role")})[:1]  # type: ignore[attr-defined]
