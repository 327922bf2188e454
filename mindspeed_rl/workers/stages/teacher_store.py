"""Log-probs of a teacher next to supervised data, for the divergences of stage sft."""

from __future__ import annotations

import json
import time

import numpy as np

from mindspeed_rl.checkpoint.model_source import find_model, load_tokenizer_of
from mindspeed_rl.config import MegatronConfig
from mindspeed_rl.data.datasets import StoredLogProbs
from mindspeed_rl.data.tokenizer import hash_vocabulary
from mindspeed_rl.files import write_file
from mindspeed_rl.workers.stages.instruction import Instruction
from mindspeed_rl.workers.teacher_servers import TeacherServers

#: rows that are requested at a time
_CHUNK = 256


def store_log_probs(config: MegatronConfig, server: str, top_k: int) -> None:
    """Write `<prefix>_teacher.bin` and its index for the data of a run, with the data of its evaluation.

    Args:
        config: configuration of the run, with the seq_length and the packs that it will train with.
        server: address of the teacher.
        top_k: tokens that are stored for each position.

    Raises:
        ValueError: the data or the tokenizer cannot be read.
        TeacherServerError: the server does not return log-probs, or has another tokenizer.
    """
    tokenizer = load_tokenizer_of(config, find_model(config, "megatron_training"))
    stage, teacher = Instruction(config, tokenizer), TeacherServers.of_server(server, top_k)
    for prefix in (config.data_path, config.eval_data_path):
        if not isinstance(prefix, str):
            continue
        items, start = stage.open(prefix), time.monotonic()
        data, index = StoredLogProbs.files(prefix)
        # without an index the file is not read
        index.unlink(missing_ok=True)
        lengths: list[int] = []
        with data.open("wb") as file:
            for first in range(0, len(items), _CHUNK):
                rows = [stage.rows([items[number]]) for number in range(first, min(first + _CHUNK, len(items)))]
                pairs = [(ids.tolist(), size) for row in rows for ids, size in zip(row.input_ids, row.response_lengths)]
                if not first:
                    teacher.check(tokenizer, pairs[0][0])
                # a row predicts all tokens up to its end
                judged = iter(teacher.request(server, [pair for pair in pairs if pair[1]]))
                for row in rows:
                    mine = [next(judged) for size in row.response_lengths if size]
                    lengths.append(sum(row.response_lengths))
                    records = np.empty(lengths[-1], StoredLogProbs.record(top_k))
                    if mine:
                        records["log_probs"] = np.concatenate([log_probs.numpy() for log_probs, _ in mine])
                        records["ids"] = np.concatenate([ids.numpy() for _, ids in mine])
                    file.write(records.tobytes())
                print(f"{prefix}: {len(lengths)} of {len(items)} rows, {time.monotonic() - start:.0f} s", flush=True)
        metadata = {"topk": top_k, "teacher": server, "vocabulary": hash_vocabulary(tokenizer.get_vocab())}
        write_file(index, json.dumps(metadata | {"lengths": lengths}))
        print(f"{sum(lengths):,} tokens are in {data} ({data.stat().st_size / 2**20:.1f} MiB)", flush=True)
