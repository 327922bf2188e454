"""The same rows give the same update under every layout, and it is the update of transformers and plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_hf
import torch
import training_jobs as jobs
from comparison import assert_same_training, distances, losses
from ranks import Ranks
from slow_layouts import EP, PP, RING, ULYSSES, VPP, marked
from training_jobs import Setting

Reference = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def single_process(ranks: Callable[[int], Ranks], models: dict[str, Path]) -> Reference:
    """(model name) -> what one process reports with packed micro-batches of two rows."""
    known: dict[str, list[dict[str, Any]]] = {}

    def report(name: str) -> list[dict[str, Any]]:
        if name not in known:
            known[name] = ranks(1).run(jobs.train, setting=Setting(str(models[name])))
        return known[name]

    return report


# ---------------------------------------------------------------- one process, and what it must equal


def transformers_training(name: str, steps: int = 5) -> dict[str, Any]:
    """The same training with transformers, torch's AdamW and clip_grad_norm_, a row at a time."""
    model = tiny_hf.build(name)
    keys, rows = jobs.KEYS, jobs.all_rows()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": keys["weight_decay"]}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=keys["adam_eps"])
    results: dict[str, Any] = {"loss": [], "grad_norm": []}
    for step in range(steps):
        # 2 steps from lr_warmup_init to lr, then a cosine to 0 over the other 18
        start = keys["lr_warmup_init"]
        rate = (
            start + (keys["lr"] - start) * step / 2 if step < 2 else keys["lr"] * (1 + math.cos(math.pi * (step - 2) / 18)) / 2
        )
        total = torch.zeros(())
        for ids, prompt, weights in zip(rows.input_ids, rows.prompt_lengths, rows.columns["weights"]):
            log_softmax = (model(ids[None]).logits[0] / jobs.TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
            log_probs = log_softmax.gather(1, ids[prompt:, None])[:, 0]
            entropy = -(log_softmax.exp() * log_softmax).sum(-1)
            total = total - (weights * log_probs + 0.1 * entropy).sum()
        loss = total / sum(rows.response_lengths)
        optimizer.zero_grad()
        loss.backward()
        results["loss"].append(loss.item())
        results["grad_norm"].append(torch.nn.utils.clip_grad_norm_(model.parameters(), keys["clip_grad"]).item())
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return results | {"weights": {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}}


@pytest.mark.parametrize("name", ["tied", "untied", "moe"])
def test_one_process_follows_transformers(single_process: Reference, models: dict[str, Path], name: str) -> None:
    ours, theirs = single_process(name), transformers_training(name)
    assert losses(ours) == pytest.approx(theirs["loss"], rel=1e-4)
    assert ours[0]["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    if name != "moe":  # transformers holds experts fused under other names
        for key, weight in ours[0]["weights"].items():
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(theirs["weights"][key]), rtol=1e-4, atol=2e-6)


ONE_PROCESS = {
    "padded": {"packed": False},
    "micro-batch 1": {"micro_batch_size": 1},
    "micro-batch 4": {"micro_batch_size": 4},
    "micro-batch 8 padded": {"micro_batch_size": 8, "packed": False},
    "token budget": {"token_budget": 30},
    "token budget padded": {"token_budget": 30, "packed": False},
    "recompute uniform": {"keys": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}},
    "recompute block": {"keys": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}},
    "recompute selective": {"keys": {"recompute_granularity": "selective"}},
    "chunked loss": {"keys": {"loss_chunk_size": 3, "loss_vocab_chunk_size": 7}},
    "distributed optimizer": {"keys": {"use_distributed_optimizer": True}},
}


@pytest.mark.parametrize("changes", ONE_PROCESS.values(), ids=ONE_PROCESS)
def test_how_rows_are_cut_and_recomputed_does_not_change_the_update(
    ranks: Callable[[int], Ranks], single_process: Reference, models: dict[str, Path], changes: dict[str, Any]
) -> None:
    setting = Setting(str(models["tied"]), **changes)
    assert_same_training(ranks(1).run(jobs.train, setting=setting), single_process("tied"))


# ---------------------------------------------------------------- several processes

