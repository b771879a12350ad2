"""What a rank measures of itself, and the JSON lines in which it says so."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from trainer_core.counts import GIB


@dataclass(frozen=True)
class StepRecord:
    """One step (from 1) on one rank: the line of steps.jsonl.

    ``loss`` in nats a token is None on ranks that do not own it; ``tokens`` are those of the global batch. The memory
    peaks are those of this step (resident set: of the process so far), None where the device has no such figure.
    ``excluded`` says why the step is no sample of the speed.
    """

    step: int
    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    step_time_s: float
    peak_active_gib: float | None = None
    peak_reserved_gib: float | None = None
    peak_rss_gib: float | None = None
    alloc_retries: int = 0
    recompiles: int = 0
    excluded: str | None = None


class RankWriter:
    """Appends JSON lines to a rank's file; every line is out at once and whole, since it is also the sign of life."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, kind: str, **values: Any) -> None:
        """One line. JSON has no NaN: figures that are not finite become null and are named in ``not_finite``."""
        bad = [k for k, v in values.items() if isinstance(v, float) and not math.isfinite(v)]
        row = {"kind": kind, "time": time.time(), **values, **dict.fromkeys(bad)}
        if bad:
            row["not_finite"] = bad
        os.write(self.file, (json.dumps(row, allow_nan=False) + "\n").encode())

    def step(self, record: StepRecord) -> None:
        self.write("step", **asdict(record))

    def close(self) -> None:
        os.close(self.file)


class MemoryMeter:
    """Peaks of each step. CUDA: the caching allocator's; every device: the resident set."""

    def __init__(self, device: torch.device):
        self.device, self.retries = device, 0

    def read(self) -> dict[str, Any]:
        """The StepRecord's memory fields since the last call; starts the next step's peaks."""
        rss = peak_rss_bytes() / GIB
        if self.device.type != "cuda":
            return {"peak_active_gib": None, "peak_reserved_gib": None, "peak_rss_gib": rss, "alloc_retries": 0}
        stats = torch.cuda.memory_stats(self.device)
        retries = stats["num_alloc_retries"]
        before, self.retries = self.retries, retries
        torch.cuda.reset_peak_memory_stats(self.device)
        return {
            "peak_active_gib": stats["active_bytes.all.peak"] / GIB,
            "peak_reserved_gib": stats["reserved_bytes.all.peak"] / GIB,
            "peak_rss_gib": rss,
            "alloc_retries": retries - before,
        }


def peak_rss_bytes() -> int:
    """Peak resident set of this process. Linux: VmHWM, since ru_maxrss of a child begins at its parent's."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(row for row in status.read_text().splitlines() if row.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class CompileCounter:
    """What torch.compile did. Reads Dynamo's own counters, and does not load Dynamo where nothing compiles."""

    def __init__(self) -> None:
        self.seen = (0, 0)
        self.take()

    def take(self) -> tuple[int, int]:
        """(graphs compiled, frames compiled again) since the last call."""
        now = (self.graphs(), self.recompiles())
        (graphs, again), self.seen = self.seen, now
        return now[0] - graphs, now[1] - again

    def graphs(self) -> int:
        return self._counters("stats").get("unique_graphs", 0)

    def breaks(self) -> int:
        return sum(self._counters("graph_break").values())

    def recompiles(self) -> int:
        module = sys.modules.get("torch._dynamo.convert_frame")
        return sum(n - 1 for n in module.FRAME_COMPILE_COUNTER.values()) if module else 0

    def evidence(self) -> dict[str, int]:
        return {"graphs_compiled": self.graphs(), "graph_breaks": self.breaks()}

    @staticmethod
    def _counters(name: str) -> dict[str, int]:
        module = sys.modules.get("torch._dynamo.utils")
        return module.counters[name] if module else {}


class GpuSampler:
    """Samples a GPU through NVML in a thread: utilisation, power, clock, memory. Use as a context manager.

    ``reason`` says why there is nothing to sample (no GPU, no pynvml); then it does nothing.
    """

    def __init__(self, device: torch.device, interval_s: float = 0.5):
        self.interval_s, self.stopped = interval_s, threading.Event()
        self.samples: list[dict[str, float]] = []
        self.thread: threading.Thread | None = None
        self.read, self.reason = _nvml_reader(device)

    def __enter__(self) -> GpuSampler:
        if self.read is not None:
            self.thread = threading.Thread(target=self._run, args=(self.read,), daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stopped.set()
        if self.thread is not None:
            self.thread.join()

    def _run(self, read: Callable[[], dict[str, float]]) -> None:
        while True:
            self.samples.append(read())
            if self.stopped.wait(self.interval_s):
                return

    def summary(self) -> dict[str, Any]:
        """Mean and maximum of every figure so far, or the reason why there are none."""
        samples = list(self.samples)
        if not samples:
            return {"reason": self.reason or "no sample was taken"}
        columns = {key: [s[key] for s in samples] for key in samples[0]}
        return {"n": len(samples), **{k: {"mean": sum(v) / len(v), "max": max(v)} for k, v in columns.items()}}


def _nvml_reader(device: torch.device) -> tuple[Callable[[], dict[str, float]] | None, str | None]:
    """A function that reads the GPU behind ``device``, or the reason why there is none.

    The GPU is found by its UUID: NVML's numbers do not follow CUDA_VISIBLE_DEVICES.
    """
    if device.type != "cuda":
        return None, f"the device is {device.type}, no GPU"
    try:
        import pynvml
    except ModuleNotFoundError:
        return None, "NVML sampling needs nvidia-ml-py: pip install 'meshmark[cuda]'"
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"

    def read() -> dict[str, float]:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "utilisation_frac": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "sm_clock_mhz": float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            "memory_used_gib": memory.used / GIB,
        }

    return read, None
