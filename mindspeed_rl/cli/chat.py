"""`mindspeed-rl chat`: talk with a model on the console."""

from __future__ import annotations

import sys

from mindspeed_rl.cli.inference_options import (
    DEFAULT_LENGTH,
    MOST_LIKELY,
    SAMPLED,
    add_agent_options,
    add_model_options,
    add_prompt_options,
    add_sampling_options,
    build_sampling,
    check_common,
    open_agents,
    open_session,
    run_command,
    running_engine,
)
from mindspeed_rl.cli.options import Parser, print_status
from mindspeed_rl.inference.console_chat import MAX_IMAGES, History, run_chat
from mindspeed_rl.observability.logging import clean_text

_DESCRIPTION = (
    "Talk with a model. /exit (q, quit, exit) ends; /new (new, clear) forgets the conversation; /history shows it; "
    "/image FILE and /video FILE add an image or a video to the next question; "
    "Ctrl-C ends a response."
)


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(prog="mindspeed-rl chat", description=_DESCRIPTION, allow_abbrev=False)
    group = parser.add_argument_group("conversation")
    add = group.add_argument
    add("--task", choices=("chat",), help="upstream's name for this command")
    add("--system-prompt", help="system prompt before the first turn")
    add("--history-turns", type=int, default=3, help="earlier pairs of question and answer the model sees; default 3")
    thinking = group.add_mutually_exclusive_group()
    thinking.add_argument("--show-thinking", action="store_true", help="also show thoughts")
    thinking.add_argument("--hide-thinking", action="store_true", help="show only responses (the default)")
    add("--greedy", action="store_true", help="the most likely response instead of a sampled one")
    add_sampling_options(parser, max_new_tokens=512)
    add_agent_options(parser)
    add_prompt_options(parser)
    add_model_options(parser)
    return parser


def _chat(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    check_common(args)
    if args.history_turns < 0:
        raise ValueError(f"--history-turns is {args.history_turns}; it must be at least 0")
    if args.greedy and any(value is not None for value in (args.temperature, args.top_k, args.top_p, args.min_p)):
        raise ValueError("--greedy samples nothing: drop --temperature, --top-k, --top-p and --min-p")
    session = open_session(args, chats=True)
    length = args.max_length or min(session.model.model_config.max_position_embeddings, DEFAULT_LENGTH)
    if args.max_new_tokens >= length:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens} leaves no room for a question in {length} tokens")
    sampling = build_sampling(args, MOST_LIKELY if args.greedy else SAMPLED, session.prompt_format.stop_token_ids)
    history = History(session.prompt_format, args.system_prompt, args.history_turns, length - args.max_new_tokens)
    with (
        open_agents(session, args) as agents,
        running_engine(session, max_model_len=length, max_images=MAX_IMAGES, max_videos=MAX_IMAGES, agents=agents) as engine,
    ):
        print_status(_DESCRIPTION)
        run_chat(
            engine,
            history,
            sampling,
            read=input,
            write=_write,
            show_thinking=args.show_thinking,
            seed=args.seed,
        )
    return 0


def _write(text: str) -> None:
    sys.stdout.write(clean_text(text))
    sys.stdout.flush()


def main(argv: list[str]) -> int:
    """Run a chat; return 0, 2 for a wrong option or file, 1 when the engine failed."""
    return run_command(_chat, argv)
