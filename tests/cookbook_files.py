"""A model and data sets for the programs of `tinker-cookbook`, which are run as they are published.

The model has the name of one that they know: `AutoTokenizer.from_pretrained("Qwen/Qwen3-8B-Base")` finds it as a folder below
the one in which a program runs. The data sets are a cache of `datasets`, which it reads without a network.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

MODEL_NAME = "Qwen/Qwen3-8B-Base"
_SPECIAL = ["<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_MAX_POSITIONS = 2048
_BOX, _NEXT_TURN = " \\boxed{", "\n\nUser:"


def make_model(folder: Path, num_steps: int = 150) -> Path:
    """Write a tiny model with a token per character; return its folder.

    It has learned one thing: after "Assistant:" it answers any digit in a box. A loop that rewards the right one has something
    to reinforce.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    target = folder / MODEL_NAME
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=_SPECIAL[3:],
        clean_up_tokenization_spaces=False,
    )
    # a token each, so that the form of an answer is learned in seconds
    fast.add_tokens([_BOX, _NEXT_TURN])
    fast.save_pretrained(target)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=_MAX_POSITIONS,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=vocabulary["<eos>"],
        pad_token_id=vocabulary["<pad>"],
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    _teach(model, fast, num_steps)
    model.save_pretrained(target)
    return target


def _teach(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, num_steps: int) -> None:
    """Train the model to answer a random digit in a box."""
    import torch

    chance = random.Random(1)
    pieces = [*"abcdefghijklmnopqrstuvwxyz ?.:\n0123456789AU}", _BOX, _BOX, f"{_BOX}}}.", _NEXT_TURN]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(num_steps):
        length = chance.choice((20, 40, 60))
        rows = []
        for _ in range(16):
            context = "".join(chance.choice(pieces) for _ in range(80))
            digit = chance.randrange(10)
            text = f"{context}\n\nAssistant:{_BOX}{digit}}}{_NEXT_TURN}"
            rows.append(tokenizer.encode(text)[-length:])
        tokens = torch.tensor(rows)
        labels = tokens.clone()
        labels[:, :-4] = -100
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / num_steps)
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def make_data_sets(cache: Path, num_rows: int = 136, num_solved: int = 16) -> None:
    """Write the data sets of the programs into a cache of `datasets`; the answer to every question is 7."""
    chance = random.Random(0)
    questions = [f"{chance.randrange(10)} + {chance.randrange(10)}?" for _ in range(num_rows)]
    answers = ["7"] * num_rows
    chats = [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in zip(questions, answers)
    ]
    pairs = [
        {"chosen": f"\n\nHuman: {question}\n\nAssistant: {answer}", "rejected": f"\n\nHuman: {question}\n\nAssistant: no"}
        for question, answer in zip(questions, answers)
    ]
    solved = [{"question": question, "answer": f"#### {answer}"} for question, answer in zip(questions[:num_solved], answers)]
    words = "when the ship sailed over several seas many people could see it before they were known ".split()
    pages = [{"text": " ".join(chance.choice(words) for _ in range(200))} for _ in range(200)]
    _write(cache, "HuggingFaceH4/no_robots", "default", {"train": chats, "test": chats[:4]})
    _write(cache, "openai/gsm8k", "main", {"train": solved, "test": solved[:4]})
    _write(cache, "Anthropic/hh-rlhf", "default", {"train": pairs, "test": pairs[:4]})
    _write(cache, "zwhe99/DeepMath-103K", "default", {"train": [{"question": question} for question in questions]})
    _write(cache, "Salesforce/wikitext", "wikitext-103-raw-v1", {"train": pages})


def _write(cache: Path, name: str, config: str, splits: dict[str, list[dict[str, object]]]) -> None:
    """Write a data set as `datasets.load_dataset` leaves one of a hub in its cache."""
    import pyarrow
    from datasets import Dataset, DatasetInfo, SplitDict, SplitInfo
    from datasets.naming import camelcase_to_snakecase

    owner, _, short = name.partition("/")
    short = camelcase_to_snakecase(short)
    folder = cache / f"{owner}___{short}" / config / "0.0.0" / "made"
    folder.mkdir(parents=True)
    infos, features = SplitDict(dataset_name=short), None
    for split, rows in splits.items():
        data = Dataset.from_list(rows)
        features = data.features
        table = data.data.table
        file = str(folder / f"{short}-{split}.arrow")
        with pyarrow.OSFile(file, "wb") as sink, pyarrow.RecordBatchStreamWriter(sink, table.schema) as writer:
            writer.write_table(table)
        infos[split] = SplitInfo(name=split, num_bytes=table.nbytes, num_examples=len(rows), dataset_name=short)
    info = DatasetInfo(
        features=features, splits=infos, dataset_name=short, config_name=config, builder_name="parquet", version="0.0.0"
    )
    info.write_to_directory(str(folder))
    assert json.loads((folder / "dataset_info.json").read_text())["config_name"] == config
