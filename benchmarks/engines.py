"""docs/engines.md: the matrix of drafts and engines, from the rule tables.

python -m benchmarks.engines            # print it
python -m benchmarks.engines --write docs/engines.md
python -m benchmarks.engines --check docs/engines.md    # exit 1 if it is not what the tables say
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.published import PUBLISHED
from blockdraft.engines.matrix import document as matrix_document
from blockdraft.inspection.engines import Facts


def document() -> str:
    """The document for every published draft of which something is known."""
    drafts = {
        entry.name: Facts(config=entry.read(), dialect=entry.dialect, raw=dict(entry.config), own=entry.own)
        for entry in PUBLISHED
        if entry.config is not None
    }
    return matrix_document(drafts)


def main() -> int:
    parser = argparse.ArgumentParser(description="Which draft runs in which engine.")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--write", type=Path)
    where.add_argument("--check", type=Path)
    options = parser.parse_args()
    text = document()
    if options.write is not None:
        options.write.write_text(text)
    elif options.check is not None:
        if options.check.read_text() != text:
            print(f"{options.check} is not what the tables say: python -m benchmarks.engines --write {options.check}")
            return 1
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
