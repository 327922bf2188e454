"""The audit of data: a planted fault of each kind is found, and its clean twin is not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rl.audit.data import find_answer
from mindspeed_rl.audit.near_duplicates import NearDuplicates
from mindspeed_rl.audit.overlap import OverlapIndex
from mindspeed_rl.audit.texts import find_frame, find_language, hash_n_grams, hash_words, normalise, strip_frame
from mindspeed_rl.cli.preprocess import main as preprocess

Audit = Callable[..., tuple[int, Any]]
GSM8K = [json.loads(line) for line in (Path(__file__).parents[2] / "data/gsm8k/sample.jsonl").read_text().splitlines()]
ROWS = [{"prompt": row["question"], "labels": row["answer"].rpartition("#### ")[2]} for row in GSM8K]
WORDS = "lamp river seven cloud bread stone music green paper horse window garden silver doctor bridge summer candle forest"


def faults(found: dict[str, Any]) -> dict[str, int]:
    return {kind: one["rows"] for kind, one in found["findings"].items()}


def test_gsm8k_rows_pass_without_a_finding(audit: Audit) -> None:
    code, found = audit("data", ROWS[:30], held_out=ROWS[30:])
    assert (code, faults(found), found["rows"]) == (0, {}, 30)
    assert not found["constant_answer"]["wins"] and found["writing"] == {"Latin letters": 30}


def story(seed: int, length: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS.split(), k=length))


FIRST = ROWS[0]["prompt"]
#: a row after the clean ones -> its fault; the twin, which has none
PLANTED: dict[str, tuple[dict[str, Any] | str, str, dict[str, Any] | str]] = {
    "equal": (ROWS[0], "duplicate", {**ROWS[0], "prompt": FIRST.replace("16", "18")}),
    "equal but for case, spaces and width": (
        {**ROWS[0], "prompt": FIRST.upper().replace("16", "１６").replace(" ", "  ")}, "duplicate", ROWS[31]
    ),
    "another label": ({**ROWS[0], "labels": "17"}, "conflict", {"prompt": FIRST.replace("16", "15"), "labels": "17"}),
    "nearly equal": (
        {**ROWS[0], "prompt": FIRST.replace("the remainder", "the remains")}, "near_duplicate",
        {**ROWS[0], "prompt": "Ducks lay eggs. " + FIRST[-60:]},
    ),
    "an evaluation prompt": (ROWS[39], "overlap", ROWS[32]),
    "an evaluation prompt in a longer text": (
        {**ROWS[39], "prompt": f"Here is a question. {ROWS[39]['prompt']} Think about it first."}, "overlap",
        {**ROWS[32], "prompt": f"Here is a question. {ROWS[32]['prompt']} Think about it first."},
    ),
    "no prompt": ({"prompt": " ", "labels": "3"}, "empty", {"prompt": "3 + 4?", "labels": "7"}),
    "no label": ({"prompt": "5 + 6?", "labels": ""}, "empty", {"prompt": "5 + 6?", "labels": "11"}),
    "no JSON": ('{"prompt": "5 + 6?", "labels": ', "malformed", {"prompt": "5 + 6?", "labels": "11"}),
    "a column too few": ({"question": "5 + 6?"}, "malformed", {"prompt": "5 + 6?", "labels": "11"}),
    "too long": ({"prompt": story(1, 700), "labels": "3"}, "too_long", {"prompt": story(1, 100), "labels": "3"}),
    "the answer at the end": (
        {"prompt": "How much is 5 + 6? Answer: 11", "labels": "11"}, "answer", {"prompt": "How much is 11 - 6?", "labels": "5"}
    ),
    "a label that is not an answer": (
        {"prompt": "How much is 8 + 6?", "labels": "#### none"}, "label", {"prompt": "How much is 8 + 6?", "labels": "#### 14"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_its_twin_is_not(audit: Audit, name: str) -> None:
    row, kind, twin = PLANTED[name]
    options = ("rl_config.verifier_function=[gsm8k]", "--bound=0")
    code, found = audit("data", [*ROWS[:30], row], *options, held_out=ROWS[35:])
    assert (code, faults(found)) == (1, {kind: 1})
    assert "train.jsonl, row 31" in found["findings"][kind]["examples"][0]
    code, found = audit("data", [*ROWS[:30], twin], *options, held_out=ROWS[35:])
    assert (code, faults(found)) == (0, {})


def test_cut_prompts_are_counted_where_the_run_cuts_them(audit: Audit) -> None:
    rows = [*ROWS[:9], {"prompt": story(1, 700), "labels": "3"}]
    code, found = audit("data", rows, "rl_config.long_prompts=cut_left", "--bound=0.05")
    assert (code, faults(found), found["faulty_share"]) == (1, {"cut": 1}, 0.1)


@pytest.mark.parametrize(
    ("labels", "wins"),
    [
        (["yes"] * 7 + ["no"] * 3, True),
        (["yes"] * 6 + ["no"] * 4, False),
        (["A"] * 4 + ["B"] * 2 + ["C"] * 2 + ["D"] * 2, True),
        (list("ABCDABCDAB"), False),
        (["yes"] * 10, True),
        ([str(number) for number in range(10)], False),
    ],
)
def test_a_constant_answer_wins_where_its_label_is_far_over_chance(audit: Audit, labels: list[str], wins: bool) -> None:
    rows = [{**row, "labels": label} for row, label in zip(ROWS, labels, strict=False)]
    code, found = audit("data", rows, "rl_config.verifier_function=[exact_match]")
    assert found["constant_answer"]["wins"] is wins and code == wins
    assert found["constant_answer"]["share"] == max(map(labels.count, labels)) / len(labels)


@pytest.mark.parametrize("is_planted", [True, False])
def test_notes_are_of_the_data_as_a_whole_and_count_against_no_bound(audit: Audit, is_planted: bool) -> None:
    rows = [{"prompt": f"How many are {n} and {n + 1} {story(n, 9)}?", "labels": str(2 * n + 1)} for n in range(130)]
    keys = ["rl_config.verifier_function=[exact_match]", "rl_config.max_prompt_length=150", "--bound=0"]
    if is_planted:
        rows = [*rows, {"prompt": "小明有三个苹果，一共几个？", "labels": "3"}]
        keys = [*keys, "rl_config.max_prompt_length=4000", "megatron_training.global_batch_size=4096"]
    code, found = audit("data", rows, *keys)
    begins = ("131 prompts are fewer than the", "The longest prompt has", "A few prompts are written otherwise")
    assert code == 0 and len(found["notes"]) == (3 if is_planted else 0), found["notes"]
    assert all(note.startswith(begin) for note, begin in zip(found["notes"], begins))


def test_the_part_that_split_holds_back_is_the_evaluation_set(audit: Audit) -> None:
    rows = [*ROWS[:18], ROWS[0], ROWS[39]]  # the last two of 20 are held back
    code, found = audit("data", rows, "megatron_training.split='90,10,0'")
    assert (found["rows"], found["evaluation"], faults(found)) == (18, {"split 90,10,0": 2}, {"overlap": 1})
    assert "row 1:" in found["findings"]["overlap"]["examples"][0] and code == 1


def test_a_cleaned_file_has_the_rows_without_a_fault_and_the_others_their_reasons(audit: Audit, tmp_path: Path) -> None:
    marked = [{**row, "source": index, "nested": {"é": [1, None]}} for index, row in enumerate(ROWS[:12])]
    broken = {"prompt": "half \ud83d of a character", "labels": "1"}
    rows = [*marked, marked[3], '{"prompt"', {"prompt": "", "labels": "1"}, json.dumps(broken)]
    clean = tmp_path / "clean.jsonl"
    assert audit("data", rows, f"--clean={clean}")[0] == 1
    written = [json.loads(line) for line in clean.read_text(encoding="utf-8").splitlines()]
    dropped = [json.loads(line) for line in (tmp_path / "clean.dropped.jsonl").read_text(encoding="utf-8").splitlines()]
    assert written == marked
    assert [line["row"] for line in dropped] == [13, 14, 15, 16]
    assert [line["reason"] for line in dropped[:3]] == ["equal to an earlier prompt", "cannot be read", "empty prompt or label"]
    assert dropped[0]["detail"] == "as train.jsonl, row 4" and "not valid JSON" in dropped[1]["detail"]
    assert audit("data", written)[0] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clean.dropped.jsonl", "clean.jsonl", "train.jsonl"]


def test_preprocessed_prompts_are_audited_too_but_not_cleaned(audit: Audit, tmp_path: Path, tokenizer_folder: str) -> None:
    rows = [*ROWS[:12], ROWS[4]]
    (tmp_path / "raw.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--input", f"{tmp_path}/raw.jsonl", "--output-prefix", f"{tmp_path}/data", "--tokenizer-name-or-path"]
    columns = ["--map-keys", '{"prompt": "prompt", "query": "", "response": "labels"}']
    handler = ["--handler-name", "R1AlpacaStyleInstructionHandler", "--prompt-type", "qwen", *columns, "--workers", "1"]
    assert preprocess([*flags, tokenizer_folder, *handler]) == 0
    code, found = audit("data", [{}], f"megatron_training.data_path={tmp_path}/data")
    assert (code, faults(found), found["rows"]) == (1, {"duplicate": 1}, 13)
    code, text = audit("data", [{}], f"--clean={tmp_path}/c.jsonl", f"megatron_training.data_path={tmp_path}/data")
    assert code == 2 and "is preprocessed; audit the raw data" in text


# ---------------------------------------------------------------------- the parts


@pytest.mark.parametrize(
    ("prompt", "label", "is_there"),
    [
        ("What is 3 + 4? The answer is 7.", "7", True),
        ("3 加 4 等于多少？答案是7", "7", True),
        ("3 加 4 等于多少？答案：7。", "7", True),
        ("Q: 3 + 4\n#### 7", "x = 7\n#### 7", True),
        (r"Show that it is \boxed{7}", "7", True),
        ("Solution: $7$", "7", True),
        ("What is 3 + 4? Only 7 people know.", "7", False),
        ("The answer is 77.", "7", False),
        ("The answer is 7.5.", "7", False),
        ("Answer: yes or no. Is 7 prime?", "yes", False),
        ("答案：是或否。", "是", False),
        ("Answer: A, B, C or D", "A", False),
        ("Give the answer as 3 words.", "3", False),
        ("Pick the answer. (A) red (B) blue", "A", False),
        ("Translate: the old man went down to the sea with his boat", "the old man went down to the sea with his boat", True),
        ("Translate: the old man", "the old man", False),
        ('{"a": 1} answer: {"a": 1}', '{"a": 1}', False),
        ("", "7", False),
        ("What?", None, False),
    ],
)
def test_an_answer_is_given_away_after_a_word_such_as_answer_or_as_a_long_text(
    prompt: str, label: str | None, is_there: bool
) -> None:
    assert bool(find_answer(prompt, label)) is is_there


def jaccard(one: str, other: str) -> float:
    first, second = (set(hash_n_grams(hash_words(text), 3).tolist()) for text in (one, other))
    return len(first & second) / len(first | second)


def test_equal_hashes_estimate_the_share_of_shingles(tmp_path: Path) -> None:
    """Within four standard deviations, sqrt(J (1 - J) / 128), of sets that are counted."""
    near = NearDuplicates(tmp_path)
    for seed in range(40):
        words = story(seed, 200).split()
        changed = [word if index % (seed + 2) else "other" for index, word in enumerate(words)]
        one, other = " ".join(words), " ".join(changed)
        share = jaccard(one, other)
        estimate = float((near.sign(hash_words(one)) == near.sign(hash_words(other))).mean())
        assert abs(estimate - share) <= 4 * np.sqrt(share * (1 - share) / 128) + 1e-9
    near.close()


def test_originals_are_the_first_of_nearly_equal_texts_and_the_pairs_are_those_of_a_naive_count(tmp_path: Path) -> None:
    texts = [story(seed, 80) for seed in range(60)]
    texts += [f"{text} and so on" for text in texts[:20]] + [text.replace("lamp", "boat") for text in texts[20:40]]
    near = NearDuplicates(tmp_path)
    for text in texts:
        near.add(text, hash_words(text))
    originals = near.find_originals()
    near.close()
    for index, text in enumerate(texts):
        shares = [jaccard(text, other) for other in texts[:index]]
        if max(shares, default=0.0) >= 0.9:
            assert originals[index] == int(np.argmax(shares))
        elif max(shares, default=0.0) < 0.65:
            assert originals[index] == index


def test_signatures_that_are_cut_off_are_an_error(tmp_path: Path) -> None:
    near = NearDuplicates(tmp_path)
    for _ in range(3):
        near.add(text := story(3, 80), hash_words(text))
    assert near.find_originals().tolist() == [0, 0, 0]
    os.truncate(tmp_path / "signatures", 2 * 512 + 100)
    with pytest.raises(OSError, match="ends before signature 2"):
        near.find_originals()
    near.close()


def test_texts_with_other_numbers_are_no_near_duplicates(tmp_path: Path) -> None:
    near = NearDuplicates(tmp_path)
    texts = [f"{story(3, 80)} {number} times" for number in (4, 5, 4)]
    for text in texts:
        near.add(text, hash_words(text))
    assert near.find_originals().tolist() == [0, 1, 0]
    near.close()


def test_signatures_are_as_good_as_those_of_datasketch(tmp_path: Path) -> None:
    datasketch = pytest.importorskip("datasketch", reason="the package datasketch is an extra: envs/cpu/extras.sh installs it")
    near, ours, theirs = NearDuplicates(tmp_path), [], []
    for seed in range(60):
        one = story(seed, 120)
        other = " ".join(word if index % (seed % 12 + 2) else "other" for index, word in enumerate(one.split()))
        share = jaccard(one, other)
        hashes = [datasketch.MinHash(128), datasketch.MinHash(128)]
        for sketch, text in zip(hashes, (one, other), strict=True):
            words = text.split()
            sketch.update_batch([" ".join(words[at : at + 3]).encode() for at in range(len(words) - 2)])
        theirs.append(hashes[0].jaccard(hashes[1]) - share)
        ours.append((near.sign(hash_words(one)) == near.sign(hash_words(other))).mean() - share)
    near.close()
    assert np.std(ours) < 1.3 * np.std(theirs) and abs(np.mean(ours)) < 0.02


def test_words_of_many_evaluation_prompts_are_the_form_of_the_task() -> None:
    form = "Please reason step by step and put your final answer within a box"
    index = OverlapIndex(normalise(f"{story(seed, 20)} {form}") for seed in range(30))
    assert index.find(hash_words(normalise(f"{story(99, 20)} {form}"))) is None
    assert index.find(hash_words(normalise(f"{story(7, 20)} {form}"))) == (7, 1.0)
    half = " ".join(story(7, 20).split()[:15]) + " something quite different from here on"
    assert index.find(hash_words(half)) == (7, pytest.approx(8 / 14, abs=0.1))  # 8 of its 15 - 7 + 6 runs of eight words


def test_short_prompts_overlap_with_equal_ones_only_and_operators_are_words() -> None:
    index = OverlapIndex(["3 + 4", "你好吗"])
    assert index.find(hash_words("3 + 4")) == (0, 1.0)
    assert index.find(hash_words("你好吗")) == (1, 1.0)
    assert index.find(hash_words("3 * 4")) is None and index.find(hash_words("")) is None


def test_a_frame_is_what_all_prompts_share_and_ends_between_words() -> None:
    texts = [f"<user>\nQuestion: {number}7 and {number}? Think.</user>" for number in range(10, 30)]
    frame = find_frame(texts)
    assert strip_frame(texts[0], frame) == "107 and 10"
    assert find_frame(texts[:5]) == (0, 0) and find_frame(["same"] * 100) == (0, 0)
    assert strip_frame(texts[0], (0, 0)) == texts[0]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How many?", "Latin letters"), ("多少个苹果？", "Chinese"), ("りんごは何個", "Japanese"), ("몇 개", "Korean"),
        ("Сколько", "Cyrillic letters"), ("x 是 a 的 b 多少呢", "Chinese"), ("3 + 4 = ?", "no letters"), ("", "no letters"),
        ("Größe", "Latin letters"), ("😀😀", "no letters"),
    ],
)  # fmt: skip
def test_the_writing_of_a_text_is_that_of_most_letters(text: str, language: str) -> None:
    assert find_language(text) == language


# ---------------------------------------------------------------------- the command


def test_huge_and_odd_rows_are_audited(audit: Audit) -> None:
    rows = [
        *ROWS[:8], {"prompt": "长" * 200_000, "labels": "1"}, {"prompt": "\u202e\u200b \x00 ！", "labels": "２"},
        {"prompt": "a" * 100_000, "labels": "b" * 100_000}, "[]",
        {"prompt": [{"role": "user", "content": "hi"}], "labels": "1"},
    ]  # fmt: skip
    code, found = audit("data", rows, "rl_config.verifier_function=[gsm8k]")
    assert code == 1 and found["rows"] == 13
    assert faults(found)["too_long"] == 2 and faults(found)["malformed"] == 2


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["megatron_training.data_path=/nowhere/x.jsonl"], "/nowhere"),
        (["--bound=2"], "--bound 2 must be a fraction"),
        (["--clean=/nowhere/x.jsonl"], "/nowhere is not a folder"),
        (["--clean=/"], "--clean /: / is a folder"),
        (["--clean=/proc/x.jsonl"], "--clean /proc/x.jsonl cannot be written"),
        (["-o/nowhere/x.html"], "--output /nowhere/x.html: /nowhere is not a folder"),
        (["--model=/nowhere/model"], "--model: '/nowhere/model' does not exist"),
        ([f"--model={Path(__file__).parent}"], "audit holds neither a Hugging Face model"),
        (["megatron_training.tokenizer_name_or_path=null"], "tokenizer_name_or_path: not set"),
        (["megatron_training.stage=sft"], "stage: sft; the audit is of runs with rollouts"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(
    audit: Audit, options: list[str], text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(audit, capfd, text, *options)


def assert_refused(audit: Audit, capfd: pytest.CaptureFixture[str], text: str, *options: str, **keys: Any) -> None:
    try:
        code, printed = audit("data", ROWS[:3], *options, **keys)
    except SystemExit as end:  # argparse
        code, printed = end.code, " ".join(capfd.readouterr().err.split())
    assert code == 2 and text in str(printed), printed


def test_no_output_takes_the_place_of_data_or_of_another_output(
    audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, held_out = tmp_path / "train.jsonl", tmp_path / "heldout.jsonl"
    for option in ("--clean", "--output"):
        text = f"{option} {train} is a file of megatron_training.data_path"
        assert_refused(audit, capfd, text, f"{option}={train}")
        assert len(train.read_text().splitlines()) == 3
    text = f"--clean {held_out} is a file of megatron_training.eval_data_path; write another one"
    assert_refused(audit, capfd, text, f"--clean={held_out}", held_out=ROWS[5:7])
    twice = [f"--clean={tmp_path}/c.jsonl", f"--output={tmp_path}/c.dropped.jsonl"]
    assert_refused(audit, capfd, "--clean (its second file) and --output write the same file", *twice)


def test_data_without_a_row_and_evaluation_sets_without_a_prompt_are_refused(
    audit: Audit, capfd: pytest.CaptureFixture[str]
) -> None:
    code, text = audit("data", [""])
    assert code == 2 and "data_path: " in text and "train.jsonl has no row" in text
    text = "heldout.jsonl has no prompt; heldout.jsonl, row 1: is not valid JSON"
    assert_refused(audit, capfd, text, held_out=['{"prompt"'])
    code, found = audit("data", ROWS[:9], held_out=[*ROWS[20:22], {"prompt": "", "labels": "1"}])
    note = found["notes"][0]
    assert code == 0 and "1 of 3 rows of the evaluation set" in note and "heldout.jsonl, row 3" in note


@pytest.mark.parametrize("kind", ["data", "reward"])
def test_a_model_of_images_is_refused(audit: Audit, tmp_path: Path, kind: str) -> None:
    config = {"model_type": "qwen2_5_vl", "image_token_id": 5, "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = audit(kind, ROWS[:3], f"actor_config.load={tmp_path}")
    assert code == 2 and f"actor_config.load: {tmp_path} has a model of images" in text


def test_an_audit_of_rewards_without_a_prompt_says_why(audit: Audit) -> None:
    code, text = audit("reward", [{"prompt": "How many?"}])
    assert code == 2 and "train.jsonl has no prompt; train.jsonl, row 1: has no column" in text


def test_an_unknown_kind_names_the_known_ones(capfd: pytest.CaptureFixture[str]) -> None:
    from mindspeed_rl.cli.main import main

    assert main(["audit", "dta"]) == 2
    assert "did you mean 'data'" in capfd.readouterr().err
    assert main(["audit", "--help"]) == 0 and "data" in capfd.readouterr().out


def test_the_page_shows_texts_as_text(audit: Audit, tmp_path: Path) -> None:
    bad = {"prompt": "<script>alert(1)</script> and a few more words", "labels": "1"}
    audit("data", [*ROWS[:3], bad], f"-o{tmp_path}/page.html", held_out=[bad])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "&lt;script&gt;" in page and "overlaps with an evaluation prompt" in page


def test_the_audit_itself_needs_no_torch() -> None:
    heavy = "torch ray vllm transformers"
    program = f"import sys, mindspeed_rl.cli.audit; print([m for m in '{heavy}'.split() if m in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert shown.stdout.strip() == "[]"
