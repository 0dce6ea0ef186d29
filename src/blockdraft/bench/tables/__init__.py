"""The tables: records in, columns of estimates out. All figures carry their interval, prompts being independent.

Owns which numbers stand beside each other. A (data set by width), B (matrix of data sets), C (long contexts), positions
within the block and the output, thinking and answer, speed against the same system without speculation.
"""

from __future__ import annotations

from blockdraft.bench.tables.acceptance import lengths, matrix, other_names
from blockdraft.bench.tables.context import long_context
from blockdraft.bench.tables.positions import OUTPUT_BOUNDS, block_positions, output_positions, sections
from blockdraft.bench.tables.speed import speed_ups

__all__ = [
    "OUTPUT_BOUNDS",
    "block_positions",
    "lengths",
    "long_context",
    "matrix",
    "other_names",
    "output_positions",
    "sections",
    "speed_ups",
]
