"""Writes the support table of docs/ascend.md and docs/zh/ascend.md from what the tests really ran.

    tests/npu_sim/run.sh --junitxml results.xml && python tests/npu_sim/support_table.py results.xml...

Several files (one for each part of the suite) are read as one. A row passes when all of its tests passed, fails with one of
them, is "not run" when one was skipped, and never says more than "simulated". A row keeps its state in the document when some
of its tests are missing from the files and none failed; a test of which only some parameters ran must not be in them.
"""

from __future__ import annotations

import ast
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START, END = "<!-- support table: start -->", "<!-- support table: end -->"

#: (English, Chinese, beginnings of the test names)
ROWS = (
    ("Device, memory, random state, streams, profiler", "设备、显存、随机数、流、profiler", ("test_simulator.",)),
    ("The environment that the installer makes: every requirement met or left out with its reason",
     "安装脚本所建的环境：每项依赖都已满足，或附理由略去", ("test_installation.",)),
    ("Fingerprints of weights equal the host's, small tensors summed together", "权重指纹与主机一致，小张量合并求和",
     ("test_fingerprints.",)),
    ("Gated delta net: convolution and rule equal the CPU, kernels by the longest sequence",
     "gated delta net：卷积与递推与 CPU 一致，算子数只随最长序列增长",
     ("test_gated_delta.test_the_device", "test_gated_delta.test_kernels")),
    ("Gated delta net: MindSpeed's Triton kernel, run by Triton's interpreter in float16, equals torch's operators",
     "gated delta net：MindSpeed 的 Triton 算子经 Triton 解释器以 float16 运行，与 torch 算子一致",
     ("test_gated_delta.test_the_kernel",)),
    ("HCCL collectives, 2 and 4 processes", "HCCL 集合通信，2 与 4 进程", ("test_collectives.",)),
    ("Fused attention: dense, packed, ring", "融合注意力：稠密、打包、环形", ("test_attention.",)),
    ("Qwen3-VL with images, fp32: tower, projector and language model train, attention of all of them fused",
     "带图像的 Qwen3-VL，fp32：视觉塔、投影层与语言模型参与训练，注意力全部融合", ("test_vision.test_images",)),
    ("Qwen3-VL built without its tower (`language_model_only`), fp32: trains as on the CPU",
     "不构建视觉塔的 Qwen3-VL（`language_model_only`），fp32：训练与 CPU 一致", ("test_vision.test_the_language",)),
    ("Rollout by vllm-ascend of prompts with images and videos (Qwen2.5-VL, Qwen3-VL, Qwen3.5, fp32): log-probs equal "
     "transformers'; with quantized language models, those of the format's definition",
     "vllm-ascend 对带图像与视频的 prompt 进行 rollout（Qwen2.5-VL、Qwen3-VL、Qwen3.5，fp32）：log-prob 与 transformers 一致；"
     "语言模型量化后符合其定义",
     ("test_vision.test_the_engine",)),
    ("Engine in fp32 equal to the CPU: TP2, PP2, DP2, CP2", "引擎 fp32 与 CPU 一致：TP2、PP2、DP2、CP2",
     ("test_engine.test_training", "test_engine.test_padded")),
    ("A prompt computed once for its samples", "一个 prompt 的所有样本只计算一次 prompt",
     ("test_engine.test_a_prompt", "test_mindspeed.test_a_prompt")),
    ("Offload with measured memory", "卸载并测量显存", ("test_engine.test_offloading",)),
    ("Checkpoint saved under TP2, continued under DP2", "TP2 下保存、DP2 下续训", ("test_engine.test_a_checkpoint",)),
    ("Resharding over HCCL, bit-equal", "通过 HCCL 重切分，逐位一致", ("test_engine.test_weights_gathered",)),
    ("MindSpeed core_r0.16.0: start order, repatch, fused kernels counted",
     "MindSpeed core_r0.16.0：启动顺序、repatch、融合算子计数",
     ("test_mindspeed.test_one_process", "test_mindspeed.test_every_layer")),
    ("MindSpeed bf16: TP2, PP2, DP2, TP2 x PP2, CP2 ring, CP2 Ulysses",
     "MindSpeed bf16：TP2、PP2、DP2、TP2×PP2、CP2 环形、CP2 Ulysses",
     ("test_mindspeed.test_every_layout", "test_mindspeed.test_ring")),
    ("Optimizer state in host memory by MindSpeed's class: numbers of the plain optimizer; checkpoints go on either way",
     "优化器状态经 MindSpeed 的类放在主机内存：数值与普通优化器相同，检查点可双向续训", ("test_swapped_optimizer.",)),
    ("A share of the optimizer's states in host memory or in a file, updated there: numbers of the device, layouts, saves",
     "优化器状态按比例放在主机内存或文件中，由主机更新：数值与设备一致，各种切分与保存",
     ("test_offloaded_optimizer.",)),
    ("Gradients that products of layers and grouped experts add to float32 sums: as in float64; eight models and layouts",
     "线性层与分组专家的矩阵乘直接把梯度累加到 float32 的和：与 float64 一致；八种模型与切分",
     ("test_gradient_products.",)),
    ("Products of tensor parallel layers fused with their collectives: every number of plain layers; six models and layouts",
     "张量并行层的矩阵乘与通信融合：每个数与普通层相同；六种模型与切分",
     ("test_parallel_products.",)),
    ("A reference whose layers come from host memory: numbers of one that stays on the device, in every layout",
     "参考模型的各层从主机内存逐层搬入：各种切分下数值与常驻设备时一致", ("test_streamed_weights.",)),
    ("The run file for one device trains, saves and resumes with the numbers of the run without what saves memory",
     "单设备配置文件可训练、保存、续训，数值与不省显存的运行一致", ("test_one_card.test_it", "test_one_card.test_bytes")),
    ("GRPO by the run file of a 950, also with MXFP8 in the rollout, resume",
     "按 950 的配置文件运行 GRPO（rollout 也用 MXFP8），续训", ("test_one_card.test_a_950",)),
    ("Supervised stages by their run files, fp32: pretrain, SFT, preference losses, reward models, as on the CPU",
     "监督阶段按其配置文件运行，fp32：预训练、SFT、偏好损失、奖励模型，与 CPU 一致", ("test_stages.",)),
    ("Switches together (recomputation, overlap, exchange of experts, Muon, routers, checkpoints): numbers of the plain run or "
     "of the CPU, after a checkpoint too", "多个开关一起打开（重计算、通信重叠、专家交换、Muon、路由、检查点）："
     "数值与不开时或 CPU 一致，续训后亦然", ("test_switches.",)),
    ("transformers' modules under FSDP2 with experts, and rows on as many context-parallel ranks as they need: numbers of one "
     "process on the CPU, fp32, after a checkpoint too",
     "FSDP2 下的 transformers 模块（含专家），以及每条序列按需占用上下文并行 rank："
     "数值与 CPU 单进程一致，fp32，续训后亦然",
     ("test_layouts.",)),
    ("MindSpeed bf16: EP2", "MindSpeed bf16：EP2", ("test_mindspeed.test_expert_parallelism",)),
    ("Multi-token-prediction layers (DeepSeek-V3, Qwen3.5) train as on the CPU, fp32; TP2, PP2, CP2; kernels counted",
     "MTP 层（DeepSeek-V3、Qwen3.5）训练与 CPU 一致，fp32；TP2、PP2、CP2；算子计数",
     ("test_mindspeed.test_prediction", "test_mindspeed.test_a_prediction")),
    ("Attention to the tokens of an indexer (DeepSeek-V3.2, GLM-5) trains as on the CPU, fp32; TP2, PP2 with recomputation",
     "只关注 indexer 选出的 token 的注意力（DeepSeek-V3.2、GLM-5）训练与 CPU 一致，fp32；TP2、带重计算的 PP2",
     ("test_mindspeed.test_attention_to",)),
    ("MindSpeed's grouped expert product: Qwen3-MoE, DeepSeek-V3", "MindSpeed 分组专家矩阵乘：Qwen3-MoE、DeepSeek-V3",
     ("test_mindspeed.test_experts_on",)),
    ("vllm-ascend 0.23 by itself: log-probs of transformers, sleep and wake-up, new weights, TP2, experts",
     "单独运行 vllm-ascend 0.23：与 transformers 的对数概率一致、睡眠与唤醒、更新权重、TP2、专家",
     ("test_rollout.test_log_probs", "test_rollout.test_every_layer", "test_rollout.test_sleep", "test_rollout.test_other",
      "test_rollout.test_two_devices", "test_rollout.test_experts")),
    ("vllm-ascend 0.23 by itself: experts over two replicas, over the dies of one, over both: tokens of one process",
     "单独运行 vllm-ascend 0.23：专家分布于两个副本、一个副本的各 die、两者兼有：与单进程 token 相同",
     ("test_rollout.test_devices_that_share_experts",)),
    ("vllm-ascend 0.23 by itself: speculative decoding by suffixes: greedy tokens and log-probs of transformers",
     "单独运行 vllm-ascend 0.23：后缀投机解码：贪心 token 与对数概率同 transformers", ("test_rollout.test_with_drafts",)),
    ("vllm-ascend 0.23 by itself: experts in int4 (W4A8 dynamic, groups of 256) next to int8: log-probs of the definition",
     "单独运行 vllm-ascend 0.23：int4 专家（W4A8 动态，每组 256 个元素）与 int8：对数概率符合其定义",
     ("test_rollout.test_int4",)),
    ("vllm-ascend 0.23 by itself: int8 matrices (W8A8 dynamic), experts of eight families, latent attention, TP2: "
     "log-probs of the definition",
     "单独运行 vllm-ascend 0.23：int8 矩阵（W8A8 动态），含八个系列的专家、潜在注意力、TP2：对数概率符合其定义",
     ("test_rollout.test_int8",)),
    ("vllm-ascend 0.23 by itself: gated delta nets (Qwen3-Next, Qwen3.5 dense and with experts), its Triton kernels by "
     "Triton's interpreter: log-probs of transformers, TP2, graphs; int8 matrices: log-probs of the definition",
     "单独运行 vllm-ascend 0.23：gated delta net（Qwen3-Next、稠密与带专家的 Qwen3.5），其 Triton 算子由 Triton 解释器运行："
     "对数概率与 transformers 一致，TP2，计算图；int8 矩阵：对数概率符合其定义",
     ("test_rollout.test_delta_nets",)),
    ("vllm-ascend 0.23 by itself: Qwen3.5 as published, without its tower, dense and with experts, in int8, MXFP8 and W4A8, "
     "TP2, shared experts, graphs: log-probs of the definition",
     "单独运行 vllm-ascend 0.23：已发布的 Qwen3.5 不构建视觉塔，稠密与带专家，int8、MXFP8 与 W4A8，TP2，"
     "共享专家，计算图：对数概率符合其定义",
     ("test_rollout.test_published",)),
    ("vllm-ascend 0.23 by itself: MiniMax-M2, its norms over all heads by Triton's interpreter: log-probs of transformers, "
     "and of the definitions of int8, MXFP8 and int4",
     "单独运行 vllm-ascend 0.23：MiniMax-M2，其对全部头的归一化由 Triton 解释器运行：对数概率与 transformers 一致，"
     "并符合 int8、MXFP8 与 int4 的定义",
     ("test_rollout.test_minimax",)),
    ("vllm-ascend 0.23 by itself on 950: MXFP8 matrices, experts too: log-probs of the definition; A2 refuses them",
     "在 950 上单独运行 vllm-ascend 0.23：MXFP8 矩阵，含专家：对数概率符合其定义；A2 拒绝", ("test_rollout.test_mxfp8",)),
    ("vllm-ascend 0.23 by itself on A2, A3 and 950: exchange of experts that it chooses, and all-gather by key; keys that "
     "change no token",
     "在 A2、A3、950 上单独运行 vllm-ascend 0.23：其选择的专家交换方式，及按配置改用 allgather；不改变 token 的键",
     ("test_rollout.test_each_device", "test_rollout.test_an_a3", "test_rollout.test_keys")),
    ("vllm-ascend 0.23 by itself on A3: experts exchanged by MC2 and all-to-all, on 16 devices of an A2 by MC2: tokens of "
     "all-gather",
     "单独运行 vllm-ascend 0.23：A3 上专家经 MC2 与 all-to-all 交换，A2 上 16 个设备经 MC2：token 与 all-gather 相同",
     ("test_mc2.",)),
    ("vllm-ascend 0.23 by itself: the experts that it reports for each token equal transformers'",
     "单独运行 vllm-ascend 0.23：所报告的每个 token 的专家与 transformers 一致",
     ("test_rollout.test_the_experts", "test_rollout.test_reported_experts")),
    ("vllm-ascend 0.23 by itself: graphs of whole decoding steps, captured once, read the weights of every sync",
     "单独运行 vllm-ascend 0.23：整个解码步的计算图只捕获一次，每次权重同步后读到新权重", ("test_rollout.test_graphs",)),
    ("vllm-ascend 0.23 by itself: a decoding step has at most 90 kernels, as many at any batch size",
     "单独运行 vllm-ascend 0.23：一步解码至多 90 个 kernel，与 batch 大小无关", ("test_rollout.test_a_decoding",)),
    ("vllm-ascend 0.23 by itself: latent attention (DeepSeek-V3), TP2",
     "单独运行 vllm-ascend 0.23：潜在注意力（DeepSeek-V3）、TP2",
     ("test_rollout.test_latent",)),
    ("GRPO as a command: Ray, MindSpeed, vllm-ascend, offload, proven pushes, resume",
     "以命令运行 GRPO：Ray、MindSpeed、vllm-ascend、卸载、有校验的权重更新、续训",
     ("test_training.test_grpo", "test_training.test_a_run", "test_training.test_another")),
    ("GRPO with experts split in training and in rollout: Qwen3-MoE, DeepSeek-V3",
     "训练与推理都切分专家的 GRPO：Qwen3-MoE、DeepSeek-V3", ("test_training.test_experts_",)),
    ("GRPO as a command with a prediction layer that trains (DeepSeek-V3), resume; the same layer makes drafts",
     "以命令运行 GRPO 并训练 MTP 层（DeepSeek-V3），续训；该层亦用于生成草稿",
     ("test_training.test_prediction", "test_training.test_drafts_of")),
    ("An average of the weights, audit, evaluation sets and recorded log-probs in one GRPO run, resume; a game of two roles, "
     "and two roles that train their own adapters, with an engine of TP2",
     "一次 GRPO 中同时使用权重滑动平均、审计、多个评测集与记录的对数概率，可续训；两个角色的游戏；"
     "两个角色各自训练适配器，引擎 TP2",
     ("test_newer_features.test_the_exported", "test_newer_features.test_it", "test_newer_features.test_responses",
      "test_newer_features.test_a_model", "test_newer_features.test_two_roles")),
    ("GRPO on servers (asynchronous, one step off, a dedicated reference, recorded log-probs), with partial responses, and "
     "with FSDP2 and responses of a form: by the formulas, and resumed as if not stopped",
     "使用推理服务的 GRPO（异步、one_step_off、参考模型专用设备、记录的对数概率），分段回答，"
     "以及 FSDP2 与限定格式的回答：符合公式，续训如同未中断",
     ("test_modes.",)),
    ("Critic, reward model, teachers and judge on devices of their own, a standalone server: figures of shared devices; "
     "a device of the rollout that moves to the trainer",
     "critic、奖励模型、教师与评判使用专用设备，独立启动的推理服务：数值与共用设备时一致；rollout 的一个设备转去训练",
     ("test_dedicated_devices.",)),
    ("Rollout by transformers' module, fp32: tokens of the CPU; a run trains",
     "用 transformers 的模块做 rollout，fp32：token 与 CPU 相同，可用于训练",
     ("test_newer_features.test_the_module", "test_newer_features.test_a_rollout")),
    ("Training as a service: losses, gradients and samples of transformers and peft, fp32",
     "训练服务：损失、梯度与采样同 transformers 和 peft，fp32", ("test_newer_features.test_a_service",)),
    ("A server process of the service: losses, steps, samples and loaded weights of the same loop in process, after a kill too",
     "服务进程：损失、优化步、采样与载入的权重均同进程内的循环一致；被强制结束后亦然", ("test_service.",)),
    ("Cost of a step, counted: no pass waits, forward asks for no more than plain Megatron",
     "一步的开销计数：前向反向中主机不等待，前向不超过原版 Megatron", ("test_cost.",)),
    ("`tools/npu_smoke.sh`: device, HCCL, training steps, experts", "`tools/npu_smoke.sh`：设备、HCCL、训练步、专家",
     ("test_smoke.",)),
)  # fmt: skip

