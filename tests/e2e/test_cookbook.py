"""Programs of `tinker-cookbook`, as they are published, against a server of this project with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cookbook_files
import pytest
from patience import patient
from service_server import ServerProcess, running

pytest.importorskip("tinker_cookbook")
pytestmark = pytest.mark.slow
RECIPES = "tinker_cookbook.recipes"
#: program -> module and options
PROGRAMS = {
    "sl_loop": ("sl_loop", "batch_size=4 max_length=512 lora_rank=4 max_steps=3 save_every=2 log_path=OUT"),
    # its batch of 128 rows is not an option
    "sl_basic": ("sl_basic", "lora_rank=4 log_path=OUT"),
    **{
        f"rl_loop {loss}": (
            "rl_loop",
            f"batch_size=2 group_size=8 lora_rank=4 max_tokens=16 max_steps=2 loss_fn={loss} log_path=OUT",
        )
        for loss in ("importance_sampling", "cispo", "gspo")
    },
    "rl_basic": ("rl_basic", "max_tokens=8 lora_rank=4 max_steps=1 log_path=OUT"),
    "dpo": ("preference.dpo.train", "batch_size=4 max_length=512 max_steps=2 log_path=OUT"),
    "on-policy distillation": (
        "distillation.on_policy_distillation",
        f"teacher_model={cookbook_files.MODEL_NAME} group_size=2 groups_per_batch=2 lora_rank=4 max_tokens=8 max_steps=2 "
        "log_path=OUT",
    ),
    "numerics check": (
        "rl_numerics_check.train",
        "renderer_name=qwen3_disable_thinking group_size=2 groups_per_batch=2 lora_rank=4 max_tokens=16 "
        "max_trajectory_tokens=1800 max_steps=2 log_path=OUT task.num_pages_min=2 task.num_pages_max=3 task.page_chars=200",
    ),
}
KEY = "tml-cookbook-1"


class Server(ServerProcess):
    """The server, as a process that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        model = cookbook_files.make_model(folder)
        cookbook_files.make_data_sets(folder / "data_sets")
        run_file = {
            "platform": "cpu",
            "megatron_training": {"bf16": False, "tokenizer_name_or_path": str(model), "reset_attention_mask": True},
            "actor_config": {
                "finetune": True,
                "load": str(model),
                "lora_target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
                "lora_r": 32,
                "lora_alpha": 32,
            },
            "rl_config": {"actor_resource": {"num_npus": 1}, "use_remove_padding": True, "exact_log_probs": True},
            "generate_config": {
                "infer_tensor_parallel_size": 1,
                "lora_push": "adapter",
                "max_num_seqs": 64,
                "max_model_len": 2048,
                "max_num_batched_tokens": 2048,
                "dtype": "float32",
                "kv_cache_memory_gib": 0.25,
            },
            "serve_config": {
                "model_name": cookbook_files.MODEL_NAME,
                "num_models": 4,
                "folder": str(folder / "serve"),
            },
        }
        super().__init__(folder, run_file, {}, limit_s=180)

    def run(self, name: str, module: str, options: str, out: Path) -> tuple[int, str]:
        words = options.replace("OUT", str(out)).split()
        words += [f"model_name={cookbook_files.MODEL_NAME}", f"base_url=http://127.0.0.1:{self.port}"]
        env = {
            **os.environ,
            "TINKER_API_KEY": KEY,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.folder / "data_sets"),
        }
        command = [sys.executable, "-W", "ignore", "-m", f"{RECIPES}.{module}", *words]
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            text = process.communicate(timeout=patient(120))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{name}: {process.communicate()[0][-3000:]}") from None
        return process.returncode, text


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(Server(tmp_path_factory.mktemp("cookbook"))) as server:
        yield server


def read_metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_the_cookbook_runs_as_it_is_published(name: str, server: Server, tmp_path: Path) -> None:
    code, text = server.run(name, *PROGRAMS[name], tmp_path / "out")
    assert code == 0, text[-3000:]
    assert read_metrics(tmp_path / "out")


def test_a_loss_that_is_not_offered_is_refused_by_its_name(server: Server, tmp_path: Path) -> None:
    options = "batch_size=2 group_size=2 lora_rank=4 max_tokens=4 max_steps=1 loss_fn=stable_reinforce log_path=OUT"
    code, text = server.run("stable_reinforce", "rl_loop", options, tmp_path / "out")
    assert code != 0 and "stable_reinforce" in text.rpartition("Traceback")[2]


def train_with_sdk(port: int, count: int) -> list[float]:
    """Return the losses, and the log-probs of samples, of a loop with a seed."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{port}", api_key=KEY)
    training = service.create_lora_training_client(base_model=cookbook_files.MODEL_NAME, rank=4, seed=1).result()
    numbers: list[float] = []
    for step in range(count):
        tokens = [10 + (7 * step + index) % 80 for index in range(20)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 19}
        datum = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        losses = [training.forward_backward([datum], "cross_entropy") for _ in range(2)]
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        numbers += [future.result().metrics["loss:sum"] for future in losses]
        if step % 4 == 3:
            sampler = training.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=5, seed=step)
            sample = sampler.sample(types.ModelInput.from_ints(tokens[:5]), 1, params).result().sequences[0]
            numbers += [float(value) for value in sample.logprobs or []]
    service.close("success").result()
    return numbers


def test_a_killed_server_changes_no_bit_of_a_loop(server: Server) -> None:
    expected = train_with_sdk(server.port, 14)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train_with_sdk, server.port, 14)
        for _ in range(2):
            time.sleep(patient(1.5))
            server.end(signal.SIGKILL)
            server.start()
        assert training.result(timeout=patient(200)) == expected


def test_a_loop_learns_and_transformers_loads_what_it_has_learned(server: Server, tmp_path: Path) -> None:
    """The answer is always 7; the model begins with any digit."""
    import tinker
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = (
        "batch_size=2 group_size=32 lora_rank=8 learning_rate=5e-3 max_tokens=16 max_steps=8 loss_fn=importance_sampling "
        "log_path=OUT"
    )
    code, text = server.run("learns", "rl_loop", options, tmp_path / "out")
    assert code == 0, text[-3000:]
    rewards = [row["reward/total"] for row in read_metrics(tmp_path / "out")]
    assert rewards[0] < 0.4 and rewards[-1] > 0.8, rewards
    state = json.loads((tmp_path / "out" / "checkpoints.jsonl").read_text().splitlines()[-1])["state_path"]
    service = tinker.ServiceClient(base_url=f"http://127.0.0.1:{server.port}", api_key=KEY)
    training = service.create_training_client_from_state(state).result()
    path = training.save_weights_external("learned").result().path
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    service.close("success").result()
    adapter = tmp_path / "adapter"
    for name, url in urls.items():
        (adapter / name).parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=30) as reply:
            (adapter / name).write_bytes(reply.read())
    folder = server.folder / cookbook_files.MODEL_NAME
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    prompt = "User: What is a held-out question? Provide a numerical answer, written inside \\boxed{}.\n\nAssistant:"
    tokens = torch.tensor([tokenizer.encode(prompt)])

    def count_sevens(model: torch.nn.Module) -> int:
        torch.manual_seed(0)
        replies = model.generate(input_ids=tokens, do_sample=True, max_new_tokens=12, num_return_sequences=32, top_k=0)
        return sum("\\boxed{7}" in tokenizer.decode(reply[tokens.shape[1] :]) for reply in replies)

    before = count_sevens(base)
    after = count_sevens(PeftModel.from_pretrained(base, adapter))
    assert before <= 12 and after >= 24, (before, after)
