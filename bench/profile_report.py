"""What a run's traces say: top operations, exposed communication, overlap, idle time. No torch.

All shares are of the window, the profiled steps of a rank. On a GPU trace compute are kernels and copies,
communication are NCCL kernels and copies between GPUs. On a CPU trace compute is the time inside operators, and
communication that of gloo's work and of communication operators; the rest, Python between operators and waiting, is
idle. A receive lasts from its posting, so pipeline bubbles show as exposed ``send_recv``.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Interval = tuple[float, float]

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
GPU_COMM = re.compile(r"nccl|multimem|PtoP", re.IGNORECASE)
CPU_COMM = re.compile(r"(_?c10d(_functional)?(_autograd)?)::|gloo:")
KINDS = (
    ("all_gather", r"all_?gather"), ("reduce_scatter", r"reduce_?scatter"), ("all_reduce", r"all_?reduce"),
    ("all_to_all", r"all_?to_?all"), ("broadcast", r"broadcast"), ("send_recv", r"send|recv|PtoP"),
    ("wait", r"wait_tensor"),
)  # fmt: skip
TOP = 15


def profile_report(run_dir: Path) -> dict[str, Any]:
    """{run_dir, steps, mean: shares, ranks: {rank: shares}, top_ops}; the shares are :func:`rank_report`'s.

    Raises FileNotFoundError where the run has no trace, ValueError where one is not readable.
    """
    files = sorted(run_dir.glob("profile/rank*.pt.trace.json*"), key=_rank)
    if not files:
        raise FileNotFoundError(f"{run_dir} has no profile/rank*.pt.trace.json.gz: run it with run.profile=on")
    ranks: dict[str, dict[str, Any]] = {}
    operations: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for path in files:
        events = read_trace(path)
        ranks[str(_rank(path))] = rank_report(events)
        for name, (seconds, count) in operation_times(events).items():
            operations[name][0] += seconds
            operations[name][1] += count
    total = sum(seconds for seconds, _ in operations.values()) or 1.0
    top = sorted(operations.items(), key=lambda item: -item[1][0])[:TOP]
    mean = {}
    for key in ("window_s", "compute_frac", "comm_frac", "exposed_comm_frac", "idle_frac", "overlap_frac"):
        known = [r[key] for r in ranks.values() if r[key] is not None]
        mean[key] = statistics.fmean(known) if known else None
    return {
        "run_dir": str(run_dir),
        "steps": max(r["steps"] for r in ranks.values()),
        "mean": mean,
        "ranks": ranks,
        "top_ops": [{"name": n, "time_s": s, "count": int(c), "share": s / total} for n, (s, c) in top],
    }


def read_trace(path: Path) -> list[Event]:
    """The complete events of a Chrome trace, plain or gzipped."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as file:
            events = json.load(file)["traceEvents"]
    except (ValueError, KeyError, TypeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no Chrome trace: {error}") from None
    return [e for e in events if e.get("ph") == "X" and "dur" in e]


def rank_report(events: list[Event]) -> dict[str, Any]:
    """{device, steps, window_s, compute_frac, comm_frac, exposed_comm_frac, idle_frac, overlap_frac, exposed}.

    exposed_comm_frac: communication while nothing computes; exposed: the same by kind, two kinds at once count in
    both. overlap_frac: the share of the communication that is hidden, None without any.
    """
    on_gpu = any(e.get("cat") in GPU_CATEGORIES for e in events)
    marks = [e for e in events if e["name"].startswith("ProfilerStep#") and e.get("cat") != "gpu_user_annotation"]
    work, wires = gpu_activity(events) if on_gpu else cpu_activity(events)
    spans = [_span(e) for e in marks] or [_span(e) for e in events]
    # kernels outlive the Python that launched them
    ends = [e["ts"] + e["dur"] for e in events if e.get("cat") in GPU_CATEGORIES] + [end for _, end in spans]
    window = (min((start for start, _ in spans), default=0.0), max(ends, default=0.0))
    length = window[1] - window[0] or 1.0
    compute = clip(union(work), window)
    comm = {kind: clip(union(intervals), window) for kind, intervals in sorted(wires.items())}
    all_comm = union(i for intervals in comm.values() for i in intervals)
    exposed = measure(subtract(all_comm, compute))
    return {
        "device": "cuda" if on_gpu else "cpu",
        "steps": len(marks),
        "window_s": length / 1e6,
        "compute_frac": measure(compute) / length,
        "comm_frac": measure(all_comm) / length,
        "exposed_comm_frac": exposed / length,
        "idle_frac": 1 - measure(union([*compute, *all_comm])) / length,
        "overlap_frac": 1 - exposed / measure(all_comm) if all_comm else None,
        "exposed": {kind: measure(subtract(intervals, compute)) / length for kind, intervals in comm.items()},
    }


def gpu_activity(events: list[Event]) -> tuple[list[Interval], dict[str, list[Interval]]]:
    """(compute, communication by kind) of all streams."""
    compute: list[Interval] = []
    comm: dict[str, list[Interval]] = defaultdict(list)
    for e in events:
        if e.get("cat") in GPU_CATEGORIES:
            (comm[comm_kind(e["name"])] if GPU_COMM.search(e["name"]) else compute).append(_span(e))
    return compute, comm


def cpu_activity(events: list[Event]) -> tuple[list[Interval], dict[str, list[Interval]]]:
    """(compute, communication by kind) of all threads.

    Left out of the compute: what gloo's own threads do inside a collective, and operators that only hold others (the
    autograd engine's, and hooks that communicate), whose own time is Python or waiting.
    """
    comm: dict[str, list[Interval]] = defaultdict(list)
    threads: dict[Any, dict[str, list[Event]]] = defaultdict(lambda: {"ops": [], "comm": []})
    for e in events:
        communicates = CPU_COMM.match(e["name"]) is not None
        if communicates:
            comm[comm_kind(e["name"])].append(_span(e))
        if communicates or e.get("cat") == "cpu_op":
            threads[e.get("tid")]["comm" if communicates else "ops"].append(e)
    compute: list[Interval] = []
    for thread in threads.values():
        inside = union(map(_span, thread["comm"]))
        if measure(subtract(union(map(_span, thread["ops"])), inside)) == 0:
            continue
        starts = sorted(e["ts"] for e in thread["comm"] if not e["name"].startswith("gloo:"))
        own = [_span(e) for e in thread["ops"] if not _only_holds(e, starts)]
        calls = union(_span(e) for e in thread["comm"] if not e["name"].startswith("gloo:"))
        compute += subtract(union(own), calls)
    return compute, comm


def _only_holds(op: Event, comm_starts: list[float]) -> bool:
    if op["name"].startswith("autograd::engine"):
        return True
    i = bisect.bisect_left(comm_starts, op["ts"])
    holds = i < len(comm_starts) and comm_starts[i] < op["ts"] + op["dur"]
    return holds and not op["name"].startswith("Compiled")


def comm_kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), "other")


