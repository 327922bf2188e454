"""Options that generate, chat and evaluate share, and the way from them to a running engine."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from mindspeed_rl.cli.options import Parser, add_silent, as_options, note_without_effect, say
from mindspeed_rl.config.run import PLATFORMS
from mindspeed_rl.data.templates import Thinking
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.runtime.fork_server import build_local_ray_environment

if TYPE_CHECKING:
    from mindspeed_rl.inference.agent_engine import AgentEngine
    from mindspeed_rl.inference.engine_interface import Engine
    from mindspeed_rl.inference.session import Session

#: how answers are drawn unless the user says otherwise: upstream's defaults, and the most likely answer
SAMPLED = Sampling(temperature=0.7, max_tokens=128, stop_token_ids=(), top_p=0.95, top_k=50)
MOST_LIKELY = Sampling(temperature=0.0, max_tokens=1, stop_token_ids=())

#: most tokens of a conversation unless --max-length says another number
DEFAULT_LENGTH = 4096

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
    add(
        "--lora-load",
        type=Path,
        help="adapter to merge: a PEFT folder, or a checkpoint with LoRA weights (its newest, or the iter_* folder named)",
    )
    add("--lora-r", type=int, help="checked against the adapter")
    add("--lora-alpha", type=float, help="checked against the adapter; needed where it does not state its alpha")
    add("--lora-target-modules", nargs="+", default=[], help="checked: the adapted Megatron modules")

    group = parser.add_argument_group("engine")
    add = group.add_argument
    add("--platform", choices=PLATFORMS, default="auto")
    add("--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="auto: the checkpoint's")
    add("--fp16", action="store_const", const="float16", dest="dtype", help=argparse.SUPPRESS)
    add("--tensor-parallel-size", "--tensor-model-parallel-size", type=int, default=1, help="devices an engine is split over")
    add("--data-parallel-size", type=int, default=1, help="engines that share the requests")
    add("--engine", choices=("vllm", "megatron"), default="vllm", help="megatron: the training model itself, to check vLLM")
    add("--pipeline-parallel-size", "--pipeline-model-parallel-size", dest="pipeline_model_parallel_size", type=int, default=1,
        help="stages of --engine megatron")  # fmt: skip
    add("--max-length", "--max-model-len", type=int, help="longest prompt + answer, in tokens; default: what is needed")
    add("--max-num-seqs", type=int, help="answers at the same time; default: 32 on the CPU, 256 on devices")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the device's memory")
    add("--kv-cache-memory-gib", type=float, help="KV cache on the CPU; default: room for all answers, at most 8")
    add("--graph", action="store_true", help="compile and capture graphs: a slow start, then faster steps")
    add("--seed", type=int, default=1234)
    add_silent(parser, flags=WITHOUT_EFFECT, switches=WITHOUT_EFFECT_SWITCHES, nargs="+")


def add_prompt_options(parser: Parser) -> None:
    """How text becomes a prompt."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--prompt-type", help="chat template of ours, such as qwen, llama3, deepseek3")
    add("--prompt-type-path", help="file with templates of your own")
    add("--hf-chat-template", action="store_true", help="the tokenizer's own chat template")
    add("--enable-thinking", choices=get_args(Thinking), default="none", help="none: the template's default")
    add("--add-eos-token", nargs="+", default=[], help="more tokens that end an answer")


def add_agent_options(parser: Parser) -> None:
    """Answers of several turns, by the agent loops of reinforcement learning."""
    group = parser.add_argument_group("tools")
    add = group.add_argument
    add("--tools", help="tool file, or the name of a built-in tool: the model may call them while it answers")
    add("--tool-parser", help="how the model writes calls; default hermes")
    add("--agent-loop", help="tool_agent (the default with --tools), scheduler, environment, or module:Class")
    add("--multi-turn-scheduler", help="module:Class or module:function that goes on with the conversation")
    add("--environment", help="module:Class that answers the model, or a YAML file with its args")
    add("--max-turns", type=int, help="turns of the model in an answer; default: as many as fit")


