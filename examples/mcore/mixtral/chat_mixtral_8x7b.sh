#!/usr/bin/env bash
# Mixtral 8x7B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
: "${TP:=8}"
chat --prompt-type mixtral "$@"
