#!/usr/bin/env bash
# Qwen3 32B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_32b Qwen3-32B
: "${NNODES:=2}" "${TP:=8}" "${PP:=2}" "${INFER_TP:=4}"
grpo "$@"
