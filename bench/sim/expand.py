"""Repeat the middle layer of a shallow trace: the exact trace of a deeper model, at the cost of the shallow one.

A trace of l layers (a few) becomes one of L. Every event carries the layer it belongs to, or -1. Layers come in *runs*:
the forward goes up through them, the backward down, a foreach call of the optimizer goes through the tensors of one
layer after the other. In each run the events of the middle layer m are repeated L - l times. What an event refers to (a
storage, a mark of a stream) is named by where it was made: (run, place within the layer's events, layer), and
references between layers keep their distance. Before that, :func:`middle` checks that layers m and m + 1 are the same
under this naming, in every run; if they are not, the caller must trace more layers. A rank with two pipeline stages has
two groups of layers, each with a middle of its own. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.sim.events import Event, Storage, Trace

Ints = npt.NDArray[np.int64]
_DEFINES = (Event.ALLOC.value, Event.RECORD.value)
_REFERS = (Event.ALLOC.value, Event.FREE.value, Event.RECORD.value, Event.WAIT.value)


class NotPeriodic(Exception):
    """The traced layers differ where they would have to be the same."""


@dataclass
class Stretch:
    """The consecutive events [start, end) of one layer in run ``run``."""

    run: int
    layer: int
    start: int
    end: int


@dataclass
class Expanded:
    """The events of the deep model as arrays. ``arg`` of storage events indexes ``storage`` (a number in
    ``Trace.storages`` whose size, stream and category hold), that of RECORD and WAIT is a handle of its own."""

    kind: Ints
    arg: Ints
    stream: Ints
    layer: Ints
    storage: Ints


def stretches(trace: Trace) -> list[Stretch]:
    """Cut the labelled events into stretches of one layer; a run goes on while layers follow each other one way."""
    out: list[Stretch] = []
    run, direction, previous = -1, 0, -1
    layers = np.asarray(trace.events.layer, dtype=np.int64)
    edges = [0, *(np.flatnonzero(np.diff(layers)) + 1).tolist(), len(layers)]
    for start, end in zip(edges, edges[1:], strict=False):
        layer = int(layers[start]) if end > start else -1
        if layer < 0:
            previous = -1
            continue
        step = layer - previous
        if previous < 0 or abs(step) != 1 or (direction and step != direction):
            run, direction = run + 1, 0
        else:
            direction = step
        out.append(Stretch(run, layer, start, end))
        previous = layer
    return out


class _Names:
    """(run, ordinal) of every storage and handle, by its raw number; -1 where it was made outside of layers."""

    def __init__(self, trace: Trace, cuts: list[Stretch]):
        self.key: dict[tuple[bool, int], tuple[int, int]] = {}  # (is a handle, raw number) -> (key number, layer)
        self.keys: dict[tuple[int, int], int] = {}
        kinds, args = trace.events.kind, trace.events.arg
        for cut in cuts:
            ordinal = 0
            for i in range(cut.start, cut.end):
                if kinds[i] in _DEFINES:
                    number = self.keys.setdefault((cut.run, ordinal), len(self.keys))
                    self.key[kinds[i] == Event.RECORD, args[i]] = (number, cut.layer)
                    ordinal += 1

    def storages(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Raw number and (key number, layer) of the storages that were made in layers."""
        return ((raw, name) for (handle, raw), name in self.key.items() if not handle)

    def of(self, kind: int, arg: int) -> tuple[int, int]:
        """(key number, layer), or (-1 - raw number, -1) for what was made outside of layers."""
        return self.key.get((kind in (Event.RECORD, Event.WAIT), arg), (-1 - arg, -1))


@dataclass(frozen=True)
class Growth:
    """Layers after ``after`` move up by ``extra``; the clones of layer ``after`` take their place."""

    after: int
    extra: int
    first: int


def growths(trace: Trace, depths: list[int]) -> list[Growth]:
    """Where and by how much each stage grows. Raises NotPeriodic, or ValueError if the trace is the deeper one."""
    cuts = stretches(trace)
    names = _Names(trace, cuts)
    runs: dict[int, dict[int, Stretch]] = {}
    for cut in cuts:
        runs.setdefault(cut.run, {})[cut.layer] = cut
    out, first = [], 0
    for traced, wanted in zip(trace.depths, depths, strict=True):
        if wanted < traced:
            raise ValueError(f"{traced} layers were traced, {wanted} are asked for")
        if wanted > traced:
            out.append(Growth(_middle(trace, names, runs, first, traced), wanted - traced, first))
        first += traced
    return out


def _middle(trace: Trace, names: _Names, runs: dict[int, dict[int, Stretch]], first: int, depth: int) -> int:
    """A layer of [first, first + depth) that equals the next one in every run.

    The last layer is never like the one before it, and the first never like the second: both are left as they are.
    """
    inside = range(first, first + depth)
    own = [{layer: cut for layer, cut in run.items() if layer in inside} for run in runs.values()]
    for m in range(first + 1, first + depth - 2):
        if all(_repeats(trace, names, run, m) for run in own if run):
            return m
    raise NotPeriodic(f"no two of {depth} traced layers are alike")


