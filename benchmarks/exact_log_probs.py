"""Cost of `rl_config.exact_log_probs`: rollout and update with it and without, in processes that take turns.

    python benchmarks/exact_log_probs.py --shape 30M --rounds 3

A model with random weights generates groups of responses, and the trainer computes their log-probs and makes an update. Seconds
are the processor's, the least of the rounds, because other work on the machine moves them less than the clock's.
The last column is the largest difference between log-probs of trainer and engine.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from tiny_run import SHAPE, SHAPES

from mindspeed_rl import adaptors, platform
from mindspeed_rl.platform.environment import EXACT_VARIABLE

PROMPT_TOKENS, GROUP = 32, 8
PHASES = ("generate", "log-probs", "update")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="30M")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--responses", type=int, default=32, help="responses at once")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a response")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    platform.select("cpu")
    os.environ.update(platform.current().worker_env())
    torch.set_num_threads(1)  # threads of this process would be missing in its forks
    adaptors.apply("train")
    adaptors.apply("rollout")
    import vllm.v1.engine.llm_engine  # noqa: F401  (once, for both processes)

    import mindspeed_rl.engine.train_engine  # noqa: F401

    sizes = {"num_key_value_heads": 2, **SHAPE, **SHAPES[args.shape], "vocab_size": 512}
    config = transformers.Qwen2Config(**sizes, max_position_embeddings=1024, initializer_range=0.05)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
        context, turns = get_context("fork"), {}
        for name in ("normal", "exact"):
            turns[name], theirs = context.Pipe()
            context.Process(target=work, args=(theirs, name == "exact", Path(folder), args), daemon=True).start()
        found: dict[str, list[list[float]]] = {name: [] for name in turns}
        for _ in range(args.rounds + 1):  # the first one compiles
            for name, turn in turns.items():
                turn.send(True)
                found[name].append(turn.recv())
    print(f"| {args.shape}, {'bfloat16' if args.bf16 else 'float32'} | {' | '.join(PHASES)} | together | largest difference |")
    print("|---|---|---|---|---|---|")
    best = {name: [min(column) for column in zip(*rounds[1:])] for name, rounds in found.items()}
    for name, seconds in best.items():
        cells = [*seconds[: len(PHASES)], sum(seconds[: len(PHASES)])]
        largest = max(one[-1] for one in found[name])
        print(f"| {name} | {' | '.join(f'{cell:.2f} s' for cell in cells)} | {largest:.2g} |")
    ratios = [exact / normal for exact, normal in zip(best["exact"], best["normal"])][: len(PHASES)]
    together = sum(best["exact"][: len(PHASES)]) / sum(best["normal"][: len(PHASES)])
    print(f"| times | {' | '.join(f'{ratio:.2f}' for ratio in (*ratios, together))} | |")


def work(turn: Connection, exact: bool, folder: Path, args: argparse.Namespace) -> None:
    """Make a round for each message: seconds of each phase, and the largest difference."""
    if exact:
        os.environ[EXACT_VARIABLE] = "1"
    adaptors.apply("train")
    adaptors.apply("rollout")
    from mindspeed_rl.algorithms.interfaces import LossInputs, LossOutput, PendingMetrics
    from mindspeed_rl.checkpoint.hf import HfFolder
    from mindspeed_rl.config import GenerateConfig, MegatronConfig
    from mindspeed_rl.engine import parallel
    from mindspeed_rl.engine.batching import MicroBatching, Rows
    from mindspeed_rl.engine.build import batch_shape, build_model
    from mindspeed_rl.engine.train_engine import TrainEngine
    from mindspeed_rl.engine.weights import load_weights
    from mindspeed_rl.models.plan import plan_model
    from mindspeed_rl.resharding.transfer import WeightStream
    from mindspeed_rl.rollout.requests import Sampling
    from mindspeed_rl.rollout.vllm_engine import GenerationRequest, VllmEngine

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    config = MegatronConfig(bf16=args.bf16, lr=1e-5, train_iters=100)
    plan, longest = plan_model(config, folder), PROMPT_TOKENS + args.tokens
    parallel.init_distributed(config, plan.layout.vpp)
    model = build_model(config, plan, trainable=True)
    load_weights(model, HfFolder(folder))
    trainer = TrainEngine(config, model, batch_shape(config, packed=True, pad_id=0), temperature=1.0)
    trainer.start_training(1)
    keys = GenerateConfig(
        **{"infer_tensor_parallel_size": 1, "max_model_len": longest, "max_num_batched_tokens": 4096},
        max_num_seqs=args.responses,
        dtype="bfloat16" if args.bf16 else "float32",
        kv_cache_memory_gib=0.25,
    )
    engine = VllmEngine(folder, keys, Sampling(1.0, args.tokens, ()), run_id=str(os.getpid()), kv_bytes_per_token=4096)
    stream, batching = WeightStream(model, bucket_bytes=1 << 24), MicroBatching(1, token_budget=2048)

    def policy_gradient(inputs: LossInputs) -> LossOutput:
        per_token = -inputs.outputs[0] * inputs.mask
        return LossOutput(per_token.sum(), inputs.mask.sum(), PendingMetrics({}))

    for index in range(1000):
        turn.recv()
        engine.load_weights(stream.named_tensors(torch.bfloat16 if args.bf16 else torch.float32), index)
        prompts = torch.randint(512, (args.responses, PROMPT_TOKENS), generator=torch.Generator().manual_seed(index)).tolist()
        requests = [GenerationRequest(prompts[i // GROUP], 1000 * index + i) for i in range(args.responses)]
        times = [time.process_time()]
        completions = engine.generate(requests)
        times.append(time.process_time())
        rows = Rows(
            [torch.tensor([*r.prompt_ids, *c.token_ids]) for r, c in zip(requests, completions)],
            [PROMPT_TOKENS] * args.responses,
            columns={},
        )
        output = trainer.forward(rows, batching)
        times.append(time.process_time())
        trainer.train_step(rows, batching, policy_gradient)
        times.append(time.process_time())
        assert output is not None
        pairs = zip(output[0], completions)
        largest = max(float((ours - torch.tensor(one.log_probs)).abs().max()) for ours, one in pairs)
        turn.send([*(end - start for start, end in zip(times, times[1:])), largest])


if __name__ == "__main__":
    main()
