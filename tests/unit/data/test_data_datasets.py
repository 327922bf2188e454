"""The datasets that training reads, over files written here with megatron-core or by preprocessing."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from byte_tokenizer import build_tokenizer
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from patience import patient

from mindspeed_rl.cli.preprocess import main
from mindspeed_rl.data import indexed
from mindspeed_rl.data.datasets import (
    BatchSampler,
    InstructionDataset,
    PreferenceDataset,
    ProcessRewardDataset,
    UnpairedDataset,
)
from mindspeed_rl.data.encoding import TextEncoder
from mindspeed_rl.data.indexed import IndexedColumns, IndexedWriter, check_sample_lengths, check_token_ids, open_indexed
from mindspeed_rl.data.pretrain import PretrainData, blend, build_pretrain_datasets
from mindspeed_rl.data.prompts import PromptDataset, PromptSettings, open_prompts
from mindspeed_rl.data.tokenizer import check_tokenizer_files, load_tokenizer

BYTES = build_tokenizer()


def ids(text):
    return BYTES(text, add_special_tokens=False)["input_ids"]


def write_megatron(prefix, rows):
    """Write rows the way any Megatron script does."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for row in rows:
        builder.add_item(torch.tensor(row, dtype=torch.int32))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")


@pytest.fixture
def write_packed(tmp_path):
    def write(**columns):
        for name, rows in columns.items():
            write_megatron(tmp_path / f"d_packed_{name}_document", rows)
        return str(tmp_path / "d")

    return write


def test_our_writer_writes_the_bytes_of_megatrons_builder(tmp_path):
    rows = [[1, -100, 3], [7], [2**31 - 1, 0]]
    write_megatron(tmp_path / "theirs", rows)
    writer = IndexedWriter(tmp_path / "ours")
    writer.add_documents(np.array(rows[0], dtype=np.int32), [3])
    writer.add_documents(np.array(rows[1] + rows[2], dtype=np.int32), [1, 2])
    writer.close()
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def test_sft_rows_come_back_unshifted(write_packed):
    prefix = write_packed(input_ids=[[5, 6, 7], [8, 9]], attention_mask=[[1, 1, 1], [1, 1]], labels=[[-100, 6, 7], [-100, 9]])
    dataset = InstructionDataset(prefix)
    assert len(dataset) == 2 and dataset.lengths.tolist() == [3, 2]
    row = dataset[0]
    assert row["input_ids"].tolist() == [5, 6, 7] and row["labels"].tolist() == [-100, 6, 7]
    assert row["sample_lengths"].tolist() == [3]
    assert all(values.dtype == np.int64 for values in row.values())


