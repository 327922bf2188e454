"""Rows that the kinds of `mindspeed-rl new` make, and their pictures."""

from __future__ import annotations

import io
import random
from typing import Any

from mindspeed_rl.cli.new.tiny_model import PICTURE_SIDE

#: column -> value
Row = dict[str, Any]
_NOUNS = (
    "cat dog river mountain city teacher train book garden winter kitchen ocean forest robot market school planet bridge "
    "farmer doctor window letter piano engine island storm painter castle desert baker"
).split()
_ROMAN = {100: "C", 90: "XC", 50: "L", 40: "XL", 10: "X", 9: "IX", 5: "V", 4: "IV", 1: "I"}


def make_format() -> list[Row]:
    places = ("at home", "on a photo", "in a story")
    return [
        {"question": f"Describe a {noun} {place} as a JSON object with the key answer.", "answer": "answer"}
        for noun in _NOUNS
        for place in places
    ]


def make_maths() -> list[Row]:
    pairs = [(a, b) for a in range(1, 21) for b in range(1, 21)]
    return [{"question": f"What is {a} + {b}? Answer with the number only.", "answer": str(a + b)} for a, b in pairs]


def make_tool() -> list[Row]:
    pairs = [(a, b) for a in range(101, 999, 61) for b in range(103, 999, 67)]
    return [{"question": f"What is {a} * {b}? Use the calculator.", "answer": str(a * b)} for a, b in pairs]


def make_environment() -> list[Row]:
    openings = ("I think of", "Guess", "I have written down", "Find", "My secret is", "There is")
    question = "{} a number from 1 to 9. Answer with one digit."
    return [{"question": question.format(opening), "answer": str(number)} for opening in openings for number in range(1, 10)]


def make_preference() -> list[Row]:
    topics = [f"{verb} a {noun}" for verb in ("Draw", "Describe", "Find", "Buy", "Sell") for noun in _NOUNS]
    short, long = "Gladly: {}.", "Well, since you ask me, I could perhaps say {}, could I not?"
    return [
        {"instruction": f"{topic}.", "input": "", "chosen": short.format(answer), "rejected": long.format(answer)}
        for topic in topics
        for answer in [topic.rpartition(" ")[2]]
    ]


def make_sft() -> list[Row]:
    rows = []
    for number in range(1, 400):
        text, rest = "", number
        for value, letters in _ROMAN.items():
            text, rest = text + letters * (rest // value), rest % value
        rows.append({"instruction": f"Write {number} as a Roman numeral.", "input": "", "output": text})
    return rows


_COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 80, 230), "y": (240, 220, 40)}
PICTURES = "pictures"
_SQUARE, _NUMPICTURES = 48, 40


def make_vision() -> list[Row]:
    question = "<image>Colour? r, g, b or y"
    return [
        {"question": question, "images": [f"{letter}{index}.png"], "answer": letter}
        for letter in _COLOURS
        for index in range(_NUMPICTURES)
    ]


def draw_pictures() -> dict[str, bytes]:
    """Draw a square of one colour at a random place on black, for each row of the vision kind."""
    from PIL import Image  # of the environment of a device kind

    places, pictures = random.Random(1), dict[str, bytes]()
    for letter, colour in _COLOURS.items():
        for index in range(_NUMPICTURES):
            image = Image.new("RGB", (PICTURE_SIDE, PICTURE_SIDE))
            x, y = (places.randrange(PICTURE_SIDE - _SQUARE) for _ in range(2))
            image.paste(colour, (x, y, x + _SQUARE, y + _SQUARE))
            buffer = io.BytesIO()
            image.save(buffer, "PNG")
            pictures[f"{PICTURES}/{letter}{index}.png"] = buffer.getvalue()
    return pictures


def make_own() -> list[Row]:
    orders = ("Write {} in capitals.", "What is {} in capital letters?", "Shout the word {}.")
    return [{"question": order.format(noun), "answer": noun.upper()} for noun in _NOUNS for order in orders]
