#!/usr/bin/env bash
# Sets up the simulated NPU (once) and runs its tests: `tests/npu_sim/run.sh [pytest arguments]`.
# Needs Python 3.11, g++, nm and a package index with torch 2.13.0, torch_npu 2.13.0, vllm 0.23.0 and vllm-ascend 0.23.0
# (x86_64). `run.sh --set-up` only sets up, `run.sh --shell` opens a shell in which torch_npu has simulated devices, and
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
if [[ ! -x "$python" ]]; then
    "${NPU_SIM_PYTHON:-python3.11}" -m venv "$environment"
fi
wanted="$(cat "$here"/requirements*.txt "$root/pyproject.toml" "$root/envs/cpu/requirements.lock" | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$environment/installed" 2>/dev/null || true)" != "$wanted" ]]; then
    # what the package depends on and what the simulator needs; the lock's versions, but for what the simulator pins itself
    "$python" -m pip install -q --no-compile --disable-pip-version-check -r "$here/requirements.txt" \
        -r <("$python" -c 'import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["dependencies"], sep="\n")' \
            < "$root/pyproject.toml") \
        -c <(grep -v '^triton==' "$root/envs/cpu/requirements.lock") 2> >(grep -v '^WARNING: Location .* is ignored' >&2)
    # pinned to other releases of torch and to CUDA's packages, so they come without what they ask for
    "$python" -m pip install -q --no-compile --disable-pip-version-check --no-deps -r "$here/requirements-no-deps.txt" \
        2> >(grep -v '^WARNING: Location .* is ignored' >&2)
    # as a source install for VLLM_TARGET_DEVICE=empty is: no kernels of another device
    find "$environment"/lib/python3.11/site-packages/vllm -name '*.so' -delete
    # on all cores, where pip compiles on one; templates among the packages are no Python, and no reason to stop
    "$python" -m compileall -q -j 0 "$environment/lib" > /dev/null 2>&1 || true
    echo "$wanted" > "$environment/installed"
fi
build="$environment/cann"
if [[ ! -e "$build/vllm_ascend_C.so" ]] || [[ -n "$(find "$here/cann" -newer "$build/vllm_ascend_C.so" -name '*.[chp]*')" ]]; then
    "$python" "$here/cann/build.py" "$build"
fi

unset ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES PYTORCH_NPU_ALLOC_CONF
# site: the simulator in every process; stand_ins: pyACL; programs: what tests run as processes of their own
export LD_LIBRARY_PATH="$build" PYTHONPATH="$here/site:$here:$here/programs:$here/stand_ins:$root/tests:$root"
if [[ -n "${MINDSPEED_SRC:-}" ]]; then export PYTHONPATH="$PYTHONPATH:$MINDSPEED_SRC"; fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PATH="$environment/bin:$PATH"
# vLLM keeps what it found out about model classes, for one version of itself: without it each engine starts a process for it
export VLLM_CACHE_ROOT="$environment/vllm-cache"
export TASK_QUEUE_ENABLE=0 NPU_SIM_DEVICES="${NPU_SIM_DEVICES:-8}" CUDA_DEVICE_MAX_CONNECTIONS=1
case "${1:-}" in
    --set-up) exit 0 ;;
    --shell) exec "${SHELL:-bash}" ;;
    --run) shift; exec "$@" ;;
esac
paths=("$here")
for argument in "$@"; do  # files or folders among the arguments replace the whole suite
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths=(); fi
done
exec "$python" -m pytest -p no:cacheprovider -q ${paths[@]+"${paths[@]}"} "$@"
