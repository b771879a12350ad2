"""A torch.profiler trace of chosen steps, and on CUDA a snapshot of the allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

FOLDER = "profile"
MEMORY_EVENTS = 200_000


class Profiler:
    """Traces the steps in ``steps`` into ``run_dir/profile/rank<r>.pt.trace.json.gz`` (Chrome, Perfetto and TensorBoard
    read it), and on CUDA the allocations of those steps into ``rank<r>.memory.pickle`` (pytorch.org/memory_viz)."""

    def __init__(self, run_dir: Path, rank: int, steps: range, device: torch.device):
        self.folder, self.rank, self.steps, self.cuda = run_dir / FOLDER, rank, steps, device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self.cuda else [])]
        self.profile = profile(activities=activities) if steps else None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[bool]:
        """Around one step; yields whether it is traced. The trace is written after the last of the steps."""
        if self.profile is None or step not in self.steps:
            yield False
            return
        if step == self.steps[0]:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.cuda:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            self.profile.start()
        # the name by which the viewers find steps
        with record_function(f"ProfilerStep#{step}"):
            yield True
        if step == self.steps[-1]:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.folder / f"rank{self.rank}.pt.trace.json.gz"))
            if self.cuda:
                snapshot = str(self.folder / f"rank{self.rank}.memory.pickle")
                torch.cuda.memory._dump_snapshot(snapshot)
                torch.cuda.memory._record_memory_history(enabled=None)
