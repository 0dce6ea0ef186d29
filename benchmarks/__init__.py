"""Reproducible measurements of blockdraft; scripts of the repository, not part of the package."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: idle threads must not take a shared core
