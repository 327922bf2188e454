import json
import subprocess
import sys


def test_importing_one_loss_loads_at_most_eleven_of_our_modules_and_no_engine():
    code = "import json, sys, mindspeed_rl.algorithms.policy_losses; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    ours = [name for name in loaded if name.startswith("mindspeed_rl")]
    assert len(ours) <= 10, ours
    assert not {"ray", "vllm", "megatron", "transformers", "torch_npu", "hydra"} & set(loaded)
