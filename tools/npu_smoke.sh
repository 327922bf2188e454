#!/usr/bin/env bash
# One command for a machine with NPUs: shows what works and writes a report to attach to an issue.
#   tools/npu_smoke.sh [--only doctor,device,hccl,engine,rollout,experts] [--report FILE] [--ranks N] [--rehearse | --simulate]
# Needs two dies (--ranks more for HCCL and experts; on A3 and 950, 8 of them are what public faults were seen on) and an environment that envs/npu_a2 or envs/npu_a3 set up.
# Steps: doctor; device; HCCL between N dies; one Megatron training step with and without fused kernels against the
# CPU's numbers, on one die and with tensor parallelism; rollout, weight update with proof, sleep and wake-up inside
# three GRPO iterations of a tiny model; the same with experts over N dies, exchanged as vllm-ascend chooses (MC2 on A3 and 950)
# and by all-gather: each fails where log-probs of rollout and trainer differ, whatever the proof says. About a quarter of an hour. No step hides another: all run, the exit code tells.
# --simulate runs the same on simulated dies, in the environment that tests/npu_sim/run.sh makes (x86_64; no NPU, no CANN).
# --rehearse runs what a machine without NPUs can: the script itself, training steps and GRPO iterations on the CPU.
set -uo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root" || exit 1

steps="doctor,device,hccl,engine,rollout,experts"
only="$steps" report="$root/npu_smoke_report.md" ranks=2 platform="npu"
given=("$@")
while (( $# )); do
    case "$1" in
        --simulate)
            if [[ -z "${NPU_SIM_DEVICES:-}" ]]; then  # once more, where torch_npu has simulated dies
                export NPU_SIM_MEMORY_GIB="${NPU_SIM_MEMORY_GIB:-4}" PYTHON=python
                exec bash tests/npu_sim/run.sh --run bash tools/npu_smoke.sh "${given[@]}"
            fi
            only="device,hccl,engine,rollout,experts"; shift ;;
        --only) only="${2:?--only needs the names of steps}"; shift 2 ;;
        --report) report="${2:?--report needs a file}"; shift 2 ;;
        --ranks) ranks="${2:?--ranks needs a number}"; shift 2 ;;
        --rehearse) platform="cpu"; only="doctor,engine,rollout"; shift ;;
        *) echo "npu_smoke.sh: unknown argument '$1'" >&2; exit 2 ;;
    esac
done
for name in ${only//,/ }; do
    if [[ ",$steps," != *",$name,"* ]]; then
        echo "npu_smoke.sh: --only: '$name' is not one of $steps" >&2
        exit 2
    fi
done
python="${PYTHON:-python}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
failed=0
rows=()

step() {  # NAME DESCRIPTION COMMAND...
    local name="$1" text="$2"; shift 2
    [[ ",$only," == *",${name%%:*},"* ]] || return 0
    echo "== $text"
    local start=$SECONDS code=0
    "$@" > "$work/$name.log" 2>&1 || code=$?
    tail -n 3 "$work/$name.log"
    local result="passed"
    (( code == 0 )) || { result="**FAILED** (exit code $code)"; failed=1; }
    rows+=("| $text | $result | $(( SECONDS - start )) s |")
    logs+=("$name")
}
logs=()

step doctor "doctor" "$python" -m mindspeed_rl.cli.main doctor --platform "$platform"
step device "device: memory, streams, random numbers, matrix products and their stores" "$python" tools/npu_smoke.py device
step hccl "HCCL: collectives between $ranks dies" "$python" tools/npu_smoke.py hccl --ranks "$ranks"
smoke=("$python" tools/npu_smoke.py --platform "$platform")
step engine:fused "training step with fused kernels against the CPU's numbers" "${smoke[@]}" engine
step engine:plain "training step without fused attention against the CPU's numbers" "${smoke[@]}" engine --plain
step engine:tp "training step with tensor parallel size 2" "${smoke[@]}" engine --tensor-parallel 2
step rollout "three GRPO iterations: rollout, weight update with proof, sleep, wake-up" "${smoke[@]}" rollout --folder "$work"
experts=("${smoke[@]}" experts --folder "$work" --ranks "$ranks")
step experts:auto "three GRPO iterations with experts over $ranks dies, exchanged as vllm-ascend chooses" "${experts[@]}"
step experts:allgather "the same, exchanged by all-gather" "${experts[@]}" --exchange allgather

{
    echo "# NPU smoke report"
    echo
    echo "| | |"
    echo "|---|---|"
    echo "| date | $(date -u +%Y-%m-%dT%H:%MZ) |"
    echo "| commit | $(git rev-parse --short HEAD 2>/dev/null || echo unknown)$(git diff --quiet 2>/dev/null || echo ', modified') |"
    echo "| host | $(uname -srm) |"
    if [[ -n "${NPU_SIM_DEVICES:-}" ]]; then echo "| device | **simulated** (tests/npu_sim) |"; fi
    if [[ "$platform" == cpu ]]; then echo "| device | **none: a rehearsal on the CPU, proves nothing about NPUs** |"; fi
    echo
    echo "| step | result | time |"
    echo "|---|---|---|"
    printf '%s\n' "${rows[@]}"
    echo
    echo '```'
    npu-smi info 2>/dev/null || echo "npu-smi: not found"
    "$python" -m mindspeed_rl.cli.main doctor --platform "$platform" 2>/dev/null || true
    echo '```'
    for name in "${logs[@]}"; do
        printf '\n## %s\n\n```\n' "$name"
        tail -n 60 "$work/$name.log"
        echo '```'
    done
} > "$report"
echo "report: $report"
exit "$failed"
