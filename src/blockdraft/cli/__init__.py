"""The command line. `main` is the entry point; each file owns one part of it."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `blockdraft` command."""
    from blockdraft.cli.app import main as run

    run()
