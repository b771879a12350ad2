"""The traces of a plan: made once, kept on disk under what they depend on.

A trace does not depend on the device's speed, its links, or the number of data-parallel ranks: hardware, links and
world size along dp re-cost a cached trace.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from bench.sim.events import Trace
from bench.sim.predict import Traced
from bench.sim.resize import resize
from bench.spec import ROOT, RunSpec
from trainer_core.config import TrainConfig

DEPTH = 6
"""Layers traced of each stage: enough for a middle layer whose neighbours' neighbours are no edge."""

TRACERS = ("cache", "compiled", "events", "fusion", "kernels", "program", "stages", "trace", "tracer")
"""Modules of bench.sim that a trace depends on; the others only read traces."""


Stored = tuple[dict[int, Trace], dict[str, int]]
"""Traces by pipeline rank, and the degrees at which they were made."""


class Unsupported(Exception):
    """A plan that can not be traced, with the reason."""


def folder() -> Path:
    """$XDG_CACHE_HOME/meshmark/traces, or ~/.cache/meshmark/traces."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshmark" / "traces"


@cache
def _code() -> str:
    """Digest of what makes a trace, and of the versions of torch and torchao."""
    from bench.spec import _version

    own = (ROOT / "bench" / "sim" / f"{name}.py" for name in TRACERS)
    files = sorted([*ROOT.glob("trainer_core/**/*.py"), *own])
    text = "\0".join([_version("torch"), _version("torchao"), *(f.read_text() for f in files)])
    return hashlib.sha256(text.encode()).hexdigest()


def key_of(spec: RunSpec, kind: str) -> str:
    """What the trace depends on: the program and its shapes."""
    data: dict[str, Any] = asdict(spec.config)
    for section in ("checkpoint",):
        data.pop(section)
    for name in ("steps", "warmup_steps", "seed", "init_from", "deterministic"):
        data["train"].pop(name)
    data["optim"] = {"impl": spec.config.optim.impl, "clip": spec.config.optim.clip_norm > 0}
    data["data"] = {"seq_len": spec.config.data.seq_len}
    data["program"] = asdict(spec.program)
    # more ranks along dp change sizes of shards and groups, which :mod:`bench.sim.resize` sets; one rank or several
    # is another program
    p = data["parallel"]
    p["dp_shard"], p["dp_replicate"] = min(p["dp_shard"], 2), min(p["dp_replicate"], 2)
    p.pop("world_size")
    data["train"]["global_batch_size"] = spec.config.accumulation
    return hashlib.sha256(json.dumps([data, kind, _code()], sort_keys=True).encode()).hexdigest()[:24]


def traces_of(spec: RunSpec, kind: str) -> Traced:
    """The traces of ``spec`` on a device of ``kind`` (cpu, cuda). Raises Unsupported."""
    path = folder() / f"{key_of(spec, kind)}.pickle"
    stored = _load(path)
    if stored is None:
        stored = _make(spec, kind), dict(spec.config.parallel.degrees)
        _store(path, stored)
    traces, degrees = stored
    now = spec.config.parallel.degrees
    if degrees != now:
        traces = {rank: resize(trace, degrees, now) for rank, trace in traces.items()}
    return assemble(spec, traces)


def assemble(spec: RunSpec, traces: dict[int, Trace]) -> Traced:
    """``traces``: pipeline rank -> trace; ranks between the first and the last are like rank 1."""
    c = spec.config
    k = c.ac.k if c.ac.mode == "every_k" and c.parallel.stages == 1 else 1
    periods = [-(-len(layers) // k) for layers in c.stage_layers()]
    order = sorted(traces)
    kinds = [order.index(_like(rank, c)) for rank in range(c.parallel.pp)]
    placement = [c.rank_stages(rank) for rank in range(c.parallel.pp)]
    depths = [[periods[s] for s in stages] for stages in placement]
    return Traced([traces[r] for r in order], kinds, depths, placement, spec.program.pp_lockstep)


def _like(rank: int, c: TrainConfig) -> int:
    """The pipeline rank that is traced in place of ``rank``."""
    return rank if rank in (0, c.parallel.pp - 1) else 1


def _make(spec: RunSpec, kind: str) -> dict[int, Trace]:
    """Trace as few layers as can be repeated; all of them where they differ."""
    from bench.sim.expand import NotPeriodic, growths
    from bench.sim.trace import periods, trace_ranks

    c = spec.config
    if c.precision.float8 == "mxfp8" and kind == "cuda":
        raise Unsupported("precision.float8=mxfp8 can not be simulated on a GPU: torchao's MXFP8 kernels are Triton's, "
                          "which has no stand-in on a machine without one")  # fmt: skip
    if c.compile.enable and c.ac.mode == "selective" and c.parallel.cp > 1 and c.parallel.cp_method != "ulysses":
        raise Unsupported("compile.enable with ac.mode=selective and parallel.cp_method="
                          f"{c.parallel.cp_method} can not be simulated: the policy's operators lie inside compiled "
                          "graphs that the tracer sees only whole; ac.mode=full or none can")  # fmt: skip
    wanted = periods(c)
    ranks = tuple(sorted({_like(r, c) for r in range(c.parallel.pp)}))
    for depth in (DEPTH, DEPTH + 2):
        traces = trace_ranks(spec, ranks, depth, kind=kind)
        try:
            for rank, trace in traces.items():
                growths(trace, [wanted[s] for s in c.rank_stages(rank)])
        except NotPeriodic:
            continue
        return traces
    return trace_ranks(spec, ranks, max(wanted), kind=kind)


def _load(path: Path) -> Stored | None:
    """A stored trace; one that can not be read counts as absent."""
    try:
        with path.open("rb") as file:
            loaded: Stored = pickle.load(file)
            return loaded
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError):
        return None


def _store(path: Path, traces: Stored) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(pickle.dumps(traces, protocol=5))
    temporary.replace(path)
