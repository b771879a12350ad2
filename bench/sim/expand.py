"""Repeat the middle layer of a shallow trace: the exact trace of a deeper model, at the cost of the shallow one. No torch.

A trace of l layers (a few) becomes one of L. Every event carries the layer it belongs to, or -1. Layers come in *runs*: the
forward goes up through them, the backward down, a foreach call of the optimizer goes through the tensors of one layer
after the other. In each run the events of the middle layer m are repeated L - l times. What an event refers to (a
storage, a mark of a stream) is named by where it was made: (run, place within the layer's events, layer), and references
between layers keep their distance. Before that, :func:`middle` checks that layers m and m + 1 are the same under this
naming, in every run; if they are not, the caller must trace more layers.
"""

from __future__ import annotations

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
    """The events of the deep model as arrays. ``arg`` of storage events indexes ``storage`` (a number in ``Trace.storages``
    whose size, stream and category hold), that of RECORD and WAIT is a handle of its own."""

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
        self.raw: dict[tuple[int, int], int] = {}  # (key number, layer) -> raw number
        kinds, args = trace.events.kind, trace.events.arg
        for cut in cuts:
            ordinal = 0
            for i in range(cut.start, cut.end):
                if kinds[i] in _DEFINES:
                    number = self.keys.setdefault((cut.run, ordinal), len(self.keys))
                    self.key[kinds[i] == Event.RECORD, args[i]] = (number, cut.layer)
                    self.raw[number, cut.layer] = args[i]
                    ordinal += 1

    def of(self, kind: int, arg: int) -> tuple[int, int]:
        """(key number, layer), or (-1 - raw number, -1) for what was made outside of layers."""
        return self.key.get((kind in (Event.RECORD, Event.WAIT), arg), (-1 - arg, -1))


def middle(trace: Trace) -> int:
    """A layer that equals the next one in every run. Raises NotPeriodic if there is none."""
    cuts = stretches(trace)
    names = _Names(trace, cuts)
    runs: dict[int, dict[int, Stretch]] = {}
    for cut in cuts:
        runs.setdefault(cut.run, {})[cut.layer] = cut
    # the last layer is never like the one before it, and the first never like the second: both are left as they are
    for m in range(1, trace.layers - 2):
        if all(_repeats(trace, names, run, m) for run in runs.values()):
            return m
    raise NotPeriodic(f"no two of {trace.layers} traced layers are alike")


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


def expand(trace: Trace, layers: int) -> Expanded:
    """The events of ``layers`` layers. Raises NotPeriodic where the trace can not be repeated, ValueError if it is deeper."""
    extra = layers - trace.layers
    if extra < 0:
        raise ValueError(f"{trace.layers} layers were traced, {layers} are asked for")
    m = middle(trace) if extra else trace.layers
    cuts = stretches(trace)
    names = _Names(trace, cuts)
    args, relative = _resolve(trace, names, layers, m, extra)
    columns = [np.asarray(c, dtype=np.int64) for c in (trace.events.kind, trace.events.stream, trace.events.layer)]
    order, shift = _order(len(args), cuts, m, extra)
    kind, stream, layer = (c[order] for c in columns)
    layer = np.where(layer < 0, -1, np.where(layer > m, layer + extra, layer + shift))
    return Expanded(kind, args[order] + shift * relative[order], stream, layer,
                    _templates(trace, names, layers, m, extra))  # fmt: skip


def _resolve(trace: Trace, names: _Names, layers: int, m: int, extra: int) -> tuple[Ints, Ints]:
    """New argument of every event of the shallow trace, and 1 where it moves with a clone's layer.

    Named things get key number x layers + layer; the others follow, in the order of their raw numbers.
    """
    real = lambda layer: layer + extra if layer > m else layer
    base = len(names.keys) * layers
    args, relative = [], []
    for kind, arg, here in zip(trace.events.kind, trace.events.arg, trace.events.layer, strict=True):
        if kind not in _REFERS:
            args.append(arg)
            relative.append(0)
            continue
        key, at = names.of(kind, arg)
        if key < 0:
            args.append(base + arg)
            relative.append(0)
        else:
            # from inside a layer the distance counts, from outside the layer itself
            there = real(here) + at - here if here >= 0 else real(at)
            args.append(key * layers + there)
            relative.append(1)
    return np.asarray(args, dtype=np.int64), np.asarray(relative, dtype=np.int64)


def _order(length: int, cuts: list[Stretch], m: int, extra: int) -> tuple[Ints, Ints]:
    """Index into the shallow events and layer shift of every deep event."""
    order, shift, at = [], [], 0
    descending = {a.run for a, b in zip(cuts, cuts[1:], strict=False) if a.run == b.run and b.layer < a.layer}
    for cut in cuts:
        if cut.layer != m or not extra:
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


def _templates(trace: Trace, names: _Names, layers: int, m: int, extra: int) -> Ints:
    """New storage number -> raw storage number that has its size, stream and category."""
    base = len(names.keys) * layers
    out = np.full(base + len(trace.storages), -1, dtype=np.int64)
    out[base:] = np.arange(len(trace.storages))
    for (key, layer), raw in names.raw.items():
        if raw >= len(trace.storages):
            continue
        if layer <= m:
            out[key * layers + layer] = raw
        if layer == m:
            out[key * layers + m + 1 : key * layers + m + 1 + extra] = raw
        if layer > m:
            out[key * layers + layer + extra] = raw
    return out
