"""The tables of docs/shapes.md: every published drafter whose config is known, read by the package and counted.

python -m benchmarks.shapes --write docs/shapes.md
python -m benchmarks.shapes --check docs/shapes.md
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.published import PUBLISHED, Published
from blockdraft.config import DraftConfig, MlaConfig
from blockdraft.formats import zlab
from blockdraft.inspection import cache_bytes, count_parameters, file_sizes, step_cost

_SIZING = {"num_hidden_layers", "num_attention_heads", "head_dim", "intermediate_size"}
_FAMILIES = {"dflash": "DFlash", "dflash2": "DFlash 2", "dspark": "DSpark", "dspine": "DSpine"}
_HEAD = """# Published drafters: shapes, sizes, costs

Written by `python -m benchmarks.shapes --write docs/shapes.md` from `benchmarks/published.py`; a test compares the two.
No config.json is fetched: what is known of each comes from the sources named below, and a key that no source gives is
assumed and listed. Counts are those of the tensors that the package asks a file for, `blockdraft inspect` shows the
same for any config.json.

"""


def document() -> str:
    """The whole of docs/shapes.md."""
    known = [entry for entry in PUBLISHED if entry.config is not None]
    return "\n".join(
        [
            _HEAD + "## Shapes",
            "",
            *_table(
                ["drafter", "family", "layers", "heads", "hidden / MLP", "taps", "block", "mask", "seen"],
                _shapes(known),
            ),
            "",
            "Heads: query/key-value heads x width, or of latent attention heads x (plain + rotary), values, ranks of",
            "query and latent. Seen: window of a layer, b bidirectional or c causal in the block.",
            "",
            "## Sizes",
            "",
            *_table(["drafter", "parameters", "tensors", "bf16", "8 bits", "4 bits", "agrees with"], _sizes(known)),
            "",
            "Parameters and tensors include an embedding, head or mask vector that the file carries. \\* depends on an",
            "assumed size.",
            "",
            "## Costs of a step",
            "",
            *_table(
                ["drafter", "cache a token", "cache at most", "weights read", "head read", "inject a token", "block"],
                _costs(known),
            ),
            "",
            "One row, bf16, whole block; the definitions are those of `blockdraft inspect` ([inspect.md](inspect.md)).",
            "",
            "## What is known, and what is assumed",
            "",
            *_table(["drafter", "target", "from", "assumed"], _sources(PUBLISHED)),
            "",
            "A drafter of which everything is unknown is read by the same rules as any other: what its config.json",
            "says counts, what it leaves out is asked for by name, and a key that nobody knows is refused.",
            "",
        ]
    )


def _table(head: list[str], rows: Iterable[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _shapes(entries: list[Published]) -> Iterable[list[str]]:
    for entry in entries:
        config = entry.read()
        yield [
            entry.name,
            _FAMILIES[config.family] + (" MLA" if isinstance(config.attention, MlaConfig) else ""),
            str(config.num_layers),
            _heads(config),
            f"{config.hidden_size} / {config.intermediate_size}",
            f"{' '.join(map(str, config.target_layer_ids))} of {config.num_target_layers}",
            str(config.block_size),
            str(config.mask_token_id),
            _seen(config),
        ]


def _heads(config: DraftConfig) -> str:
    attention = config.attention
    if isinstance(attention, MlaConfig):
        return (
            f"{attention.num_heads} x ({attention.qk_nope_head_dim} + {attention.qk_rope_head_dim}), "
            f"{attention.v_head_dim}, {attention.q_lora_rank}, {attention.kv_lora_rank}"
        )
    return f"{attention.num_heads}/{attention.num_kv_heads} x {attention.head_dim}"


def _seen(config: DraftConfig) -> str:
    """Runs of layers that are alike: "4 x 2048 c, full b"."""
    runs: list[tuple[str, int]] = []
    for layer in config.layers:
        text = f"{layer.window or 'full'} {'c' if layer.is_causal else 'b'}"
        if runs and runs[-1][0] == text:
            runs[-1] = (text, runs[-1][1] + 1)
        else:
            runs.append((text, 1))
    return ", ".join(text if count == 1 else f"{count} x {text}" for text, count in runs)


def _sizes(entries: list[Published]) -> Iterable[list[str]]:
    for entry in entries:
        config = entry.read()
        total = count_parameters(config, entry.own)["total"]
        tensors = len(zlab.expected_tensors(config)) + len(entry.own)
        star = "\\*" if _SIZING & set(entry.assumed) else ""
        sizes = file_sizes(config, entry.own)
        files = [f"{sizes[kind] / 1e9:.3f} GB" for kind in ("bf16", "8_bit", "4_bit")]
        yield [entry.name, f"{total:,}{star}", f"{tensors}{star}", *files, _agrees(entry, total, tensors)]


def _agrees(entry: Published, total: int, tensors: int) -> str:
    checks = [
        (entry.num_parameters, total, f"{entry.num_parameters or 0:,} parameters"),
        (entry.billions, _rounded(total / 1e9, entry.billions), f"{entry.billions} B"),
        (entry.gigabytes, _rounded(2 * total / 1e9, entry.gigabytes), f"{entry.gigabytes} GB"),
        (entry.num_tensors, tensors, f"{entry.num_tensors} tensors"),
    ]
    found = [text if given == ours else f"NOT {text}" for given, ours, text in checks if given is not None]
    return ", ".join(found) or "nothing published"


def _rounded(number: float, like: str | None) -> str:
    """The number with as many decimals as another has."""
    return f"{number:.{len((like or '').partition('.')[2])}f}"


def _costs(entries: list[Published]) -> Iterable[list[str]]:
    for entry in entries:
        config = entry.read()
        cost = step_cost(config)
        limit = cache_bytes(config, config.max_position_embeddings)
        yield [
            entry.name,
            f"{cost['cache_bytes_per_token']:,} B",
            f"{limit / 1e6:.1f} MB" if limit < 1e9 else f"{limit / 1e9:.2f} GB",
            f"{cost['weight_bytes_per_step'] / 1e9:.3f} GB",
            f"{cost['head_bytes_per_step'] / 1e9:.3f} GB",
            f"{cost['flops']['inject_per_position'] / 1e6:.0f} MFLOP",
            f"{cost['flops']['block'] / 1e9:.1f} GFLOP",
        ]


def _sources(entries: Iterable[Published]) -> Iterable[list[str]]:
    for entry in entries:
        assumed = ", ".join(f"`{key}`" for key in entry.assumed) or "nothing"
        yield [entry.name, entry.target, entry.source, assumed if entry.config is not None else "everything"]


def main() -> None:
    """Write the document, or exit 1 if the file is not the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--check", type=Path, metavar="FILE")
    given = parser.parse_args()
    if given.write is not None:
        given.write.write_text(document(), encoding="utf-8")
    elif given.check.read_text(encoding="utf-8") != document():
        sys.exit(f"{given.check} is not what this command writes: run it with --write")


if __name__ == "__main__":
    main()
