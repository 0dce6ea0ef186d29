"""How exactly does each family of targets take positions back, and which families are there?

Tiny random models: a prompt, then 200 blocks of random ids of which a random part is kept; the logits of what was kept
against one forward over the same text, as a part of the largest logit. Next to it the same pieces with nothing taken
back (rounding) and the public reference recipe (the crop of transformers' own cache).

python -m benchmarks.rollback                            some minutes of one thread, to results/rollback.json
python -m benchmarks.rollback --write docs/targets.md    the tables, from the result and the package's lists
python -m benchmarks.rollback --check docs/targets.md
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from benchmarks import common, markdown, session
from benchmarks.table import split

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from blockdraft.targets import Target

sys.path.append(str(session.ROOT / "tests"))  # where the tiny models are

BEGIN, END = "<!-- rollback:begin -->", "<!-- rollback:end -->"
RESULT = "rollback.json"
NUM_ROUNDS, WIDTH, NUM_PROMPT, SEED = 200, 6, 9, 0
MAX_LENGTH = 2048
_COUNTER = "a counter is moved back"
_MAX_PARAMETERS = 3_000_000  # of a model of ``others``
DTYPES = ("float64", "float32")
_FUSED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"use_sliding_window": False, "layer_types": ["full_attention"] * 4},
}


# ---- the rounds ----------------------------------------------------------------------------------------------------
Round: TypeAlias = tuple[list[int], int]  # ids of the block, how many are kept
Maker: TypeAlias = "Callable[[torch.dtype], tuple[Target, Any]]"


def rounds(vocab_size: int, num_rounds: int, *, min_keep: int = 0, seed: int = SEED) -> list[Round]:
    """The prompt, all of it kept, and blocks of one or WIDTH ids of which `min_keep` to all are."""
    draw = random.Random(seed)
    made: list[Round] = [([draw.randrange(3, vocab_size) for _ in range(NUM_PROMPT)], NUM_PROMPT)]
    for _ in range(num_rounds):
        count = draw.choice([1, WIDTH, WIDTH, WIDTH])
        made.append(([draw.randrange(3, vocab_size) for _ in range(count)], draw.randint(min_keep, count)))
    return made


def kept_of(blocks: Iterable[Round]) -> list[int]:
    return [i for ids, keep in blocks for i in ids[:keep]]


def error_of(feed: Callable[[Tensor, int], Tensor], blocks: list[Round], expected_TV: Tensor) -> float:
    """The worst difference of the logits of kept positions, as a part of the largest logit.

    `feed` takes ids and how many of them stay, and gives the logits of those that stay.
    """
    import torch

    found_TV = torch.cat([feed(torch.tensor(ids), keep) for ids, keep in blocks])
    return float((found_TV - expected_TV).abs().max() / expected_TV.abs().max())


def measure(target: Target, num_rounds: int = NUM_ROUNDS) -> dict[str, float]:
    """`error` of a row with positions taken back, `rounding` of one that was never given them."""
    import torch

    blocks = rounds(target.facts.vocab_size, num_rounds)
    [whole, taken, honest] = [target.new_row() for _ in range(3)]
    [expected] = target.forward([torch.tensor(kept_of(blocks))], [whole])

    def take_back(ids: Tensor, keep: int) -> Tensor:
        [scored] = target.forward([ids], [taken])
        target.rollback([taken], [keep])
        return scored.logits_TV[:keep]

    def leave_out(ids: Tensor, keep: int) -> Tensor:
        return target.forward([ids[:keep]], [honest])[0].logits_TV if keep else expected.logits_TV[:0]

    try:
        return {
            "error": error_of(take_back, blocks, expected.logits_TV),
            "rounding": error_of(leave_out, blocks, expected.logits_TV),
        }
    finally:
        for row in (whole, taken, honest):
            target.free(row)


def reference(model: Any, num_rounds: int = NUM_ROUNDS) -> dict[str, Any]:
    """Such rounds by the public recipe: a recording cache of transformers, cropped behind every block.

    Its loop always keeps the first id of a block, so here one is kept at least. Where it stops with an error, `error`
    is what was seen before.
    """
    import torch
    from transformers import DynamicCache

    blocks = rounds(model.get_input_embeddings().weight.shape[0], num_rounds, min_keep=1)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    seen: dict[str, Any] = {"outcome": "ran"}
    found: list[Tensor] = []
    with torch.inference_mode():
        expected_TV = model(torch.tensor([kept_of(blocks)]), use_cache=False).logits[0]
        for number, (ids, keep) in enumerate(blocks):
            doing = "forward"
            try:
                logits_TV = model(torch.tensor([ids]), cache=cache, use_cache=True).logits[0, :keep]
                doing = "crop"
                cache.crop(keep - len(ids))
            except (RuntimeError, TypeError, ValueError, AttributeError, IndexError) as fault:
                seen = {"outcome": type(fault).__name__, "in": doing, "block": number}
                break
            found.append(logits_TV)
    if found:
        count = sum(map(len, found))
        error = float((torch.cat(found) - expected_TV[:count]).abs().max() / expected_TV.abs().max())
        seen = {**seen, "error": error}
    return {**seen, "is_croppable": bool(cache.is_croppable)}


# ---- the families --------------------------------------------------------------------------------------------------
def families() -> dict[str, Maker]:
    """Name -> maker of a tiny target and of the transformers model in it (None: it has none), in the table's order."""
    import tiny_hybrids
    import tiny_targets

    made: dict[str, Maker] = {family: _attention(family) for family in tiny_targets.ATTENTION_ONLY}
    made |= {f"{family}, fused": _fused(family) for family in _FUSED}
    made |= {family: _hybrid(family) for family in (*tiny_hybrids.SPARSE, *tiny_hybrids.RECURRENT, *tiny_hybrids.TRIED)}
    return {**made, "kimi_k3": _kimi_k3}


