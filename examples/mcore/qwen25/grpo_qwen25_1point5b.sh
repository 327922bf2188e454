#!/usr/bin/env bash
# Qwen2.5 1.5B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_1p5b Qwen2.5-1.5B
: "${TP:=1}" "${MBS:=2}"
grpo "$@"
