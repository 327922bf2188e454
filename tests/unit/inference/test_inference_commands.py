"""The command lines of generate, chat and evaluate: what is accepted, and how mistakes end."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rl.cli import chat, evaluate, generate
from mindspeed_rl.cli.main import main

COMMANDS = {"generate": generate, "chat": chat, "evaluate": evaluate}
NEEDED = {"generate": ["--prompt", "p"], "chat": [], "evaluate": ["--task", "gsm8k", "--task-data-path", __file__]}


def fails(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr with which a wrong command line ends, with exit status 2."""
    assert main(list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_flag_is_an_error_that_names_the_nearest(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, command, "--load", "x", *NEEDED[command], "--max-new-token", "5")
    assert "did you mean --max-new-tokens?" in error


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_model_is_an_error(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "holds neither a Hugging Face model" in fails(capsys, command, "--load", str(tmp_path), *NEEDED[command])


UPSTREAM = [
    "--tokenizer-type PretrainedFromHF --tokenizer-name-or-path t --lora-load l --lora-r 8 --lora-alpha 16",
    "--lora-target-modules linear_qkv linear_proj --max-length 256 --top-k 50 --top-p 0.95 --temperature 0.7",
    "--tensor-model-parallel-size 2 --use-kv-cache --bf16 --add-eos-token <|im_end|> --prompt-type qwen",
    "--hf-chat-template --seed 42 --max-position-embeddings 8192 --load-checkpoint-loosely --tokenizer-not-use-fast",
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flags", UPSTREAM)
def test_upstreams_flags_are_known(command: str, flags: str) -> None:
    COMMANDS[command].make_parser().parse_args(["--load", "x", *NEEDED[command], *flags.split()])


def test_flags_of_single_commands_are_known() -> None:
    generate.make_parser().parse_args("--load x --task greedy do_sample --num-beams 2 --stream --length-penalty 1".split())
    chat.make_parser().parse_args("--load x --task chat --history-turns 3".split())
    words = (
        "--load x --task mmlu --task-data-path d --evaluation-batch-size 4 --max-eval-samples 5 --no-chat-template --broadcast"
    )
    evaluate.make_parser().parse_args(words.split())


def test_flags_without_effect_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    main(["generate", "--load", "nowhere", "--prompt", "p", "--use-kv-cache"])
    assert "note: --use-kv-cache has no effect: the engine always has one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("generate --task greed --prompt p", "--task greed is unknown; there are greedy,"),
        ("generate --task chat --prompt p", "mindspeed-rl chat"),
        ("generate --prompt p --input f", "--prompt and --input exclude each other"),
        ("generate --input nowhere", "--input nowhere is not a file"),
        ("generate --prompt p --input-key k", "--input-key names a column of --input"),
        ("generate --prompt p q --stream", "--stream shows one"),
        ("generate --prompt p --repetition-penalty 0", "--repetition-penalty is 0; it must be in [0.01, 100]"),
        ("chat --presence-penalty -3", "--presence-penalty is -3; it must be in [-2, 2]"),
        ("chat --frequency-penalty 2.5", "--frequency-penalty is 2.5; it must be in [-2, 2]"),
        ("generate --prompt p --min-tokens 9 --max-new-tokens 8", "--min-tokens is 9; it must be between 0 and"),
        ("generate --prompt p --task beam_search --repetition-penalty 2", "--repetition-penalty: beam_search ranks"),
        ("generate --prompt p --num-return 2", "greedy gives 1 answers"),
        ("generate --prompt p --temperature -1", "--temperature is -1; it must be in [0, 2]"),
        ("generate --prompt p --top-p 1.5", "--top-p is 1.5; it must be in (0, 1]"),
        ("generate --prompt p --top-k -5", "--top-k is -5"),
        ("generate --prompt p --max-new-tokens 0", "--max-new-tokens is 0; it must be positive"),
        ("generate --prompt p --pipeline-model-parallel-size 2", "--engine megatron has stages"),
        ("chat --history-turns -1", "--history-turns is -1; it must be at least 0"),
        ("chat --greedy --temperature 1", "--greedy samples nothing"),
        ("chat --show-thinking --hide-thinking", "not allowed with argument"),
        ("evaluate --task gsm8 --task-data-path x", "--task gsm8 is unknown; did you mean gsm8k?"),
        ("evaluate --task gsm8k mmlu --task-data-path x", "2 tasks need as many --task-data-path, not 1"),
        ("evaluate --task gsm8k gsm8k --task-data-path x y", "--task names a task twice"),
        ("evaluate --task gsm8k --task-data-path nowhere", "gsm8k: --task-data-path nowhere does not exist"),
        ("evaluate --task gsm8k --task-data-path x --num-return 2", "several answers need a --temperature above 0"),
        ("evaluate --task gsm8k --task-data-path x --top-k 5", "need a --temperature above 0"),
    ],
)
def test_wrong_options_are_one_line_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], words: str, error: str
) -> None:
    command, *rest = words.split()
    assert error in fails(capsys, command, "--load", "nowhere", *rest)


def test_an_empty_prompt_is_refused_before_anything_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert fails(capsys, "generate", "--load", "nowhere", "--prompt", "p", " ", "") == "error: --prompt 2, 3 is empty"
    rows = tmp_path / "rows.jsonl"
    for row, error in (('{"question": ""}', "the prompt (column question) is empty"),
                       ('{"messages": [{"role": "user", "content": " "}]}', "the last message is empty")):  # fmt: skip
        rows.write_text('{"prompt": "p"}\n' + row)
        assert f"line 2: {error}" in fails(capsys, "generate", "--load", "nowhere", "--input", str(rows))


def test_options_of_sampling_reach_every_method() -> None:
    words = "--load x --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty 0.1 --min-tokens 3 --temperature 1"
    args = generate.make_parser().parse_args(words.split())
    for method, temperature in (("greedy", 0.0), ("do_sample", 1.0)):
        sampling = generate._build_generation_settings(method, args, (7,), 99).sampling
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens)
        assert (sampling.temperature, *penalties) == (temperature, 1.2, 0.5, 0.1, 3)


def test_the_method_follows_from_the_sampling_options() -> None:
    def methods(words: str) -> list[str]:
        return generate._choose_methods(generate.make_parser().parse_args(["--load", "x", *words.split()]))

    assert methods("") == ["greedy"]
    assert methods("--temperature 0") == ["greedy"]
    assert methods("--top-k 5") == ["do_sample"]
    assert methods("--task greedy_search greedy_search_with_sampling greedy") == ["greedy", "do_sample"]


def test_sampling_defaults_are_upstreams() -> None:
    args = generate.make_parser().parse_args(["--load", "x"])
    sampling = generate._build_generation_settings("do_sample", args, (), 99).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.7, 50, 0.95, 128)
    greedy = generate._build_generation_settings("greedy", args, (), 99).sampling
    assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0.0, -1, 1.0, 0.0)
