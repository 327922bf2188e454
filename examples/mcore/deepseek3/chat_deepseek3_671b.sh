#!/usr/bin/env bash
# DeepSeek-V3 671B: a conversation on the console.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

model deepseekv3_671b DeepSeek-V3
: "${TP:=4}"
chat --prompt-type deepseek3 "$@"
