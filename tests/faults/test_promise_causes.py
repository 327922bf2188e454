"""Causes of a broken promise, each provoked in a run and named by its check."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fault_run import TWO, FaultRun, struck
from grpo_command import preprocess_prompts

pytestmark = pytest.mark.slow

#: the promise is checked after three iterations; its figures are those of the later half
ITERATIONS = ["megatron_training.train_iters=4", "actor_config.save=null", "rl_config.use_prefix_grouper=false"]
PLUGIN = Path(__file__).parent / "site" / "faulty_reward.py"
SERVERS = [
    "rl_config.use_integrated_worker=false",
    "rl_config.rollout_resource.num_npus=1",
    "rl_config.actor_resource.num_npus=1",
]
#: each turn calls the tool once; a template that writes what the tool said as it is
TEMPLATE = {
    "name": "bare",
    "format_assistant": {"slots": ["{{content}}", ["eos_token"]]},
    "format_observation": {"slots": ["{{content}}="]},
    "format_tools": {"tool_format": "qwen"},
}
TOOLS = [
    "megatron_training.data_path={folder}/prompts",
    "megatron_training.prompt_type=bare",
    "megatron_training.prompt_type_path={folder}/bare.json",
    "rl_config.multi_turn_enable=true",
    "rl_config.tool_config_path={folder}/tools.yaml",
    "rl_config.tool_parser_format=faulty_reward:EveryTurn",
    "rl_config.max_turns=2",
    "rl_config.max_total_response_length=24",
]
OFFLOAD = [f"generate_config.offload_train_{part}=true" for part in ("optimizer", "grad", "param")]

_SLOW = {"place": "engine.forward", "how": "slow", "seconds": 0.4}
_BUSY = {"place": "host.sample", "counts": {"busy_s": 1000.0, "stolen_s": 100.0, "swapped": 100_000, "throttled": 2}}

#: cause -> keys, armed faults, the figure, words of its sentences
CAUSES: dict[str, tuple[list[str], list[dict[str, object]], str, list[str]]] = {
    # the mean of all prompts is promised, and the longest ones come first
    "slow rank and longer prompts": (
        [*TWO, "megatron_training.data_path={folder}/sorted.jsonl", "megatron_training.no_shuffle=true"],
        [{"place": "engine.forward", "rank": 1, "how": "slow", "seconds": 2.0}],
        "reference_model",
        [
            r"worker 1 is slow, [\d.]+ times the median of the others in reference_model",
            "prompts are longer, 3 tokens in the mean instead of 1",
        ],
    ),
    "slow rewards": (
        [*TWO, "rl_config.verifier_function=[faulty]", f"rl_config.external_plugins=[{PLUGIN}]"],
        [{"place": "reward", "how": "slow", "seconds": 0.1}],
        "all",
        [r"the trainer waits [\d.]+ s for rewards"],
    ),
    "offload in eager mode": (
        [*TWO, *OFFLOAD, "generate_config.enforce_eager=false"],
        [{"place": "storages.free", "how": "slow", "seconds": 0.4}, {"place": "engine.build", "how": "eager"}],
        "all",
        [r"offloading takes [\d.]+ s", "the engine runs in eager mode, without the captured graphs that were planned"],
    ),
    "tools": (
        [*TWO, *TOOLS],
        [{"place": "tool", "how": "slow", "seconds": 3.0}],
        "rollout",
        [r"samples wait [\d.]+ s for tools"],
    ),
    "servers": (
        ["actor_config.tensor_model_parallel_size=1", *SERVERS],
        [{"place": "server.submit", "how": "slow", "seconds": 0.2}],
        "rollout",
        [r"the trainer waits [\d.]+ s for rollout servers"],
    ),
    "truncation on a machine that swaps, is hot and shared": (
        [*TWO, "generate_config.sampling_config.max_tokens=2"],
        [_SLOW, _BUSY],
        "all",
        [
            r"\d+% of the responses run into the limit of 2 tokens",
            r"the machine swaps, \d+ MiB",
            r"other programs take [\d.e+]+ of \d+ cores",
            r"the virtual machine gets -?\d+% of its cores' time",
            "throttled by heat",
        ],
    ),
}


def _run(task: Path, folder: Path, keys: list[str], faults: list[dict[str, object]]) -> tuple[FaultRun, dict[str, str]]:
    """Return a run that has ended, and the causes of its report by figure."""
    (folder / "bare.json").write_text(json.dumps([TEMPLATE]))
    (folder / "tools.yaml").write_text("tools:\n  - faulty_reward:looked_up\n")
    # the task's 80 prompts have three tokens, of which these iterations take 32; the others have one
    rows = [*(task / "train.jsonl").read_text().splitlines(), *[json.dumps({"prompt": "=", "labels": "="})] * 400]
    (folder / "sorted.jsonl").write_text("\n".join(rows) + "\n")
    keys = [key.replace("{folder}", str(folder)) for key in keys]
    with struck(task, folder, *ITERATIONS, *keys, shares=True) as run:
        for index, fault in enumerate(faults):
            draft = run.faults / f"{index}.draft"
            draft.write_text(json.dumps(fault | {"stays": True}))
            draft.rename(draft.with_suffix(".json"))
        assert run.wait(400.0) == 0, run.output[-3000:]
        assert len(list(run.faults.glob("*.taken"))) == len(faults)
    rows = json.loads((folder / "run" / "report.json").read_text())["plan"]["kept"]
    return run, {row["name"]: row["cause"] for row in rows if row["broken"]}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_that_is_provoked_is_named(cause: str, task: Path, tmp_path: Path) -> None:
    keys, faults, figure, words = CAUSES[cause]
    if keys[-len(TOOLS) :] == TOOLS:
        preprocess_prompts(task, tmp_path / "prompts")
    run, causes = _run(task, tmp_path, keys, faults)
    assert all(re.search(sentence, causes[figure]) for sentence in words), (causes, run.metrics[-1])
    (line,) = (line for line in run.output.splitlines() if "promise, iteration 3: " in line)
    assert all(re.search(sentence, line) for sentence in words), line


def test_longer_responses_are_named_and_no_fault_that_was_not_provoked(task: Path, tmp_path: Path) -> None:
    # half of the limit of four tokens was assumed; the task's answers have two and the end
    run, causes = _run(task, tmp_path, TWO, [_SLOW])
    assert run.metrics[-1]["response_length/mean"] > 1.2 * 2
    assert "assumed: responses of" in run.output and "assumed: prompts of" not in run.output  # which were read
    assert "responses are longer, 3 tokens in the mean instead of 2" in causes["reference_model"], causes
    assert not re.search("rewards|servers|offloading", "; ".join(causes.values()))
