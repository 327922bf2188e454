#!/usr/bin/env bash
# Sets up the CPU environment and runs every check: bash tests/run.sh [--all] [pytest arguments]
#
# --all runs the tests marked slow and those on the simulated NPU too. Paths among the pytest arguments replace the default ones.
# VENV_DIR=... uses another environment than .venv.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${VENV_DIR:-$root/.venv}"

select=(-m "not slow")
arguments=()
paths=()
for argument in "$@"; do
    if [[ "$argument" == --all ]]; then
        select=()
    elif [[ "$argument" != -* && -e "${argument%%::*}" ]]; then
        paths+=("$argument")
    else
        arguments+=("$argument")
    fi
done
whole=no
if [[ ${#paths[@]} -eq 0 ]]; then
    whole=yes
    for folder in tests/unit tests/dist tests/e2e; do
        [[ -d "$folder" ]] && paths+=("$folder")
    done
fi

bash envs/cpu/install.sh "$venv"

# Several processes share the cores: one thread each, or they step on each other's toes.
export OMP_NUM_THREADS=1

status=0
"$venv/bin/ruff" check --quiet . || status=1
"$venv/bin/lint-imports" --no-logo --cache-dir "$venv/.import_linter_cache" || status=1
"$venv/bin/pyrefly" check --python-interpreter-path "$venv/bin/python" --output-format min-text --summary=none || status=1
[[ $status -eq 0 ]] || echo "tests/run.sh: the linters or the type checker found faults (see above); the result is a failure whatever the tests say." >&2

"$venv/bin/python" -m pytest "${select[@]}" ${arguments[@]+"${arguments[@]}"} "${paths[@]}" || status=$?
# The simulated NPU has an environment of its own (x86_64 only).
if [[ ${#select[@]} -eq 0 && "$whole" == yes && "$(uname -m)" == x86_64 ]]; then
    bash tests/npu_sim/run.sh || status=$?
fi
exit "$status"
