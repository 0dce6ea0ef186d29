"""Fixtures that every test file shares, and one thread for torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of prototypes beside the repository; tests that need it are skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("BLOCKDRAFT_SHARED", default))
    if not folder.is_dir():
        pytest.skip("the shared folder is missing: set BLOCKDRAFT_SHARED to it")
    return folder
