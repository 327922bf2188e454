#!/usr/bin/env bash
# Sets up the CPU environment and runs every check: bash tests/run.sh [--all | --extra] [--part K/N] [pytest arguments]
#
# Unit tests run first, in one process more than there are cores (at most four), as some of them wait; a file is on one of them.
# The others start processes of their own; they are three lanes that run at the same time where there are two cores and 12 GiB of
# free memory, and one after another elsewhere: tests/e2e and two files of tests/dist; the rest of tests/dist, the optional
# packages and the releases of the second line; the simulated NPU, the faults and two hosts.
# The output of the second and third comes when all have ended.
# --all runs the tests marked slow too, tests of optional packages in an environment of their own (envs/cpu/extras.sh), and those
# that Megatron's release can change on the newest release of the second line (tests/second_line).
# --extra runs what --all has no room for: the tests marked extra, and the older release of the second line.
# --part K/N runs the K-th of N parts of about the same length (tests/parts.py), the first with the linters; all N together are the
# whole, so that a part that was interrupted or failed can be run again by itself.
# Paths among the pytest arguments replace the default ones. The tests on the simulated NPU run where it can be set up (x86_64,
# Python 3.11, g++, the packages of tests/npu_sim); a line says why they were left out.
# VENV_DIR=... uses another environment than .venv, EXTRAS_VENV=... another one than .venv-extras, NPU_SIM_VENV=... another one
# than .venv-npu-sim.
set -euo pipefail
trap 'exit 130' INT  # pytest ends with a summary and a status of its own, after which the next part would start

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="${VENV_DIR:-$root/.venv}"

run=default
arguments=()
paths=()
part=1/1
while [[ $# -gt 0 ]]; do
    argument="$1"
    shift
    if [[ "$argument" == --all || "$argument" == --extra ]]; then
        run="${argument#--}"
    elif [[ "$argument" == --part ]]; then
        part="${1:-}"
        shift || true
    elif [[ "$argument" == --part=* ]]; then
        part="${argument#*=}"
    elif [[ "$argument" != -* && -e "${argument%%::*}" ]]; then
        paths+=("$argument")
    else
        arguments+=("$argument")
    fi
done
case "$run" in
    default) select=(-m "not slow") ;;
    all) select=(-m "not extra") ;;
    extra) select=(-m extra) ;;