#: what no test here can show
HARDWARE = (
    ("Kernel numerics and speed", "算子精度与性能"),
    ("HCCL over real links, several nodes", "真实链路与多机 HCCL"),
    (
        "vllm-ascend's compiled operators and Triton kernels, as compiled for the device",
        "vllm-ascend 的编译算子与 Triton 算子（为设备编译后的形式）",
    ),
    ("vllm-ascend's graphs of parts of a step, dynamic EPLB", "vllm-ascend 的局部图、动态 EPLB"),
)


def results(paths: list[Path]) -> dict[str, str]:
    """Test name (file.function) -> "passed", "skipped" or "failed"; the worst of its parameters."""
    order = ("passed", "skipped", "failed")
    result: dict[str, str] = {}
    for case in (case for path in paths for case in ElementTree.parse(path).iter("testcase")):
        name = f"{case.get('classname', '').split('.')[-1]}.{case.get('name', '').split('[')[0]}"
        state = "failed" if case.find("failure") is not None or case.find("error") is not None else "passed"
        state = "skipped" if case.find("skipped") is not None else state
        result[name] = max(result.get(name, "passed"), state, key=order.index)
    return result


def tests(folder: Path = ROOT / "tests" / "npu_sim") -> list[str]:
    """Names (file.function) of all tests of the simulator."""
    found = ((path.stem, node) for path in sorted(folder.glob("test_*.py")) for node in ast.parse(path.read_text()).body)
    functions = ((file, node.name) for file, node in found if isinstance(node, ast.FunctionDef))
    return [f"{file}.{name}" for file, name in functions if name.startswith("test_")]


