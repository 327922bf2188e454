"""Options that generate, chat and evaluate share, and the way from them to a running engine."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mindspeed_rl.inference.engine_settings import EngineSettings
    from mindspeed_rl.inference.model_files import ModelFiles
    from mindspeed_rl.inference.prompts import PromptFormat
    from mindspeed_rl.inference.records import Engine

#: Upstream's flags that change nothing here, and why.
WITHOUT_EFFECT = {
    "--tokenizer-type": "the tokenizer's files say it",
    "--micro-batch-size": "requests are batched as they come",
    "--evaluation-batch-size": "requests are batched as they come; --max-num-seqs bounds them",
    "--seq-length": "--max-length bounds prompt and answer",
    "--max-position-embeddings": "config.json says it",
    "--distributed-backend": "the platform decides",
}
WITHOUT_EFFECT_SWITCHES = {
    "--use-kv-cache": "the engine always has one",
    "--use-mcore-models": "the checkpoint says it",
    "--bf16": "the checkpoint says it; --dtype changes it",
    "--broadcast": "every rank sees all requests",
    "--no-load-optim": "only weights are read",
    "--no-load-rng": "only weights are read",
    "--exit-on-missing-checkpoint": "always so",
}


class Parser(argparse.ArgumentParser):
    """Raises ValueError for mistakes, with the nearest flag for an unknown one."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            known = [flag for action in self._actions for flag in action.option_strings if action.help != argparse.SUPPRESS]
            first = next((word for word in message.removeprefix(prefix).split() if word.startswith("-")), "")
            near = difflib.get_close_matches(first.partition("=")[0], known, n=1)
            message += f" (did you mean {near[0]}?)" if near else ""
        raise ValueError(message)


def add_model_options(parser: Parser) -> None:
    """What is loaded, and on what it runs."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add("--load", type=Path, required=True, help="Hugging Face folder, training checkpoint or Megatron checkpoint")
    add("--load-iteration", type=int, help="iteration of a checkpoint; default: its latest")
    add("--hf-cfg-dir", type=Path, help="checkpoint: Hugging Face folder with config.json; default: --tokenizer-name-or-path")
    add("--tokenizer-name-or-path", help="folder of the tokenizer; default: the model's")
    add("--tokenizer-not-use-fast", action="store_true", help="the Python implementation of the tokenizer")
    add("--trust-remote-code", action="store_true", help="run Python code that comes with model and tokenizer")
    add("--load-checkpoint-loosely", action="store_true", help="skip tensors that the model does not have")
    add("--lora-load", type=Path, help="adapter to merge: a PEFT folder or a checkpoint with LoRA weights")
    add("--lora-r", type=int, help="checked against the adapter")
    add("--lora-alpha", type=float, help="checked against the adapter; needed where it does not state its alpha")
    add("--lora-target-modules", nargs="+", default=[], help="checked: the adapted Megatron modules")

    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--platform", choices=("auto", "npu", "cpu", "cuda"), default="auto")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="auto: the checkpoint's")
    add("--fp16", action="store_const", const="float16", dest="dtype", help=argparse.SUPPRESS)
    add("--tensor-parallel-size", "--tensor-model-parallel-size", type=int, default=1, help="devices an engine is split over")
    add("--data-parallel-size", type=int, default=1, help="engines that share the requests")
    add("--pipeline-model-parallel-size", type=int, default=1, help=argparse.SUPPRESS)
    add("--max-length", "--max-model-len", type=int, help="longest prompt + answer, in tokens; default: what is needed")
    add("--max-num-seqs", type=int, help="answers at the same time; default: 32 on the CPU, 256 on devices")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the device's memory")
    add("--kv-cache-memory-gib", type=float, help="KV cache on the CPU; default: room for all answers, at most 8")
    add("--graph", action="store_true", help="compile and capture graphs: a slow start, then faster steps")
    add("--seed", type=int, default=1234)
    for flag in WITHOUT_EFFECT:
        parser.add_argument(flag, nargs="+", help=argparse.SUPPRESS)
    for flag in WITHOUT_EFFECT_SWITCHES:
        parser.add_argument(flag, action="store_true", help=argparse.SUPPRESS)


def add_prompt_options(parser: Parser) -> None:
    """How text becomes a prompt."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--prompt-type", help="chat template of ours, such as qwen, llama3, deepseek3")
    add("--prompt-type-path", help="file with templates of your own")
    add("--hf-chat-template", action="store_true", help="the tokenizer's own chat template")
    add("--enable-thinking", choices=("true", "false", "none"), default="none", help="none: the template's default")
    add("--add-eos-token", nargs="+", default=[], help="more tokens that end an answer")


