#!/usr/bin/env bash
# Qwen3 30B-A3B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_30b_a3b Qwen3-30B-A3B
: "${NNODES:=2}" "${TP:=4}" "${EP:=2}" "${INFER_TP:=4}"
grpo "$@"
