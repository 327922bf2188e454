"""Shared options of generate, chat and evaluate, and the engine that they configure."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from mindspeed_rl.cli.options import (
    Parser,
    add_silent,
    build_options,
    note_without_effect,
    print_status,
    read_json_object,
    take_adapter,
)
from mindspeed_rl.config.run import PLATFORMS
from mindspeed_rl.config.threads import WAITING
from mindspeed_rl.data.templates import Thinking
from mindspeed_rl.hub import fetch, parse_hub_name
from mindspeed_rl.importing import collecting_seldom
from mindspeed_rl.inference.engine_interface import Engine
from mindspeed_rl.observability.logging import build_quiet_environment
from mindspeed_rl.rollout.requests import Sampling
from mindspeed_rl.run.rules.engine_limits import MAX_TEMPERATURE
from mindspeed_rl.runtime.fork_server import build_local_ray_environment

if TYPE_CHECKING:
    from mindspeed_rl.inference.agent_engine import AgentEngine
    from mindspeed_rl.inference.session import Session

#: default sampling: upstream's values, and the most likely response
SAMPLED = Sampling(temperature=0.7, max_tokens=128, stop_token_ids=(), top_p=0.95, top_k=50)
MOST_LIKELY = Sampling(temperature=0.0, max_tokens=1, stop_token_ids=())
#: options of sampling: what shapes the distribution, and what changes it as an answer grows
SHAPE = ("temperature", "top_p", "top_k", "min_p")
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")

#: max tokens of a conversation without --max-length
DEFAULT_LENGTH = 4096

#: template that no option names -> what it is
_TEMPLATE_NOTES = {
    "hf": "the tokenizer's own",
    "empty": "none, the texts of the turns are joined as they are",
}
#: Upstream's flags that change nothing here, and why.
_WITHOUT_EFFECT = {
    "--tokenizer-type": "the tokenizer's files determine it",
    "--micro-batch-size": "requests are batched as they come",
    "--evaluation-batch-size": "requests are batched as they come; --max-num-seqs bounds them",
    "--seq-length": "--max-length bounds prompt and answer",
    "--max-position-embeddings": "config.json determines it",
    "--distributed-backend": "the platform decides",
}
_WITHOUT_EFFECT_SWITCHES = {
    "--use-kv-cache": "the engine always has one",
    "--use-mcore-models": "the checkpoint determines it",
    "--bf16": "the checkpoint determines it; --dtype changes it",
    "--broadcast": "every rank sees all requests",
    "--no-load-optim": "only weights are read",
    "--no-load-rng": "only weights are read",
    "--exit-on-missing-checkpoint": "always so",
}


def add_model_options(parser: Parser) -> None:
    """Add the options of the model and its engine."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--load",
        required=True,
        help="Hugging Face folder, training checkpoint or Megatron checkpoint; or owner/name, ms://owner/name on a hub",
    )
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
    add("--engine", choices=("vllm", "megatron", "transformers"), default="vllm",
        help="megatron: the training model itself, to check vLLM; transformers: its own module, slow, for a model that vLLM "
        "does not serve")  # fmt: skip
    add("--pipeline-parallel-size", "--pipeline-model-parallel-size", dest="pipeline_model_parallel_size", type=int, default=1,
        help="stages of --engine megatron")  # fmt: skip
    add("--max-length", "--max-model-len", type=int, help="longest prompt + answer, in tokens; default: what is needed")
    add("--max-num-seqs", type=int, help="answers at the same time; default: 32 on the CPU, 256 on devices")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the device's memory")
    add("--kv-cache-memory-gib", type=float, help="KV cache on the CPU; default: room for all answers, at most 8")
    add("--graph", action="store_true", help="compile and capture graphs: a slow start, then faster steps")
    add("--seed", type=int, default=1234)
    add_silent(parser, flags=_WITHOUT_EFFECT, switches=_WITHOUT_EFFECT_SWITCHES, nargs="+")