def test_a_neat_pack_is_split_by_its_mask_and_loses_its_padding(write_packed):
    prefix = write_packed(
        input_ids=[[5, 6, 7, 8, 9, 0, 0]], attention_mask=[[1, 1, 1, 2, 2, 0, 0]], labels=[[-100, 6, 7, -100, 9, -100, -100]]
    )
    row = InstructionDataset(prefix)[0]
    assert row["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert row["sample_lengths"].tolist() == [3, 2]
    cut = InstructionDataset(prefix, seq_length=4)[0]
    assert cut["input_ids"].tolist() == [5, 6, 7, 8] and cut["sample_lengths"].tolist() == [3, 1]


def test_a_full_neat_pack_without_padding_is_split_too(write_packed):
    prefix = write_packed(input_ids=[[5, 6, 7]], attention_mask=[[1, 1, 2]], labels=[[-100, 6, 7]])
    assert InstructionDataset(prefix)[0]["sample_lengths"].tolist() == [2, 1]


PLAIN_PACK = {
    # the first sample has two answers, each with an end token; the second one has no end token at all
    "input_ids": [[5, 6, 2, 7, 2, 8, 9, 0, 0]],
    "attention_mask": [[1] * 9],
    "labels": [[-100, 6, 2, 7, 2, -100, 9, -100, -100]],
}


def test_a_plain_pack_is_split_where_its_samples_begin_and_nowhere_else(write_packed):
    prefix = write_packed(**PLAIN_PACK, sample_lengths=[[5, 2]])
    assert InstructionDataset(prefix)[0]["sample_lengths"].tolist() == [9]
    assert InstructionDataset(prefix, pad_id=0)[0]["sample_lengths"].tolist() == [7]
    assert InstructionDataset(prefix, pad_id=0, splits_packs=True)[0]["sample_lengths"].tolist() == [5, 2]
    for seq_length, lengths in ((6, [5, 1]), (5, [5]), (3, [3])):
        cut = InstructionDataset(prefix, pad_id=0, seq_length=seq_length, splits_packs=True)[0]
        assert cut["sample_lengths"].tolist() == lengths and len(cut["input_ids"]) == seq_length


def test_a_plain_pack_that_does_not_show_where_its_samples_begin_is_refused(write_packed):
    prefix = write_packed(**PLAIN_PACK)
    with pytest.raises(ValueError, match=r"has no .*d_packed_sample_lengths_document\.bin, .*; run preprocess --pack again"):
        check_sample_lengths(prefix)
    assert InstructionDataset(prefix)[0]["sample_lengths"].tolist() == [9]
    write_packed(sample_lengths=[[5, 5]])
    with pytest.raises(ValueError, match=r"sample_lengths_document\.bin, row 0: samples of \[5, 5\] tokens in a row of 9"):
        check_sample_lengths(prefix)


def test_cut_rows_and_those_without_a_label_left_are_counted(write_packed):
    prefix = write_packed(
        input_ids=[[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 0, 0], [1, 2], [1, 2, 3, 4]],
        attention_mask=[[1] * 4, [1] * 4, [1] * 4, [1] * 2, [1] * 4],
        # a label on the first token is predicted by none
        labels=[[-100, 2, 3, 4], [-100, -100, 3, 4], [-100, 2, -100, -100], [-100, 2], [1, -100, 3, 4]],
    )
    dataset = InstructionDataset(prefix, pad_id=0, seq_length=2)
    assert dataset.count_cut(range(5)) == (3, 2)
    assert dataset.count_cut([0, 2]) == (1, 0)
    assert InstructionDataset(prefix, pad_id=0).count_cut(range(5)) == (0, 0)


def test_documents_of_a_sample_are_those_that_were_stored_whatever_their_tokens(tmp_path, tokenizer):
    end = tokenizer.eos_token_id
    generator = np.random.default_rng(0)
    # half of them have end tokens inside, none has one at its end
    documents = [[number] * int(generator.integers(1, 9)) + [end, number] * (number % 2) for number in range(600, 1000)]
    write_megatron(tmp_path / "d_text_document", documents)
    data = PretrainData([str(tmp_path / "d_text_document")], 16, "100,0,0", marks_documents=True)
    train = build_pretrain_datasets(data, tokenizer, (60, 0, 0))[0]
    for item in (train[index] for index in range(60)):
        owners = [int(token) for token in item["tokens"]]
        for position in reversed(range(15)):  # an end token comes before another token of its document
            owners[position] = owners[position + 1] if owners[position] == end else owners[position]
        changes = [position for position in range(1, 16) if owners[position] != owners[position - 1] != end != owners[position]]
        assert np.cumsum(item["document_lengths"]).tolist() == [*changes, 16]


@pytest.mark.parametrize(
    ("suffix", "cut", "message"),
    [
        ("bin", lambda content: content[:-4], r"has 20 bytes and its \.idx describes 24; row 2 is the first that is not comp"),
        ("bin", lambda content: content[:8], "row 0 is the first that is not complete"),
        ("bin", lambda content: content + b"0000", "has 28 bytes and its .idx describes 24; they are not of one run"),
        ("bin", lambda content: b"", "is empty"),
        ("idx", lambda content: content[:-8], r"\.idx is damaged: 94 bytes, version 1, token type 4, 3 rows"),
        ("idx", lambda content: content[:20], r"\.idx is damaged"),
        ("idx", lambda content: content[:17] + b"\x63" + content[18:], r"\.idx is damaged: .* token type 99"),
        ("idx", lambda content: content[:4], "is not a Megatron index"),
    ],
)
def test_a_truncated_or_damaged_dataset_is_refused_when_it_is_opened(tmp_path, suffix, cut, message):
    write_megatron(tmp_path / "d", [[1, 2, 3], [4], [5, 6]])
    assert [row.tolist() for row in open_indexed(tmp_path / "d")] == [[1, 2, 3], [4], [5, 6]]
    path = tmp_path / f"d.{suffix}"
    path.write_bytes(cut(path.read_bytes()))
    with pytest.raises(ValueError, match=message) as raised:
        open_indexed(tmp_path / "d")
    assert str(tmp_path / "d") in str(raised.value)


def test_ids_outside_the_vocabulary_are_found_by_file_row_and_position(tmp_path, monkeypatch):
    write_megatron(tmp_path / "d", [[1, 2, -100], [4], [5, 9, 6]])
    check_token_ids(tmp_path / "d", 10, allows_ignored=True)
    with pytest.raises(ValueError, match=r"d\.bin, row 2, position 1: token id 9 is not in the model's vocabulary of 9"):
        check_token_ids(tmp_path / "d", 9, allows_ignored=True)
    with pytest.raises(ValueError, match="row 0, position 2: token id -100"):
        check_token_ids(tmp_path / "d", 10, allows_ignored=False)
    write_megatron(tmp_path / "d", [[1, 2], [-7]])
    with pytest.raises(ValueError, match="row 1, position 0: token id -7"):
        check_token_ids(tmp_path / "d", 10, allows_ignored=True)
    monkeypatch.setattr(indexed, "_CHECKED_TOKENS", 2)  # chunks end inside of rows
    write_megatron(tmp_path / "d", [[1, 2, 3], [4, 5, 6, 70]])
    with pytest.raises(ValueError, match="row 1, position 3: token id 70"):
        check_token_ids(tmp_path / "d", 10, allows_ignored=False)


def test_missing_or_unequal_columns_are_errors(write_packed, tmp_path):
    prefix = write_packed(input_ids=[[1, 2]], labels=[[1, 2]])
    with pytest.raises(ValueError, match=r"d_packed_attention_mask_document.idx \(found: input_ids, labels\)"):
        InstructionDataset(prefix)
    write_packed(attention_mask=[[1]])
    with pytest.raises(ValueError, match="input_ids and attention_mask .* differ in length"):
        InstructionDataset(prefix)
    write_packed(attention_mask=[[1, 1], [1]])
    with pytest.raises(ValueError, match="different numbers of rows"):
        InstructionDataset(prefix)
    with pytest.raises(ValueError, match="no such files at all"):
        IndexedColumns(tmp_path / "other", ["input_ids"])


def test_half_written_files_are_errors(tmp_path):
    write_megatron(tmp_path / "a", [[1]])
    (tmp_path / "a.bin").unlink()
    with pytest.raises(ValueError, match="a.bin does not exist"):
        open_indexed(tmp_path / "a")
    (tmp_path / "a.bin").write_bytes(b"1234")
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(ValueError, match="not a Megatron index"):
        open_indexed(tmp_path / "a")


def test_preference_pairs_and_their_length_filter(write_packed):
    prefix = write_packed(
        chosen_input_ids=[[1, 2], [3]],
        chosen_labels=[[-100, 2], [3]],
        rejected_input_ids=[[1, 4, 5], [6]],
        rejected_labels=[[-100, 4, 5], [6]],
    )
    dataset = PreferenceDataset(prefix)
    assert {name: values.tolist() for name, values in dataset[0].items()} == {
        "chosen_input_ids": [1, 2],
        "chosen_labels": [-100, 2],
        "rejected_input_ids": [1, 4, 5],
        "rejected_labels": [-100, 4, 5],
    }
    short = PreferenceDataset(prefix, seq_length=2)
    assert len(short) == 1 and short.num_too_long == 1 and short[0]["rejected_input_ids"].tolist() == [6]


def test_process_reward_samples_know_their_steps(write_packed):
    prefix = write_packed(input_ids=[[1, 9, 2, 9]], attention_mask=[[1] * 4], labels=[[-100, 3, -100, 4]])
    sample = ProcessRewardDataset(prefix)[0]
    assert sample["step_positions"].tolist() == [1, 3]
    assert sample["labels"][sample["step_positions"]].tolist() == [3, 4]


RL_ROWS = [
    {"q": "short", "a": "1", "level": 3},
    {"q": "much too long", "a": "2", "level": 4},
    {"q": "tiny", "a": "3", "level": 5},
]
GSM8K_SETTINGS = PromptSettings(map_keys={"prompt": "question", "query": "", "response": "answer"})
RL_KEYS = {"prompt": "q", "query": "", "response": "a", "system": ""}


def test_raw_and_preprocessed_prompts_are_the_same(tmp_path, tokenizer_folder, write_jsonl):
    raw = write_jsonl(RL_ROWS)
    command = ["--input", raw, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "rl")]
    command += ["--handler-name", "R1AlpacaStyleInstructionHandler", "--prompt-type", "qwen", "--map-keys", json.dumps(RL_KEYS)]
    assert main([*command, "--dataset-additional-keys", "labels", "level"]) == 0
    settings = PromptSettings(prompt_type="qwen", map_keys=RL_KEYS)
    options = {"max_prompt_length": 300, "dataset_additional_keys": ["labels", "level"]}
    indexed = open_prompts(tmp_path / "rl", load_tokenizer(tokenizer_folder), **options)
    tokenizer = load_tokenizer(tokenizer_folder)
    loaded = open_prompts(raw, tokenizer, settings=settings, **options)
    assert len(indexed) == len(loaded) == 3
    for index in range(3):
        assert indexed[index]["prompt_ids"] == loaded[index]["prompt_ids"]
        assert indexed[index]["label"] == loaded[index]["label"] == RL_ROWS[index]["a"]
        assert indexed[index]["columns"] == {"level": str(RL_ROWS[index]["level"])}
        assert loaded[index]["columns"] == {"level": RL_ROWS[index]["level"]}
    wanted = (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\ntiny<|im_end|>\n<|im_start|>assistant\n"
    )
    assert loaded[2]["prompt_ids"] == ids(wanted)
    assert tokenizer.eos_token == "<|im_end|>"


