"""Shared settings: one thread, so that bits do not depend on the machine, and where real data may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture
def shared_data() -> Path:
    """The folder of real data beside the project; tests that need it skip where it is not."""
    folder = SHARED / "data"
    if not folder.is_dir():
        pytest.skip("needs real CIFAR-100 in ../shared/data")
    return folder
