"""generate, chat and evaluate on a tiny random model, as a user runs them; the tokens equal transformers'.

One process runs all three commands, because importing vLLM takes longer than everything else here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from patience import patient
from shared_forks import shared
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from mindspeed_rl.cli.convert import main as convert
from mindspeed_rl.observability.logging import clean_text
from mindspeed_rl.runtime.fork_server import INFERENCE

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "unit" / "data"))
from byte_tokenizer import TEST_DATA, build_tokenizer  # noqa: E402

PROMPTS = ["once upon a time", "2 + 2 =", "x"]
NUM_NEW, NUM_BEAMS = 16, 3
PROGRAM = """
import io, json, sys
from mindspeed_rl.cli.main import main
codes = []
for words, typed in json.loads(sys.argv[1]):
    sys.stdin = io.StringIO(typed)
    print(f"=== {words[0]}", flush=True)
    codes.append(main(words))
print("=== codes", json.dumps(codes))
"""


@dataclass(frozen=True)
class Session:
    """What the three commands left behind; `shown` is their standard output by command."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    model: Qwen2ForCausalLM
    codes: list[int]
    shown: dict[str, str]
    said: str


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    folder = tmp_path_factory.mktemp("inference")
    tokenizer = build_tokenizer(eos_token="<|im_end|>")
    tokenizer.chat_template = (TEST_DATA / "chat_templates" / "qwen25.jinja").read_text(encoding="utf-8")
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config).float().eval()
    model.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    cut = ("--target-tensor-parallel-size", "2", "--target-pipeline-parallel-size", "2")
    assert convert(["--load-dir", str(folder / "hf"), "--save-dir", str(folder / "megatron"), *cut]) == 0
    assert convert(["--load-dir", str(folder / "hf"), "--save-dir", str(folder / "dist"), "--ckpt-format", "torch_dist"]) == 0
    questions = [{"question": text, "choices": ["one", "two"], "answer": 1} for text in PROMPTS]
    (folder / "x_test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "other.jsonl").write_text('{"unknown": "column"}\n')
    commands = [
        (
            [
                *("generate", "--load", str(folder / "megatron"), "--prompt", *PROMPTS, "--max-new-tokens", str(NUM_NEW)),
                *("--task", "greedy", "beam_search", "do_sample", "--num-beams", str(NUM_BEAMS)),
                *("--output", str(folder / "answers.jsonl")),
            ],
            "",
        ),
        (
            ["chat", "--load", str(folder / "hf"), "--hf-chat-template", "--greedy", "--max-new-tokens", str(NUM_NEW)],
            "hello\nclear\nquit\n",
        ),
        (
            [
                *("evaluate", "--load", str(folder / "dist"), "--task", "gsm8k", "multiple_choice", "math"),
                *(
                    "--task-data-path",
                    str(TEST_DATA / "gsm8k" / "sample.jsonl"),
                    str(folder / "x_test.jsonl"),
                    str(folder / "other.jsonl"),
                ),
                *("--num-shots", "0", "--max-new-tokens", "4", "--max-eval-samples", "5"),
                *("--output", str(folder / "scores.json"), "--answers", str(folder / "verdicts.jsonl")),
            ],
            "",
        ),
        (
            [
                *("generate", "--load", str(folder / "hf"), "--prompt", *PROMPTS, "--max-new-tokens", str(NUM_NEW)),
                *("--repetition-penalty", "1.5", "--min-tokens", str(NUM_NEW), "--output", str(folder / "penalized.jsonl")),
            ],
            "",
        ),
    ]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **shared(INFERENCE, platform="auto")},
        capture_output=True,
        text=True,
        timeout=patient(500),
        check=False,
    )
    if done.returncode != 0:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}")
    parts = dict(part.split("\n", 1) if "\n" in part else (part, "") for part in done.stdout.split("=== ")[1:-1])
    codes = json.loads(done.stdout.rsplit("=== codes", 1)[1])
    return Session(folder, tokenizer, model, codes, parts, done.stderr)


def continue_with_transformers(session: Session, ids: list[int], **how: object) -> tuple[list[int], float]:
    """Tokens and log-prob (per token) of the best continuation."""
    out = session.model.generate(
        torch.tensor([ids]),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **how,
    )
    tokens = out.sequences[0, len(ids) :].tolist()
    while tokens and tokens[-1] == session.tokenizer.pad_token_id:
        tokens.pop()
    return tokens, float(out.sequences_scores[0]) if "num_beams" in how else 0.0