def test_prompts_as_long_as_the_limit_are_filtered_and_counted(tmp_path, tokenizer, write_jsonl):
    raw = write_jsonl([*RL_ROWS, {"q": " ", "a": "x"}])
    limit = len("much too long")
    settings = PromptSettings(map_keys=RL_KEYS)
    prompts = open_prompts(raw, tokenizer, max_prompt_length=limit, settings=settings)
    assert [prompts[index]["label"] for index in range(len(prompts))] == ["1", "3"]
    assert (prompts.num_read, prompts.num_too_long, prompts.dropped) == (4, 1, {"empty prompt": 1})
    assert prompts.describe() == "2 prompts of 4 rows (1 too long, 1 empty prompt)"
    assert len(open_prompts(raw, tokenizer, max_prompt_length=limit + 1, settings=settings)) == 3
    with pytest.raises(ValueError, match="no prompt is left"):
        open_prompts(raw, tokenizer, max_prompt_length=2, settings=settings)


def test_longer_prompts_are_left_out_or_cut_to_their_last_tokens(tmp_path, tokenizer, write_jsonl):
    raw, limit = write_jsonl([*RL_ROWS, {"q": " ", "a": "x"}]), len("much too long")
    options = {"settings": PromptSettings(map_keys=RL_KEYS)}
    whole = open_prompts(raw, tokenizer, max_prompt_length=limit, long_prompts="drop_longer", **options)
    assert (len(whole), whole.num_too_long, whole.num_cut) == (3, 0, 0)
    shorter = open_prompts(raw, tokenizer, max_prompt_length=limit - 1, long_prompts="drop_longer", **options)
    assert (len(shorter), shorter.num_too_long) == (2, 1)
    cut = open_prompts(raw, tokenizer, max_prompt_length=4, long_prompts="cut_left", **options)
    assert [prompt["prompt_ids"] for prompt in cut] == [prompt["prompt_ids"][-4:] for prompt in whole]
    assert cut.lengths.tolist() == [len(prompt["prompt_ids"]) for prompt in cut] and max(cut.lengths) == 4
    number = sum(len(prompt["prompt_ids"]) > 4 for prompt in whole)
    assert number and cut.describe() == f"3 prompts of 4 rows (0 too long, {number} cut to their last 4 tokens, 1 empty prompt)"
    (part,) = open_prompts(f"{raw}[1:2]", tokenizer, max_prompt_length=4, long_prompts="cut_left", **options)
    assert part["prompt_ids"] == whole[1]["prompt_ids"][-4:]
    with pytest.raises(ValueError, match="tokens and are longer"):
        open_prompts(raw, tokenizer, max_prompt_length=1, long_prompts="drop_longer", **options)


