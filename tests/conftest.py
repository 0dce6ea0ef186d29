"""Fixtures that every test file shares, and one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from tiny_pair import TinyPair

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of prototypes beside the repository; tests that need it are skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("BLOCKDRAFT_SHARED", default))
    if not folder.is_dir():
        pytest.skip("the shared folder is missing: set BLOCKDRAFT_SHARED to it")
    return folder


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    """A tiny random target and a draft that fits it, as folders on disk."""
    from tiny_pair import write_tiny_pair

    return write_tiny_pair(tmp_path_factory.mktemp("pair"))
