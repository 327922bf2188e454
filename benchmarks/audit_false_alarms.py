"""False alarms of the audits: on rows without a hole, judges that agree, and runs whose reward is not tricked.

    python benchmarks/audit_false_alarms.py [--gsm8k FILE] [--test FILE]    # 1,000 rows or more of GSM8K, and its test set

Prints how many of 1,000 panels of judges and of 1,000 runs have an alarm without a cause; then, for each set of rows, on how
many of them a cheat or a label that is wrong in every task gets through.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import json
import random
import re
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.audit.cheats import MUTATIONS
from mindspeed_rl.audit.data import audit_data
from mindspeed_rl.audit.judges import JudgeAudit, JudgedRow, Panelist
from mindspeed_rl.audit.marked import MarkedResponses
from mindspeed_rl.audit.reward import audit_reward
from mindspeed_rl.audit.rows import open_run_data, read_cases
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.observability.alerts import find_alerts
from mindspeed_rl.observability.diversity import measure_diversity
from mindspeed_rl.observability.history import History
from mindspeed_rl.rewards.judge_outages import Outage
from mindspeed_rl.rewards.samples import RewardSample
from mindspeed_rl.run.draft import draft

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, Any]]
#: verifiers whose labels are tried
LABEL_TRIALS = ("acc", "accuracy", "math_17k_acc", "math_verify_reward", "gsm8k", "gsm8k_flexible")


def make_tokenizer(folder: Path) -> str:
    """Write a tokenizer of bytes, and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    marks = ["<|im_start|>", "<|im_end|>"]
    vocabulary = {token: index for index, token in enumerate(["<eos>", *marks, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = {"eos_token": "<eos>", "pad_token": "<eos>", "additional_special_tokens": marks}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return str(folder)


def to_rows(solved: Iterable[Mapping[str, str]]) -> Rows:
    """Return rows of GSM8K with prompt and label."""
    return [{"prompt": row["question"], "labels": row["answer"].rpartition("#### ")[2]} for row in solved]


def make_records() -> Rows:
    """Return rows of examples/records."""
    spec = importlib.util.spec_from_file_location("make_records", ROOT / "examples/records/make_records.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [{"prompt": row["question"], "labels": row["answer"]} for row in module.make_rows(100, 0, held_out=False)]


def make_sums(count: int) -> Rows:
    """Return questions in words with numbers as answers."""
    draws, rows = random.Random(0), []
    for _ in range(count):
        boxes, more, pens = draws.randint(11, 999), draws.randint(11, 99), draws.randint(2, 9)
        question = f"A shop has {boxes} boxes and gets {more} more; each holds {pens} pens. How many pens are there?"
        rows.append({"prompt": question, "labels": str((boxes + more) * pens)})
    return rows


def make_chinese(count: int) -> Rows:
    """Return questions about sentences of the guides in Chinese, with the page as the answer."""
    sentences: dict[str, str] = {}
    for page in sorted((ROOT / "docs/zh").glob("*.md")):
        if page.stem in ("index", "keys", "upstream_commands"):  # generated tables, and links to the other pages
            continue
        for sentence in re.split(r"[。\n]", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)):
            if len(re.findall("[\u4e00-\u9fff]", sentence)) >= 24 and "|" not in sentence:
                sentences.setdefault(sentence.strip("-# >"), page.stem)
    chosen = random.Random(0).sample(sorted(sentences), count)
    return [{"prompt": f"这句话出自哪一页？{sentence}。只写文件名。", "labels": sentences[sentence]} for sentence in chosen]


def make_code(count: int) -> Rows:
    """Return tasks that the docstrings of Python's library describe, with a test each."""
    found: dict[str, str] = {}
    for name in sorted(sys.stdlib_module_names):
        # these print or open windows when they are imported, or have each function under several names
        if name.startswith("_") or name in ("antigravity", "this", "idlelib", "turtle", "lib2to3", "tkinter", "pdb"):
            continue
        with contextlib.suppress(Exception):
            module = importlib.import_module(name)
            classes = [value for _, value in inspect.getmembers(module, inspect.isclass) if value.__module__ == name]
            for owner in (module, *classes):
                for member, value in inspect.getmembers(owner, inspect.isfunction):
                    text = inspect.cleandoc(value.__doc__ or "")
                    # functions of one name have like texts, and a function with two names has one
                    if value.__module__ == name and len(text.split()) >= 12 and text not in found.values():
                        found.setdefault(member, text)
    chosen = random.Random(0).sample(sorted(found), count)
    return [
        {"prompt": f"Write the Python function {name}.\n\n{found[name]}", "labels": f"assert callable({name})"}
        for name in chosen
    ]


def make_choices(solved: Iterable[Mapping[str, str]]) -> Rows:
    """Return GSM8K's questions with four answers, one of which is right."""
    draws, rows = random.Random(0), []
    for row in to_rows(solved):
        answer = int(row["labels"].replace(",", ""))
        answers = draws.sample([answer, answer + draws.randint(1, 9), answer * 2 + 1, answer + draws.randint(10, 99)], 4)
        listed = "\n".join(f"{letter}. {value}" for letter, value in zip("ABCD", answers))
        rows.append({"prompt": f"{row['prompt']}\n{listed}", "labels": "ABCD"[answers.index(answer)]})
    return rows


def make_units(solved: Iterable[Mapping[str, str]]) -> Rows:
    """Return GSM8K's questions with numbers and units as answers."""
    units = ("km", "kg", "cm^2", "%", "dollars", "m/s", "°C", "hours")
    return [{**row, "labels": f"{row['labels']} {units[place % 8]}"} for place, row in enumerate(to_rows(solved))]


def make_talks(solved: Iterable[Mapping[str, str]]) -> Rows:
    """Return conversations with the tool calls of GSM8K's solutions, whose last step is left to the model."""
    system, rows = "You are a careful assistant. Use the calculator for every step, and answer with one number.", []
    for row in solved:
        turns: list[Mapping[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": row["question"]}]
        for place, (sum_, result) in enumerate(re.findall(r"<<([^=<>]*)=([^<>]*)>>", row["answer"])[:-1]):
            call = {"name": "calculator", "arguments": {"expression": sum_}}
            turns.append({"role": "assistant", "content": "", "tool_calls": [{"id": f"{place}", "function": call}]})
            turns.append({"role": "tool", "tool_call_id": f"{place}", "content": result})
        rows.append({"prompt": turns, "labels": row["answer"].rpartition("#### ")[2]})
    return rows


@dataclass(frozen=True)
class Kind:
    """Clean rows of a kind.

    Attributes:
        name: the kind.
        rows: the rows.
        verifiers: reward functions that try the labels.
        function: reward function that is attacked; empty for none.
        overrides: keys of the run.
    """

    name: str
    rows: Rows
    verifiers: Sequence[str]
    function: str = "exact_match"
    overrides: Sequence[str] = ()


def list_kinds(solved: Sequence[Mapping[str, str]]) -> list[Kind]:
    """Return clean rows of other kinds than questions with numbers."""
    talks = ["megatron_training.prompt_type=qwen3", "megatron_training.map_keys={prompt: prompt, query: '', response: labels}"]
    return [
        Kind("sentences in Chinese", make_chinese(1000), ("base_acc", "acc")),
        Kind("code with tests", make_code(1000), ("code",), ""),
        Kind("four choices", make_choices(solved), ("multiple_choice",), "multiple_choice"),
        Kind("numbers with units", make_units(solved), ("acc", "accuracy", "math_verify_reward")),
        Kind("conversations with tools", make_talks(solved), ("acc", "gsm8k"), overrides=talks),
    ]


def measure_data(
    name: str, rows: Rows, held_out: Rows, tokenizer_folder: str, verifiers: Sequence[str], overrides: Sequence[str] = ()
) -> None:
    """Print how many rows have a finding of `audit data`, and its notes."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("train.jsonl", "eval.jsonl")]
        for path, each in zip(paths, (rows, held_out)):
            path.write_text("".join(json.dumps(row) + "\n" for row in each), encoding="utf-8")
        keys = [
            f"megatron_training.data_path={paths[0]}",
            f"megatron_training.tokenizer_name_or_path={tokenizer_folder}",
            f"megatron_training.eval_data_path={paths[1] if held_out else 'null'}",
            f"rl_config.verifier_function=[{','.join(verifiers)}]",
            f"rl_config.verifier_weight={[1.0] * len(verifiers)}",
            "rl_config.max_prompt_length=20000",
            *overrides,
        ]
        run, tokenizer = draft(load_run_config("grpo_tiny_cpu", None, keys)), load_tokenizer(tokenizer_folder)
        audit = audit_data(*open_run_data(run, tokenizer), run)
    found = ", ".join(f"{finding.count} {kind}: {finding.examples[0]}" for kind, finding in audit.findings.items()) or "none"
    wins = "a constant answer wins" if audit.constant is not None and audit.constant[2] else "no constant answer wins"
    print(f"audit data, {name}: {len(audit.reasons)} of {audit.num_rows} rows ({found}), {wins}", *audit.notes, flush=True)


def measure_outages(count: int) -> None:
    """Print how many runs leave a judge alone that replies to all but 1 of 200 requests, one at a time: the worst case."""
    draws, left_alone = random.Random(5), 0
    for _ in range(count):
        outage = Outage("judge", clock=lambda: 0.0)
        for _ in range(20 * 128):
            if draws.random() < 0.005:
                outage.record_failure(1.0, "late")
            elif outage.is_open:
                break
            else:
                outage.record_reply()
        left_alone += outage.is_open
    print(f"runs whose judge misses 1 of 200 requests: {left_alone} of {count} leave it alone", flush=True)


def measure(
    name: str,
    rows: Rows,
    function: str,
    tokenizer_folder: str,
    plugins: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> None:
    """Audit a reward function on the rows, and print what gets through."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        keys = [
            f"megatron_training.data_path={path}",
            f"megatron_training.tokenizer_name_or_path={tokenizer_folder}",
            "megatron_training.eval_data_path=null",
            f"rl_config.verifier_function=[{function}]",
            f"rl_config.external_plugins=[{','.join(plugins)}]",
            "rl_config.max_prompt_length=4000",
            "generate_config.sampling_config.max_tokens=2048",
            *overrides,
        ]
        run, tokenizer = draft(load_run_config("grpo_tiny_cpu", None, keys)), load_tokenizer(tokenizer_folder)
        audit = audit_reward(run, list(read_cases(open_run_data(run, tokenizer)[0])), tokenizer)
    wrong = [audit.mutations[one.title].cheated for one in MUTATIONS if one.is_wrong and one.title in audit.mutations]
    through = set[str]().union(*(outcome.cheated for outcome in audit.cheats.values()), *wrong)
    print(f"{name}, {function}: {len(through)} of {audit.num_rows} rows, {audit.num_responses:,} responses", flush=True)


class ExactNumber:
    """An environment of one turn that takes the label and nothing else."""

    def reset(self, task: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Start with the row's prompt."""
        self.label = str(task["label"])
        return []

    def step(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], float, bool]:
        """Compare the turn with the label."""
        return [], float(messages[-1]["content"].strip() == self.label), True


def measure_judges(count: int, accuracy: float, bound: float) -> None:
    """Print how many panels of two judges, each right about 100 responses with this chance, do not pass."""
    draws, failed = random.Random(0), 0
    for _ in range(count):
        truth = [draws.random() < 0.5 for _ in range(100)]
        scores = [[float(right == (draws.random() < accuracy)) for right in truth] for _ in range(2)]
        rows = [JudgedRow("", RewardSample(), (right,)) for right in truth]
        panel = [Panelist(f"judge {n}", list(each), [None] * 100) for n, each in enumerate(scores)]
        failed += not JudgeAudit(rows, panel).passes(bound)
    print(f"judges right on {accuracy:.0%} of 100 responses: {failed} of {count} panels below {bound:g}", flush=True)


def measure_votes(count: int) -> None:
    """Print how many runs have the alert `votes_missing`: three judges, of whose replies 1 in 200 is none."""
    draws, alerts = random.Random(3), 0
    for _ in range(count):
        means = [sum(draws.random() < 0.005 for _ in range(3 * 128)) / 128 for _ in range(20)]
        lines = [{"iteration": index, "judge/missing_rewards/mean": mean} for index, mean in enumerate(means)]
        alerts += any(alert.kind == "votes_missing" for alert in find_alerts(History(lines)))
    print(f"runs with judges that miss 1 of 200 votes: {alerts} of {count} with votes_missing", flush=True)


def measure_marks(count: int) -> None:
    """Print how many files of 200 marks fail: half of the responses are right, and people are wrong about 1 of 100."""
    draws, failed = random.Random(4), 0
    for _ in range(count):
        truth = [index % 2 == 0 for index in range(200)]
        marks = [is_right != (draws.random() < 0.01) for is_right in truth]
        marked = MarkedResponses([("", "")] * 200, marks, [float(is_right) for is_right in truth], 1.0)
        failed += marked.paid_share > 0.05
    print(f"files of marks by people who are right about 99 of 100: {failed} of {count} fail", flush=True)


def measure_gaps(count: int) -> None:
    """Print how many runs of eleven audits have the alert of a tricked reward, though the check follows the reward."""
    draws, alerts = random.Random(0), 0
    for _ in range(count):
        start, end, strictness = draws.uniform(0.0, 0.5), draws.uniform(0.3, 1.0), draws.uniform(0.9, 1.0)
        lines = []
        for step in range(11):
            share = start + (end - start) * step / 10
            earned = [draws.random() < share for _ in range(64)]
            audited = [paid and draws.random() < strictness for paid in earned]
            gaps = [float(paid) - float(accepted) for paid, accepted in zip(earned, audited)]
            figures = {"audit/earned": statistics.fmean(earned), "audit/audited": statistics.fmean(audited)}
            figures |= {"audit/gap": statistics.fmean(gaps), "audit/gap_error": statistics.stdev(gaps) / 8}
            lines.append({"iteration": 10 * step, **figures})
        alerts += any(alert.kind == "reward_tricked" for alert in find_alerts(History(lines)))
    print(f"runs whose check follows the reward: {alerts} of {count} with reward_tricked", flush=True)


def measure_sentences(rows: Sequence[Mapping[str, str]], count: int) -> None:
    """Print how many runs have the alert one_sentence whose responses become the published solutions of their prompts."""
    draws, alerts = random.Random(0), 0
    for _ in range(count):
        lines = []
        for step in range(10):
            chosen = draws.sample(range(len(rows)), 8)
            groups = [
                (
                    rows[index]["question"],
                    [rows[index if draws.random() < step / 9 else draws.randrange(len(rows))]["answer"] for _ in range(8)],
                )
                for index in chosen
            ]
            labels = [rows[index]["answer"].rpartition("#### ")[2] for index in chosen]
            lines.append({"iteration": step, "diversity/pattern_share": measure_diversity(groups, labels).pattern_share})
        alerts += any(alert.kind == "one_sentence" for alert in find_alerts(History(lines)))
    print(f"runs over {len(rows):,} solutions: {alerts} of {count} with one_sentence", flush=True)


def main(argv: Sequence[str]) -> None:
    """Measure all sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gsm8k", type=Path, default=ROOT / "tests/data/gsm8k/sample.jsonl")
    parser.add_argument("--test", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="all but the audits of rewards, which take half an hour")
    arguments = parser.parse_args(argv)
    path = arguments.gsm8k
    solved = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()][:1000]
    gsm8k = to_rows(solved)
    held_out = (
        [] if arguments.test is None else to_rows(map(json.loads, arguments.test.read_text(encoding="utf-8").splitlines()))
    )
    measure_judges(1000, 0.97, 0.667)
    measure_gaps(1000)
    measure_votes(1000)
    measure_marks(1000)
    measure_outages(1000)
    measure_sentences(solved, 1000)
    sys.path.insert(0, str(Path(__file__).parent))  # for the environment
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder))
        measure_data("GSM8K", gsm8k, held_out, tokenizer, LABEL_TRIALS)
        for kind in list_kinds(solved):
            measure_data(kind.name, kind.rows, [], tokenizer, kind.verifiers, kind.overrides)
        if arguments.quick:
            return
        for function in ("exact_match", "acc"):
            measure("GSM8K", gsm8k, function, tokenizer)
        played = [f"rl_config.environment={Path(__file__).stem}:ExactNumber", "rl_config.multi_turn_enable=true"]
        measure("GSM8K, an environment", gsm8k, "exact_match", tokenizer, overrides=[*played, "rl_config.rule_reward=false"])
        measure(
            "examples/records", make_records(), "exact_record", tokenizer, [str(ROOT / "examples/records/record_rewards.py")]
        )
        measure("the quickstart", [{"prompt": f"{n}=", "labels": str(n)} for n in range(10, 60)], "exact_match", tokenizer)
        measure("sums in words", make_sums(1000), "exact_match", tokenizer)
        for kind in list_kinds(solved):
            if kind.function:
                measure(kind.name, kind.rows, kind.function, tokenizer, overrides=kind.overrides)


if __name__ == "__main__":
    main(sys.argv[1:])