def test_a_slice_counts_empty_lines_at_both_ends_alike(tmp_path, tokenizer):
    raw = tmp_path / "gaps.jsonl"
    lines = [
        "",
        *(json.dumps({"prompt": f"q{number}", "labels": "x"}) for number in range(3)),
        "",
        json.dumps({"prompt": "q3", "labels": "x"}),
    ]
    raw.write_text("\n".join(lines) + "\n")

    def prompts(part):
        found = open_prompts(f"{raw}{part}", tokenizer, max_prompt_length=9)
        return [found[index]["prompt_ids"] for index in range(len(found))]

    assert prompts("[0:3]") == [ids("q0"), ids("q1")]
    assert prompts("[3:6]") == [ids("q2"), ids("q3")]


def test_raw_prompts_without_labels_and_in_chat_form(tokenizer, write_jsonl):
    ppo = open_prompts(write_jsonl([{"instruction": "Q"}]), tokenizer, max_prompt_length=9, dataset_additional_keys=[])
    assert ppo[0] == {"prompt_ids": ids("Q"), "label": None, "columns": {}}
    chat = [{"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "7"}}]
    assert open_prompts(write_jsonl(chat), tokenizer, max_prompt_length=9)[0]["label"] == "7"
    plain = [{"prompt": "Q", "labels": "8", "instruct": "no"}]
    assert open_prompts(write_jsonl(plain), tokenizer, max_prompt_length=9)[0] == {
        "prompt_ids": ids("Q"),
        "label": "8",
        "columns": {},
    }


def test_labels_are_kept_where_there_are_some_when_no_columns_are_asked_for(tmp_path, tokenizer, tokenizer_folder, write_jsonl):
    options = {"max_prompt_length": 300, "dataset_additional_keys": None}
    assert open_prompts(write_jsonl([{"instruction": "Q", "output": "A"}]), tokenizer, **options)[0]["label"] == "A"
    assert open_prompts(write_jsonl([{"question": "Q", "answer": "A"}]), tokenizer, settings=GSM8K_SETTINGS, **options)[0] == {
        "prompt_ids": ids("Q"),
        "label": "A",
        "columns": {},
    }
    raw = write_jsonl([{"instruction": "Q"}])
    assert open_prompts(raw, tokenizer, **options)[0]["label"] is None
    command = ["--input", raw, "--tokenizer-name-or-path", tokenizer_folder, "--output-prefix", str(tmp_path / "ppo")]
    assert main([*command, "--handler-name", "PPOAlpacaStyleInstructionHandler"]) == 0
    assert open_prompts(tmp_path / "ppo", tokenizer, **options)[0] == {"prompt_ids": ids("Q"), "label": None, "columns": {}}


@pytest.mark.parametrize(
    ("thinking", "ending"),
    [("none", "assistant\n"), ("true", "assistant\n"), ("false", "assistant\n<think>\n\n</think>\n\n")],
)
def test_raw_prompts_open_a_thought_as_asked(thinking, ending, tokenizer, write_jsonl):
    settings = PromptSettings(prompt_type="qwen3", enable_thinking=thinking)
    prompts = open_prompts(write_jsonl([{"prompt": "Q", "labels": "A"}]), tokenizer, max_prompt_length=300, settings=settings)
    assert prompts[0]["prompt_ids"] == ids(f"<|im_start|>user\nQ<|im_end|>\n<|im_start|>{ending}")


def test_thinking_of_a_template_without_thoughts_is_refused(tokenizer, write_jsonl):
    settings = PromptSettings(prompt_type="qwen", enable_thinking="true")
    with pytest.raises(ValueError, match="enable_thinking=true has no meaning for prompt_type='qwen'"):
        open_prompts(write_jsonl([{"prompt": "Q", "labels": "A"}]), tokenizer, max_prompt_length=300, settings=settings)


def test_malformed_raw_prompts_name_the_row(tokenizer, write_jsonl):
    raw = write_jsonl([{"instruction": "Q", "output": "A"}, {"instruction": "Q"}])
    with pytest.raises(ValueError, match="rows.jsonl, row 2: has no column 'output'"):
        open_prompts(raw, tokenizer, max_prompt_length=9)
    skipped = open_prompts(raw, tokenizer, max_prompt_length=9, settings=PromptSettings(on_bad_row="skip"))
    assert len(skipped) == 1 and skipped.dropped == {"malformed": 1}
    with pytest.raises(ValueError, match="is neither a raw file or folder, nor a prefix"):
        open_prompts("/nonexistent/x", tokenizer, max_prompt_length=9)


def test_the_labels_of_an_sft_dataset_are_not_reference_answers(write_packed, tokenizer):
    prefix = write_packed(input_ids=[[1, 2]], attention_mask=[[1, 1]], labels=[[-100, 2]])
    assert open_prompts(prefix, tokenizer, max_prompt_length=9, dataset_additional_keys=[])[0]["label"] is None
    with pytest.raises(ValueError, match="labels of supervised tuning"):
        open_prompts(prefix, tokenizer, max_prompt_length=9)


@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_resume_where_they_stopped(shuffle):
    sampler = BatchSampler(7, seed=3, shuffle=shuffle)
    stream = sampler.batches(0, 3)
    whole = [next(stream) for _ in range(12)]
    for done in range(10):
        resumed = BatchSampler(7, seed=3, shuffle=shuffle).batches(3 * done, 3)
        assert [next(resumed) for _ in range(2)] == whole[done : done + 2]


def test_wrapping_shows_every_sample_once_an_epoch():
    stream = BatchSampler(7, seed=3).batches(0, 3)
    drawn = [index for _ in range(7) for index in next(stream)]
    assert [sorted(drawn[start : start + 7]) for start in (0, 7, 14)] == [list(range(7))] * 3
    assert drawn[:7] != drawn[7:14]


def test_a_batch_larger_than_the_dataset_wraps_over_several_epochs():
    assert next(BatchSampler(2, shuffle=False).batches(0, 5)) == [0, 1, 0, 1, 0]


def test_the_order_depends_on_seed_and_epoch_alone():
    orders = {tuple(BatchSampler(20, seed=seed).permute(epoch)) for seed in (1, 2) for epoch in (0, 1)}
    assert len(orders) == 4
    assert np.array_equal(BatchSampler(20, seed=1).permute(1), BatchSampler(20, seed=1).permute(1))


def test_wrong_samplers_are_errors():
    with pytest.raises(ValueError, match="holds no samples"):
        BatchSampler(0)
    with pytest.raises(ValueError, match="must not be negative"):
        next(BatchSampler(3).batches(-1, 2))


def test_blends_read_prefixes_and_weights(tmp_path):
    for name in "ab":
        write_megatron(tmp_path / name, [[1, 2, 3]])
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    assert blend([a]) == ([a], None)
    assert blend([a, b]) == ([a, b], None)
    assert blend(["0.3", a, "0.7", b]) == ([a, b], [0.3, 0.7])
    with pytest.raises(ValueError, match="a weight before every prefix"):
        blend(["0.3", a, b])
    with pytest.raises(ValueError, match="positive weight"):
        blend(["0", a, "1", b])
    with pytest.raises(ValueError, match="with _text_document"):
        blend([str(tmp_path / "c")])


def test_pretraining_windows_cover_the_documents_in_order_of_tokens(tmp_path, tokenizer):
    documents = [list(range(10, 30)), list(range(40, 53))]
    write_megatron(tmp_path / "p_text_document", documents)
    data = PretrainData([str(tmp_path / "p_text_document")], seq_length=8, cache_dir=str(tmp_path / "cache"))
    train, valid, test = build_pretrain_datasets(data, tokenizer, (4, 0, 0))
    assert valid is None and test is None
    seen = []
    for index in range(4):
        item = train[index]
        assert item["tokens"].shape == (8,) and item["loss_mask"].tolist() == [1.0] * 8
        assert item["labels"].tolist()[:-1] == item["tokens"].tolist()[1:]
        seen += item["tokens"].tolist()
    stream = sum(documents, []), documents[1] + documents[0]
    windows = {tuple(tokens[start : start + 8]) for tokens in stream for start in range(0, 32, 8)}
    assert {tuple(seen[start : start + 8]) for start in range(0, 32, 8)} <= windows


def test_a_blend_draws_by_weight(tmp_path, tokenizer):
    for name, token in (("a", 7), ("b", 9)):
        write_megatron(tmp_path / f"{name}_text_document", [[token] * 400])
    paths = ["1", str(tmp_path / "a_text_document"), "3", str(tmp_path / "b_text_document")]
    train, *_ = build_pretrain_datasets(PretrainData(paths, seq_length=4), tokenizer, (40, 0, 0))
    drawn = [int(train[index]["tokens"][0]) for index in range(40)]
    assert (drawn.count(7), drawn.count(9)) == (10, 30)
    with pytest.raises(ValueError, match="a blend with a cache_dir needs torch.distributed"):
        build_pretrain_datasets(PretrainData(paths, seq_length=4, cache_dir=str(tmp_path)), tokenizer, (40, 0, 0))


def test_load_tokenizer_settles_end_and_padding(tmp_path):
    bare = build_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(tmp_path / "nopad")
    loaded = load_tokenizer(tmp_path / "nopad")
    assert loaded.pad_token_id == loaded.eos_token_id == BYTES.eos_token_id
    bare.eos_token = None
    bare.save_pretrained(tmp_path / "noeos")
    with pytest.raises(ValueError, match="has no eos_token"):
        load_tokenizer(tmp_path / "noeos")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot load a tokenizer"):
        load_tokenizer(tmp_path / "empty")
    with pytest.raises(ValueError, match="is not a folder"):
        load_tokenizer(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("file", "entry"), [("tokenizer_config.json", [None, "owner/repo--file.Fast"]), ("config.json", "owner/repo--file.Class")]
)
def test_trusted_code_of_a_tokenizer_is_that_of_its_folder(tmp_path, file, entry):
    build_tokenizer().save_pretrained(tmp_path)
    (tmp_path / file).write_text(json.dumps({"auto_map": {"AutoTokenizer": entry}}))
    with pytest.raises(ValueError, match=r"auto_map.AutoTokenizer names code of another repository .*, which is not run"):
        load_tokenizer(tmp_path, trust_remote_code=True)



def test_a_folder_is_looked_at_before_anything_is_imported(tmp_path):
    build_tokenizer().save_pretrained(tmp_path / "sound")
    assert check_tokenizer_files(tmp_path / "sound")
    assert not check_tokenizer_files("somebody/a-model-of-the-hub")
    with pytest.raises(ValueError, match="is not a folder"):
        check_tokenizer_files(tmp_path / "nothing")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="the folder holds none"):
        check_tokenizer_files(tmp_path / "model")
    (tmp_path / "sound" / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ValueError, match="tokenizer.json is not valid JSON: Expecting value"):
        check_tokenizer_files(tmp_path / "sound")
    program = "import sys; from mindspeed_rl.data.tokenizer import check_tokenizer_files as look; look(sys.argv[1])"
    program += "; sys.exit('transformers' in sys.modules)"
    folder = tmp_path / "byte5"
    build_tokenizer().save_pretrained(folder)
    assert subprocess.run([sys.executable, "-c", program, str(folder)], timeout=patient(60)).returncode == 0


def test_a_tokenizer_without_a_rust_backend_works_too():
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    assert not slow.is_fast
    assert TextEncoder(slow).encode(["ab", "é"]) == [[byte + 3 for byte in b"ab"], [byte + 3 for byte in "é".encode()]]
    with_end = TextEncoder(slow, add_special_tokens=True).encode(["a"])
    assert with_end == [[ord("a") + 3, slow.eos_token_id]]


def test_importing_the_registry_loads_nothing_heavy():
    heavy = "('torch', 'transformers', 'megatron', 'numpy', 'datasets')"
    code = f"import sys, mindspeed_rl.data; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def labels_of(prompts: PromptDataset) -> list[str | None]:
    return [prompts[index]["label"] for index in range(len(prompts))]


@pytest.mark.parametrize(
    ("suffix", "expected"), [("", "0123456"), ("[:2]", "01"), ("#3", "012"), ("[5:]", "56"), ("[2:4]", "23"), ("[4:99]", "456")]
)
def test_a_slice_behind_the_path_reads_these_rows_alone(tmp_path, tokenizer, suffix, expected):
    from datasets import Dataset

    rows = [{"prompt": "Q", "labels": str(number)} for number in range(7)]
    saved, lines = tmp_path / "saved", tmp_path / "rows.jsonl"
    Dataset.from_list(rows).save_to_disk(str(saved))
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in (saved, lines):
        prompts = open_prompts(f"{path}{suffix}", tokenizer, max_prompt_length=9)
        assert "".join(label or "" for label in labels_of(prompts)) == expected


def test_a_slice_without_rows_is_refused(tokenizer, write_jsonl):
    path = write_jsonl([{"prompt": "Q", "labels": "1"}])
    with pytest.raises(ValueError, match="selects no row: 2 is not after 3"):
        open_prompts(f"{path}[3:2]", tokenizer, max_prompt_length=9)


def test_the_system_prompt_stands_before_prompts_that_bring_none(tokenizer, write_jsonl):
    rows = [
        {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "7"}},
        {
            "prompt": [{"role": "system", "content": "own"}, {"role": "user", "content": "Q"}],
            "reward_model": {"ground_truth": "8"},
        },
    ]
    settings = PromptSettings(system_prompt="be brief", prompt_type="qwen")
    prompts = open_prompts(write_jsonl(rows), tokenizer, max_prompt_length=999, settings=settings)
    first, second = (tokenizer.decode(prompts[index]["prompt_ids"]) for index in (0, 1))
    assert "be brief" in first and "own" not in first
    assert "own" in second and "be brief" not in second


