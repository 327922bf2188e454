#!/usr/bin/env bash
# Mixtral 8x7B: Hugging Face weights to a Megatron checkpoint. Training also loads the Hugging Face folder directly.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model mixtral_8x7b Mixtral-8x7B-v0.1
: "${TP:=4}" "${PP:=2}" "${EP:=2}"
hf2mcore "$@"
