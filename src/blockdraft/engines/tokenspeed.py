"""TokenSpeed: how it is started with a draft, what its log says about it, and where each of that was read.

Of the card of lightseekorg/kimi-k3-dflash2 the flags of its command are known as others quote them; the rest of that
command (lengths, CUDA graphs) follows TokenSpeed's own gates for Kimi K3.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from blockdraft.engines.rules import Alarm, Engine, Flag, Forbidden, NodeLines, Reading, Support, Variable
from blockdraft.engines.setting import Setting

_LARGEST_GRAPH = 16  # requests, where nobody says how many: the size that its own Kimi K3 gates capture


def _head(setting: Setting) -> Sequence[str]:
    return ("tokenspeed", "serve", setting.target_path)


def _backend(setting: Setting) -> str | None:
    """`mla` for a draft on latent attention: the one that its publisher validated."""
    return "mla" if setting.draft.is_mla else None


def _graph_sizes(setting: Setting) -> tuple[str, ...]:
    largest = setting.concurrency or _LARGEST_GRAPH
    sizes = [1]
    while sizes[-1] * 2 < largest:
        sizes.append(sizes[-1] * 2)
    return tuple(str(size) for size in dict.fromkeys([*sizes, largest]))


def _stream(setting: Setting) -> str | None:
    """Only where the file is silent: TokenSpeed reads `aux_hidden_stream` itself."""
    nest = setting.draft.raw.get("dflash_config") or {}
    is_declared = nest.get("aux_hidden_stream") or setting.draft.raw.get("aux_hidden_stream")
    return setting.tap_stream if setting.is_kimi_k3 and not is_declared else None


TOKENSPEED = Engine(
    name="tokenspeed",
    label="TokenSpeed",
    read="0.1.0",
    distributions=("tokenspeed",),
    package="tokenspeed",
    program="tokenspeed",
    head=_head,
    features={"dflash": "runtime/models/dflash.py", "dflash2": "runtime/models/dflash2.py"},
    variables=(
        Variable(
            name="TOKENSPEED_DFLASH_AUX_STREAM",
            value=_stream,
            why="which stream of Kimi K3 the taps are; the draft's file does not say, and without it they are prefix",
            source="tokenspeed f4d8ec6e test/ci/eval/kimi-k3-nvfp4-dspark-tp8 (it sets attn_res); drafter at 259c6ea",
        ),
    ),
    flags=(
        Flag(
            name="--tensor-parallel-size",
            aliases=("--tp", "--attn-tp-size"),
            value=lambda setting: setting.tensor_parallel,
            why="every GPU named holds a slice of each layer",
            source="lightseekorg/kimi-k3-dflash2 card (8); tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--tp",
        ),
        Flag(
            name="--nnodes",
            value=lambda setting: setting.machine.num_nodes if setting.is_multi_node else None,
            why="nodes that share the target",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--nodes",
        ),
        Flag(
            name="--node-rank",
            value=lambda setting: setting.node_rank if setting.is_multi_node else None,
            why="which of the nodes this is; node 0 serves HTTP",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--node-rank",
        ),
        Flag(
            name="--nprocs-per-node",
            value=lambda setting: setting.machine.num_gpus if setting.is_multi_node else None,
            why="GPUs of each node",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--gpus",
        ),
        Flag(
            name="--world-size",
            value=lambda setting: setting.machine.total_gpus if setting.is_multi_node else None,
            why="GPUs of all nodes",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--gpus",
        ),
        Flag(
            name="--dist-init-addr",
            value=lambda setting: setting.head if setting.is_multi_node else None,
            why="where the nodes meet, on node 0",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
            option="--head",
        ),
        Flag(
            name="--host",
            value=lambda setting: setting.host,
            why="where it listens",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--host",
        ),
        Flag(
            name="--port",
            value=lambda setting: setting.port,
            why="where it listens",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--port",
        ),
        Flag(
            name="--trust-remote-code",
            value=lambda setting: () if setting.needs_remote_code else None,
            why="the target's config.json points at code of its own",
            source="tokenspeed f4d8ec6e docs/recipes/models.md",
        ),
        Flag(
            name="--mm-encoder-tp-mode",
            value=lambda setting: "data" if setting.is_kimi_k3 else None,
            why="Kimi K3's vision tower is not split over 8 GPUs: whole images go round instead",
            source="tokenspeed f4d8ec6e docs/serving/parallelism.md",
        ),
        Flag(
            name="--speculative-algorithm",
            value=lambda setting: "DSPARK" if setting.is_dspark else "DFLASH",
            why="the draft's family; DFLASH runs DFlash 2 too",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed f4d8ec6e runtime/utils/server_args.py",
        ),
        Flag(
            name="--speculative-draft-model-path",
            value=lambda setting: setting.draft_path,
            why="the draft",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
        ),
        Flag(
            name="--speculative-num-steps",
            value=lambda setting: setting.num_proposals,
            why="proposals of a block; it must be one less than the width, and starts with nothing else",
            source="lightseekorg/kimi-k3-dflash2 card (7); tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--width",
        ),
        Flag(
            name="--speculative-eagle-topk",
            value=lambda setting: 1,
            why="a chain, no tree: nothing else is accepted",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed f4d8ec6e runtime/utils/server_args.py",
        ),
        Flag(
            name="--speculative-num-draft-tokens",
            value=lambda setting: setting.width,
            why="positions that the target scores, anchor included; the file's block_size fixes it",
            source="lightseekorg/kimi-k3-dflash2 card (8); tokenspeed f4d8ec6e execution/drafter/dflash.py",
            option="--width",
        ),
        Flag(
            name="--speculative-draft-model-quantization",
            value=lambda setting: "unquant",
            why="the draft is bf16, whatever the target is",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed f4d8ec6e runtime/utils/server_args.py",
        ),
        Flag(
            name="--attention-backend",
            value=_backend,
            why="the backend that drafts on latent attention were validated with",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed PR 1423 (tokenspeed_mla serves too)",
            is_fixed=False,
        ),
        Flag(
            name="--drafter-attention-backend",
            value=_backend,
            why="the draft's own; left out it follows the target's",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed f4d8ec6e runtime/utils/server_args.py",
            is_fixed=False,
        ),
        Flag(
            name="--sampling-backend",
            value=lambda setting: "flashinfer",
            why="requests are sampled as they ask; `greedy` would ignore temperature, top-k and top-p",
            source="lightseekorg/kimi-k3-dflash2 card; tokenspeed f4d8ec6e runtime/utils/server_args.py",
            is_fixed=False,
        ),
        Flag(
            name="--max-model-len",
            value=lambda setting: setting.context,
            why="the longest request that is served",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--context",
        ),
        Flag(
            name="--max-num-seqs",
            value=lambda setting: setting.concurrency,
            why="requests that run at a time",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--concurrency",
        ),
        Flag(
            name="--max-cudagraph-capture-size",
            value=lambda setting: setting.concurrency or _LARGEST_GRAPH,
            why="the largest batch that runs as a CUDA graph: every batch that is served",
            source="tokenspeed f4d8ec6e test/ci/eval/kimi-k3-dspark-mxfp4-tp8ep8-evalscope-aime26-amd.yaml",
            is_fixed=False,
        ),
        Flag(
            name="--cudagraph-capture-sizes",
            value=_graph_sizes,
            why="batches between are padded to the next of these",
            source="tokenspeed f4d8ec6e test/ci/eval/kimi-k3-dspark-mxfp4-tp8ep8-evalscope-aime26-amd.yaml",
            is_fixed=False,
        ),
        Flag(
            name="--disable-prefill-graph",
            value=lambda setting: () if setting.is_kimi_k3 else None,
            why="beside a draft its graphs for prompts do not fit into what Kimi K3 leaves",
            source="tokenspeed f4d8ec6e test/ci/eval/kimi-k3-nvfp4-dspark-tp8-two-node-...-slurm.yaml",
            is_fixed=False,
        ),
        Flag(
            name="--gpu-memory-utilization",
            value=lambda setting: setting.memory_fraction,
            why="share of a GPU's memory for weights and caches",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
            option="--memory-fraction",
        ),
        Flag(
            name="--enable-log-request-stats",
            value=lambda setting: (),
            why="one line per request with its acceptance, which is where it is measured; it adds no GPU sync",
            source="tokenspeed f4d8ec6e docs/configuration/server.md",
        ),
    ),
    forbidden=(
        Forbidden(
            names=("--speculative-config",),
            allowed=(),
            text="beside the flags it counts num_speculative_tokens as the width, not as proposals: use --width",
            source="tokenspeed f4d8ec6e runtime/utils/server_args.py",
        ),
        Forbidden(
            names=("--headless",),
            allowed=(),
            text="without its gateway there is nothing to probe: run it by hand",
            source="tokenspeed f4d8ec6e cli/serve_smg.py",
        ),
    ),
    supports=(
        Support(
            name="dflash",
            when=lambda setting: setting.draft.family == "dflash",
            oldest="0.1.0",
            feature="dflash",
            text="DFlash",
            source="tokenspeed f4d8ec6e runtime/models/dflash.py",
        ),
        Support(
            name="dflash2",
            when=lambda setting: setting.draft.is_v2,
            oldest="0.1.0",
            feature="dflash2",
            text="DFlash 2",
            source="tokenspeed 0e92f2ae runtime/models/dflash2.py; f4d8ec6e, also 0.1.0, has no such file",
        ),
        Support(
            name="dspark",
            when=lambda setting: setting.is_dspark,
            oldest="0.1.0",
            feature="dflash",
            text="DSpark",
            source="tokenspeed PR 924",
        ),
    ),
    readings=(
        Reading(
            what="width",
            pattern=re.compile(r"server_args=.*?speculative_num_draft_tokens=(\d+)"),
            read=lambda match: int(match[1]),
            source="tokenspeed f4d8ec6e runtime/entrypoints/engine.py; its log names neither taps nor mask",
        ),
    ),
    alarms=(
        Alarm(
            pattern=re.compile(r"DFLASH incremental projection init failed"),
            text="taps are projected after the target's pass instead of within it: slower steps, the same proposals",
            is_fatal=False,
            source="tokenspeed f4d8ec6e execution/drafter/dflash.py",
        ),
    ),
    ready_path="/readiness",
    ready_source="tokenspeed f4d8ec6e cli/serve_smg.py",
    acceptance="log",
    acceptance_source="tokenspeed f4d8ec6e runtime/engine/request_stats.py (acc_len is (C - 1) / S)",
    nodes=NodeLines(source="tokenspeed f4d8ec6e docs/serving/parallelism.md"),
    fixed_width="tokenspeed f4d8ec6e execution/drafter/dflash.py (block_size must be the width, or one less)",
)
