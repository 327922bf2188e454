"""`mindspeed-rl generate`: responses to prompts from the command line, a file or a pipe."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mindspeed_rl.cli.inference_options import (
    MOST_LIKELY,
    PENALTIES,
    SAMPLED,
    SHAPE,
    add_agent_options,
    add_model_options,
    add_prompt_options,
    add_sampling_options,
    build_sampling,
    check_common,
    compute_agent_length,
    open_agents,
    open_session,
    run_command,
    running_engine,
)
from mindspeed_rl.cli.options import Parser, print_status, refuse_first
from mindspeed_rl.data.content_marks import IMAGE_MARK, VIDEO_MARK
from mindspeed_rl.data.conversation import Conversation, user
from mindspeed_rl.data.images import TAG, count_videos
from mindspeed_rl.data.videos import VIDEO_TAG
from mindspeed_rl.inference.batch_generation import (
    METHODS,
    GeneratedAnswer,
    GenerationSettings,
    Method,
    generate,
    read_jsonl,
    write_jsonl,
)
from mindspeed_rl.inference.engine_interface import Engine, Request
from mindspeed_rl.inference.text_stream import IncrementalText
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.rollout.requests import sample_seed

if TYPE_CHECKING:
    from mindspeed_rl.inference.agent_engine import AgentEngine
    from mindspeed_rl.inference.session import Session

_PromptRow = tuple[Conversation, dict[str, Any]]

_DESCRIPTION = "Generate answers. Prompts come from --prompt, from --input, or one a line from a pipe."


def make_parser() -> Parser:
    """Build the argument parser."""
    parser = Parser(prog="mindspeed-rl generate", description=_DESCRIPTION, allow_abbrev=False)
    group = parser.add_argument_group("generation")
    add = group.add_argument
    add("--prompt", nargs="+", help="prompts")
    add("--input", help="JSON lines with prompt, question, instruction or messages; - reads them from a pipe")
    add("--input-key", help="column of --input that holds the prompt")
    add("--image", nargs="+", metavar="FILE", help="images of every --prompt, in the places of its <image> or before its text")
    add("--video", nargs="+", metavar="FILE", help="videos of every --prompt, in the places of its <video> or before its text")
    add("--image-folder", help="folder of relative paths of images and videos; default: the working directory")
    add("--output", type=Path, help="file for the answers, JSON lines; default: text on the console")
    add("--system-prompt", help="system prompt of every prompt that brings none (needs a chat template)")
    add(
        "--task",
        nargs="+",
        metavar="METHOD",
        help=f"{', '.join(dict.fromkeys(METHODS.values()))} (each in turn); default: do_sample where "
        "--temperature, --top-k, --top-p or --min-p are given, else greedy",
    )
    add("--num-return", "--num-return-sequences", type=int, default=1, help="answers to each prompt")
    add("--num-beams", type=int, default=2, help="beams of beam search")
    add("--length-penalty", type=float, default=1.0, help="beam search: scores are log-prob / length ** this")
    add("--stop", nargs="+", default=[], help="texts that end an answer")
    add("--stream", action="store_true", help="show the answer to the one prompt as it is made")
    add_sampling_options(parser)
    add_agent_options(parser)
    add_prompt_options(parser)
    add_model_options(parser)
    return parser


def _read_prompts(args: argparse.Namespace) -> list[_PromptRow]:
    """Return (conversation, columns that the output repeats) of every prompt.

    Raises:
        ValueError: no prompt is given, or several sources, or a line is malformed.
    """
    refuse_first(
        (args.prompt is not None and args.input is not None, "--prompt and --input exclude each other"),
        (
            (args.image or args.video) and args.prompt is None,
            "--image and --video belong to --prompt; rows of --input name their images and videos themselves",
        ),
        (
            args.image_folder is not None and not Path(args.image_folder).expanduser().is_dir(),
            f"--image-folder {args.image_folder} is not a folder",
        ),
        (args.input_key is not None and args.input is None, "--input-key names a column of --input"),
    )
    if args.input == "-":
        rows = read_jsonl(sys.stdin, "standard input", args.input_key, args.image_folder)
    elif args.input is not None:
        path = Path(args.input).expanduser()
        if not path.is_file():
            raise ValueError(f"--input {args.input} is not a file")
        with path.open(encoding="utf-8") as file:
            rows = read_jsonl(file, str(path), args.input_key, args.image_folder)
    else:
        texts = args.prompt if args.prompt is not None else _read_piped_lines()
        if empty := [str(index) for index, text in enumerate(texts, start=1) if not text.strip()]:
            raise ValueError(f"--prompt {', '.join(empty)} is empty")
        rows = [(Conversation([user(text)]), {"prompt": text}) for text in texts]
        if args.image or args.video:
            lines = [json.dumps({"prompt": text, "images": args.image, "videos": args.video}) for text in texts]
            rows = read_jsonl(lines, "--prompt", None, args.image_folder)
    if args.system_prompt is None:
        return rows
    return [(replace(conversation, system=conversation.system or args.system_prompt), row) for conversation, row in rows]


def _read_piped_lines() -> list[str]:
    if sys.stdin.isatty():
        raise ValueError("there is no prompt: give --prompt, --input, or lines on standard input")
    texts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not texts:
        raise ValueError("there is no prompt: give --prompt TEXT, --input FILE, or lines on standard input, which has none")
    return texts


def _choose_methods(args: argparse.Namespace) -> list[Method]:
    """Return the methods that --task names, each once.

    Raises:
        ValueError: an unknown name, or chat among others.
    """
    given = [name for name in SHAPE if vars(args)[name] is not None]
    if args.task is None:
        return ["do_sample"] if given and args.temperature != 0 else ["greedy"]
    for name in args.task:
        if name not in METHODS:
            raise ValueError(f"--task {name} is unknown; there are {', '.join(METHODS)}, and chat, a separate command")
    methods: list[Method] = list(dict.fromkeys(METHODS[name] for name in args.task))
    if given and not {"do_sample", "beam_search_with_sampling"} & set(methods):
        print_status(
            f"note: {', '.join('--' + name.replace('_', '-') for name in given)} have no effect on {' '.join(methods)}"
        )
    return methods


def _build_generation_settings(
    method: Method, args: argparse.Namespace, stop_token_ids: tuple[int, ...], max_model_len: int
) -> GenerationSettings:
    """Build the settings of one method; sampling defaults are upstream's.

    Raises:
        ValueError: an option does not fit the method.
    """
    if method in ("greedy", "beam_search"):
        sampling = build_sampling(args, MOST_LIKELY, stop_token_ids, PENALTIES)
    else:
        sampling = build_sampling(args, SAMPLED, stop_token_ids)
    return GenerationSettings(
        method,
        sampling,
        max_model_len,
        num_return=args.num_return,
        num_beams=args.num_beams,
        length_penalty=args.length_penalty,
        stop_strings=tuple(args.stop),
        seed=args.seed,
    )


def _generate(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    check_common(args)
    if args.task == ["chat"]:
        raise ValueError("--task chat is a command of its own: mindspeed-rl chat")
    methods = _choose_methods(args)
    prompts = _read_prompts(args)
    plain = methods in (["greedy"], ["do_sample"]) and args.num_return == 1 and not args.output and not args.stop
    if args.stream and not (plain and len(prompts) == 1):
        raise ValueError("--stream shows one greedy or sampled answer to one prompt, without --output, --num-return and --stop")
    for method in methods:  # wrong options are found before the model is opened
        _build_generation_settings(method, args, (), 1)
    session = open_session(args)
    with open_agents(session, args) as agents:
        if agents is not None and any(method.startswith("beam") for method in methods):
            raise ValueError("--tools and --agent-loop do not go with beam search")
        _generate_responses(args, session, agents, prompts, methods)
    return 0


def _generate_responses(
    args: argparse.Namespace, session: Session, agents: AgentEngine | None, prompts: list[_PromptRow], methods: list[Method]
) -> None:
    prompts = [_decode_videos(session, index, *prompt) for index, prompt in enumerate(prompts)]
    ids = session.prompt_format.encode([conversation for conversation, _ in prompts])
    max_model_len = session.needed_length(max(map(len, ids)), args.max_new_tokens)
    if agents is not None:  # --max-new-tokens limits one turn
        max_model_len = max(max_model_len, compute_agent_length(session, args))
    settings = [
        _build_generation_settings(method, args, session.prompt_format.stop_token_ids, max_model_len) for method in methods
    ]
    max_log_probs = max(setting.max_log_probs for setting in settings)
    videos = [count_videos(conversation.images) for conversation, _ in prompts]
    images = [len(conversation.images) - count for (conversation, _), count in zip(prompts, videos)]
    opened = running_engine(
        session,
        max_model_len=max_model_len,
        max_log_probs=max_log_probs,
        max_images=max(1, *images),
        max_videos=max(videos),
        agents=agents,
    )
    with opened as engine:
        if args.stream:
            _stream(session, engine, ids[0], settings[0], prompts[0][0].images)
        else:
            _generate_all(session, engine, prompts, ids, settings, args.output)


def _decode_videos(session: Session, index: int, conversation: Conversation, row: dict[str, Any]) -> _PromptRow:
    """Return a prompt with its videos decoded; ValueError names one that cannot be read."""
    try:
        return session.prompt_format.decode_videos(conversation), row
    except ValueError as error:
        raise ValueError(f"prompt {index + 1}: {error}") from error


def _stream(session: Session, engine: Engine, ids: list[int], settings: GenerationSettings, images: tuple[str, ...]) -> None:
    text, finish = IncrementalText(session.prompt_format.decoder), None
    request = Request(ids, sample_seed(settings.seed, 0, 0, 0), images=images)
    for partial in engine.stream([request], settings.sampling):
        # the end token is sampled like any other, and is not text of the response
        added = [token for token in partial.token_ids if token not in settings.sampling.stop_token_ids]
        print(clean_text(text.add(added)), end="", flush=True)
        finish = partial.finish
    print(clean_text(text.finish()), flush=True)
    if finish == "length":
        limit = f"--max-new-tokens {settings.sampling.max_tokens}"
        if len(ids) + settings.sampling.max_tokens > session.settings.max_model_len:
            limit = f"the {session.settings.max_model_len} tokens of --max-length, of which the prompt has {len(ids)}"
        print_status(f"note: the answer was cut by {limit}")


def _generate_all(
    session: Session,
    engine: Engine,
    prompts: list[_PromptRow],
    ids: list[list[int]],
    settings: list[GenerationSettings],
    path: Path | None,
) -> None:
    output: list[dict[str, Any]] = []
    for setting in settings:
        start = time.perf_counter()
        images = [conversation.images for conversation, _ in prompts]
        answers = generate(engine, session.prompt_format, ids, setting, images)
        seconds, tokens = time.perf_counter() - start, sum(answer.num_tokens for answer in answers)
        speed = f"{tokens} tokens in {seconds:.2f} s ({tokens / seconds:.0f} tokens/s)"
        cut = sum(answer.finish == "length" for answer in answers)
        limits = f"; {cut} cut by --max-new-tokens or --max-length" if cut else ""
        print_status(f"{setting.method}: {len(answers)} answers, {speed}{limits}")
        if path is None:
            _print(prompts, answers, setting, several=len(settings) > 1)
        output += [_build_row(prompts[answer.prompt][1], len(ids[answer.prompt]), answer, setting.method) for answer in answers]
    if path is not None:
        write_jsonl(path, output)
        print_status(f"wrote {len(output)} answers to {path}")


def _build_row(columns: dict[str, Any], prompt_tokens: int, answer: GeneratedAnswer, method: str) -> dict[str, Any]:
    return {
        **columns,
        "response": answer.text,
        "method": method,
        "prompt_index": answer.prompt,
        "sample": answer.sample,
        "prompt_tokens": prompt_tokens,
        "response_tokens": answer.num_tokens,
        "log_prob": answer.log_prob,
        "finish_reason": answer.finish,
    }


def _print(prompts: list[_PromptRow], answers: list[GeneratedAnswer], setting: GenerationSettings, *, several: bool) -> None:
    """Print the responses; several have their prompt as a heading."""
    if len(answers) == 1 and not several:
        print(clean_text(answers[0].text), flush=True)
        return
    for answer in answers:
        question = prompts[answer.prompt][0].messages[-1].content.replace(IMAGE_MARK, TAG).replace(VIDEO_MARK, VIDEO_TAG)
        method = f" [{setting.method}]" if several else ""
        sample = f" #{answer.sample + 1}" if setting.num_return > 1 else ""
        print(clean_text(f">> {question}{method}{sample}\n{answer.text}\n"), flush=True)


def main(argv: list[str]) -> int:
    """Generate; return 0, 2 for a wrong option or file, 1 when generation failed, 130 after Ctrl-C."""
    return run_command(_generate, argv)