def text_of(session: Session, tokens: list[int]) -> str:
    kept = [token for token in tokens if token != session.tokenizer.eos_token_id]
    marks = {session.tokenizer.convert_tokens_to_ids(mark): mark for mark in ("<think>", "</think>")}
    parts, run = [], []
    for token in kept:
        if token in marks:
            parts += [session.tokenizer.decode(run, skip_special_tokens=True), marks[token]]
            run = []
        else:
            run.append(token)
    return "".join([*parts, session.tokenizer.decode(run, skip_special_tokens=True)])


def answers(session: Session, method: str) -> list[dict]:
    rows = map(json.loads, (session.folder / "answers.jsonl").read_text(encoding="utf-8").splitlines())
    return [row for row in rows if row["method"] == method]


def test_greedy_answers_from_a_megatron_checkpoint_are_those_of_transformers(session: Session) -> None:
    for prompt, row in zip(PROMPTS, answers(session, "greedy"), strict=True):
        ids = session.tokenizer(prompt)["input_ids"]
        tokens, _ = continue_with_transformers(session, ids)
        assert row["prompt"] == prompt
        assert row["response"] == text_of(session, tokens)
        assert row["response_tokens"] == len(tokens)
        with torch.no_grad():
            log_probs = session.model(torch.tensor([ids + tokens])).logits[0].log_softmax(-1)
        expected = sum(float(log_probs[len(ids) - 1 + place, token]) for place, token in enumerate(tokens))
        assert row["log_prob"] == pytest.approx(expected, abs=1e-3)


def test_beam_search_finds_the_sequence_that_transformers_finds(session: Session) -> None:
    for prompt, row in zip(PROMPTS, answers(session, "beam_search"), strict=True):
        tokens, score = continue_with_transformers(session, session.tokenizer(prompt)["input_ids"], num_beams=NUM_BEAMS)
        assert row["response"] == text_of(session, tokens)
        assert row["log_prob"] / row["response_tokens"] == pytest.approx(score, abs=1e-4)


def test_sampled_answers_differ_from_greedy_ones_and_the_speed_is_told(session: Session) -> None:
    assert [row["response"] for row in answers(session, "do_sample")] != [row["response"] for row in answers(session, "greedy")]
    assert session.said.count("tokens/s)") == 4


def test_penalties_and_the_least_number_of_tokens_are_those_of_transformers(session: Session) -> None:
    rows = [json.loads(line) for line in (session.folder / "penalized.jsonl").read_text(encoding="utf-8").splitlines()]
    for prompt, row in zip(PROMPTS, rows, strict=True):
        ids = session.tokenizer(prompt)["input_ids"]
        tokens, _ = continue_with_transformers(session, ids, repetition_penalty=1.5, min_new_tokens=NUM_NEW)
        assert row["response"] == text_of(session, tokens)
        assert (row["response_tokens"], row["finish_reason"]) == (NUM_NEW, "length")
    assert f"; {len(PROMPTS)} cut by --max-new-tokens" in session.said
    assert [row["response"] for row in rows] != [row["response"] for row in answers(session, "greedy")]


def test_chat_streams_the_answer_to_the_templated_question(session: Session) -> None:
    messages = [{"role": "user", "content": "hello"}]
    text = session.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens, _ = continue_with_transformers(session, session.tokenizer(text, add_special_tokens=False)["input_ids"])
    streamed = session.shown["chat"].partition("MindSpeed-RL: ")[2].partition("\nYou >> The conversation starts anew.\n")[0]
    text = text_of(session, tokens).rstrip("\N{REPLACEMENT CHARACTER}")
    assert streamed == clean_text(text) + ("" if session.tokenizer.eos_token_id in tokens else " [cut by --max-new-tokens]")


def test_scores_are_counts_and_a_failing_task_makes_the_exit_status_1(session: Session) -> None:
    assert session.codes == [0, 0, 1, 0]
    scores = json.loads((session.folder / "scores.json").read_text())
    assert scores["failed"].keys() == {"math"}
    assert scores["tasks"]["gsm8k"]["total"] == 5 and scores["tasks"]["multiple_choice"]["total"] == 3
    verdicts = list(map(json.loads, (session.folder / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()))
    for name, task in scores["tasks"].items():
        right = [row["right"] for row in verdicts if row["task"] == name]
        assert (sum(right), len(right)) == (task["right"], task["total"])


def test_a_choice_is_the_letter_with_the_highest_probability(session: Session) -> None:
    verdicts = map(json.loads, (session.folder / "verdicts.jsonl").read_text(encoding="utf-8").splitlines())
    letters = {letter: session.tokenizer(letter)["input_ids"][0] for letter in "AB"}
    for row in (row for row in verdicts if row["task"] == "multiple_choice"):
        with torch.no_grad():
            logits = session.model(torch.tensor([session.tokenizer(row["prompt"])["input_ids"]])).logits[0, -1]
        assert row["response"] == max(letters, key=lambda letter: float(logits[letters[letter]]))