def agents_of(session: Session, args: argparse.Namespace) -> AbstractContextManager[AgentEngine | None]:
    """The agents that the options ask for, their tools started; None without any. Their end is that of the block.

    Raises:
        ValueError: an option, a tool or a plug-in is wrong.
    """
    # loads vLLM's parsers' base and the tools, which answers of one turn do without
    from mindspeed_rl.inference.agent_engine import AgentEngine, AgentSettings

    settings = as_options(AgentSettings, args)
    if not (settings.tools or settings.agent_loop or settings.multi_turn_scheduler or settings.environment):
        if settings.tool_parser or settings.max_turns:
            raise ValueError("--tool-parser and --max-turns need --tools or --agent-loop")
        return contextlib.nullcontext()
    if settings.max_turns is not None and settings.max_turns < 1:
        raise ValueError(f"--max-turns is {settings.max_turns}; it must be positive")
    return contextlib.closing(AgentEngine(settings, session.prompt_format, agent_length(session, args)))


def agent_length(session: Session, args: argparse.Namespace) -> int:
    """Most tokens of a prompt and all turns behind it."""
    return args.max_length or min(session.max_position, DEFAULT_LENGTH)


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
    note_without_effect(args, {**WITHOUT_EFFECT, **WITHOUT_EFFECT_SWITCHES})
    if args.pipeline_model_parallel_size != 1 and args.engine != "megatron":
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: vLLM's engine has no pipeline here; a "
            "checkpoint cut in any way loads without the flag, and --engine megatron has stages"
        )
    if args.engine == "megatron" and args.graph:
        raise ValueError("--graph: graphs are vLLM's; --engine megatron has none")
    positive = (
        "tensor_parallel_size",
        "data_parallel_size",
        "pipeline_model_parallel_size",
        "max_length",
        "max_num_seqs",
        "max_new_tokens",
        "kv_cache_memory_gib",
    )
    for name in positive:
        value = vars(args)[name]
        if value is not None and not value > 0:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be positive")
    ranges = {
        "temperature": (0.0, float("inf")),
        "top_p": (1e-9, 1.0),
        "min_p": (0.0, 1.0),
        "gpu_memory_utilization": (1e-9, 1.0),
    }
    for name, (least, most) in ranges.items():
        value = vars(args)[name]
        if value is not None and not least <= value <= most:
            allowed = "at least 0" if most == float("inf") else f"in {'[0' if least == 0 else '(0'}, 1]"
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be {allowed}")
    if args.top_k is not None and args.top_k < 1 and args.top_k != -1:
        if args.top_k != 0:
            raise ValueError(f"--top-k is {args.top_k}; it must be positive, or -1 for all tokens")
        # 0 is transformers' word for all tokens
        args.top_k = -1


def sampling_of(args: argparse.Namespace, usual: Sampling, stop_token_ids: tuple[int, ...]) -> Sampling:
    """How answers are drawn: as the user says, and as usual where nothing is said."""
    names = ("temperature", "top_p", "top_k", "min_p")
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    return replace(usual, max_tokens=args.max_new_tokens or usual.max_tokens, stop_token_ids=stop_token_ids, **given)


def open_session(args: argparse.Namespace) -> Session:
    """Opens model, tokenizer and template; nothing large is read yet.

    Raises:
        ValueError: a folder, adapter, tokenizer or template is not usable.
    """
    os.environ.update(build_quiet_environment(os.environ))
    os.environ.update(build_local_ray_environment(os.environ))
    # loads torch, which must find this environment, and which --help and wrong options do without
    from mindspeed_rl.inference import session

    opened = session.open_session(as_options(session.SessionOptions, args))
    for notice in opened.model.source.notices:
        say(f"note: {notice}")
    return opened


@contextlib.contextmanager
def running_engine(
    session: Session, *, max_model_len: int, max_log_probs: int = 20, agents: AgentEngine | None = None
) -> Iterator[Engine]:
    """The engine, built and loaded, and the agents around it; it ends with the block. See `Session.running_engine`."""
    say(f"loading {session.model.describe()} ...")
    with session.running_engine(max_model_len=max_model_len, max_log_probs=max_log_probs) as engine:
        yield engine if agents is None else agents.wrap(engine)


def run_command(run: Callable[[list[str]], int], argv: list[str]) -> int:
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