esac
whole=no
if [[ ${#paths[@]} -eq 0 ]]; then
    whole=yes
elif [[ "$part" != 1/1 ]]; then
    echo "tests/run.sh: --part $part is of the whole; with paths there are no parts." >&2
    exit 2
fi
if [[ ! "$part" =~ ^([1-9][0-9]*)/([1-9][0-9]*)$ ]] || ((BASH_REMATCH[1] > BASH_REMATCH[2])); then
    echo "tests/run.sh: --part is ${part:-empty}; it is K/N with 1 <= K <= N, as in --part 2/4." >&2
    exit 2
fi

bash envs/cpu/install.sh "$venv"

# Where the environment forbids Python to write bytecode, each of a thousand processes would compile the package anew.
"$venv/bin/python" -m compileall -q -j 0 mindspeed_rl > /dev/null || true

# Several processes share the cores: one thread each, or they step on each other's toes.
export OMP_NUM_THREADS=1

status=0
if [[ "$part" == 1/* ]]; then
    "$venv/bin/ruff" check --quiet . || status=1
    "$venv/bin/lint-imports" --no-logo --cache-dir "$venv/.import_linter_cache" || status=1
    "$venv/bin/pyrefly" check --python-interpreter-path "$venv/bin/python" --output-format min-text --summary=none || status=1
fi
[[ $status -eq 0 ]] || echo "tests/run.sh: the linters or the type checker found faults (see above); the result is a failure whatever the tests say." >&2

found=no
take_result() { # pytest says 5 where nothing was selected, as by -k
    [[ $1 -eq 5 ]] || found=yes
    [[ $1 -eq 0 || $1 -eq 5 ]] || status=$1
    [[ $1 -ne 2 || -z "$in_lane" ]] || exit 2  # it was interrupted
}
run_tests() {
    local result=0
    "$venv/bin/python" -m pytest "${select[@]}" ${arguments[@]+"${arguments[@]}"} "$@" || result=$?
    take_result "$result"
}

# runs the files of ENVIRONMENT that are in this part, if any, by a FUNCTION
run_environment() {
    local option=() lines files
    [[ "$run" == default ]] || option=("--$run")
    lines="$("$venv/bin/python" tests/parts.py "$1" --part "$part" ${option[@]+"${option[@]}"})" || exit 1
    [[ -n "$lines" ]] || return 0
    mapfile -t files <<< "$lines"
    "${@:2}" "${files[@]}"
}

# The simulated NPU has an environment of its own.
run_npu_sim() {
    local reason="" tool result=0
    [[ "$(uname -m)" == x86_64 ]] || reason="torch_npu's wheel for this torch is for x86_64 only"
    for tool in "${NPU_SIM_PYTHON:-python3.11}" g++ nm; do
        [[ -n "$reason" ]] || command -v "$tool" > /dev/null || reason="$tool was not found"
    done
    if [[ -z "$reason" ]] && ! bash tests/npu_sim/run.sh --set-up; then
        reason="its environment could not be set up (see above)"
        [[ "$run" == default ]] || status=1  # the others ask for it
    fi
    if [[ -n "$reason" ]]; then
        echo "tests/run.sh: the tests on the simulated NPU were left out: $reason." >&2
        return
    fi
    bash tests/npu_sim/run.sh "${select[@]}" ${arguments[@]+"${arguments[@]}"} "$@" || result=$?
    take_result "$result"
}

# Optional packages and the releases of the second line have environments of their own too.
run_extras() {
    local extras="${EXTRAS_VENV:-$root/.venv-extras}" result=0
    if bash envs/cpu/extras.sh "$venv" "$extras"; then
        "$extras/bin/python" -m pytest ${arguments[@]+"${arguments[@]}"} "$@" || result=$?
        take_result "$result"
    else
        status=1  # --all asked for everything
    fi
}
run_release() {
    local result=0
    VENV_DIR="$venv" MEGATRON="$1" bash tests/second_line/run.sh ${arguments[@]+"${arguments[@]}"} "${@:2}" || result=$?
    take_result "$result"
}

npu_sim_lane() {
    run_environment npu_sim run_npu_sim
    run_environment faults run_tests
    run_environment server_faults run_tests
}
dist_lane() {
    local release
    run_environment dist run_tests
    if [[ "$run" != default ]]; then
        run_environment extras run_extras
        for release in 0.17.1 0.19.2; do
            run_environment "megatron-$release" run_release "$release"
        done
    fi
}
e2e_lane() {
    run_environment e2e run_tests
    run_environment routers run_tests
}

lanes=() outputs=()
start_beside() { # a lane, whose output is kept
    outputs+=("$(mktemp)")
    (
        status=0 found=no in_lane=yes
        "$1"
        [[ "$found" == yes || $status -ne 0 ]] || status=5
        exit "$status"
    ) > "${outputs[-1]}" 2>&1 &
    lanes+=("$!")
}
end_beside() {
    local index result
    for index in "${!lanes[@]}"; do
        result=0
        wait "${lanes[index]}" || result=$?
        unset "lanes[index]"
        cat "${outputs[index]}"
        rm "${outputs[index]}"
        take_result "$result"
    done
}
stop_beside() { # pytest ends with a summary at this signal, which the shell of a lane ignores
    local index
    for index in "${!lanes[@]}"; do
        pkill -INT -P "${lanes[index]}" || true
        wait "${lanes[index]}" || true
        cat "${outputs[index]}"
        rm "${outputs[index]}"
    done
}
in_lane=""
trap stop_beside EXIT

cores="$(getconf _NPROCESSORS_ONLN)"
if [[ "$whole" == no ]]; then
    run_tests "${paths[@]}"
else
    run_environment unit run_tests --numprocesses "$((cores < 4 ? cores + 1 : 4))" --dist loadfile --no-loadscope-reorder
    free_gib="$(awk '/^MemAvailable:/ { print int($2 / 1048576) }' /proc/meminfo 2> /dev/null || echo 0)"
    if ((cores > 1 && ${free_gib:-0} >= 12)); then
        start_beside npu_sim_lane
        start_beside dist_lane
        e2e_lane
        end_beside
    else
        dist_lane
        e2e_lane
        npu_sim_lane
    fi
fi
[[ "$found" == yes || $status -ne 0 ]] || status=5
exit "$status"
