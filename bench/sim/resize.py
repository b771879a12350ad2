"""The trace of one number of data-parallel ranks as that of another: shards and groups change their size. No torch.

Kernels and storages that hold FSDP shards only were marked while tracing; their bytes scale with 1 / shards, up to the
padding of parameters whose first dimension the shards do not divide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bench.sim.events import Collective, Op, Storage, Trace

_MEMBERS = {
    "pp": ("pp",), "dp_replicate": ("dp_replicate",), "dp_shard": ("dp_shard",), "cp": ("cp",), "tp": ("tp",),
    "fsdp": ("dp_shard", "cp"), "loss": ("dp_replicate", "dp_shard", "cp"),
}  # fmt: skip
"""Mesh axes that a group's axis consists of, outermost first."""


def resize(trace: Trace, old: Mapping[str, int], new: Mapping[str, int]) -> Trace:
    """``old`` and ``new``: degree of every mesh axis, outermost first; they differ along dp only."""
    scale = old["dp_shard"] * old["cp"] / (new["dp_shard"] * new["cp"])
    storages: dict[int, Storage] = {}
    out = replace(trace, table=[_entry(e, scale, new) for e in trace.table],
                  storages=[_storage(s, scale, storages) for s in trace.storages])  # fmt: skip
    return out


def _storage(s: Storage, scale: float, made: dict[int, Storage]) -> Storage:
    if not s.sharded:
        return s
    if id(s) not in made:
        made[id(s)] = replace(s, bytes=max(1, round(s.bytes * scale)))
    return made[id(s)]


def _entry(entry: Op | Collective, scale: float, new: Mapping[str, int]) -> Op | Collective:
    if isinstance(entry, Op):
        if not entry.sharded:
            return entry
        return replace(entry, bytes_read=entry.bytes_read * scale, bytes_written=entry.bytes_written * scale,
                       flops=entry.flops * scale)  # fmt: skip
    if entry.axis not in _MEMBERS:
        return entry
    axes = list(new)
    members = _MEMBERS[entry.axis]
    size, stride = 1, 1
    for axis in members:
        size *= new[axis]
    for axis in axes[axes.index(members[-1]) + 1 :]:
        stride *= new[axis]
    # HSDP reduces shards over the replicas
    shard = entry.axis == "dp_replicate" and entry.phase == "bwd"
    return replace(entry, size=size, stride=stride, bytes=entry.bytes * scale if shard else entry.bytes)
