#!/usr/bin/env bash
# DeepSeek-V3 671B: answers to prompts.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
: "${TP:=4}"
generate --prompt-type deepseek3 "$@"
