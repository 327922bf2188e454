#!/usr/bin/env bash
# Llama 3.2 1B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B
: "${TP:=1}" "${MBS:=2}"
grpo "$@"
