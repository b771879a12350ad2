"""The one SLURM that all tests of this folder share."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_kit import Slurm


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """Use it with the marker ``slurm``. The folder's name is short: sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    running = Slurm.start(folder)
    yield running
    running.stop()
    shutil.rmtree(folder)
