"""The shape of the package, counted: what a reader of its upper floors relies on."""

from __future__ import annotations

import ast
from pathlib import Path

import shape_counts

import mindspeed_rl

PACKAGE = Path(mindspeed_rl.__file__).parent
SOURCES = shape_counts.read_sources(PACKAGE)
NUM_LINES = sum(len(source.lines) for source in SOURCES)
MOST_DEFERRED = 20

#: words that have a term of the field in their place, in names of files, classes, functions, attributes and parameters
OWN_WORDS = frozenset(
    "standing standings sign signs culprit meeting spanning apart kept mend mends mended repair nearest breach breaches "
    "mistake mistakes piece pieces box boxes beginning ending begun began feed feeds draw draws drawn look looks looked said "
    "says told tells tell asked asks ask wanted chip chips die dies network networks aside spelling spellings notice notices "
    "cure cures usual facts trial trials declared dialogue dialogues".split()
)
#: name -> why it keeps such a word
EXCEPTIONS: dict[str, str] = {
    "begun": "a field of the HTTP interface of rollout servers",
    "rows_kept": "a field of the files that a resumed preprocessing reads",
    "network": "of machines: the planner's word for links between nodes",
}

#: function that decides something of a run -> the modules that may call it
DECIDED_IN = {
    "place": ("config/run.py",),
    "read_sizes": ("config/run.py",),
    # parity compares losses of given batches, without a run
    # the page shows the formula of every algorithm
    "build_objective": ("config/run.py", "run/objective.py", "cli/parity.py", "run/explain/algorithm_page.py"),
    # nor has the command that stores log-probs of a teacher
    "find_model": ("run/models.py", "checkpoint/model_source.py", "workers/stages/teacher_store.py"),
    # inference has no run
    "plan_model": ("run/models.py", "inference/megatron_engine.py"),
}


def _is_own(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").split(".")[0] == PACKAGE.name
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == PACKAGE.name for alias in node.names)


def _deferred() -> list[tuple[str, bool]]:
    """Imports of own modules inside functions: (file:line, whether a comment on or above the line says why)."""
    found = set()
    for source in SOURCES:
        for function in source.functions:
            for node in ast.walk(function):
                if _is_own(node):
                    first = node.lineno - 1
                    while source.lines[first - 1].strip().startswith(("from ", "import ")):
                        first -= 1  # one comment serves the imports below it
                    near = source.lines[first - 1 : node.end_lineno]
                    found.add((f"{source.path}:{node.lineno}", any("#" in line for line in near)))
    return sorted(found)


def test_few_imports_of_own_modules_are_deferred_and_each_has_its_reason():
    deferred = _deferred()
    assert len(deferred) <= MOST_DEFERRED, deferred
    assert not [place for place, has_reason in deferred if not has_reason]


def test_no_method_is_found_by_attribute_dispatch():
    """Workers and loops are called by methods that a reader can find by name."""
    places = [
        f"{source.path}:{function.lineno}"
        for source in SOURCES
        if source.path.parts[0] in ("trainers", "workers", "serving", "runtime")
        for function in source.functions
        if function.name == "__getattr__"
    ]
    assert not places


def test_the_package_has_few_files_that_are_worth_opening():
    """450 files for 78,000 lines, and as many for each line that is added; a model family has a short file of its own."""
    families = [source for source in SOURCES if source.path.parts[0] == "models" and "Architecture(" in "".join(source.lines)]
    assert len(SOURCES) - len(families) <= max(439, NUM_LINES / 173)
    assert shape_counts.share_of_short_bodies(SOURCES) <= 0.27
    assert shape_counts.public_names(SOURCES) <= 20 * NUM_LINES / 1000


def test_types_are_named():
    assert shape_counts.uses_of_any(SOURCES) <= 8 * NUM_LINES / 1000


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert shape_counts.share_of_question_docstrings(SOURCES) <= 0.02


def test_the_record_of_a_run_is_passed_on_by_few_calls():
    """There were 418 calls in 59 files before what follows from a run file was decided once."""
    calls = shape_counts.Walk(SOURCES, "mindspeed_rl", "mindspeed_rl.trainers.launch").calls
    assert 0 < len(calls) <= 209, calls


def test_a_run_is_decided_in_one_place():
    calls = [
        f"{source.path}:{node.lineno} {node.func.id}"
        for source in SOURCES
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and str(source.path) not in DECIDED_IN.get(node.func.id, (str(source.path),))
    ]
    assert not calls


def test_names_are_words_of_the_field():
    names = {
        f"{source.path}:{line} {name}"
        for source in SOURCES
        for name, line in shape_counts.named_things(source)
        if not OWN_WORDS.isdisjoint(shape_counts.words_of(name)) and name not in EXCEPTIONS
    }
    assert not names


def test_functions_fit_on_a_screen():
    long = [
        f"{source.path}:{function.lineno} {function.name}"
        for source in SOURCES
        for function in source.functions
        if (function.end_lineno or 0) - function.lineno + 1 > 104
    ]
    assert not long
