"""What the stages make of their data: packs, documents, scores, judgements, evaluation, order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from supervised_samples import EOS, NETWORK, answers, instruction_row, log_probs, pair_row, text, write_columns
from transformers import AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

from mindspeed_rl.data.indexed import IndexedWriter, column_prefix


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(tiny_model).float().eval()


def learnt(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probs of the answer."""
    with torch.no_grad():
        return log_probs(model, prompt + answer)[len(prompt) - 1 :]


# ---------------------------------------------------------------- sft: packs


def pack(samples: list[tuple[list[int], list[int]]], *, neat: bool, length: int = 64) -> dict[str, list[int]]:
    """One row of `length` tokens."""
    row: dict[str, list[int]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for number, (prompt, answer) in enumerate(samples, start=1):
        row["input_ids"] += prompt + answer
        row["labels"] += [-100] * len(prompt) + answer
        row["attention_mask"] += [number if neat else 1] * (len(prompt) + len(answer))
    rest = length - len(row["input_ids"])
    assert rest >= 0
    return {
        "input_ids": row["input_ids"] + [0] * rest,
        "attention_mask": row["attention_mask"] + [0 if neat else 1] * rest,
        "labels": row["labels"] + [-100] * rest,
        "sample_lengths": [len(prompt) + len(answer) for prompt, answer in samples],
    }


@pytest.mark.parametrize("neat", [True, False])
@pytest.mark.parametrize("micro_batch_size", [1, 8])
def test_samples_of_a_pack_train_as_if_they_were_alone(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path, neat: bool, micro_batch_size: int
) -> None:
    samples = answers(24, seed=1)
    prefix = write_columns(tmp_path / "packs", [pack(samples[i : i + 3], neat=neat) for i in range(0, 24, 3)])
    stage = start(
        "sft",
        prefix,
        pack=True,
        neat_pack=neat,
        reset_attention_mask=True,
        reset_position_ids=True,
        micro_batch_size=micro_batch_size,
    )
    expected = -torch.cat([learnt(model, *sample) for sample in samples]).mean().item()
    result = stage.train().metrics.results()
    assert result["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert result["train/samples"] == 8  # a pack counts as one
    assert result["train/tokens"] == sum(len(prompt) + len(answer) for prompt, answer in samples)


def test_without_reset_the_samples_of_a_pack_see_those_before_them(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    samples = answers(24, seed=1)
    packs = [samples[i : i + 3] for i in range(0, 24, 3)]
    prefix = write_columns(tmp_path / "packs", [pack(samples, neat=False) for samples in packs])
    losses = []
    for samples in packs:
        row = pack(samples, neat=False, length=sum(len(prompt) + len(answer) for prompt, answer in samples))
        mask = torch.tensor(row["labels"][1:]) != -100
        with torch.no_grad():
            losses.append(-log_probs(model, row["input_ids"])[mask])
    result = start("sft", prefix, pack=True).train().metrics.results()["train/loss"]
    assert result == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_labels_need_not_be_the_next_tokens(start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path) -> None:
    # efficient-EOS templates train the end token where the next turn begins
    ids, labels = [5, 6, 7, 8, 9, 10, 11], [-100, -100, 7, 8, EOS, -100, 11]
    rows = [{"input_ids": ids, "attention_mask": [1] * 7, "labels": labels}] * 8
    result = start("sft", write_columns(tmp_path / "turns", rows)).train().metrics.results()["train/loss"]
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = -(table[1, 7] + table[2, 8] + table[3, EOS] + table[5, 11]) / 4
    assert result == pytest.approx(expected.item(), rel=1e-5)


def test_padding_to_seq_length_changes_no_figure(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in answers(8, seed=1)])
    short = start("sft", prefix).train().metrics.results()
    long = start("sft", prefix, no_pad_to_seq_lengths=False).train().metrics.results()
    assert long["train/loss"] == pytest.approx(short["train/loss"], rel=1e-5)
    assert long["train/grad_norm"] == pytest.approx(short["train/grad_norm"], rel=1e-4)
    assert long["train/tokens"] == short["train/tokens"]


def test_cut_labels_are_counted_and_a_step_without_any_changes_nothing(start: Callable[..., Any], tmp_path: Path) -> None:
    # 16 rows: of eight the answer is behind the cut, of four the end of it
    rows = [instruction_row([5] * 9, [7, 8, EOS])] * 8 + [instruction_row([5] * 4, [7, 8, 9, EOS])] * 4
    rows += [instruction_row([5, 6], [7, EOS])] * 4
    stage = start("sft", write_columns(tmp_path / "rows", rows), seq_length=6, no_shuffle=True, global_batch_size=8)
    assert "warning: 12 of 16 samples are cut at seq_length, 8 have no label left" in str(stage.data())
    before = {name: tensor.clone() for name, tensor in stage.role.model.models[0].state_dict().items() if tensor is not None}
    result = stage.train().metrics.results()
    assert result["train/skipped_steps"] == 1 and not {"train/loss", "train/grad_norm"} & set(result)
    after = stage.role.model.models[0].state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    result = stage.train().metrics.results()
    assert result["train/loss"] > 0 and result["train/grad_norm"] > 0 and "train/skipped_steps" not in result


# ---------------------------------------------------------------- pretrain


def write_documents(prefix: Path, documents: list[list[int]]) -> str:
    writer = IndexedWriter(column_prefix(prefix, "text", packed=False))
    for document in documents:
        writer.add_documents(np.array(document, dtype=np.int32), [len(document)])
    writer.close()
    return column_prefix(prefix, "text", packed=False)


@pytest.mark.parametrize("reset", [True, False])
def test_documents_of_a_sample_see_each_other_only_without_reset(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path, reset: bool
) -> None:
    path = write_documents(tmp_path / "documents", [prompt + answer for prompt, answer in answers(200, seed=2)])
    stage = start("pretrain", path, seq_length=32, reset_attention_mask=reset, train_iters=2)
    losses = []
    for number in range(8):
        item = stage.train_items[number]
        tokens, labels = item["tokens"].tolist(), item["labels"]
        cuts = [0, *(i + 1 for i, token in enumerate(tokens) if token == EOS and reset and i < 31), 32]
        for first, end in zip(cuts, cuts[1:]):
            with torch.no_grad():
                table = model(torch.tensor([tokens[first:end]])).logits[0].log_softmax(-1)
            losses.append(-table.gather(1, labels[first:end, None])[:, 0])
    assert stage.train().metrics.results()["train/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_the_end_of_a_document_is_learnt(start: Callable[..., Any], tmp_path: Path) -> None:
    path = write_documents(tmp_path / "documents", [[7, 8, 9, EOS]] * 40)
    stage = start("pretrain", path, seq_length=16, train_iters=1)
    item = stage.train_items[0]
    assert (item["labels"] == EOS).any() and bool(item["loss_mask"].bool().all())


def test_blends_sample_by_weight_and_hold_documents_back_for_evaluation(start: Callable[..., Any], tmp_path: Path) -> None:
    first = write_documents(tmp_path / "first", [[3, 3, 3, EOS]] * 400)
    second = write_documents(tmp_path / "second", [[4, 4, 4, EOS]] * 400)
    stage = start("pretrain", [0.25, first, 0.75, second], seq_length=8, train_iters=10, split="90,10,0", eval_iters=2)
    is_from_third = [3 in stage.train_items[number]["tokens"].tolist() for number in range(80)]
    assert sum(is_from_third) == 20
    assert stage.data().num_held_out >= 16 and stage.evaluate().metrics.results()["eval/loss"] > 0


# ---------------------------------------------------------------- orm, prm


def test_an_outcome_reward_model_scores_the_last_token_and_exports_as_a_classifier(
    start: Callable[..., Any], tiny_model: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    scorer = Qwen2ForSequenceClassification(Qwen2Config(**NETWORK, num_labels=1)).float().eval()
    scorer.save_pretrained(tmp_path / "scorer")
    pairs = [(prompt, chosen, rejected) for (prompt, chosen), (_, rejected) in zip(answers(8, seed=4), answers(8, seed=5))]
    prefix = write_columns(tmp_path / "pairs", [pair_row(*pair) for pair in pairs])
    stage = start("orm", prefix, load=str(tmp_path / "scorer"), save=str(tmp_path / "save"))

    def score(classifier: torch.nn.Module, ids: list[int]) -> torch.Tensor:
        return classifier(torch.tensor([ids])).logits[0, 0]

    margins = torch.stack([score(scorer, p + chosen) - score(scorer, p + rejected) for p, chosen, rejected in pairs])
    expected = -torch.nn.functional.logsigmoid(margins).mean()
    result = stage.train().metrics.results()
    assert result["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert result["train/rewards/accuracies"] == pytest.approx((margins > 0).float().mean().item())
    expected.backward()
    norm = torch.nn.utils.clip_grad_norm_(scorer.parameters(), 1.0)
    assert result["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)

    stage.role.save_hf(tmp_path / "exported")
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "exported").float().eval()
    assert exported.config.num_labels == 1
    prompt, chosen, rejected = pairs[0]
    with torch.no_grad():
        margin = score(exported, prompt + chosen) - score(exported, prompt + rejected)
    assert margin.item() != pytest.approx(margins[0].item(), abs=1e-6)  # a step was made
    again = start("orm", prefix, load=str(tmp_path / "exported"), micro_batch_size=1, global_batch_size=1)
    assert again.train().metrics.results()["train/rewards/margins"] == pytest.approx(margin.item(), rel=1e-4, abs=1e-6)


def test_a_reward_model_may_start_from_a_language_model(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "pairs", [pair_row(p, a, a[::-1]) for p, a in answers(8, seed=4)])
    stage = start("orm", prefix)
    losses = [stage.train().metrics.results()["train/loss"] for _ in range(5)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5)  # all scores are equal
    assert losses[-1] < losses[0]


STEP, GOOD, BAD = 90, 91, 92


def steps_row(seed: int) -> dict[str, list[int]]:
    """Three steps, each closed by a placeholder; the last token is one."""
    rng = np.random.RandomState(seed)
    ids, labels = [], []
    for _ in range(3):
        step = rng.randint(3, 90, rng.randint(1, 6)).tolist()
        ids += [*step, STEP]
        labels += [-100] * len(step) + [int(rng.choice((GOOD, BAD)))]
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("reward_tokens", [[text(GOOD), text(BAD)], []])
def test_a_process_reward_model_judges_at_the_placeholders(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path, reward_tokens: list[str]
) -> None:
    rows = [steps_row(seed) for seed in range(8)]
    prefix = write_columns(tmp_path / "steps", rows)
    losses, right = [], []
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0][ids == STEP]
        judged = labels[ids == STEP]
        if reward_tokens:
            logits, judged = logits[:, [GOOD, BAD]], (judged == BAD).long()
            right += (logits.argmax(-1) == judged).tolist()
        losses.append(torch.nn.functional.cross_entropy(logits, judged, reduction="none"))
    result = start("prm", prefix, reward_tokens=reward_tokens).train().metrics.results()
    assert result["train/loss"] == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)
    if reward_tokens:
        assert result["train/rewards/accuracies"] == pytest.approx(sum(right) / len(right))


def test_judgements_beside_the_reward_tokens_are_named(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "steps", [steps_row(seed) for seed in range(8)])
    stage = start("prm", prefix, reward_tokens=[text(GOOD), text(93)])
    with pytest.raises(ValueError, match=f"reward_tokens: the data judges a step as '{text(BAD)}', none of"):
        stage.train()


# ---------------------------------------------------------------- evaluation, order, parts


def test_evaluation_is_the_token_mean_over_the_held_out_rows(
    start: Callable[..., Any], model: Qwen2ForCausalLM, tmp_path: Path
) -> None:
    samples = answers(20, seed=6)
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in samples[:8]])
    held_out = write_columns(tmp_path / "held_out", [instruction_row(*sample) for sample in samples[8:]])
    stage = start("sft", prefix, eval_data_path=str(held_out), eval_iters=5)
    expected = -torch.cat([learnt(model, *sample) for sample in samples[8:]]).mean().item()
    result = stage.evaluate().metrics.results()
    assert result.pop("eval/loss") == pytest.approx(expected, rel=1e-5)
    assert all(name.startswith("memory/evaluate/") for name in result)
    before = {name: p.clone() for name, p in stage.role.model.models[0].named_parameters()}
    stage.evaluate()
    assert all(torch.equal(p, before[name]) for name, p in stage.role.model.models[0].named_parameters())
    few = start("sft", prefix, eval_data_path=str(held_out), eval_iters=1)
    expected = -torch.cat([learnt(model, *sample) for sample in samples[8:16]]).mean().item()
    assert few.evaluate().metrics.results()["eval/loss"] == pytest.approx(expected, rel=1e-5)


def test_split_holds_back_rows_at_the_end(start: Callable[..., Any], tmp_path: Path) -> None:
    rows = [instruction_row(*sample) for sample in answers(20, seed=6)]
    stage = start("sft", write_columns(tmp_path / "sft", rows), split="80,15,5")
    assert str(stage.data()) == "16 samples to train on, 3 to evaluate on"
    assert stage.held_out[0]["input_ids"].tolist() == rows[16]["input_ids"]
    assert start("sft", tmp_path / "sft").held_out is None
    with pytest.raises(ValueError, match="split: 'most' must have fractions"):
        start("sft", tmp_path / "sft", split="most")


@pytest.mark.parametrize("full_shuffle", [False, True])
def test_every_row_is_seen_once_an_epoch_and_all_epochs_shuffle_together_on_request(
    start: Callable[..., Any], tmp_path: Path, full_shuffle: bool
) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row([n], [n, EOS]) for n in range(3, 13)])
    stage = start(
        "sft", prefix, global_batch_size=5, micro_batch_size=5, train_iters=4, no_shuffle=False,
        full_shuffle_instruction_dataset=full_shuffle,
    )  # fmt: skip
    order = stage.stage.order(10, stage.run.plan, 0)
    order_seen = [number for _ in range(4) for number in next(order)]
    assert sorted(order_seen) == sorted([*range(10)] * 2)
    assert (sorted(order_seen[:10]) != list(range(10))) == full_shuffle
    assert order_seen[:10] != sorted(order_seen[:10])


def test_positions_that_restart_without_the_attention_are_refused(start: Callable[..., Any], tmp_path: Path) -> None:
    prefix = write_columns(tmp_path / "sft", [instruction_row(*sample) for sample in answers(8, seed=1)])
    with pytest.raises(ValueError, match="reset_position_ids: true needs reset_attention_mask: true"):
        start("sft", prefix, reset_position_ids=True)


def test_figures_of_a_step_count_every_token_and_operation(start: Callable[..., Any], tmp_path: Path) -> None:
    rows = [instruction_row(*sample) for sample in answers(8, seed=1)]
    result = start("sft", write_columns(tmp_path / "sft", rows)).train().metrics.results()
    lengths = [len(row["input_ids"]) for row in rows]
    assert result["train/tokens"] == sum(lengths)
    # a layer: q and o 128 x 128, k and v 64 x 128, gate, up and down 192 x 128; two layers and the head
    weights = 2 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 192 * 128) + 128 * 128
    attention = 2 * 2 * 128 * sum(length**2 for length in lengths)
    assert result["train/model_tflop"] * 1e12 == pytest.approx(3 * (2 * weights * sum(lengths) + attention))
