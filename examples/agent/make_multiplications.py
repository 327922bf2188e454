"""Makes the agent example's task: products that the model cannot compute, but can ask the calculator for.

Everything is made here, nothing is downloaded. Writes below the given folder:
  model/                  the quickstart's network with random weights, and a tokenizer whose chat template writes tools
  raw/sft.jsonl           messages, tools: solved conversations, with a call and without
  raw/train.jsonl, raw/heldout.jsonl   prompt, labels: for reinforcement learning and for evaluation
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "quickstart"))

from make_task import make_model, make_tokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from mindspeed_rl.tools.tool_file import build_tools, read_tools

SEED = 7
NUM_HELD_OUT, NUM_TRAIN = 200, 4000
#: solved with a call; guessed although there is the tool, which is what reinforcement has to change; guessed without tools
NUM_CALLED, NUM_GUESSED, NUM_ALONE = 600, 900, 150
FACTORS = range(400, 1000)  # so that all products have six digits
TOOL_FILE = "configs/tools/calculator.yaml"
#: what a call is made of, as one token each: a tokenizer that was learned from calls would have them too
WORDS = [
    *("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *('{"name": "', "calculator", '", "arguments": {"', "expression", '": "', '"}}'),
]
#: calls as Hermes and Qwen write them, but for the line breaks; of the tools only their names are listed
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>"
    "{% else %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}{% endif %}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


def make_agent_tokenizer() -> PreTrainedTokenizerFast:
    """The quickstart's characters, and the words of a call."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def conversation(a: int, b: int, schemas: list[dict[str, Any]], *, calls: bool) -> dict[str, Any]:
    """A conversation that ends with the product, which the calculator is asked for or not."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"{a}*{b}="}]
    if calls:
        call = {"name": "calculator", "arguments": {"expression": f"{a}*{b}"}}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
        messages.append({"role": "tool", "content": str(a * b)})
    messages.append({"role": "assistant", "content": str(a * b)})
    return {"messages": messages, "tools": schemas}


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    """Writes the task; the same bytes every time."""
    draw = random.Random(SEED)
    pairs = [(a, b) for a in FACTORS for b in FACTORS]
    sizes = (NUM_HELD_OUT, NUM_CALLED, NUM_GUESSED, NUM_ALONE, NUM_TRAIN)
    chosen = iter(draw.sample(pairs, sum(sizes)))
    held_out, called, guessed, alone, train = (list(islice(chosen, size)) for size in sizes)
    (calculator,) = build_tools(read_tools(TOOL_FILE))
    schemas = calculator.schemas
    rows = [conversation(*pair, schemas, calls=True) for pair in called]
    rows += [conversation(*pair, schemas, calls=False) for pair in guessed]
    rows += [conversation(*pair, [], calls=False) for pair in alone]
    draw.shuffle(rows)
    write(folder / "raw" / "sft.jsonl", rows)
    for name, part in (("train", train), ("heldout", held_out)):
        write(folder / "raw" / f"{name}.jsonl", ({"prompt": f"{a}*{b}=", "labels": str(a * b)} for a, b in part))
    tokenizer = make_agent_tokenizer()
    model = make_model(tokenizer)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(
        f"task: {len(rows)} solved products for SFT, {NUM_CALLED} with a call; {len(train)} for GRPO, {NUM_HELD_OUT} held out"
    )
    print(f"model: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
