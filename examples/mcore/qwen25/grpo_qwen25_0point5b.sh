#!/usr/bin/env bash
# Qwen2.5 0.5B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen25_0p5b Qwen2.5-0.5B
: "${TP:=1}" "${MBS:=4}"
grpo "$@"