def add_sampling_options(parser: Parser, *, max_new_tokens: int | None = 128) -> None:
    """How an answer is drawn. Values not given are None, so that it can be told what the user said."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add("--max-new-tokens", type=int, default=max_new_tokens, help="longest answer" + _default(max_new_tokens))
    add("--temperature", type=float, help="divides the logits; 0 is greedy; default 0.7 where answers are sampled")
    add("--top-k", type=int, help="most likely tokens that are kept, -1 keeps all; default 50")
    add("--top-p", type=float, help="probability mass that is kept; default 0.95")
    add("--min-p", type=float, help="tokens below this fraction of the most likely one are dropped; default 0")


def _default(value: Any) -> str:
    return "" if value is None else f"; default {value}"


def check_common(args: argparse.Namespace) -> None:
    """Says which flags have no effect.

    Raises:
        ValueError: a number makes no sense.
    """
    for flag, reason in {**WITHOUT_EFFECT, **WITHOUT_EFFECT_SWITCHES}.items():
        if getattr(args, flag.removeprefix("--").replace("-", "_")):
            say(f"note: {flag} has no effect: {reason}")
    if args.pipeline_model_parallel_size != 1:
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: the inference engine has no pipeline; "
            "a checkpoint cut in any way loads without the flag"
        )
    positive = (
        "tensor_parallel_size",
        "data_parallel_size",
        "max_length",
        "max_num_seqs",
        "max_new_tokens",
        "kv_cache_memory_gib",
    )
    for name in positive:
        value = getattr(args, name, None)
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be positive")
    ranges = {
        "temperature": (0.0, float("inf")),
        "top_p": (1e-9, 1.0),
        "min_p": (0.0, 1.0),
        "gpu_memory_utilization": (1e-9, 1.0),
    }
    for name, (least, most) in ranges.items():
        value = getattr(args, name, None)
        if value is not None and not least <= value <= most:
            allowed = "at least 0" if most == float("inf") else f"in {'[0' if least == 0 else '(0'}, 1]"
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be {allowed}")
    if getattr(args, "top_k", None) is not None and args.top_k < 1 and args.top_k != -1:
        if args.top_k != 0:
            raise ValueError(f"--top-k is {args.top_k}; it must be positive, or -1 for all tokens")
        args.top_k = -1


def say(text: str) -> None:
    """To stderr, which does not mix with results."""
    print(text, file=sys.stderr, flush=True)


@dataclass
class Session:
    """What the options resolve to before the engine starts.

    Attributes:
        max_position: the model's own limit of prompt + answer.
    """

    args: argparse.Namespace
    model: ModelFiles
    tokenizer: PreTrainedTokenizerBase
    prompt_format: PromptFormat
    settings: EngineSettings
    platform_name: str

    @property
    def max_position(self) -> int:
        return self.model.network.max_position_embeddings


def open_session(args: argparse.Namespace, *, default_template: str | None = None) -> Session:
    """Opens model, tokenizer and template; nothing large is read yet.

    Args:
        default_template: taken when no option names a template.

    Raises:
        ValueError: a folder, adapter, tokenizer or template is not usable.
    """
    from mindspeed_rl.observability.logging import quiet_environment, set_up_logging

    os.environ.update(quiet_environment(os.environ))
    from mindspeed_rl import platform

    device = platform.select(args.platform)
    for name, value in device.worker_env().items():
        os.environ.setdefault(name, value)
    if args.graph:
        os.environ.pop("TORCHDYNAMO_DISABLE", None)
    from mindspeed_rl.data.tokenizer import load_tokenizer
    from mindspeed_rl.inference.engine_settings import EngineSettings
    from mindspeed_rl.inference.model_files import ModelSettings, open_model
    from mindspeed_rl.inference.prompts import PromptFormat, choose_template

    model_settings = ModelSettings(
        load=args.load.expanduser(),
        hf_folder=_hf_folder(args),
        iteration=args.load_iteration,
        lora_load=None if args.lora_load is None else args.lora_load.expanduser(),
        lora_r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_target_modules=tuple(args.lora_target_modules),
        loosely=args.load_checkpoint_loosely,
    )
    model = open_model(model_settings)
    set_up_logging(None)
    for notice in model.source.notices:
        say(f"note: {notice}")
    tokenizer_path = args.tokenizer_name_or_path or str(model.hf_folder)
    tokenizer = load_tokenizer(
        tokenizer_path, trust_remote_code=args.trust_remote_code, use_fast=not args.tokenizer_not_use_fast
    )
    prompt_format = PromptFormat(
        tokenizer,
        choose_template(tokenizer, args.prompt_type, args.hf_chat_template) or default_template,
        template_path=args.prompt_type_path,
        thinking=args.enable_thinking,
        hf_folder=model.hf_folder,
        end_tokens=args.add_eos_token,
    )
    settings = EngineSettings(
        model=model_settings,
        tokenizer=tokenizer_path,
        max_model_len=args.max_length or model.network.max_position_embeddings,
        dtype=args.dtype,
        max_num_seqs=args.max_num_seqs,
        tensor_parallel_size=args.tensor_parallel_size,
        data_parallel_size=args.data_parallel_size,
        gpu_memory_utilization=args.gpu_memory_utilization,
        kv_cache_memory_gib=args.kv_cache_memory_gib,
        enforce_eager=not args.graph,
        trust_remote_code=args.trust_remote_code,
    )
    return Session(args, model, tokenizer, prompt_format, settings, device.name)


def _hf_folder(args: argparse.Namespace) -> Path | None:
    """Where a checkpoint's config.json may be: what the user says, else a tokenizer folder that has one."""
    if args.hf_cfg_dir is not None:
        return args.hf_cfg_dir.expanduser()
    tokenizer = None if args.tokenizer_name_or_path is None else Path(args.tokenizer_name_or_path).expanduser()
    return tokenizer if tokenizer is not None and (tokenizer / "config.json").is_file() else None


