#!/usr/bin/env bash
# Sets up the simulated NPU (once) and runs its tests: `tests/npu_sim/run.sh [pytest arguments]`.
# Needs Python 3.11, g++, nm and a package index (x86_64). The environment is what envs/npu_common/install.sh makes for users, with
# the pair of torch and torch_npu that package indices have for x86_64.
# `run.sh --set-up` only sets up, `run.sh --shell` opens a shell in which torch_npu has simulated devices, and
# `run.sh --run COMMAND...` runs a command there.
# MINDSPEED_SRC=<folder of a MindSpeed core_r0.16.0 checkout> adds the tests that need MindSpeed; without it, sources in
# ../shared/mindspeed beside the repository are taken where there are any.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
environment="${NPU_SIM_VENV:-$root/.venv-npu-sim}"
python="$environment/bin/python"

if [[ -z "${MINDSPEED_SRC:-}" && -d "$root/../shared/mindspeed/mindspeed" ]]; then
    MINDSPEED_SRC="$(cd "$root/../shared/mindspeed" && pwd)"
    export MINDSPEED_SRC
fi
mkdir -p "$environment"
exec 9> "$environment/.set_up.lock"
flock 9  # a second start waits for the first
expected="$({
    cat "$root"/envs/npu_common/{install.sh,packages.py,requirements.txt,constraints-*.txt,resolved-main.txt}
    # names of requirements: the files above have the versions
    sed '/^\[tool/,$d' "$root/pyproject.toml" | grep -oE '^    "[A-Za-z0-9._-]+'
    echo "$root ${MINDSPEED_SRC:-}"
    [[ -z "${MINDSPEED_SRC:-}" ]] || find "$MINDSPEED_SRC" -name '*.py' -printf '%P %s\n' | sort
} | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$environment/installed" 2>/dev/null || true)" != "$expected" ]]; then
    # from nothing: packages of an earlier state have other requirements
    rm -rf "${environment:?}"/{installed,bin,include,lib,lib64,share,src,pyvenv.cfg,vllm-cache}
    PIP_QUIET="${PIP_QUIET:-1}" PIP_NO_COMPILE=1 PYTHON="${NPU_SIM_PYTHON:-python3.11}" bash "$root/envs/npu_common/install.sh" \
        --chip simulated --venv "$environment" pytest pytest-timeout
    # on all cores, where pip compiles on one; templates among the packages are not Python, and no reason to stop
    "$python" -m compileall -q -j 0 "$environment/lib" > /dev/null 2>&1 || true
    echo "$expected" > "$environment/installed"
fi
build="$environment/cann"
if [[ ! -e "$build/vllm_ascend_C.so" ]] || [[ -n "$(find "$here/cann" -newer "$build/vllm_ascend_C.so" -name '*.[chp]*')" ]]; then
    "$python" "$here/cann/build.py" "$build"
fi
exec 9>&-

unset ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES PYTORCH_NPU_ALLOC_CONF
# site: the simulator in every process; stand_ins: pyACL; programs: what tests run as processes of their own
export LD_LIBRARY_PATH="$build" PYTHONPATH="$here/site:$here:$here/programs:$here/stand_ins:$root/tests:$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$environment/bin:$PATH"
# vLLM keeps what it found out about model classes, for one version of itself: without it each engine starts a process for it
export VLLM_CACHE_ROOT="$environment/vllm-cache"
export TASK_QUEUE_ENABLE=0 NPU_SIM_DEVICES="${NPU_SIM_DEVICES:-8}" CUDA_DEVICE_MAX_CONNECTIONS=1
case "${1:-}" in
    --set-up) exit 0 ;;
    --shell) exec "${SHELL:-bash}" ;;
    --run)
        shift
        if [[ -z "${MINDSPEED_SRC:-}" ]]; then
            echo "tests/npu_sim/run.sh: MINDSPEED_SRC names no checkout of MindSpeed core_r0.16.0; commands that train will ask for it." >&2
        fi
        exec "$@"
        ;;
esac
paths=("$here")
for argument in "$@"; do  # files or folders among the arguments replace the whole suite
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths=(); fi
done
exec "$python" -m pytest -p no:cacheprovider -q ${paths[@]+"${paths[@]}"} "$@"
