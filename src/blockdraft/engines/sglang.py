"""SGLang: how it is started with a draft, what its log says about it, and where each of that was read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from blockdraft.engines.rules import Alarm, Engine, Flag, Forbidden, NodeLines, Reading, Support
from blockdraft.engines.setting import Setting, Version

_RENAMED = Version(
    "0.5.23"
)  # the state that was read; when the window's flag and the strategy's got their names is not


def _head(setting: Setting) -> Sequence[str]:
    return ("python", "-m", "sglang.launch_server")


def _is_renamed(setting: Setting) -> bool:
    return setting.installed.version >= _RENAMED


def _window(setting: Setting) -> int | None:
    """Positions that the draft's own cache keeps: asked for, or all that its layers can see."""
    if setting.is_dspark:
        return None
    window = setting.draft_window if setting.draft_window is not None else setting.draft.config.max_window
    return window


def _on_kimi_k3(setting: Setting) -> bool:
    return setting.is_kimi_k3


SGLANG = Engine(
    name="sglang",
    label="SGLang",
    read="0.5.23",
    distributions=("sglang",),
    package="sglang",
    program="python",
    head=_head,
    default_port=30000,
    features={"dflash": "srt/models/dflash.py", "dspark": "srt/models/dspark.py"},
    flags=(
        Flag(
            name="--model-path",
            aliases=("--model",),
            value=lambda setting: setting.target_path,
            why="the target",
            source="sglang 0.5.23 arg_groups/fields/model.py",
        ),
        Flag(
            name="--host",
            value=lambda setting: setting.host,
            why="where it listens",
            source="sglang 0.5.23 arg_groups/fields/serving.py",
            option="--host",
        ),
        Flag(
            name="--port",
            value=lambda setting: setting.port,
            why="where it listens",
            source="sglang 0.5.23 arg_groups/fields/serving.py",
            option="--port",
        ),
        Flag(
            name="--tp-size",
            aliases=("--tp", "--tensor-parallel-size"),
            value=lambda setting: setting.tensor_parallel,
            why="every GPU named holds a slice of each layer; DFLASH allows no pipeline stages",
            source="sglang 0.5.23 arg_groups/fields/parallel.py, speculative_hook.py (pp_size == 1)",
            option="--tp",
        ),
        Flag(
            name="--nnodes",
            value=lambda setting: setting.machine.num_nodes if setting.is_multi_node else None,
            why="nodes that share the target",
            source="sglang 0.5.23 arg_groups/fields/parallel.py",
            option="--nodes",
        ),
        Flag(
            name="--node-rank",
            value=lambda setting: setting.node_rank if setting.is_multi_node else None,
            why="which of the nodes this is",
            source="sglang 0.5.23 arg_groups/fields/parallel.py",
            option="--node-rank",
        ),
        Flag(
            name="--dist-init-addr",
            aliases=("--nccl-init-addr",),
            value=lambda setting: setting.head if setting.is_multi_node else None,
            why="where the nodes meet, on node 0",
            source="sglang 0.5.23 arg_groups/fields/parallel.py",
            option="--head",
        ),
        Flag(
            name="--trust-remote-code",
            value=lambda setting: () if setting.needs_remote_code else None,
            why="the target's config.json points at code of its own",
            source="sglang 0.5.23 arg_groups/fields/model.py; z-lab/Kimi-K2.5-DFlash card",
        ),
        Flag(
            name="--context-length",
            value=lambda setting: setting.context,
            why="the longest request that is served",
            source="sglang 0.5.23 arg_groups/fields/model.py",
            option="--context",
        ),
        Flag(
            name="--max-running-requests",
            value=lambda setting: setting.concurrency,
            why="with a draft it is 48 where nobody says",
            source="sglang 0.5.23 arg_groups/speculative_hook.py",
            option="--concurrency",
        ),
        Flag(
            name="--mem-fraction-static",
            value=lambda setting: setting.memory_fraction,
            why="share of a GPU's memory for weights and caches",
            source="sglang 0.5.23 arg_groups/fields/memory.py",
            option="--memory-fraction",
        ),
        Flag(
            name="--mamba-radix-cache-strategy",
            value=lambda setting: "extra_buffer" if setting.target.is_recurrent and _is_renamed(setting) else None,
            why="a target with recurrent state needs snapshots of it to take proposals back and to reuse prefixes",
            source="sglang 0.5.23 arg_groups/mamba_hook.py; z-lab/dflash README under the flag's older name",
            is_fixed=False,
        ),
        Flag(
            name="--mamba-scheduler-strategy",
            value=lambda setting: "extra_buffer" if setting.target.is_recurrent and not _is_renamed(setting) else None,
            why="a target with recurrent state needs snapshots of it to take proposals back and to reuse prefixes",
            source="z-lab/dflash README; gone in sglang 0.5.23, the version of the renaming is not verified",
            is_fixed=False,
        ),
        Flag(
            name="--speculative-algorithm",
            value=lambda setting: "DSPARK" if setting.is_dspark else "DFLASH",
            why="the draft's family; DFLASH runs DFlash 2 too, by the parts that the file has",
            source="sglang 0.5.23 arg_groups/fields/spec.py, models/dflash.py",
        ),
        Flag(
            name="--speculative-draft-model-path",
            aliases=("--speculative-draft-model",),
            value=lambda setting: setting.draft_path,
            why="the draft",
            source="sglang 0.5.23 arg_groups/fields/spec.py",
        ),
        Flag(
            name="--speculative-num-draft-tokens",
            aliases=("--speculative-dflash-block-size",),
            value=lambda setting: None if setting.is_dspark else setting.width,
            why="positions that the target scores, anchor included; stated, as an unread config would mean 16",
            source="sglang 0.5.23 arg_groups/speculative_hook.py",
            option="--width",
        ),
        Flag(
            name="--speculative-dspark-block-size",
            aliases=("--speculative-num-draft-tokens",),
            value=lambda setting: setting.num_proposals if setting.is_dspark else None,
            why="proposals of DSpark; the target scores one position more",
            source="sglang 0.5.23 arg_groups/fields/spec.py",
            option="--width",
        ),
        Flag(
            name="--speculative-draft-window-size",
            value=lambda setting: _window(setting) if _is_renamed(setting) else None,
            why="the draft's cache keeps what its sliding layers can see, and no more",
            source="sglang 0.5.23 arg_groups/fields/spec.py",
            option="--draft-window",
        ),
        Flag(
            name="--speculative-dflash-draft-window-size",
            value=lambda setting: None if _is_renamed(setting) else _window(setting),
            why="the draft's cache keeps what its sliding layers can see, and no more",
            source="z-lab/Kimi-K2.5-DFlash card; gone in sglang 0.5.23, the version of the renaming is not verified",
            option="--draft-window",
        ),
        Flag(
            name="--speculative-draft-model-quantization",
            value=lambda setting: "unquant" if setting.is_target_quantised else None,
            why="the target is quantised, the draft is not: left out, it would be read in the target's format",
            source="sglang 0.5.23 arg_groups/fields/spec.py (inherited); sglang issue 35629",
        ),
    ),
    forbidden=(
        Forbidden(
            names=("--pp-size", "--pipeline-parallel-size"),
            allowed=("1",),
            text="DFLASH runs in one pipeline stage: use --tp and --nodes",
            source="sglang 0.5.23 arg_groups/speculative_hook.py",
        ),
        Forbidden(
            names=("--speculative-num-steps", "--speculative-eagle-topk"),
            allowed=("1",),
            text="a block is drafted in one step; SGLang sets it back to 1 with a warning",
            source="sglang 0.5.23 arg_groups/speculative_hook.py",
        ),
    ),
    supports=(
        Support(
            name="dflash",
            when=lambda setting: setting.draft.family == "dflash",
            oldest="0.5.16",
            feature="dflash",
            text="DFlash",
            source="sglang PR 35784, run on 0.5.16; older releases were not read",
        ),
        Support(
            name="dflash2",
            when=lambda setting: setting.draft.is_v2,
            oldest="0.5.23",
            feature="dflash",
            text="DFlash 2",
            source="sglang 0.5.23 models/dflash.py (selector); releases before it were not read",
        ),
        Support(
            name="dspark",
            when=lambda setting: setting.is_dspark,
            oldest="0.5.16",
            feature="dspark",
            text="DSpark",
            source="sglang PR 35784 compares it on 0.5.16; older releases were not read",
        ),
        Support(
            name="kimi_k3_capture",
            when=lambda setting: _on_kimi_k3(setting) and not setting.is_dspark,
            oldest="0.5.23",
            text="the taps of a Kimi K3 target for DFLASH",
            source="sglang PR 35784 (0.5.16 fails to start), 0.5.23 models/kimi_k3.py",
        ),
    ),
    readings=(
        Reading(
            what="width",
            pattern=re.compile(r"Initialized DFLASH draft runner\..*?block_size=(\d+)"),
            read=lambda match: int(match[1]),
            source="sglang 0.5.23 speculative/dflash_worker_v2.py",
        ),
        Reading(
            what="window",
            pattern=re.compile(r"Initialized DFLASH draft runner\..*?draft_window_size=(\w+)"),
            read=lambda match: None if match[1] == "None" else int(match[1]),
            source="sglang 0.5.23 speculative/dflash_worker_v2.py",
        ),
        Reading(
            what="mask",
            pattern=re.compile(r"DFLASH draft runner ready\..*?mask_token_id=(\d+)"),
            read=lambda match: int(match[1]),
            source="sglang 0.5.23 speculative/dflash_worker_v2.py",
        ),
        Reading(
            what="width",
            pattern=re.compile(r"Initialized DSpark draft runner\..*?verify_num_draft_tokens=(\d+)"),
            read=lambda match: int(match[1]),
            source="sglang 0.5.23 speculative/dspark_components/dspark_worker_v2.py",
        ),
        Reading(
            what="mask",
            pattern=re.compile(r"Initialized DSpark draft runner\..*?mask_token_id=(\d+)"),
            read=lambda match: int(match[1]),
            source="sglang 0.5.23 speculative/dspark_components/dspark_worker_v2.py",
        ),
    ),
    alarms=(
        Alarm(
            pattern=re.compile(r"falling back to greedy argmax verification"),
            text="it checks sampled requests by the most likely id: their text is not the target's distribution",
            is_fatal=True,
            source="sglang 0.5.23 speculative/dflash_worker_v2.py; sglang issue 39253",
        ),
        Alarm(
            pattern=re.compile(r"Draft config num_target_layers=\d+ differs from runtime target"),
            text="it counts other layers in the target than the draft was trained on",
            is_fatal=True,
            source="sglang 0.5.23 model_runner_components/spec_aux_hidden_state.py",
        ),
        Alarm(
            pattern=re.compile(r"Disable DFLASH draft cuda graph"),
            text="the draft runs without CUDA graphs: slower steps, the same proposals",
            is_fatal=False,
            source="sglang 0.5.23 speculative/dflash_worker_v2.py",
        ),
    ),
    ready_path="/health",
    ready_source="sglang 0.5.23 entrypoints/http_server.py",
    acceptance="replies",
    acceptance_source="sglang 0.5.23 managers/tokenizer_manager.py (spec_verify_ct, spec_num_correct_drafts)",
    nodes=NodeLines(source="sglang 0.5.23 arg_groups/fields/parallel.py"),
)
