#!/usr/bin/env bash
# Sets up the simulated NPU (once) and runs its tests: `tests/npu_sim/run.sh [pytest arguments]`.
# Needs Python 3.11, g++, nm and a package index with torch 2.13.0 and torch_npu 2.13.0 (x86_64).
# MINDSPEED_SRC=<folder of a MindSpeed core_r0.16.0 checkout> adds the tests that need MindSpeed.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
root="$(cd "$here/../.." && pwd)"
environment="${NPU_SIM_VENV:-$root/.venv-npu-sim}"
python="$environment/bin/python"

if [[ ! -x "$python" ]]; then
    "${NPU_SIM_PYTHON:-python3.11}" -m venv "$environment"
fi
wanted="$(cat "$here/requirements.txt" "$root/envs/cpu/requirements.lock" | sha256sum | cut -d' ' -f1)"
if [[ "$(cat "$environment/installed" 2>/dev/null || true)" != "$wanted" ]]; then
    # the lock's versions, but for what the simulator pins itself
    "$python" -m pip install -q -r "$here/requirements.txt" -c <(grep -v '^triton==' "$root/envs/cpu/requirements.lock")
    echo "$wanted" > "$environment/installed"
fi
build="$environment/cann"
if [[ ! -e "$build/libascendcl.so" ]] || [[ -n "$(find "$here/cann" -newer "$build/libascendcl.so" -name '*.[chp]*')" ]]; then
    "$python" "$here/cann/build.py" "$build"
fi

unset ASCEND_HOME_PATH ASCEND_OPP_PATH ASCEND_RT_VISIBLE_DEVICES PYTORCH_NPU_ALLOC_CONF
export LD_LIBRARY_PATH="$build" PYTHONPATH="$here:$root/tests:$root" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TASK_QUEUE_ENABLE=0 NPU_SIM_DEVICES="${NPU_SIM_DEVICES:-8}" CUDA_DEVICE_MAX_CONNECTIONS=1
if [[ "${1:-}" == "--shell" ]]; then
    exec "${SHELL:-bash}"
fi
paths=("$here")
for argument in "$@"; do  # files or folders among the arguments replace the whole suite
    if [[ "$argument" != -* && -e "${argument%%::*}" ]]; then paths=(); fi
done
exec "$python" -m pytest -p no:cacheprovider -q ${paths[@]+"${paths[@]}"} "$@"