TP, SP = {"tensor_model_parallel_size": 2}, {"tensor_model_parallel_size": 2, "sequence_parallel": True}
ZERO = {"use_distributed_optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FULL_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

TWO_PROCESSES: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2 tied": ("tied", {"keys": TP}),
    "TP2 untied": ("untied", {"keys": TP}),
    "TP2 SP tied": ("tied", {"keys": SP}),
    "TP2 SP untied": ("untied", {"keys": SP | {"loss_vocab_chunk_size": 7}}),
    "TP2 SP padded": ("tied", {"keys": SP, "packed": False}),
    "TP2 SP recompute": ("tied", {"keys": SP | FULL_RECOMPUTE}),
    "TP2 distributed optimizer": ("tied", {"keys": TP | ZERO}),
    "PP2 tied": ("tied", {"keys": PP}),
    "PP2 untied": ("untied", {"keys": PP}),
    "PP2 padded": ("tied", {"keys": PP, "packed": False}),
    "PP2 token budget": ("tied", {"keys": PP, "token_budget": 30}),
    "PP2 recompute": ("tied", {"keys": PP | FULL_RECOMPUTE}),
    "PP2 uneven": ("tied", {"keys": PP | {"num_layer_list": "1,3"}}),
    "PP2 noop layers": ("tied", {"keys": PP | {"noop_layers": "0,5"}}),
    "VPP2 tied": ("tied", {"keys": VPP}),
    "VPP2 untied": ("untied", {"keys": VPP}),
    "VPP2 three micro-batches": ("tied", {"keys": VPP, "micro_batch_size": 3}),
    "VPP2 token budget": ("tied", {"keys": VPP, "token_budget": 30}),
    "CP2 Ulysses": ("tied", {"keys": ULYSSES}),
    "CP2 Ulysses padded": ("tied", {"keys": ULYSSES, "packed": False}),
    "CP2 ring": ("tied", {"keys": RING}),
    "CP2 ring padded": ("tied", {"keys": RING, "packed": False}),
    "CP2 distributed optimizer": ("untied", {"keys": ULYSSES | ZERO}),
    "DP2": ("tied", {}),
    "DP2 token budget": ("tied", {"token_budget": 30}),
    "DP2 overlap": ("tied", {"keys": {"overlap_grad_reduce": True}}),
    "DP2 distributed optimizer": ("tied", {"keys": ZERO}),
    "DP2 distributed optimizer overlap": ("untied", {"keys": ZERO | OVERLAP}),
    "EP2": ("moe", {"keys": EP}),
    "EP2 grouped": ("moe", {"keys": EP | {"moe_grouped_gemm": True}}),
    "EP2 allgather": ("moe", {"keys": EP | {"moe_token_dispatcher_type": "allgather"}}),
    "EP2 allgather token budget": ("moe", {"keys": EP | {"moe_token_dispatcher_type": "allgather"}, "token_budget": 30}),
    "EP2 allgather padded": ("moe", {"keys": EP | {"moe_token_dispatcher_type": "allgather"}, "packed": False}),
    # ranks have other numbers of rows, and other widths
    "EP2 allgather padded token budget": (
        "moe",
        {"keys": EP | {"moe_token_dispatcher_type": "allgather"}, "packed": False, "token_budget": 30},
    ),
    "EP2 grouped distributed optimizer": ("moe", {"keys": EP | ZERO | {"moe_grouped_gemm": True}}),
    "TP2 SP EP2 ETP1": ("moe", {"keys": SP | EP | {"expert_tensor_parallel_size": 1}}),
    "TP2 SP experts": ("moe", {"keys": SP}),
    "TP2 SP ETP1": ("moe", {"keys": SP | {"expert_tensor_parallel_size": 1}}),
    "TP2 SP ETP1 grouped": ("moe", {"keys": SP | {"expert_tensor_parallel_size": 1, "moe_grouped_gemm": True}}),
    "TP2 SP experts over TP": ("moe", {"keys": SP | {"moe_tp_extend_ep": True}}),
    "PP2 experts": ("moe", {"keys": PP}),
}


#: each of their parts is in another layout of the table too
SLOW_OF_TWO = (
    "TP2 untied",
    "TP2 SP padded",
    "PP2 padded",
    "PP2 recompute",
    "VPP2 untied",
    "VPP2 three micro-batches",
    "CP2 Ulysses padded",
    "CP2 ring padded",
    "DP2 token budget",
    "EP2 allgather",
    "EP2 allgather padded",
    "TP2 SP ETP1",
    "TP2 SP experts",
)


@pytest.mark.parametrize(("name", "changes"), marked(TWO_PROCESSES, SLOW_OF_TWO))
def test_two_processes_train_as_one_does(
    ranks: Callable[[int], Ranks], single_process: Reference, models: dict[str, Path], name: str, changes: dict[str, Any]
) -> None:
    reports = ranks(2).run(jobs.train, setting=Setting(str(models[name]), **changes))
    assert_same_training(reports, single_process(name))


