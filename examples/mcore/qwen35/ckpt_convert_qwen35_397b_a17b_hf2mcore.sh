#!/usr/bin/env bash
# Qwen3.5 397b_a17b: Hugging Face weights with their tower to a Megatron checkpoint. Training also loads the Hugging Face folder.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model qwen35_397b_a17b Qwen3.5-397B-A17B
: "${TP:=2}" "${PP:=4}" "${EP:=16}"
hf2mcore "$@"