def state_of(beginnings: tuple[str, ...], names: list[str], ran: dict[str, str], before: str) -> str:
    """State of a row, whose tests are those of `names` that begin like it; `before` where they did not all run."""
    states = [ran.get(name, "missing") for name in names if name.startswith(beginnings)]
    if "failed" in states:
        return "failed"
    if not states or "missing" in states:
        return before
    return "skipped" if "skipped" in states else "passed"


#: words for (English, Chinese)
STATES = {
    "passed": ("passed, simulated", "模拟通过"),
    "skipped": ("not run", "未运行"),
    "failed": ("**failed**", "**失败**"),
}


def states_in(document: str, chinese: bool) -> dict[str, str]:
    """Text of a row -> its state in a document; a row that is not there has not run."""
    states = {words[chinese]: state for state, words in STATES.items()}
    lines = document.split(START)[1].split(END)[0].strip().splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    return {text: states[state] for text, state, _ in rows if state in states}


def table(ran: dict[str, str], document: str, chinese: bool) -> str:
    """The table in one language, in place of the one in `document`."""
    head = "| 内容 | 状态 | NPU 硬件 |" if chinese else "| What | State | On NPU hardware |"
    unverified = "未在 NPU 上验证" if chinese else "not verified on NPU"
    before, names = states_in(document, chinese), tests()
    lines = [head, "|---|---|---|"]
    for row in ROWS:
        state = state_of(row[2], names, ran, before.get(row[chinese], "skipped"))
        lines.append(f"| {row[chinese]} | {STATES[state][chinese]} | {unverified} |")
    lines += [f"| {row[chinese]} | {'无法模拟' if chinese else 'cannot be simulated'} | {unverified} |" for row in HARDWARE]
    return "\n".join(lines)


def write(path: Path, text: str, start: str = START, end: str = END) -> None:
    """Replaces what is between the markers of a document."""
    content = path.read_text(encoding="utf-8")
    before, rest = content.split(start)
    path.write_text(f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    """Writes both documents."""
    ran = results([Path(argument) for argument in sys.argv[1:]])
    for path, chinese in ((ROOT / "docs" / "ascend.md", False), (ROOT / "docs" / "zh" / "ascend.md", True)):
        write(path, table(ran, path.read_text(encoding="utf-8"), chinese))


if __name__ == "__main__":
    main()
