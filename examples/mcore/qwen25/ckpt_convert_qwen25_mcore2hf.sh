#!/usr/bin/env bash
# The name in MindSpeed-LLM of ckpt_convert_qwen25_7b_mcore2hf.sh.
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

renamed ckpt_convert_qwen25_7b_mcore2hf.sh "$@"
