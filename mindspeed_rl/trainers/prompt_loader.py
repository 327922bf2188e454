"""The prompts of a run: opened as the run file says, counted, and put into the data plane batch by batch."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rl.config.keys.megatron import read_split
from mindspeed_rl.config.keys.rl import DistillationKeys
from mindspeed_rl.data import card
from mindspeed_rl.data.cache_folders import CACHE
from mindspeed_rl.data.card import DataCard
from mindspeed_rl.data.datasets import BatchSampler
from mindspeed_rl.data.images import read_references
from mindspeed_rl.data.prompts import PromptDataset, PromptItem, PromptSettings, open_prompts
from mindspeed_rl.dataplane.client import DataPlane
from mindspeed_rl.observability.metrics import Metrics
from mindspeed_rl.run import Run
from mindspeed_rl.run.batch_sizes import BatchPlan
from mindspeed_rl.runtime.reports import WorkerReport
from mindspeed_rl.trainers.advantages import TrainBatch
from mindspeed_rl.trainers.prompt_sampling import PromptOrder, build_prompt_sampler
from mindspeed_rl.workers.agents import read_tool_schemas
from mindspeed_rl.workers.responses import read_image_rules

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


#: labels that are looked at, at equal distances
_CHECKED_LABELS = 20_000
#: how tables write a cell that has nothing
_MISSING = frozenset(("nan", "null", "undefined", "#n/a", "<na>"))
_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
#: what Excel writes for a cell such as 3/4 or 1-2 that it took for a date
_EXCEL_DATE = re.compile(rf"\d{{1,2}}-{_MONTH}|{_MONTH}-\d{{2}}|\d{{4}}-\d{{2}}-\d{{2}} 00:00:00|\d{{1,2}}月\d{{1,2}}日")


class PromptLoader:
    """The prompts of a run in their order; each has n_samples_per_prompt rows in the data plane.

    The position in them is a number of prompts, so that a run may resume with another batch or mode.

    Attributes:
        COLUMNS: that it puts into the data plane.
        next_prompt: index of the next one that was never taken.
        waiting: indexes of prompts that were started before a resume and did not train: they come first.
        batch: indexes of the prompts whose rows are in the data plane, in their order.
    """

    COLUMNS = ("prompt_ids", "labels", "extra")

    def __init__(
        self, prompts: PromptDataset, plane: DataPlane, plan: BatchPlan, order: PromptOrder, *, seed: int, shuffle: bool
    ) -> None:
        self._prompts, self._plane, self._plan = prompts, plane, plan
        self._sampler = BatchSampler(len(prompts), seed=seed, shuffle=shuffle)
        self._choice = build_prompt_sampler(order, prompts, seed=seed, shuffle=shuffle)
        self._described = describe_order(prompts, order, seed=seed, shuffle=shuffle)
        self._pass_start = self.next_prompt = 0
        self.waiting: list[int] = []
        self.batch: list[int] = []
        self._measured: set[int] = set()  # prompts whose rewards a filter has shown, in this iteration

    def item(self, index: int) -> PromptItem:
        """Return the prompt of this index, counted from the start of the run over all epochs."""
        if self._choice is not None:
            return self._prompts[self._choice.row(index - self._pass_start)]
        return self._prompts[next(self._sampler.batches(index - self._pass_start, 1))[0]]

    def put(self) -> None:
        """Replace the rows of the data plane by the next prompts."""
        size = self._plan.num_prompts
        self.batch = self.waiting[:size]
        items = [self.item(index) for index in self.batch]
        self.waiting = self.waiting[size:]
        if count := size - len(items):
            new = range(self.next_prompt, self.next_prompt + count)
            if self._choice is None:  # the order of a pass is computed once
                rows = next(self._sampler.batches(new.start - self._pass_start, count))
                items += [self._prompts[row] for row in rows]
            else:
                items += [self.item(index) for index in new]
            self.batch = [*self.batch, *new]
            self.next_prompt = new.stop
        repeat = self._plan.n_samples_per_prompt
        self._plane.clear(size)
        self._plane.put(prompt_rows(items, repeat), range(size * repeat))

    def observe(self, rewards: Tensor) -> None:
        """Take note of the rewards [rows] of groups that a filter reads, before it keeps or leaves them."""
        self._observe(rewards, range(len(self.batch)))
        self._measured.update(self.batch)

    def on_batch(self, batch: TrainBatch) -> None:
        """Take note of the rewards of the rows that train, with a reward model's; a prompt is measured once."""
        self._observe(batch.totals, [place for place, index in enumerate(self.batch) if index not in self._measured])
        self._measured.clear()

    def _observe(self, rewards: Tensor, places: Sequence[int]) -> None:
        """Take note of the rewards of some prompts of the batch, NaN where there is none, where the order depends on them."""
        if self._choice is not None:
            groups = rewards.view(len(self.batch), -1).tolist()
            indexes = [self.batch[place] - self._pass_start for place in places]
            self._choice.observe(indexes, [groups[place] for place in places])

    def report(self) -> list[WorkerReport]:
        """Return the counts of an order that depends on rewards; nothing for another."""
        if self._choice is None:
            return []
        metrics = Metrics()
        for name, count in self._choice.count().items():
            metrics.add_sum(f"prompts/{name}", count)
        return [WorkerReport(metrics)]

    def state_dict(self) -> dict[str, object]:
        """Return the position, as plain values."""
        start: dict[str, object] = {"pass_start": self._pass_start, "order": self._described}
        if self._choice is not None:
            start["sampler"] = self._choice.state_dict()
        return {"next_prompt": self.next_prompt, "in_flight": self.waiting, **start}

    def load_state_dict(self, state: Mapping[str, Any], iteration: int) -> None:
        """Continue where `state_dict` was taken, after this iteration; a new pass begins over other prompts than those."""
        # checkpoints of earlier versions have rollouts at most
        self.next_prompt = state.get("next_prompt", state.get("draws", iteration) * self._plan.num_prompts)
        self._pass_start, self.waiting = state.get("pass_start", 0), list(state.get("in_flight", ()))
        if state.get("order", self._described) != self._described:
            self._pass_start, self.waiting = self.next_prompt, []
        elif self._choice is not None and "sampler" in state:
            self._choice.load_state_dict(state["sampler"])


