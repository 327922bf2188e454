"""ROLL's pipelines that learn from rows: SFT and DPO, by their formulas."""

from __future__ import annotations

import json
from dataclasses import replace

from mindspeed_rl.config.errors import ConfigError
from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.roll_objective import read_rate
from mindspeed_rl.importers.translators import describe_preprocessing, name_tokens

#: beta of ROLL's DPO, whatever its file says
_BETA = 0.1
#: variable of the user: the rows of several files in one
_DATA = "DATA"


def describe_rows(run: Import, command: SourceCommand, shared: Recipe, role: str) -> Recipe:
    """Return the run of a pipeline that learns from rows.

    Both drop an incomplete last batch of an epoch, and SFT still counts its rows where it says over how many steps the rate
    decays. SFT reads rows in their order. DPO decays its rate over max_steps divided by the replicas.
    """
    step, length = shared.step_samples, command.count("sequence_length", 2048)
    epochs, limit = command.number(f"{role}training_args.num_train_epochs", 1), command.maybe("max_steps")
    if epochs != int(epochs) or epochs < 1:
        raise ConfigError([f"{role}training_args.num_train_epochs is {epochs:g}, but ROLL takes a whole number"])
    is_dpo = command.program == "dpo"
    if is_dpo and limit is None:
        limit = 500
    taken, reached = count_steps(run, epochs, step)
    ends = is_dpo and int(limit or 0) < taken
    total = int(limit or 0) if ends else taken
    decay = max(1, int(limit or 0) // shared.dp) if is_dpo else reached
    ends |= is_uneven(run, step)
    rate, schedule = read_rate(command, role, total, decay=decay)
    note = f"{total} steps" + (f", the shorter of max_steps and the epochs of {run.settings.rows} rows" if is_dpo else "")
    names = f"{role}training_args.num_train_epochs" + (" max_steps" if is_dpo else "")
    run.note_given(names, note, changes_nothing=False)
    name, data = _read_file(run, command, role)
    words = _write_words(run, command, length)
    return replace(
        shared,
        stage="dpo" if is_dpo else "sft",
        total_steps=total,
        loss="sigmoid" if is_dpo else "cross_entropy",
        beta=_BETA if is_dpo else None,
        sequence_length=length,
        trained_tokens="the answers and the head of their turn" if is_dpo else None,
        weight_decay=rate.weight_decay,
        clip_grad=rate.clip_grad,
        rates=(replace(rate, decay=decay if decay != total else None),),
        train_iters=total if ends else None,
        train_epochs=None if ends else epochs,
        data=(data,),
        keys={
            **shared.keys,
            f"{ACTOR}.data_path": data,
            f"{ACTOR}.seq_length": length,
            f"{ACTOR}.no_shuffle": None if is_dpo else True,
        },
        notes={
            **shared.notes,
            "data_path": describe_preprocessing(name, data, shared.model, words),
            "global_batch_size": "rows of an optimizer step",
            "no_shuffle": "ROLL's SFT reads rows in their order",
        },
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    ).follow(schedule)


def count_steps(run: Import, epochs: float, step: int) -> tuple[int, int]:
    """Return the steps of the epochs, and those over which the rate decays: what the rows of all epochs together would fill."""
    taken = run.settings.rows // step * int(epochs)
    return taken, max(1, int(epochs) * run.settings.rows // step) if run.settings.knows_rows else taken


def is_uneven(run: Import, step: int) -> bool:
    """Return whether the rows that the user says do not fill the steps of an epoch, so that the run needs their number."""
    return run.settings.knows_rows and run.settings.rows % step != 0


def _read_file(run: Import, command: SourceCommand, role: str) -> tuple[str, str]:
    """Return the rows, and the prefix of their tokens.

    Raises:
        ConfigError: there are several files, or none.
    """
    files, given = command.list_texts(f"{role}data_args.file_name"), command.environment.get(_DATA)
    if given is None and len(files) != 1:
        raise ConfigError([f"{role}data_args.file_name: {len(files)} files: write their rows to one, --set {_DATA}=FILE"])
    name = given or files[0]
    for option in command.options:
        if option.startswith(f"{role}data_args."):
            run.note_given(option, "the data of the plan", changes_nothing=False)
    run.note_given("global_template", "the tokenizer's chat template (--prompt-type hf); ROLL's is not compared",
                   changes_nothing=False)  # fmt: skip
    return name, name_tokens(name)


def _write_words(run: Import, command: SourceCommand, length: int) -> str:
    """Return the options of preprocess for the columns of a pipeline."""
    if command.program == "dpo":
        chosen, rejected = (command.text(f"{name}_key", name) for name in ("chosen", "rejected"))
        handler, columns = "AlpacaStylePairwiseHandler", {"query": "", "system": "", "chosen": chosen, "rejected": rejected}
        run.note_given("chosen_key rejected_key", "--map-keys of preprocess", changes_nothing=False)
    else:
        handler = "AlpacaStyleInstructionHandler"
        columns = {
            "prompt": command.text("prompt_key", "instruction"),
            "query": command.text("query_key"),
            "response": command.text("response_key", "output"),
            "system": command.text("system_key"),
        }
        run.note_given("system_key prompt_key query_key response_key", "--map-keys of preprocess", changes_nothing=False)
    return f" --handler-name {handler} --prompt-type hf --map-keys '{json.dumps(columns)}' --seq-length {length}"
