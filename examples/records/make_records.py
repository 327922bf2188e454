"""Writes the task: a sentence about an order, and its six facts as a JSON object.

    python examples/records/make_records.py FOLDER      train.jsonl and heldout.jsonl with the columns question and answer

Held-out sentences have other templates, names and cities than those that train.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_TRAIN, NUM_HELD_OUT = 400, 100
FIRST = "Maria John Aisha Wei Lena Omar Priya Tom Sofia Ivan Grace Hugo Nina Pedro Yuki Clara Ahmed Ruth Daniel Mei".split()
LAST = (
    "Lopez Smith Khan Zhang Fischer Hassan Patel Baker Rossi Petrov Okafor Laurent Novak Silva Tanaka Weber"
).split()  # fmt: skip
CITIES = "Lima Oslo Cairo Madrid Boston Delhi Lyon Quito Turin Kyoto Dakar Porto Austin Hanoi Bergen Accra".split()
JOBS = "nurse teacher baker pilot farmer painter lawyer cook dentist driver".split()
ITEMS = "lamps chairs books cups shirts candles pens bags plates clocks".split()
TRAIN = (
    "{name}, a {age}-year-old {job} from {city}, ordered {count} {item}.",
    "{count} {item} were bought by {name}, who is {age} and works as a {job} in {city}.",
    "In {city}, the {job} {name} ({age}) asked for {count} {item}.",
    "A {job} of {age} years, {name}, lives in {city} and has paid for {count} {item}.",
)
HELD_OUT = (
    "Please send {count} {item} to {name} in {city}; the customer is {age} and a {job}.",
    "{name} of {city} is a {job}, {age} years old, and wants {count} {item}.",
    "Order: {count} {item}. Buyer: {name}, {job}, {age}, {city}.",
)
QUESTION = "Text: {text}\nWrite one JSON object with the keys name, age, job, city, item, count."


def make_rows(count: int, seed: int, *, held_out: bool) -> list[dict[str, str]]:
    """Returns rows with question and answer; the same for the same seed."""
    draws = random.Random(seed)
    # every fifth pair of names, and every fourth city, is held out
    names = [
        f"{first} {last}" for i, first in enumerate(FIRST) for j, last in enumerate(LAST) if ((i + j) % 5 == 0) == held_out
    ]
    cities = [city for index, city in enumerate(CITIES) if (index % 4 == 0) == held_out]
    rows = []
    for _ in range(count):
        record: dict[str, object] = {"name": draws.choice(names), "age": draws.randint(18, 79), "job": draws.choice(JOBS)}
        record |= {"city": draws.choice(cities), "item": draws.choice(ITEMS), "count": draws.randint(2, 60)}
        text = draws.choice(HELD_OUT if held_out else TRAIN).format(**record)
        rows.append({"question": QUESTION.format(text=text), "answer": json.dumps(record)})
    return rows


def main(folder: Path) -> None:
    """Writes both files; the same bytes every time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", NUM_TRAIN, 0), ("heldout", NUM_HELD_OUT, 1)):
        rows = make_rows(count, seed, held_out=name == "heldout")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"task: {NUM_TRAIN} sentences to train on, {NUM_HELD_OUT} held out")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
