"""False alarms of `mindspeed-rl audit reward` on rows whose reward functions have no hole.

    python benchmarks/audit_false_alarms.py [TOKENIZER]     # a folder; default: a tokenizer of words that is made here

Prints, for each set of rows, on how many of them a cheat or a label that is wrong in every task gets through.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.audit.cheats import MUTATIONS
from mindspeed_rl.audit.reward import audit_reward
from mindspeed_rl.audit.rows import open_run_data, read_cases
from mindspeed_rl.config.loader import load_run_config
from mindspeed_rl.data.tokenizer import load_tokenizer
from mindspeed_rl.run.draft import draft

ROOT = Path(__file__).resolve().parents[1]
Rows = list[dict[str, str]]


def make_tokenizer(folder: Path) -> str:
    """Write a tokenizer of bytes, and return its folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<eos>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return str(folder)


def read_gsm8k() -> Rows:
    """Return the rows of GSM8K that the tests have."""
    lines = (ROOT / "tests/data/gsm8k/sample.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [{"prompt": row["question"], "labels": row["answer"].rpartition("#### ")[2]} for row in rows]


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


def measure(name: str, rows: Rows, function: str, tokenizer_folder: str, plugins: Sequence[str] = ()) -> None:
    """Audit a reward function on the rows, and print what gets through."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        overrides = [
            f"megatron_training.data_path={path}",
            f"megatron_training.tokenizer_name_or_path={tokenizer_folder}",
            "megatron_training.eval_data_path=null",
            f"rl_config.verifier_function=[{function}]",
            f"rl_config.external_plugins=[{','.join(plugins)}]",
            "rl_config.max_prompt_length=4000",
            "generate_config.sampling_config.max_tokens=2048",
        ]
        run, tokenizer = draft(load_run_config("grpo_tiny_cpu", None, overrides)), load_tokenizer(tokenizer_folder)
        audit = audit_reward(run, list(read_cases(open_run_data(run, tokenizer)[0])), tokenizer)
    wrong = [audit.mutations[one.title].cheated for one in MUTATIONS if one.is_wrong and one.title in audit.mutations]
    through = set[str]().union(*(outcome.cheated for outcome in audit.cheats.values()), *wrong)
    print(f"{name}, {function}: {len(through)} of {audit.num_rows} rows, {audit.num_responses:,} responses", flush=True)


def main(argv: Sequence[str]) -> None:
    """Measure all sets."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = argv[0] if argv else make_tokenizer(Path(folder))
        measure("GSM8K of the tests", read_gsm8k(), "exact_match", tokenizer)
        measure(
            "examples/records", make_records(), "exact_record", tokenizer, [str(ROOT / "examples/records/record_rewards.py")]
        )
        measure("the quickstart", [{"prompt": f"{n}=", "labels": str(n)} for n in range(10, 60)], "exact_match", tokenizer)
        measure("sums in words", make_sums(1000), "exact_match", tokenizer)
        measure("GSM8K of the tests", read_gsm8k()[:20], "acc", tokenizer)


if __name__ == "__main__":
    main(sys.argv[1:])