def add_prompt_options(parser: Parser) -> None:
    """Add the options that turn text into a prompt."""
    group = parser.add_argument_group("prompts")
    add = group.add_argument
    add("--prompt-type", help="chat template of ours, such as qwen, llama3, deepseek3")
    add("--prompt-type-path", help="file with templates of your own")
    add("--hf-chat-template", action="store_true", help="the tokenizer's own chat template")
    add("--no-chat-template", action="store_true", help="plain text, whatever template the model was trained with")
    add("--enable-thinking", choices=get_args(Thinking), default="none", help="none: the template's default")
    add("--chat-template-kwargs", type=read_json_object, help="JSON object of further arguments of the tokenizer's template")
    add("--add-eos-token", nargs="+", default=[], help="more tokens that end an answer")
    add("--stop-token-ids", nargs="+", type=int, default=[], metavar="ID", help="the same, by id")


def add_agent_options(parser: Parser) -> None:
    """Add the options of responses of several turns, by the agent loops of reinforcement learning."""
    group = parser.add_argument_group("tools")
    add = group.add_argument
    add("--tools", help="tool file, or the name of a built-in tool: the model may call them while it answers")
    add("--tool-parser", help="how the model writes calls; default hermes")
    add("--agent-loop", help="tool_agent (the default with --tools), scheduler, environment, or module:Class")
    add("--multi-turn-scheduler", help="module:Class or module:function that continues the conversation")
    add("--environment", help="module:Class that answers the model, or a YAML file with its args")
    add("--max-turns", type=int, help="turns of the model in an answer; default: as many as fit")


def open_agents(session: Session, args: argparse.Namespace) -> AbstractContextManager[AgentEngine | None]:
    """Start the agents and tools of the options; None without any. They end with the block.

    Raises:
        ValueError: an option, a tool or a plug-in is wrong.
    """
    # imports vLLM's parsers and the tools, which responses of one turn do not need
    from mindspeed_rl.inference.agent_engine import AgentEngine, AgentSettings

    settings = build_options(AgentSettings, args)
    if not (settings.tools or settings.agent_loop or settings.multi_turn_scheduler or settings.environment):
        if settings.tool_parser or settings.max_turns:
            raise ValueError("--tool-parser and --max-turns need --tools or --agent-loop")
        return contextlib.nullcontext()
    if settings.max_turns is not None and settings.max_turns < 1:
        raise ValueError(f"--max-turns is {settings.max_turns}; it must be positive")
    return contextlib.closing(AgentEngine(settings, session.prompt_format, compute_agent_length(session, args)))


def compute_agent_length(session: Session, args: argparse.Namespace) -> int:
    """Return the max tokens of a prompt and all turns after it."""
    return args.max_length or min(session.model.model_config.max_position_embeddings, DEFAULT_LENGTH)


def add_sampling_options(parser: Parser, *, max_new_tokens: int | None = 128) -> None:
    """Add the options of sampling. Values not given are None, which distinguishes them from given ones."""
    group = parser.add_argument_group("sampling")
    add = group.add_argument
    add(
        "--max-new-tokens",
        type=int,
        default=max_new_tokens,
        help="longest response" + ("" if max_new_tokens is None else f"; default {max_new_tokens}"),
    )
    add("--temperature", type=float, help="divides the logits; 0 is greedy; default 0.7 where answers are sampled")
    add("--top-k", type=int, help="most likely tokens that are kept, -1 keeps all; default 50")
    add("--top-p", type=float, help="probability mass that is kept; default 0.95")
    add("--min-p", type=float, help="tokens below this fraction of the most likely one are dropped; default 0")
    add("--repetition-penalty", type=float, help="divides logits of tokens that prompt or answer have; default 1, off")
    add("--presence-penalty", type=float, help="subtracted from the logits of tokens that the answer has; default 0")
    add("--frequency-penalty", type=float, help="the same, times their number; default 0")
    add("--min-tokens", type=int, help="no end token before so many tokens; default 0")