@contextlib.contextmanager
def running_engine(session: Session, *, max_model_len: int, most_log_probs: int = 20) -> Iterator[Engine]:
    """The engine, built and loaded; it ends with the block.

    Args:
        max_model_len: longest prompt + answer that is needed.
    """
    settings = replace(session.settings, max_model_len=max_model_len, most_log_probs=most_log_probs)
    say(f"loading {session.model.describe()} ...")
    if settings.tensor_parallel_size * settings.data_parallel_size > 1:
        from mindspeed_rl.inference.launch import engine_group

        with engine_group(settings, session.platform_name) as engine:
            yield engine
    else:
        from mindspeed_rl import adaptors

        adaptors.apply("rollout")  # before vLLM, which the engine imports
        from mindspeed_rl.inference.engine import InferenceEngine

        yield InferenceEngine(settings, session.model, session.tokenizer)


def needed_length(session: Session, longest_prompt: int, max_new_tokens: int) -> int:
    """max_model_len for prompts and answers of these lengths.

    Raises:
        ValueError: it is more than the model or --max-length allows.
    """
    most = session.args.max_length or session.max_position
    if most > session.max_position:
        raise ValueError(f"--max-length {most} is above the model's max_position_embeddings, {session.max_position}")
    if longest_prompt >= most:
        raise ValueError(
            f"the longest prompt has {longest_prompt} tokens, but prompt and answer together may have {most} "
            "(--max-length, or the model's max_position_embeddings)"
        )
    return min(longest_prompt + max_new_tokens, most)


def run_command(run: Any, argv: list[str]) -> int:
    """Runs a command; errors of the user and of the machine are one line on stderr.

    Returns:
        What `run` returns; 2 for a wrong option or file, 1 for a failure, 130 after Ctrl-C.
    """
    try:
        return run(argv)
    except (ValueError, FileNotFoundError) as error:
        say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    except (RuntimeError, OSError) as error:
        say(f"error: {error}")
        return 1
