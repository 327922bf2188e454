#!/usr/bin/env bash
# Qwen3 0.6B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen3_0p6b Qwen3-0.6B
: "${TP:=1}" "${MBS:=4}"
grpo "$@"