def operation_times(events: list[Event]) -> dict[str, tuple[float, int]]:
    """Name -> (seconds, count): kernels of a GPU trace, else operators without the time of the operators inside.

    The autograd engine's wrappers are left out: their own time is Python.
    """
    gpu = [e for e in events if e.get("cat") in GPU_CATEGORIES]
    out: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def add(name: str, microseconds: float) -> None:
        seconds, count = out[name]
        out[name] = (seconds + microseconds / 1e6, count + 1)

    for e in gpu:
        add(e["name"], e["dur"])
    threads: dict[Any, list[Event]] = defaultdict(list)
    for e in [] if gpu else events:
        if e.get("cat") == "cpu_op" and not e["name"].startswith("autograd::engine"):
            threads[e.get("tid")].append(e)
    for ops in threads.values():
        stack: list[list[Any]] = []
        for e in [*sorted(ops, key=lambda e: (e["ts"], -e["dur"])), {"ts": float("inf"), "dur": 0.0, "name": ""}]:
            while stack and stack[-1][0] <= e["ts"]:
                _, name, own = stack.pop()
                add(name, own)
            if stack:
                stack[-1][2] -= e["dur"]
            stack.append([e["ts"] + e["dur"], e["name"], e["dur"]])
    return dict(out)


def _span(e: Event) -> Interval:
    return e["ts"], e["ts"] + e["dur"]


def _rank(path: Path) -> int:
    return int(path.name.removeprefix("rank").partition(".")[0])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint."""
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def subtract(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """What of ``a`` is not in ``b``; both sorted and disjoint."""
    out, j = [], 0
    for start, end in a:
        while j < len(b) and b[j][1] <= start:
            j += 1
        k = j
        while k < len(b) and b[k][0] < end:
            if b[k][0] > start:
                out.append((start, b[k][0]))
            start = b[k][1]
            k += 1
        if start < end:
            out.append((start, end))
    return out


def clip(intervals: list[Interval], window: Interval) -> list[Interval]:
    return [(max(s, window[0]), min(e, window[1])) for s, e in intervals if e > window[0] and s < window[1]]


def measure(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", type=Path)
    p.add_argument("--json", action="store_true")


def main(args: argparse.Namespace) -> int:
    """``bench profile-report``."""
    from bench.cli import OK, UsageError, emit

    try:
        report = profile_report(args.run_dir)
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(str(error)) from None
    shares = [f"  {name:18} {'n/a' if v is None else f'{v:.4g}'}" for name, v in report["mean"].items()]
    ops = [f"  {op['share']:6.1%}  {op['time_s']:.4f} s  {op['count']:6} x {op['name']}" for op in report["top_ops"]]
    head = f"{report['steps']} steps, {len(report['ranks'])} ranks; mean over ranks:"
    emit(report, args.json, "\n".join([head, *shares, "top operations:", *ops]))
    return OK