def _attention(family: str, **changes: Any) -> Maker:
    def make(dtype: torch.dtype) -> tuple[Target, Any]:
        from blockdraft.targets import HFTarget
        from tiny_targets import tiny_model

        model = tiny_model(family, dtype=dtype, max_position_embeddings=MAX_LENGTH, **changes)
        return HFTarget(model), model

    return make


def _hybrid(family: str) -> Maker:
    def make(dtype: torch.dtype) -> tuple[Target, Any]:
        from blockdraft.targets import HFTarget
        from tiny_hybrids import tiny_hybrid

        model = tiny_hybrid(family, dtype=dtype)
        return HFTarget(model), model

    return make


def _fused(family: str) -> Maker:
    def make(dtype: torch.dtype) -> tuple[Target, Any]:
        from blockdraft.targets.fused import FusedTarget

        plain, model = _attention(family, **_FUSED[family])(dtype)
        return FusedTarget(model, plain.facts, (), pack=dtype.itemsize == 4), model

    return make


def _kimi_k3(dtype: torch.dtype) -> tuple[Target, Any]:
    from blockdraft.config import TargetFacts
    from blockdraft.targets.kimi_k3 import KimiK3Target
    from kimi_k3_kit import edited, tiny_model

    facts = TargetFacts.from_config(edited(max_position_embeddings=MAX_LENGTH))
    return KimiK3Target(tiny_model(dtype=dtype, max_position_embeddings=MAX_LENGTH), facts), None


def method(target: Any) -> str:
    """How a target takes positions back, from what it is made of."""
    from blockdraft.targets import HFTarget
    from blockdraft.targets.kimi_k3 import KimiK3Target

    if isinstance(target, KimiK3Target):
        return "each state is summed anew from the tape of its writes"
    mixers = target._mixers if isinstance(target, HFTarget) else None
    if mixers is None:
        return _COUNTER
    if not mixers.can_repeat:
        return "cache layers of its own class are put back, the kept part is run again whole"
    num_deltas = len(mixers.deltas)
    parts = [f"the recurrence of {num_deltas} mixers runs again"] if num_deltas else []
    if num_whole := len(mixers.modules) - num_deltas:
        parts.append(f"{num_whole} mixer{'s'[: num_whole != 1]} run{'s'[: num_whole == 1]} again whole")
    return f"states are put back; on the kept part, {' and '.join(parts)}"


def rows_of(target: Any) -> str:
    """How several rows of a target run, from what it is made of."""
    from blockdraft.targets import HFTarget

    if not isinstance(target, HFTarget):
        return "one pass"
    return {None: "one by one", "modules": "one pass, attention one by one"}.get(target.way, "one pass")


