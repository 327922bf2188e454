"""The group `serve_config`: a server that trains and samples models of many clients (`mindspeed-rl serve`)."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_rl.catalogue.records import Bounds
from mindspeed_rl.config.keys.schema import Range, key

#: passes of models that are given to the engines at the same time
MAX_PASSES = 4

# fmt: off


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Models, address, keys and limits of a server; a run file with this group has no loop of its own."""

    model_name: str | None = key(None, "name of the base model for clients; the name of its folder when unset",
        "基座模型对客户显示的名称；不设时为其文件夹名", on_resume="exact")
    num_models: int = key(4, "models of clients that exist at the same time, each with an adapter of up to rank lora_r",
        "同时存在的客户模型数，每个有一个秩不超过 lora_r 的适配器", range=Bounds(1, 4096), on_resume="exact")
    num_engine_adapters: int | None = key(None,
        "adapters that one step of the rollout engine computes together; others wait; num_models when unset",
        "推理引擎一步中同时计算的适配器数，其余等待；不设时为 num_models", range=Bounds(1, 1024), on_resume="exact")
    max_tokens_per_pass: int = key(8192, "tokens of one forward pass; longer requests take several, and a longer sequence one",
        "一次前向的 token 数；更长的请求分几次，更长的单条序列单独一次", range=Range.TOKENS,
        on_resume="exact")
    sampler_ema_decay: float = key(0.0,
        "decay per step of the moving average of a model's matrices, which samplers and exports have; 0: the last weights",
        "采样与导出所用权重的滑动平均每步的衰减系数；0 表示用最新权重", range=Bounds(0, 1, excludes_high=True),
        on_resume="exact")
    folder: str = key("./runs/serve",
        "folder of sessions, operations and checkpoints, from which a restarted server resumes",
        "会话、操作与检查点的文件夹，服务重启后由此接续", on_resume="exact")
    host: str = key("127.0.0.1", "address to listen at; other than loopback needs api_keys_file",
        "监听地址；非本机回环地址需要 api_keys_file", on_resume="exact")
    port: int = key(8787, "port to listen at; 0 for a free one", "监听端口；0 为任一空闲端口", range=Bounds(0, 65535),
        on_resume="exact")
    api_keys_file: str | None = key(None, "file with one API key and its owner per line; any key is taken when unset",
        "每行一个 API key 及其所有者的文件；不设时接受任何 key", on_resume="exact")
    max_sessions: int = key(1000, "sessions that are open at the same time", "同时打开的会话数", range=Range.PROCESSES,
        on_resume="exact")
    max_sessions_per_key: int = key(250, "sessions of an API key that are open at the same time",
        "一个 API key 同时打开的会话数", range=Range.PROCESSES, on_resume="exact")
    session_timeout_s: float = key(600.0, "seconds without a heartbeat after which a session ends",
        "多少秒没有心跳后会话结束", range=Range.WAIT_S, on_resume="exact")
    max_tokens_in_flight: int = key(10**6, "tokens of the waiting and running requests of an API key",
        "一个 API key 等待与运行中的请求的 token 总数", range=Range.TOKENS, on_resume="exact")
    max_checkpoints: int = key(100, "checkpoints of an API key", "一个 API key 的检查点数", range=Bounds(1, 10**6),
        on_resume="exact")
    max_checkpoint_gib: float = key(100.0, "GiB of all checkpoints of an API key", "一个 API key 的全部检查点的 GiB 数",
        range=Range.POSITIVE, on_resume="exact")