def describe_order(prompts: PromptDataset, order: PromptOrder, *, seed: int, shuffle: bool) -> list[int]:
    """Return numbers that differ for other prompts, and for another order: count, a sum over some, seed, shuffling, keys."""
    some = [prompts[index]["prompt_ids"] for index in np.linspace(0, len(prompts) - 1, min(64, len(prompts)), dtype=int)]
    content = zlib.crc32(json.dumps([list(map(int, ids)) for ids in some]).encode())
    return [len(prompts), content, seed, int(shuffle), *order.describe()]


def describe_prompts(prompts: PromptDataset, batch: int) -> list[str]:
    """Return warnings about data that trains, but probably not as it was meant: too few rows, long ones, empty labels.

    Args:
        batch: prompts of a rollout.
    """
    warnings = []
    if len(prompts) < batch:
        repeats = f"1 to {-(-batch // len(prompts))} times" if batch % len(prompts) else f"{batch // len(prompts)} times"
        warnings.append(
            f"the data has {len(prompts)} prompts for rollouts of {batch} (global_batch_size): each rollout has every prompt"
            f" {repeats}"
        )
    some = np.linspace(0, len(prompts) - 1, min(_COMPARED, len(prompts)), dtype=int)
    different = len({hash(str(prompts[index])) for index in some})
    if different * 2 <= len(some):
        warnings.append(f"only {different} of {len(some)} prompts are different, with label and other columns")
    if prompts.num_too_long > len(prompts):
        warnings.append(
            f"{prompts.num_too_long} of {prompts.num_read} rows are left out: their prompts are too long; the longest has"
            f" {prompts.longest} tokens, which need rl_config.max_prompt_length={prompts.longest + 1}"
        )
    if prompts.dropped:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(prompts.dropped.items()))
        warnings.append(f"{sum(prompts.dropped.values())} of {prompts.num_read} rows are left out: {reasons}")
    return [*warnings, *_describe_labels(prompts)]


