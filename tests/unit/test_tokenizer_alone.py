"""A tokenizer without models of transformers, and with them afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from patience import patient
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PROGRAM = """
import json, sys
from mindspeed_rl.data.tokenizer import load_tokenizer

def brought():
    models = ("transformers.modeling_utils", "transformers.generation.utils", "torch._dynamo",
              "transformers.core_model_loading", "transformers.models.qwen2.configuration_qwen2")
    return [name for name in models if name in sys.modules]

tokenizer = load_tokenizer(sys.argv[1])
alone = [brought(), tokenizer("ba")["input_ids"], tokenizer.eos_token_id]

from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
ids = tokenizer("ba", return_tensors="pt")["input_ids"]
drawn = model.generate(ids, max_new_tokens=2, do_sample=False)
import transformers.generation, transformers.generation.utils as theirs
print(json.dumps([alone, list(drawn.shape), transformers.generation.GenerationMixin is theirs.GenerationMixin,
                  isinstance(model, theirs.GenerationMixin), type(load_tokenizer(sys.argv[1])) is type(tokenizer)]))
"""


def test_a_tokenizer_brings_no_models_and_they_can_still_come(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2}, []))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(tmp_path)
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    config = Qwen2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, **heads)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patient(120))
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == [[[], [2, 1], 0], [1, 4], True, True, True]
