"""Where is the loss? Walk, base and oracle acceptance on held-out prompts; misses against rank errors by position.

First 60 GSM8K test questions and first turns of 40 MT-Bench questions, served greedily at --width; at every step that
was served the draft's own logits are looked at again: was the target's token the largest (base), in the list that the
selector walks (oracle), and which of both failed first. A killed run goes on where it was.
"""

from __future__ import annotations

from benchmarks import common, evaluated, session

SETS = {"gsm8k": 60, "mtbench": 40}
RESULT = "where.json"
MODE = "replay"


def main() -> int:
    parser = session.parser(__doc__)
    evaluated.add_options(parser)
    options = parser.parse_args()
    from blockdraft.formats import zlab

    prompts = {
        name: common.load_prompts(options.data, name, min(count, options.limit or count))
        for name, count in SETS.items()
    }
    everything = [prompt for members in prompts.values() for prompt in members]
    checkpoint = zlab.read(session.draft_folder(options))
    settings = session.settings(options) | {"width": options.width}
    path = options.work / f"where.{settings['draft']['sha256']}.{options.dtype}.w{options.width}.jsonl"
    work = common.Work.open(path, settings, session.run_facts(options))
    if any((prompt.id, MODE) not in work.records for prompt in everything):
        target, tokenizer = evaluated.load_target_for(options, checkpoint.config)
        evaluated.evaluate(options, work, MODE, everything, target, tokenizer, checkpoint.config, checkpoint.tensors)
    sets = {}
    for name, members in prompts.items():
        found = evaluated.result_of(options, [work.records[p.id, MODE] for p in members], checkpoint.config)
        evaluated.print_line(name, found)
        sets[name] = {**evaluated.shown(found), "ranks_where_the_walk_failed": evaluated.rank_histograms(found)}
    result = {
        "what": "acceptance of the walk against the largest logit alone and the best path in the lists",
        "formulas": evaluated.formulas(),
        "pair": {name: settings[name] for name in ("draft", "target")},
        "settings": settings,
        "prompts_sha256": {name: common.prompts_digest(members) for name, members in prompts.items()},
        "runs": work.runs,
        "sets": sets,
    }
    common.write_json(options.results / RESULT, result)
    return 0


if __name__ == "__main__":
    session.finish(main)