def _repeats(trace: Trace, names: _Names, run: dict[int, Stretch], m: int) -> bool:
    """Whether layers m and m + 1 are alike in a run, or the run stays on one side of the cut between them."""
    if max(run) <= m or min(run) > m:
        return True
    return m in run and m + 1 in run and _same(trace, names, run[m], run[m + 1])


def _same(trace: Trace, names: _Names, a: Stretch, b: Stretch) -> bool:
    """Whether two stretches hold the same events, references taken relative to their layer."""
    if a.end - a.start != b.end - b.start:
        return False
    e, s = trace.events, trace.storages
    for i, j in zip(range(a.start, a.end), range(b.start, b.end), strict=True):
        kind = e.kind[i]
        if kind != e.kind[j] or e.stream[i] != e.stream[j]:
            return False
        if kind not in _REFERS:
            if e.arg[i] != e.arg[j]:
                return False
            continue
        (x, lx), (y, ly) = names.of(kind, e.arg[i]), names.of(kind, e.arg[j])
        if x != y or (x >= 0 and lx - a.layer != ly - b.layer):
            return False
        if kind == Event.ALLOC and _alike(s[e.arg[i]]) != _alike(s[e.arg[j]]):
            return False
    return True


def _alike(s: Storage) -> tuple[Any, ...]:
    return s.bytes, s.stream, s.category, s.sharded


def expand(trace: Trace, depths: list[int]) -> Expanded:
    """The events of stages of ``depths`` layers. Raises as :func:`growths`."""
    grow = growths(trace, depths)
    cuts = stretches(trace)
    names = _Names(trace, cuts)
    real = _Numbering(trace.depths, grow)
    total = sum(depths)
    args, relative = _resolve(trace, names, total, real)
    columns = [np.asarray(c, dtype=np.int64) for c in (trace.events.kind, trace.events.stream, trace.events.layer)]
    order, shift = _order(len(args), cuts, grow)
    kind, stream, layer = (c[order] for c in columns)
    moved = np.asarray([*(real(i) for i in range(sum(trace.depths))), -1], dtype=np.int64)
    return Expanded(kind, args[order] + shift * relative[order], stream,
                    np.where(layer < 0, -1, moved[layer] + shift), _templates(trace, names, total, grow, real))  # fmt: skip


class _Numbering:
    """Traced layer -> its number in the deep model, and the stage it is in."""

    def __init__(self, depths: list[int], grow: list[Growth]):
        self.grow = grow
        self.stages = [slot for slot, depth in enumerate(depths) for _ in range(depth)]

    def __call__(self, layer: int) -> int:
        return layer + sum(g.extra for g in self.grow if layer > g.after)

    def seen_from(self, layer: int, here: int) -> int:
        """Within a stage the distance counts; from elsewhere, or from outside of layers, the layer itself."""
        if here >= 0 and self.stages[here] == self.stages[layer]:
            return self(here) + layer - here
        return self(layer)


def _resolve(trace: Trace, names: _Names, total: int, real: _Numbering) -> tuple[Ints, Ints]:
    """New argument of every event of the shallow trace, and 1 where it moves with a clone's layer.

    Named things get key number x layers + layer; the others follow, in the order of their raw numbers.
    """
    base = len(names.keys) * total
    args, relative = [], []
    for kind, arg, here in zip(trace.events.kind, trace.events.arg, trace.events.layer, strict=True):
        key, at = names.of(kind, arg) if kind in _REFERS else (0, -1)
        if at < 0:
            args.append(base + arg if kind in _REFERS else arg)
            relative.append(0)
        else:
            args.append(key * total + real.seen_from(at, here))
            relative.append(int(here >= 0 and real.stages[here] == real.stages[at]))
    return np.asarray(args, dtype=np.int64), np.asarray(relative, dtype=np.int64)


def _order(length: int, cuts: list[Stretch], grow: list[Growth]) -> tuple[Ints, Ints]:
    """Index into the shallow events and layer shift of every deep event."""
    order, shift, at = [], [], 0
    extras = {g.after: g.extra for g in grow}
    descending = {a.run for a, b in zip(cuts, cuts[1:], strict=False) if a.run == b.run and b.layer < a.layer}
    for cut in cuts:
        extra = extras.get(cut.layer, 0)
        if not extra:
            continue
        clone = np.arange(cut.start, cut.end)
        down = cut.run in descending
        until = cut.start if down else cut.end
        order.append(np.arange(at, until))
        shift.append(np.zeros(until - at, dtype=np.int64))
        order.append(np.tile(clone, extra))
        steps = np.arange(extra, 0, -1) if down else np.arange(1, extra + 1)
        shift.append(np.repeat(steps, len(clone)))
        at = until
    order.append(np.arange(at, length))
    shift.append(np.zeros(length - at, dtype=np.int64))
    return np.concatenate(order), np.concatenate(shift)


def _templates(trace: Trace, names: _Names, total: int, grow: list[Growth], real: _Numbering) -> Ints:
    """New storage number -> raw storage number that has its size, stream and category."""
    base = len(names.keys) * total
    out = np.full(base + len(trace.storages), -1, dtype=np.int64)
    out[base:] = np.arange(len(trace.storages))
    extras = {g.after: g.extra for g in grow}
    for number, (key, layer) in names.storages():
        at = key * total + real(layer)
        out[at : at + 1 + extras.get(layer, 0)] = number
    return out
