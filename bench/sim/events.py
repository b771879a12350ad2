"""What a traced training step is made of: kernels, collectives, storage lifetimes. No torch.

A :class:`Trace` belongs to one rank class (ranks whose step is the same). Kernels and collectives are interned in one
``table``; the events are columns that point into it, so that a price is computed once per distinct kernel. Repeated
layers are stored once: an event carries the layer it belongs to, and :func:`bench.sim.expand.expand` clones the middle
layer (see there).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    Column = array[int]

DTYPE_BYTES = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "bool": 1,
}  # fmt: skip
"""Bytes an element; every 8-bit float (e4m3, e5m2, e8m0) is ``fp8``."""

Tensor = tuple[tuple[int, ...], str]
"""Local shape and dtype name of one operand."""

Phase = Literal["fwd", "bwd", "recompute", "optim", "other"]
OpKind = Literal["gemm", "attention", "pointwise", "reduction", "copy", "embedding", "optimizer", "other"]
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send", "recv"]
Category = Literal["params", "grads", "optimizer", "activations", "logits", "comm", "temp", "buffers"]
CATEGORIES: tuple[Category, ...] = (
    "params", "grads", "optimizer", "activations", "logits", "comm", "temp", "buffers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel launch, or one fused kernel of a compiled graph.

    ``name`` is the aten overload packet (``mm``, ``_scaled_mm``, ``_scaled_dot_product_flash_attention``, ...) or, for
    a fused kernel, ``fused_pointwise``/``fused_reduction``, with the names of its parts in ``parts``. ``flops`` counts
    a multiply-add as two and is zero for kernels priced by bytes; causal attention counts the lower triangle only.
    ``bytes_read``/``bytes_written`` are what the kernel must move to and from device memory.

    ``dims``: gemm ``(batch, m, n, k)``; attention ``(batch, heads, kv_heads, q_len, kv_len, head_dim, causal,
    backward)`` with the last two 0 or 1; else empty. ``launches``: kernels behind this op (a foreach op over many
    tensors is several launches). ``compiled``: launched by compiled code (no eager dispatch between kernels).
    """

    name: str
    kind: OpKind
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    flops: float = 0.0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    dims: tuple[int, ...] = ()
    module: str = ""
    phase: Phase = "other"
    parts: tuple[str, ...] = ()
    launches: int = 1
    compiled: bool = False
    sharded: bool = False
    """Works on FSDP shards only: its sizes scale with 1 / shards."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of this rank.

    ``bytes`` is the whole message that the group handles: the gathered output of an all_gather, the input of a
    reduce_scatter, the tensor of an all_reduce or broadcast, the local input of an all_to_all, the message of a
    send/recv. ``axis`` names the mesh axis, or several joined by ``+`` for a flattened group (``dp_shard+cp``);
    ``size`` is the number of ranks of the group and ``stride`` the distance of its neighbours in global ranks, so that
    :func:`span` tells what a group crosses. ``overlap`` is ``async_tp`` where the compiler decomposes the collective
    into chunks that run beside its GEMM.
    """

    kind: CollectiveKind
    bytes: float
    axis: str
    size: int
    stride: int
    dtype: str = "bf16"
    module: str = ""
    phase: Phase = "other"
    overlap: Literal["", "async_tp"] = ""


def span(size: int, stride: int, gpus_per_node: int) -> tuple[int, int]:
    """(ranks of the group on one node, nodes it spans) of a strided group that starts at the first GPU of a node.

    Ranks are placed on nodes in order (rank // gpus_per_node), as launchers do.
    """
    on_node = min(size, max(1, -(-gpus_per_node // stride)))
    return on_node, -(-size // on_node)


class Event(IntEnum):
    """What a row of the event columns is, and what its ``arg`` means."""

    OP = 0  # arg: index in the table; runs on the row's stream
    COLLECTIVE = 1  # arg: index in the table; runs on the row's stream
    RECORD = 2  # arg: handle; marks the end of what the row's stream has been given so far
    WAIT = 3  # arg: handle; the row's stream goes on after that mark
    ALLOC = 4  # arg: storage
    FREE = 5  # arg: storage
    MARK = 6  # arg: index in ``marks`` (step, microbatch or action boundary)


@dataclass(slots=True)
class Storage:
    """One device allocation: ``bytes``, the ``stream`` that allocated it and its ``category``."""

    bytes: int
    stream: int
    category: Category = "temp"
    sharded: bool = False


@dataclass(slots=True)
class Events:
    """Columns of equal length, in program order. ``layer`` is -1 outside the repeated blocks."""

    kind: Column = field(default_factory=lambda: array("b"))
    arg: Column = field(default_factory=lambda: array("i"))
    stream: Column = field(default_factory=lambda: array("b"))
    layer: Column = field(default_factory=lambda: array("h"))

    def add(self, kind: int, arg: int, stream: int, layer: int = -1) -> None:
        self.kind.append(kind)
        self.arg.append(arg)
        self.stream.append(stream)
        self.layer.append(layer)

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(slots=True)
class Trace:
    """The step of one rank class.

    ``table`` interns :class:`Op` and :class:`Collective`; ``storages`` holds the allocations by number; ``streams``
    the stream names (0 is the compute stream). ``initial`` are the storages alive before the first step. ``depths`` is
    the number of layers that were traced, of each stage of the rank; layers are numbered through. ``facts`` holds what
    else was seen: graphs compiled, collectives that async TP takes apart, torch's pipeline tables.
    """

    table: list[Op | Collective] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    streams: list[str] = field(default_factory=lambda: ["compute"])
    initial: list[int] = field(default_factory=list)
    events: Events = field(default_factory=Events)
    marks: list[tuple[str, int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def sizes(self) -> npt.NDArray[np.int64]:
        """Bytes of every storage."""
        return np.fromiter((s.bytes for s in self.storages), np.int64, len(self.storages))

    def __getstate__(self) -> dict[str, Any]:
        """Storages as columns: a trace has ten thousands of them, of a few kinds."""
        kinds: dict[tuple[Any, ...], int] = {}
        index = array("i", (kinds.setdefault((s.bytes, s.stream, s.category, s.sharded), len(kinds))
                            for s in self.storages))  # fmt: skip
        state = {name: getattr(self, name) for name in self.__slots__ if name != "storages"}
        return {**state, "storages": (list(kinds), index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        kinds, index = state.pop("storages")
        shared = [Storage(*kind) for kind in kinds]
        self.storages = [shared[i] for i in index]
        for name, value in state.items():
            setattr(self, name, value)


class Prices(Protocol):
    """What :mod:`bench.sim.schedule` asks of a cost model.

    ``op`` returns seconds and what bounds the kernel; ``collective`` seconds alone on its links, and ``link`` the class
    of the slowest of them (``up`` inside a node, ``out`` across nodes), on which collectives get in each other's way;
    ``contention`` is the share of an overlapped collective's time that it takes from compute; ``async_tp_hidden`` the
    share of a decomposed collective's time that its GEMM hides.
    """

    contention: float
    async_tp_hidden: float

    def op(self, op: Op) -> tuple[float, Literal["compute", "memory", "launch"]]: ...

    def collective(self, collective: Collective) -> float: ...

    def link(self, collective: Collective) -> str: ...
