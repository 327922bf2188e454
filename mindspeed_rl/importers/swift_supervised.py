"""Stages of ms-swift that learn from a dataset: supervised, preference, reward model, pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mindspeed_rl.importers.options import SourceCommand
from mindspeed_rl.importers.recipe import ACTOR, Recipe
from mindspeed_rl.importers.result import Import
from mindspeed_rl.importers.swift_commands import STAGES
from mindspeed_rl.importers.swift_sizes import Sizes, find_length, read_length
from mindspeed_rl.importers.swift_templates import name_trained_tokens

_OF_ROLLOUTS = tuple(
    "epsilon epsilon_high teacher_model teacher_model_server teacher_kl_coef async_generate vllm_mode vllm_server_host "
    "vllm_server_port vllm_server_base_url reward_funcs reward_weights reward_model reward_model_plugin".split()
)


@dataclass(frozen=True)
class _Preference:
    """A preference loss.

    Attributes:
        losses: its forms; the first is the default.
        refusal: what another form is named as.
        numbers: option -> key and default.
        term: option of a supervised term, and its default.
        key: key that chooses the form.
        name: name of the loss in a plan; None for its form.
        unread: options of other losses.
    """

    losses: tuple[str, ...]
    refusal: str
    numbers: Mapping[str, tuple[str, float]]
    term: tuple[str, float] = ("", 0.0)
    key: str | None = None
    name: str | None = None
    unread: tuple[str, ...] = ()


_ONE_FORM = "another form of {}'s loss than sigmoid without label smoothing"
_PREFERENCES = {
    "dpo": _Preference(
        ("sigmoid", "hinge", "ipo"),
        "the preference loss {}; sigmoid, hinge and ipo are available",
        {"beta": ("dpo_beta", 0.1), "label_smoothing": ("dpo_label_smoothing", 0.0)},
        term=("rpo_alpha", 0.0),
        key="dpo_loss_type",
        unread=("cpo_alpha",),
    ),
    "simpo": _Preference(
        ("simpo",),
        "the preference loss {}",
        {"beta": ("simpo_beta", 2.0), "label_smoothing": ("simpo_label_smoothing", 0.0)},
        term=("cpo_alpha", 1.0),
        name="simpo_sigmoid",
        unread=("rpo_alpha",),
    ),
    "cpo": _Preference(
        ("sigmoid",),
        _ONE_FORM.format("CPO"),
        {"beta": ("cpo_beta", 0.1), "cpo_alpha": ("cpo_alpha", 1.0)},
        term=("cpo_alpha", 1.0),
        name="cpo",
    ),
    "orpo": _Preference(
        ("sigmoid",),
        _ONE_FORM.format("ORPO"),
        {"beta": ("orpo_lambda", 0.1)},
        term=("per_device_train_batch_size", 1.0),
        name="orpo",
    ),
    "kto": _Preference(
        ("kto", "apo_zero_unpaired"),
        "the preference loss {}; kto and apo_zero_unpaired are available",
        {
            "beta": ("kto_beta", 0.1),
            "desirable_weight": ("kto_desirable_weight", 1.0),
            "undesirable_weight": ("kto_undesirable_weight", 1.0),
        },
        key="kto_loss_type",
    ),
}


def describe_dataset(run: Import, command: SourceCommand, kind: str, shared: Recipe) -> Recipe:
    """Return the run of a supervised stage."""
    length = read_length(command) if kind == "pt" or command.flag("packing") else find_length(command)
    strategy = command.text("truncation_strategy", "delete")
    if strategy != "delete" and (kind, strategy) != ("pt", "split"):
        run.refuse("--truncation_strategy", f"{strategy}: rows that are cut; delete leaves them out")
    keys: dict[str, object] = {f"{ACTOR}.seq_length": length}
    notes = {"seq_length": "" if command.has("max_length") else "the model's limit"}
    if length is None:
        run.leave_unset(f"{ACTOR}.seq_length", "rows of all lengths train; there those above the model's limit are left out")
    unread: tuple[str, ...] = _OF_ROLLOUTS if kind == "kto" else (*_OF_ROLLOUTS, "calculate_KL")
    if command.flag("packing") and kind == "sft":
        keys |= {f"{ACTOR}.{name}": True for name in ("pack", "neat_pack", "reset_attention_mask", "reset_position_ids")}
        notes["pack"] = f"rows that preprocess --neat-pack has joined; those above {length} tokens are cut, and left out there"
    beta, loss = None, {"rm": "ranking"}.get(kind, "cross_entropy")
    if kind in _PREFERENCES:
        beta = command.number("beta", _PREFERENCES[kind].numbers["beta"][1])
        loss, values = _read_preference(run, command, kind)
        keys |= {f"{ACTOR}.{name}": value for name, value in values.items()}
        unread += _PREFERENCES[kind].unread
        notes["kto_beta"] = "the KL is of the batch of an optimizer step, there of a pass"
    elif command.flag("enable_dft_loss"):
        keys[f"{ACTOR}.sft_loss_type"] = "dft"
        if kind != "sft":
            run.refuse("--enable_dft_loss", f"in stage {STAGES[kind]}")
    elif command.has("loss_type"):
        run.refuse("--loss_type", f"the loss {command.text('loss_type')} in stage {STAGES[kind]}")
    return replace(
        shared,
        loss=loss,
        beta=beta,
        documents=_name_documents(command, strategy) if kind == "pt" else None,
        answer_term=_name_answer_term(command, kind),
        trained_tokens=name_trained_tokens(command, kind),
        sequence_length=length,
        keys={**shared.keys, **keys},
        notes={**shared.notes, **notes},
        unread=(*shared.unread, *unread),
        defaults=(
            *shared.defaults,
            (f"{ACTOR}.no_pad_to_seq_lengths", True, "rows are padded to the longest of a micro-batch"),
        ),
    )


def _read_preference(run: Import, command: SourceCommand, kind: str) -> tuple[str, dict[str, object]]:
    """Return the name of a preference loss, and its keys."""
    record = _PREFERENCES[kind]
    form, *others = command.list_texts("loss_type") or [record.losses[0]]
    keys: dict[str, object] = {key: command.number(name, default) for name, (key, default) in record.numbers.items()}
    if record.key is not None:
        keys[record.key] = form
    if others or form not in record.losses:
        run.refuse("--loss_type", record.refusal.format(", ".join((form, *others))))
    elif kind in ("cpo", "orpo") and command.number("label_smoothing", 0.0):
        run.refuse("--label_smoothing", record.refusal)
    elif kind == "kto" and command.flag("calculate_KL", default=form == "kto") != (form == "kto"):
        run.refuse("--calculate_KL", f"another KL than the KL of --loss_type {form}")
    option, default = record.term
    term = default if kind == "orpo" else command.number(option, default) if option else 0.0
    if kind in ("dpo", "simpo") and (term or command.has(option)):
        keys["pref_ftx"] = term
    if kind == "simpo":
        keys["gamma_beta_ratio"] = command.number("simpo_gamma", 1.0) / command.number("beta", 2.0)
    if kind in ("dpo", "simpo", "kto"):
        keys["ref_model"] = command.text("ref_model") or None
    if kind in ("cpo", "orpo"):
        run.note_given("loss_type label_smoothing", f"the loss of stage {kind}", changes_nothing=False)
    elif kind == "simpo":
        run.note_given("loss_type", "the loss of stage simpo", changes_nothing=False)
    return record.name or form, keys


def _name_documents(command: SourceCommand, strategy: str) -> str:
    """Return what becomes of the documents of pretraining; here they are joined, and the text is cut into samples."""
    length = read_length(command)
    rows = f"in packs of {length} tokens" if command.flag("packing") else "one a row"
    return f"{rows}, those above {length} tokens {'split' if strategy == 'split' else 'left out'}"


def _name_answer_term(command: SourceCommand, kind: str) -> str | None:
    """Return the average of a supervised term next to a preference loss; None where it is one pair's average."""
    option, default = _PREFERENCES[kind].term if kind in _PREFERENCES else ("", 0.0)
    has_term = kind == "orpo" or (option and command.number(option, default))
    return "mean of the tokens of a pass" if has_term and Sizes(command).micro > 1 else None