def check_common(args: argparse.Namespace) -> None:
    """Print the flags without effect, and check the numbers.

    Raises:
        ValueError: a number is out of range.
    """
    note_without_effect(args, {**_WITHOUT_EFFECT, **_WITHOUT_EFFECT_SWITCHES})
    if args.pipeline_model_parallel_size != 1 and args.engine != "megatron":
        raise ValueError(
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size}: vLLM's engine has no pipeline here; a "
            "checkpoint cut in any way loads without the flag, and --engine megatron has stages"
        )
    if args.engine != "vllm" and args.graph:
        raise ValueError(f"--graph: graphs are vLLM's; --engine {args.engine} has none")
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
    if args.min_tokens is not None and not 0 <= args.min_tokens <= (args.max_new_tokens or args.min_tokens):
        raise ValueError(f"--min-tokens is {args.min_tokens}; it must be between 0 and --max-new-tokens {args.max_new_tokens}")
    ranges = {
        "temperature": (0.0, MAX_TEMPERATURE),
        "top_p": (1e-9, 1.0),
        "min_p": (0.0, 1.0),
        "gpu_memory_utilization": (1e-9, 1.0),
        "repetition_penalty": (0.01, 100.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
    }
    for name, (minimum, maximum) in ranges.items():
        value = vars(args)[name]
        if value is not None and not minimum <= value <= maximum:
            allowed = f"in {'(0' if minimum == 1e-9 else f'[{minimum:g}'}, {maximum:g}]"
            raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be {allowed}")
    if args.top_k is not None and args.top_k < 1 and args.top_k != -1:
        if args.top_k != 0:
            raise ValueError(f"--top-k is {args.top_k}; it must be positive, or -1 for all tokens")
        # transformers has 0 for all tokens
        args.top_k = -1


def build_sampling(
    args: argparse.Namespace, default: Sampling, stop_token_ids: tuple[int, ...], names: Sequence[str] = (*SHAPE, *PENALTIES)
) -> Sampling:
    """Build the sampling settings from the options with these names; those not given keep their default."""
    given = {name: vars(args)[name] for name in names if vars(args)[name] is not None}
    return replace(default, max_tokens=args.max_new_tokens or default.max_tokens, stop_token_ids=stop_token_ids, **given)


def open_session(args: argparse.Namespace, *, chats: bool = False) -> Session:
    """Open model, tokenizer and template; nothing large is read yet.

    Args:
        chats: there is a template in any case; see `session.open_session`.

    Raises:
        ValueError: a folder, adapter, tokenizer or template is not usable.
    """
    os.environ.update({**WAITING, **os.environ, **build_quiet_environment(os.environ)})
    os.environ.update(build_local_ray_environment(os.environ))
    with collecting_seldom():
        # imports torch, which must find this environment, and which --help and wrong options do not need
        from mindspeed_rl.inference import session

    if args.no_chat_template and (args.hf_chat_template or args.prompt_type):
        raise ValueError("--no-chat-template contradicts --hf-chat-template and --prompt-type")
    name = parse_hub_name(args.load)
    args.load = Path(args.load) if name is None else fetch(name, "--load")
    take_adapter(args, "--load")
    opened = session.open_session(build_options(session.SessionOptions, args), chats=chats)
    if (template := opened.prompt_format.name) and not (args.prompt_type or args.hf_chat_template):
        print_status(f"note: chat template: {_TEMPLATE_NOTES[template]}; --prompt-type NAME takes another")
    for notice in (*opened.model.source.warnings, *opened.warnings):
        print_status(f"note: {notice}")
    return opened


@contextlib.contextmanager
def running_engine(
    session: Session,
    *,
    max_model_len: int,
    max_log_probs: int = 20,
    max_images: int = 1,
    max_videos: int = 0,
    agents: AgentEngine | None = None,
) -> Iterator[Engine]:
    """Build and load the engine and the agents around it; it ends with the block. See `Session.running_engine`."""
    print_status(f"loading {session.model.describe()} ...")
    opened = session.running_engine(
        max_model_len=max_model_len, max_log_probs=max_log_probs, max_images=max_images, max_videos=max_videos
    )
    with opened as engine:
        yield engine if agents is None else agents.wrap(engine)


def run_command(run: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command; errors of the user and of the machine are one line on stderr.

    Returns:
        The result of `run`; 2 for a wrong option or file, 1 for a failure, 130 after Ctrl-C.
    """
    try:
        return run(argv)
    except (ValueError, FileNotFoundError) as error:
        print_status(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print_status("interrupted")
        return 130
    except (RuntimeError, OSError) as error:
        print_status(f"error: {error}")
        return 1
