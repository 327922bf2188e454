#!/usr/bin/env bash
# Llama 3 8B: GRPO. Settings not named here: examples/mcore/configs/grpo.yaml.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama3_8b Meta-Llama-3-8B
: "${TP:=4}"
grpo "$@"