def others() -> list[str]:
    """Every other family of causal language models of transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(families()))


def examined(family: str) -> dict[str, Any]:
    """What the self-test finds of a family, in float64; why it was left out, where it was.

    Left out are families whose model does not come out small from the settings of a tiny Llama.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from blockdraft.errors import BlockdraftError
    from blockdraft.targets import HFTarget
    from blockdraft.targets.selftest import examine
    from tiny_targets import tiny_config

    try:
        config = tiny_config(family, max_position_embeddings=MAX_LENGTH)
        config._experts_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        if sum(parameter.numel() for parameter in model.parameters()) > _MAX_PARAMETERS:
            return {"left_out": "its other settings make it large"}
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(config).double().eval()
    except Exception as fault:  # its configuration needs more than that
        return {"left_out": f"its configuration needs more ({type(fault).__name__})"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "A_log" not in name:
                parameter.normal_(std=0.1)
    try:
        target = HFTarget(model)
        seen = examine(target)
    except (BlockdraftError, RuntimeError) as fault:  # no causal decoder; parts in float32 whatever the model is
        return {"left_out": f"it does not run so ({type(fault).__name__})"}
    found = {"error": seen.error, "rounding": seen.noise, "mistake": seen.contrast, "rows": rows_of(target)}
    target.close()
    return found


def refused() -> dict[str, dict[str, Any]]:
    """What transformers itself does with each family that is refused: one forward, and the same ids in three."""
    from blockdraft.config import REFUSED_RECURRENT_MODEL_TYPES
    from tiny_hybrids import tiny_hybrid

    return {family: pieces(tiny_hybrid(family, std=0.25)) for family in sorted(REFUSED_RECURRENT_MODEL_TYPES)}


def pieces(model: Any) -> dict[str, Any]:
    """How far off the logits of a transformers model are when its own cache carries it over two cuts."""
    import torch
    from transformers import DynamicCache

    if not takes_cache(model):
        return {"outcome": "takes no cache of transformers"}
    ids_1T = torch.tensor([kept_of(rounds(model.get_input_embeddings().weight.shape[0], 30))])[:, :60]
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        expected_TV = model(ids_1T, use_cache=False).logits[0]
        try:
            found = [model(part, cache=cache, use_cache=True).logits[0] for part in ids_1T.split(20, dim=1)]
        except (ValueError, AttributeError):
            return {"outcome": "insists on a cache of its own"}
    return {"outcome": "ran", "error": float((torch.cat(found) - expected_TV).abs().max() / expected_TV.abs().max())}


def takes_cache(model: Any) -> bool:
    """Whether a model takes a cache of transformers."""
    return "cache" in inspect.signature(model.forward).parameters


# ---- running -------------------------------------------------------------------------------------------------------
def run(names: Iterable[str], num_rounds: int = NUM_ROUNDS) -> Iterable[dict[str, Any]]:
    """One entry per family."""
    import torch

    makers = families()
    for name in names:
        start = time.perf_counter()
        entry: dict[str, Any] = {"family": name}
        for word in DTYPES:
            target, model = makers[name](getattr(torch, word))
            if target.dtype != getattr(torch, word):
                entry[word] = None
                continue
            entry |= {"method": method(target), "rows": rows_of(target), word: measure(target, num_rounds)}
            if hasattr(target, "close"):
                target.close()
            if "reference" not in entry:
                entry["reference"] = (
                    {"outcome": "not in transformers"} if model is None else reference(model, num_rounds)
                )
        session.note(f"{name}: {_shown(entry['float64'])}, {time.perf_counter() - start:.1f} s")
        yield entry


def result(options: argparse.Namespace) -> dict[str, Any]:
    """All of it; what the work file holds already is not run again."""
    settings = {
        "device": "cpu",
        "threads": options.threads,
        "dtype": " and ".join(DTYPES),
        "seed": SEED,
        "rounds": NUM_ROUNDS,
        "width": WIDTH,
        "prompt": NUM_PROMPT,
    }
    facts = session.run_facts(argparse.Namespace(device="cpu"))
    work = common.Work.open(options.work / "rollback.jsonl", settings, facts)
    for family in families():
        if (family, "rounds") not in work.records:
            [entry] = run([family])
            work.append(family, "rounds", entry)
    for family in others():
        if (family, "self-test") not in work.records:
            work.append(family, "self-test", examined(family))
            session.note(f"{family}: {_without_key(work.records[family, 'self-test'])}")
    seen = {family: _without_key(work.records[family, "self-test"]) for family in others()}
    return {
        "what": "worst difference of kept positions' logits from one forward over the kept text, of the largest logit",
        "settings": settings,
        "runs": work.runs or [facts],
        "refused": refused(),
        "families": [_without_key(work.records[family, "rounds"]) for family in families()],
        "others": {family: found for family, found in seen.items() if "error" in found},
    }


def _without_key(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("prompt", "mode")}


# ---- the tables ----------------------------------------------------------------------------------------------------
def block(found: Mapping[str, Any]) -> str:
    """What stands between the marks."""
    return "\n\n".join([_standing(found), _exactness(found), _others(found["others"])])


def _others(found: Mapping[str, Mapping[str, Any]]) -> str:
    """One paragraph about the families that the self-test alone was run on."""
    together = sum(one["rows"] != "one by one" for one in found.values())
    worst = max(one["error"] for one in found.values())
    smallest = min(one["mistake"] for one in found.values())
    return (
        f"The self-test on tiny models of {len(found)} more families, in float64: off by {worst:.0e} at most (rejected"
        f" ids that are left in show as {smallest:.0e} at least); {together} of them run many rows in one pass:"
        f" {_names(found)}."
    )


def _standing(found: Mapping[str, Any]) -> str:
    """Which families with state are run, tried or refused, from the package's own lists."""
    from blockdraft.config import PROVEN_RECURRENT_MODEL_TYPES, REFUSED_RECURRENT_MODEL_TYPES
    from blockdraft.config.pairing import _RECURRENT_MODEL_TYPES

    measured = {entry["family"] for entry in found["families"] if entry["method"] != _COUNTER}
    tried = (_RECURRENT_MODEL_TYPES | measured) - PROVEN_RECURRENT_MODEL_TYPES - REFUSED_RECURRENT_MODEL_TYPES
    rows = [
        ["proven", _names(PROVEN_RECURRENT_MODEL_TYPES), "the table below and the tests, with transformers 5.24"],
        ["self-tested at load", _names(tried) + ", and any that is not named here", "what the self-test finds"],
    ]
    reasons: dict[str, list[str]] = {}
    for family in sorted(REFUSED_RECURRENT_MODEL_TYPES):
        reasons.setdefault(_reason(found["refused"][family]), []).append(family)
    rows += [["refused", _names(families), reason] for reason, families in reasons.items()]
    return _table(["families that hold more than keys and values", "`model_type`", "why"], rows)


def _reason(seen: Mapping[str, Any]) -> str:
    if seen["outcome"] == "ran":
        return "its own forward of several ids after others forgets the state: a block cannot be scored"
    return f"its states are out of reach: it {seen['outcome']}"


def _names(families: Iterable[str]) -> str:
    return ", ".join(f"`{family}`" for family in sorted(families))


def _exactness(found: Mapping[str, Any]) -> str:
    settings, facts = found["settings"], found["runs"][-1]
    heads = ["family", "many rows", "how positions are taken back", "float64", "float32", "float32, nothing taken back"]
    rows = [
        [
            entry["family"],
            entry["rows"],
            entry["method"],
            _shown(entry["float64"]),
            f"{entry['float32']['error']:.0e}",
            f"{entry['float32']['rounding']:.0e}",
            _reference(entry["reference"]),
        ]
        for entry in found["families"]
    ]
    machine, versions = facts["machine"], facts["versions"]
    commit = (facts["commit"] or "unknown")[:10] + ("+" if facts["is_dirty"] else "")
    return "\n".join(
        [
            f"**Worst difference over {settings['rounds']} blocks of random acceptance, of the largest logit**",
            "",
            _table([*heads, "reference recipe"], rows),
            "",
            f"<sub>{machine['cpu']}, {markdown.threads(found)}, {machine['os']}, Python {versions['python']}, torch "
            f"{versions['torch']}, transformers {versions['transformers']}, {facts['date_utc'][:10]}, commit {commit}"
            "</sub>",
        ]
    )


def _shown(measured: Mapping[str, float] | None) -> str:
    return "computes in float32" if measured is None else f"{measured['error']:.0e}"


def _reference(seen: Mapping[str, Any]) -> str:
    if seen["outcome"] == "not in transformers":
        return "not in transformers"
    star = "" if seen["is_croppable"] else " *"
    if seen["outcome"] == "ran":
        return f"{seen['error']:.0e}{star}"
    if seen["in"] == "crop" and seen["block"] == 0:
        return f"no crop ({seen['outcome']})"
    return f"{seen['error']:.0e}{star}, then {seen['outcome']} in block {seen['block']}"


def _table(heads: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))


def written(text: str, found: Mapping[str, Any]) -> str:
    """The text of a file with everything between its marks made anew."""
    before, _, after = split(text, BEGIN, END)
    return f"{before}\n{block(found)}\n{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--results", type=Path, default=session.ROOT / "results")
    parser.add_argument(
        "--work", type=Path, default=session.ROOT / "benchmarks" / "work", help="folder of the work file"
    )
    session.add_document(parser)
    options = parser.parse_args()
    file = options.results / RESULT
    if options.write or options.check:
        return session.show(options, lambda text: written(text, markdown.read(file)), "rollback")
    import torch

    torch.set_num_threads(options.threads)
    common.write_json(file, result(options))
    return 0


if __name__ == "__main__":
    session.finish(main)