def _describe_labels(prompts: PromptDataset) -> list[str]:
    """Return warnings about labels that no answer is right for: empty, missing as tables write it, a spreadsheet's dates."""
    some = range(0, len(prompts), -(-len(prompts) // _CHECKED_LABELS))
    labels = {index: label.strip() for index in some if (label := prompts[index]["label"]) is not None}
    warnings = []
    empty = [index for index, label in labels.items() if not label]
    if empty:
        warnings.append(
            f"{len(empty)} of {len(some)} prompts have an empty label, the first {prompts.where(empty[0])}: a reward that"
            " compares with it cannot be right"
        )
    missing = [index for index, label in labels.items() if label.lower() in _MISSING]
    if missing:
        warnings.append(
            f"{len(missing)} of {len(some)} labels are {labels[missing[0]]!r} or alike, as tables write a missing value, the"
            f" first {prompts.where(missing[0])}"
        )
    dates = [index for index, label in labels.items() if _EXCEL_DATE.fullmatch(label)]
    if 0 < len(dates) < len(some):  # where all are dates, the task is about them
        warnings.append(
            f"{len(dates)} of {len(some)} labels look like dates that a spreadsheet makes of 3/4 or 1-2, the first"
            f" {prompts.where(dates[0])}: {labels[dates[0]]!r}; format such columns as text before they are filled"
        )
    return warnings


#: key of the prompts of the audit
_AUDIT = "audit.data_path"
#: prompts that are compared with the held-out ones, and held-out ones that are looked for, at most
_COMPARED, _HELD_OUT = 20_000, 2_000
#: fraction of the held-out prompts that is worth a warning
_LEAKED = 0.1


def _sample_contents(prompts: PromptDataset, count: int) -> Iterator[tuple[object, ...]]:
    """Yield what prompts are told apart by, of at most so many at equal distances."""
    for index in np.linspace(0, len(prompts) - 1, min(count, len(prompts)), dtype=int):
        item = prompts[index]
        yield tuple(map(int, item["prompt_ids"])), item["label"], read_references(item["columns"])


def describe_overlap(prompts: PromptDataset, held_out: PromptDataset | None) -> list[str]:
    """Return a warning where held-out prompts, with the same label and images, are also trained on."""
    if held_out is None:
        return []
    kept = Counter(_sample_contents(held_out, _HELD_OUT))
    shared = set(_sample_contents(prompts, _COMPARED)) & kept.keys()
    count, total = sum(kept[each] for each in shared), sum(kept.values())
    if count <= _LEAKED * total:
        return []
    least = "at least " if len(prompts) > _COMPARED else ""
    which = "all" if count == total else f"{least}{count} of {total}"
    return [
        f"{which} held-out prompts are also in data_path, with the same label: their reward says how well they are remembered;"
        " hold out others (eval_data_path, or split)"
    ]


def describe_data(
    run: Run,
    prompts: PromptDataset,
    held_out: PromptDataset | None,
    eval_sets: Mapping[str, PromptDataset],
    tokenizer: PreTrainedTokenizerBase,
) -> list[DataCard]:
    """Return the cards of the prompts to train on, and of the held-out ones, without examples."""
    actor, limit = run.config.actor_config, run.rl.max_prompt_length
    cards = [DataCard(f"data_path: {actor.data_path}", card.describe_prompts(prompts, tokenizer, limit))]
    if held_out is not None:
        title = f"eval_data_path: {actor.eval_data_path}" if actor.eval_data_path else f"held out by split: {actor.split}"
        cards.append(DataCard(title, card.describe_prompts(held_out, tokenizer, limit)).without_examples())
    for name, each in eval_sets.items():
        title = f"eval_sets.{name}: {(actor.eval_sets or {})[name]}"
        cards.append(DataCard(title, card.describe_prompts(each, tokenizer, limit)).without_examples())
    return cards


def prompt_rows(items: Iterable[PromptItem], repeat: int) -> dict[str, list[Any]]:
    """Return the data plane's columns of prompts, each in `repeat` rows."""
    rows = [item for item in items for _ in range(repeat)]
    return {
        "prompt_ids": [torch.tensor(item["prompt_ids"], dtype=torch.int64) for item in rows],
        "labels": [item["label"] for item in rows],
        "extra": [item["columns"] for item in rows],
    }


# ---------------------------------------------------------------------- opening


def load_prompts(run: Run, tokenizer: PreTrainedTokenizerBase) -> tuple[PromptDataset, PromptDataset | None]:
    """Return the prompts to train on, and the evaluations': a second dataset, or the part that `split` holds back."""
    actor = run.config.actor_config
    tools = read_tool_schemas(run.rl, tokenizer)
    limits = {
        "image": run.generate.limit_mm_image_per_prompt,
        "video": run.generate.limit_mm_video_per_prompt,
    }
    full = _open_run_prompts(run, "data_path", tokenizer, tools)
    train, validation, _ = read_split(actor.split)
    prompts = full if train == 1 else full.part(0, train)
    for (kind, limit), counts in zip(limits.items(), full.count_images()):
        if counts.max(initial=0) > limit:
            row = int(counts.argmax())
            raise ValueError(
                f"generate_config.limit_mm_{kind}_per_prompt: {limit}, but {full.where(row)} has {counts[row]} {kind}s; set it"
                f" to {counts[row]} or more"
            )
    if actor.eval_data_path:
        return prompts, _open_run_prompts(run, "eval_data_path", tokenizer, tools)
    return prompts, full.part(train, train + validation) if validation > 0 else None


def list_prompt_paths(run: Run) -> dict[str, object]:
    """Return the files of prompts that a run file names, by their keys."""
    actor, audit = run.config.actor_config, run.config.audit
    sets = {f"eval_sets.{name}": path for name, path in (actor.eval_sets or {}).items()}
    return {"data_path": actor.data_path, "eval_data_path": actor.eval_data_path, **sets, _AUDIT: audit.data_path}


def load_eval_sets(run: Run, tokenizer: PreTrainedTokenizerBase) -> dict[str, PromptDataset]:
    """Return the prompts of `eval_sets`, by name."""
    tools = read_tool_schemas(run.rl, tokenizer)
    names = run.config.actor_config.eval_sets or {}
    return {name: _open_run_prompts(run, f"eval_sets.{name}", tokenizer, tools) for name in names}


def name_prompt_key(key: str) -> str:
    """Return the dotted name of a key of `list_prompt_paths`."""
    return key if key == _AUDIT else f"megatron_training.{key}"


def load_audit_prompts(run: Run, tokenizer: PreTrainedTokenizerBase) -> PromptDataset | None:
    """Return the prompts of the audit; None where it has no data of its own."""
    audit = run.config.audit
    if audit.data_path is None or not audit.has_check:
        return None
    return _open_run_prompts(run, _AUDIT, tokenizer, read_tool_schemas(run.rl, tokenizer))


def _open_run_prompts(
    run: Run, key: str, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()
) -> PromptDataset:
    """Open the prompts at `actor_config.<key>`, read as the run file says.

    Args:
        tools: schemas for raw prompts; prompts of `mindspeed-rl preprocess` contain those they were preprocessed with.
    """
    actor = run.config.actor_config
    path = list_prompt_paths(run)[key]
    model = run.models.get("actor")
    if not isinstance(path, str):
        raise ValueError(f"actor_config.{key}: {path!r} must be one prefix or file of prompts.")
    settings = dataclasses.replace(
        PromptSettings.from_config(actor),
        tools=tuple(tools),
        image_rules=read_image_rules(run.models["actor"]) if run.config.reads_images else None,
        is_text_only=run.config.is_text_only,
        vocab_size=None if model is None else model.plan.model_config.vocab_size,
    )
    try:
        prompts = open_prompts(
            path,
            tokenizer,
            max_prompt_length=run.rl.max_prompt_length,
            long_prompts=run.rl.long_prompts,
            dataset_additional_keys=actor.dataset_additional_keys or None,
            settings=settings,
            cache=run.folder.parent / CACHE,
        )
    except ValueError as error:
        if key == "data_path":
            raise
        raise ValueError(f"{name_prompt_key(key)}: {error}") from error
    if key == "data_path" and run.rl.distillation.enabled:
        _check_teachers(run.rl.distillation, prompts)
        if (column := run.rl.distillation.teacher_prompt) is not None:
            prompts.add_prompts(column, tokenizer, PromptSettings.from_config(actor))
        if run.rl.distillation.on_policy_fraction < 1.0:
            limit = run.generate.max_model_len
            prompts.add_responses(run.rl.distillation.response_column, tokenizer, PromptSettings.from_config(actor), limit)
    return prompts


def _check_teachers(keys: DistillationKeys, prompts: PromptDataset) -> None:
    """Check that each prompt has a teacher.

    Raises:
        ValueError: the column that chooses it has another value than teacher_keys.
    """
    for index in range(len(prompts) if keys.teacher_keys else 0):
        if (value := str(prompts[index]["columns"][keys.teacher_key])) not in keys.teacher_keys:
            raise ValueError(
                f"rl_config.distillation.teacher_keys: {prompts.where(index)} has {value!r} in column {keys.teacher_key}, for "
                f"which there is no teacher; there is one for each of {', '.join(keys.teacher_keys)}."
            )
