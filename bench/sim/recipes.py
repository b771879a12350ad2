"""The events of a compiled graph's run, to be written again for equal inputs instead of running the graph again."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.sim.events import Event, Storage
from bench.sim.tracer import Tracer


def signature(x: Any) -> Any:
    return (tuple(x.shape), x.stride(), x.dtype) if isinstance(x, Tensor) else x


@dataclass
class _Output:
    """How to make one output again: the ``source``-th input itself, a view of it, a new tensor in the memory of storage
    ``storage``, or a plain value."""

    source: int = -1
    storage: int = -1
    size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype | None = None
    itself: bool = False
    value: Any = None


class Recording:
    """Watches one run of a graph, to make a :class:`Recipe` of it."""

    def __init__(self, inputs: list[Any], tracer: Tracer):
        self.tracer = tracer
        self.start = len(tracer.trace.events)
        self.first_storage, self.first_handle = len(tracer.trace.storages), tracer.handles
        self.drops: list[tuple[int, int]] = []

    def recipe(self, out: Any, sources: list[tuple[int, bool]]) -> Recipe | None:
        """``sources``: for every output the input whose memory it is in (-1: none), and whether it is that input. None
        where an output lies in memory that is neither an input's nor this run's."""
        outputs = []
        for t, source in zip(out, sources, strict=True):
            made = self._output(t, *source)
            if made is None:
                return None
            outputs.append(made)
        events = self.tracer.trace.events
        rows = list(zip(events.kind[self.start :], events.arg[self.start :], events.stream[self.start :], strict=True))
        rows = [row for row in rows if row[0] != Event.FREE.value or row[1] >= self.first_storage]
        kept = [i for i, k in enumerate(events.kind[self.start :], self.start)
                if k != Event.FREE.value or events.arg[i] >= self.first_storage]  # fmt: skip
        drops: dict[int, list[int]] = defaultdict(list)
        for at, number in self.drops:
            drops[bisect_left(kept, at)].append(number)
        storages = self.tracer.trace.storages[self.first_storage :]
        return Recipe(rows, dict(drops), outputs, storages, self.first_storage, self.first_handle, type(out))

    def _output(self, t: Any, source: int, itself: bool) -> _Output | None:
        if not isinstance(t, Tensor):
            return _Output(value=t)
        where: tuple[Any, ...] = (tuple(t.shape), t.stride(), t.storage_offset(), t.dtype)
        if source >= 0:
            return replace(_Output(source, -1, *where), itself=itself)
        number = self.tracer.number(t)
        return _Output(-1, number, *where) if number is not None and number >= self.first_storage else None


@dataclass
class Recipe:
    """The events of one run of a graph, to be written again without running it."""

    rows: list[tuple[int, int, int]]
    drops: dict[int, list[int]]
    outputs: list[_Output]
    storages: list[Storage]
    first_storage: int
    first_handle: int
    container: type

    def repeat(self, inputs: list[Any], tracer: Tracer) -> Any:
        """The same kernels, collectives and allocations on new inputs; new outputs of the same shapes."""
        given = [inputs[o.source] if o.source >= 0 else None for o in self.outputs]
        made: dict[int, Tensor] = {}
        wanted = {o.storage for o in self.outputs if o.storage >= 0}
        numbers: dict[int, int] = {}
        handles: dict[int, int] = {}
        for i, (kind, arg, stream) in enumerate(self.rows):
            for dead in self.drops.get(i, ()):
                inputs[dead] = None
            if kind == Event.ALLOC.value:
                storage = self.storages[arg - self.first_storage]
                if arg in wanted:
                    first = next(o for o in self.outputs if o.storage == arg)
                    made[arg] = tracer.unseen(partial(_memory, first, storage.bytes))
                    numbers[arg] = tracer.follow(made[arg])
                else:
                    numbers[arg] = tracer.allocate(storage)
            elif kind == Event.FREE.value:
                tracer.forget(numbers[arg], stream)
            elif kind == Event.RECORD.value:
                handles[arg] = tracer.record(stream)
            elif kind == Event.WAIT.value:
                tracer.add(Event.WAIT, handles.get(arg, arg), stream)
            else:
                tracer.trace.events.add(kind, arg, stream, tracer.layer)
        inputs.clear()
        return self.container(tracer.unseen(lambda: [_make(o, x, made) for o, x in zip(self.outputs, given)]))  # noqa: B905


def _memory(o: _Output, size: int) -> Tensor:
    """The tensor of an output, or where it is a part of its memory only, the whole memory as bytes."""
    t = torch.empty_strided(o.size, o.stride, dtype=o.dtype)
    return t if o.offset == 0 and t.untyped_storage().nbytes() == size else torch.empty(size, dtype=torch.uint8)


def _make(o: _Output, source: Any, made: dict[int, Tensor]) -> Any:
    if o.source < 0 and o.storage < 0:
        return o.value
    base = source if o.source >= 0 else made[o.storage]
    if o.itself or (tuple(base.shape), base.stride(), base.dtype) == (o.size, o.stride, o.dtype):
        return base
    assert o.dtype is not None
    base = base if base.dtype == o.dtype else base.flatten().view(o.dtype)
    return base.as_strided(o.size, o.stride, o.offset)
