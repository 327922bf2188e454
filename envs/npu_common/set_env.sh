# Source this in every shell that starts the suite on Ascend: CANN toolkit first, then NNAL/ATB.
# 在启动套件的每个终端中 source 本文件：先 CANN toolkit，再 NNAL/ATB。
_ascend_root="${ASCEND_ROOT:-/usr/local/Ascend}"
_ascend_toolkit="$_ascend_root/ascend-toolkit/set_env.sh"
[[ -f "$_ascend_toolkit" ]] || _ascend_toolkit="$_ascend_root/cann/set_env.sh"
for _ascend_script in "$_ascend_toolkit" "$_ascend_root/nnal/atb/set_env.sh"; do
    if [[ ! -f "$_ascend_script" ]]; then
        echo "set_env.sh: $_ascend_script does not exist; install CANN and NNAL or set ASCEND_ROOT" >&2
        return 1 2>/dev/null || exit 1
    fi
    # These scripts read unset variables: they must not run under `set -u`.
    _ascend_flags="$-"
    set +u
    # shellcheck source=/dev/null
    source "$_ascend_script"
    [[ "$_ascend_flags" != *u* ]] || set -u
done
unset _ascend_root _ascend_toolkit _ascend_script _ascend_flags
# The device library that tools link against when no driver is mounted (container builds).
_ascend_devlib="${ASCEND_HOME_PATH:-}/$(uname -m)-linux/devlib"
[[ -d /usr/local/Ascend/driver || ! -d "$_ascend_devlib" ]] || export LD_LIBRARY_PATH="$LD_LIBRARY_PATH:$_ascend_devlib"
unset _ascend_devlib
# Defaults of this suite; runtime_env.yaml carries the rest to the workers.
export CUDA_DEVICE_MAX_CONNECTIONS=1
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-3600}"
export VLLM_ASCEND_ENABLE_NZ=0
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES=1
# jemalloc gives memory back that glibc's allocator keeps in pieces; processes started from this shell use it where the machine has it.
# MINDSPEED_RL_JEMALLOC=0 leaves glibc's. / 机器上有 jemalloc 时预加载它；MINDSPEED_RL_JEMALLOC=0 关闭。
if [[ "${MINDSPEED_RL_JEMALLOC:-1}" != 0 && "${LD_PRELOAD:-}" != *jemalloc* ]]; then
    _jemalloc="$( { ldconfig -p || /sbin/ldconfig -p; } 2> /dev/null | sed -n 's/.*libjemalloc\.so\.2.* => //p' | head -n 1)" || true
    [[ -z "$_jemalloc" ]] || export LD_PRELOAD="$_jemalloc${LD_PRELOAD:+:$LD_PRELOAD}"
    unset _jemalloc
fi
