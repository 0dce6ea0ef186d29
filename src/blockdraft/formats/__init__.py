"""Checkpoint dialects: one module each, which reads and writes names and nesting on disk, no maths."""
