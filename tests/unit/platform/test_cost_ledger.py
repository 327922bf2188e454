"""Counts of a ledger on the CPU, where every call of an operator reaches the device; copies need a device of their own."""

import torch

from mindspeed_rl import platform
from mindspeed_rl.platform.cost_ledger import CostLedger

platform.select("cpu")


def counts(pairs, phase):
    return {name: count for (at, name), count in pairs.items() if at == phase}


def test_kernels_are_counted_by_phase_and_views_are_none():
    x = torch.ones(4, 3)
    with CostLedger() as ledger:
        with ledger.at("first"):
            y = (x + x).t()[1:] * 2.0
        with ledger.at("second"):
            y.exp_()
    assert counts(ledger.kernels, "first") == {"aten::add": 1, "aten::mul": 1}
    assert counts(ledger.kernels, "second") == {"aten::exp_": 1}


def test_a_phase_inside_another_is_named_after_both():
    x = torch.ones(2)
    with CostLedger() as ledger, ledger.at("update"):
        x + x
        with ledger.at("forward"), ledger.at("head"):
            x * x
    assert counts(ledger.kernels, "update") == {"aten::add": 1}
    assert counts(ledger.kernels, "update / head") == {"aten::mul": 1}


def test_a_value_that_the_host_reads_is_a_wait_with_its_line():
    x = torch.ones(3)
    with CostLedger() as ledger, ledger.at("step"):
        float(x.sum())
        x.nonzero()
        x[x > 0]
        x[torch.tensor([0, 1])]
    results = {what: line for (phase, what, line), count in ledger.waits.items() if phase == "step" and count == 1}
    assert set(results) == {"_local_scalar_dense", "nonzero", "index"}
    assert all(line.startswith("tests/unit/platform/test_cost_ledger.py:") for line in results.values())


def test_backward_is_counted_where_it_runs():
    x = torch.ones(3, requires_grad=True)
    with CostLedger() as ledger:
        with ledger.at("forward"):
            loss = (x * x).sum()
        with ledger.at("backward"):
            loss.backward()
    assert counts(ledger.kernels, "backward")["aten::mul"] == 2


class Owner:
    def work(self, x):
        return x + 1


def test_calls_of_a_method_can_be_a_phase_and_are_left_alone_afterwards():
    owner, x = Owner(), torch.ones(2)
    with CostLedger() as ledger, ledger.at("update"):
        ledger.around(owner, "work", "inside")
        ledger.around(Owner, "work", "unused")
        owner.work(x)
    assert counts(ledger.kernels, "update / inside") == {"aten::add": 1}
    owner.work(x)
    assert sum(ledger.kernels.values()) == 1 and "work" not in vars(owner)


def test_the_record_is_plain_data_with_memory_of_every_phase():
    with CostLedger() as ledger, ledger.at("update"), ledger.at("forward"):
        torch.ones(8) + 1
    record = ledger.record()
    assert [entry for entry in record["kernels"] if entry[1] == "aten::add"] == [["update / forward", "aten::add", 1]]
    assert record["peak_bytes"]["update"] >= record["peak_bytes"]["update / forward"] > 0