def test_answers_judged_alone_are_lent_to_other_prompts_each_once(write_packed):
    rows = [([10 + number, 5], [50 + number, 1]) for number in range(9)]
    prefix = write_packed(
        input_ids=[prompt + answer for prompt, answer in rows],
        labels=[[-100, -100, *answer] for _, answer in rows],
        desirable=[[number % 2] for number in range(9)],
    )
    dataset = UnpairedDataset(prefix, seed=4)
    items = [dataset[index] for index in range(len(dataset))]
    assert [item["desirable"] for item in items] == [bool(number % 2) for number in range(9)]
    lent = []
    for index, item in enumerate(items):
        assert item["mismatched_input_ids"][:2].tolist() == [10 + index, 5]
        assert item["mismatched_labels"].tolist() == [-100, -100, *item["mismatched_input_ids"][2:].tolist()]
        lent.append(int(item["mismatched_input_ids"][2]) - 50)
        assert lent[-1] != index
    assert sorted(lent) == list(range(9))


def test_answers_of_pairs_are_judged_alone_and_never_lent_to_their_own_prompt(write_packed):
    pairs = [([20 + number], [60 + number, 1], [80 + number, 7, 1]) for number in range(5)]
    prefix = write_packed(
        chosen_input_ids=[prompt + chosen for prompt, chosen, _ in pairs],
        chosen_labels=[[-100, *chosen] for _, chosen, _ in pairs],
        rejected_input_ids=[prompt + rejected for prompt, _, rejected in pairs],
        rejected_labels=[[-100, *rejected] for _, _, rejected in pairs],
    )
    dataset = UnpairedDataset(prefix, seq_length=4)
    items = [dataset[index] for index in range(10)]
    assert [item["input_ids"].tolist() for item in items] == [[p[0], *answer] for p, *both in pairs for answer in both]
    assert [item["desirable"] for item in items] == [True, False] * 5
    for item in items:
        assert item["mismatched_input_ids"][1] % 20 != item["input_ids"][0] - 20


def test_answers_to_one_prompt_alone_cannot_be_lent(write_packed):
    prefix = write_packed(input_ids=[[5, 9], [5, 8]], labels=[[-100, 9], [-100, 8]], desirable=[[1], [0]])
    with pytest.raises(ValueError, match="all prompts of the data are equal"):
        UnpairedDataset(prefix)[0]
