#!/usr/bin/env bash
# Mixtral 8x7B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
: "${NNODES:=2}" "${TP:=4}" "${PP:=2}" "${EP:=2}" "${INFER_TP:=8}"
grpo "$@"
