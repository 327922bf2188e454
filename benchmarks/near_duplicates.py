"""Time and memory of near duplicates: `mindspeed_rl.audit.near_duplicates` against datasketch (envs/cpu/extras.sh).

python benchmarks/near_duplicates.py ROWS.jsonl COLUMN
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from mindspeed_rl.audit.near_duplicates import NearDuplicates
from mindspeed_rl.audit.texts import hash_words, normalise


def find_ours(texts: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        near = NearDuplicates(Path(folder))
        for text in texts:
            near.add(text, hash_words(text))
        originals = near.find_originals()
        near.close()
    return sum(index != original for index, original in enumerate(originals.tolist()))


def find_theirs(texts: list[str]) -> int:
    from datasketch import MinHash, MinHashLSH

    index, count = MinHashLSH(threshold=0.8, num_perm=128), 0
    for number, text in enumerate(texts):
        words = re.findall(r"\w+", text)
        sketch = MinHash(128)
        sketch.update_batch([" ".join(words[at : at + 3]).encode() for at in range(max(1, len(words) - 2))])
        count += bool(index.query(sketch))
        index.insert(number, sketch)
    return count


def measure(name: str, find: Callable[[list[str]], int], texts: list[str]) -> None:
    before, start = psutil.Process().memory_info().rss, time.process_time()
    count = find(texts)
    seconds, rows = time.process_time() - start, len(texts)
    grown = psutil.Process().memory_info().rss - before
    print(f"{name}: {1e3 * seconds / rows:.2f} ms and {grown / rows:.0f} bytes a row, {count} near duplicates of {rows} rows")


if __name__ == "__main__":
    lines = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    questions = [normalise(json.loads(line)[sys.argv[2]]) for line in lines]
    measure("ours", find_ours, questions)
    measure("datasketch", find_theirs, questions)
