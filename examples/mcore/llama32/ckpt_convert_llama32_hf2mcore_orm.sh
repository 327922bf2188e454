#!/usr/bin/env bash
# Llama 3.2 1B reward model: a Hugging Face sequence classifier to a Megatron checkpoint with its score head.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model llama32_1b Llama-3.2-1B-rm
: "${TP:=1}"
hf2mcore --orm "$@"