@pytest.mark.parametrize("keys", [ZERO | OVERLAP, VPP, SP | ZERO | OVERLAP], ids=["DP2 overlap", "VPP2", "TP2 overlap"])
def test_steps_that_follow_each_other_at_once_give_the_same_weights(
    ranks: Callable[[int], Ranks], single_process: Reference, models: dict[str, Path], keys: dict[str, Any]
) -> None:
    reports = ranks(2).run(jobs.train, setting=Setting(str(models["tied"]), keys), at_once=True)
    assert_same_training(reports, single_process("tied"))


FOUR_PROCESSES = {
    "TP2 PP2 SP": ("tied", {"keys": SP | PP}),
    "TP2 DP2 distributed optimizer": ("untied", {"keys": SP | ZERO}),
    "PP2 VPP2 DP2": ("tied", {"keys": VPP | ZERO}),
    "TP2 CP2": ("tied", {"keys": SP | ULYSSES}),
    "CP4 ring": ("tied", {"keys": RING | {"context_parallel_size": 4}}),
    "PP2 EP2": ("moe", {"keys": PP | EP}),
    # experts are split over both ranks of TP, and get different numbers of tokens from them
    "TP2 SP EP2": ("moe", {"keys": SP | EP}),
}


@pytest.mark.parametrize(("name", "changes"), marked(FOUR_PROCESSES, ("TP2 CP2", "CP4 ring")))
def test_four_processes_train_as_one_does(
    ranks: Callable[[int], Ranks], single_process: Reference, models: dict[str, Path], name: str, changes: dict[str, Any]
) -> None:
    reports = ranks(4).run(jobs.train, setting=Setting(str(models[name]), **changes), timeout_s=240)
    assert_same_training(reports, single_process(name))


# ---------------------------------------------------------------- half precision

BF16 = {
    "one process": (1, "tied", {}),
    "TP2 SP": (2, "tied", SP),
    "PP2": (2, "untied", PP),
    "DP2 distributed optimizer": (2, "tied", ZERO),
    "EP2 grouped": (2, "moe", EP | {"moe_grouped_gemm": True}),
}


@pytest.mark.parametrize(("size", "name", "keys"), BF16.values(), ids=BF16)
def test_half_precision_stays_close_to_full_precision(
    ranks: Callable[[int], Ranks],
    single_process: Reference,
    models: dict[str, Path],
    size: int,
    name: str,
    keys: dict[str, Any],
) -> None:
    reports = ranks(size).run(jobs.train, setting=Setting(str(models[name]), keys | {"bf16": True}))
    distance = distances(reports, single_process(name))
    assert distance["grad_norm"] < 0.05 and distance["weights"] < 0.02
    assert losses(reports)[-1] == pytest.approx(losses(single_process(name))[-1], rel=0.02)


# ---------------------------------------------------------------- forward only


@pytest.mark.parametrize(
    ("size", "keys", "packed"),
    [(1, {}, True), (1, {}, False), (2, SP, True), (2, VPP, True), (2, ULYSSES, False), (2, RING, True), (2, {}, True)],
    ids=["one", "one padded", "TP2 SP", "VPP2", "CP2 Ulysses padded", "CP2 ring", "DP2"],
)
def test_log_probs_and_entropies_are_those_of_transformers(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, keys: dict[str, Any], packed: bool
) -> None:
    results: dict[int, Any] = {}
    for part in ranks(size).run(jobs.forward, setting=Setting(str(models["untied"]), keys, packed=packed)):
        results |= part
    rows, model = jobs.all_rows(), tiny_hf.build("untied")
    assert sorted(results) == list(range(8))
    for row, (ids, prompt) in enumerate(zip(rows.input_ids, rows.prompt_lengths)):
        with torch.no_grad():
            log_softmax = (model(ids[None]).logits[0] / jobs.TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        log_probs, entropy = (torch.tensor(values) for values in results[row])
        torch.testing.assert_close(log_probs, log_softmax.gather(1, ids[prompt:, None])[:, 0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy, -(log_softmax.exp() * log_softmax).sum(-1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("size", "keys"), [(1, {}), (2, TP), (2, SP)], ids=["one", "TP2", "TP2 SP"])
def test_no_frozen_weight_is_copied_for_each_token(
    ranks: Callable[[int], Ranks], models: dict[str, Path], size: int, keys: dict[str, Any]
) -> None:
    assert (
        ranks(size).run(jobs.products_by_token, setting=Setting(str(models["untied"]), keys, micro_batch_size=8)) == [0] * size
    )
