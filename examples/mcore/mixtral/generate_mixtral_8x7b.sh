#!/usr/bin/env bash
# Mixtral 8x7B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
: "${TP:=8}"
generate --prompt-type mixtral "$@"
