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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bench.sim.events import Event, Trace

Ints = npt.NDArray[np.int64]
_DEFINES = (Event.ALLOC.value, Event.RECORD.value)
_STORAGES = (Event.ALLOC.value, Event.FREE.value)
_HANDLES = (Event.RECORD.value, Event.WAIT.value)


class NotPeriodic(Exception):
    """The traced layers differ where they would have to be the same."""


@dataclass
class Expanded:
    """The events of the deep model as arrays. ``arg`` of storage events indexes ``storage`` (a number in
    ``Trace.storages`` whose size, stream and category hold), that of RECORD and WAIT is a handle of its own."""

    kind: Ints
    arg: Ints
    stream: Ints
    layer: Ints
    storage: Ints


@dataclass(frozen=True)
class Growth:
    """Layers after ``after`` move up by ``extra``; the clones of layer ``after`` take their place."""

    after: int
    extra: int


class _Named:
    """A trace's columns, cut into stretches of one layer, with everything that is referred to named.

    ``start``/``end``/``of_layer``/``run`` describe the stretches. For every row, ``name`` is the key of what it makes
    or refers to, -1 where it refers to nothing that was made in a layer, and ``at`` the layer where that was made.
    """

    def __init__(self, trace: Trace):
        e = trace.events
        self.kind, self.arg, self.stream, self.layer = (
            np.asarray(c, dtype=np.int64) for c in (e.kind, e.arg, e.stream, e.layer))  # fmt: skip
        self.trace = trace
        self._cut()
        self._name()

    def _cut(self) -> None:
        """A run goes on while layers follow each other one way."""
        edges = np.concatenate([[0], np.flatnonzero(np.diff(self.layer)) + 1, [len(self.layer)]])
        inside = self.layer[edges[:-1]] >= 0
        self.start, self.end, self.of_layer = edges[:-1][inside], edges[1:][inside], self.layer[edges[:-1]][inside]
        run, runs, direction = -1, [], 0
        joined = np.concatenate([[False], self.start[1:] == self.end[:-1]])
        steps = np.concatenate([[0], np.diff(self.of_layer)])
        for together, step in zip(joined.tolist(), steps.tolist(), strict=True):
            if not together or abs(step) != 1 or (direction and step != direction):
                run, direction = run + 1, 0
            else:
                direction = step
            runs.append(run)
        self.run = np.asarray(runs, dtype=np.int64)

    def _name(self) -> None:
        """A key is (run, place among what its layer's stretch makes)."""
        rows = len(self.kind)
        stretch = np.full(rows, -1, dtype=np.int64)
        for i, (a, b) in enumerate(zip(self.start.tolist(), self.end.tolist(), strict=True)):
            stretch[a:b] = i
        makes = np.isin(self.kind, _DEFINES) & (stretch >= 0)
        count = np.concatenate([[0], np.cumsum(makes)])
        made = np.flatnonzero(makes)
        ordinal = count[made] - count[self.start[stretch[made]]]
        wide = int(ordinal.max(initial=0)) + 1
        _, key = np.unique(self.run[stretch[made]] * wide + ordinal, return_inverse=True)
        self.keys = int(key.max(initial=-1)) + 1
        self.name, self.at = np.full(rows, -1, dtype=np.int64), np.full(rows, -1, dtype=np.int64)
        for kinds in (_STORAGES, _HANDLES):
            own = np.isin(self.kind, kinds)
            size = int(self.arg[own].max(initial=-1)) + 1
            names, layers = np.full(size, -1, dtype=np.int64), np.full(size, -1, dtype=np.int64)
            mine = np.isin(self.kind[made], kinds)
            names[self.arg[made[mine]]], layers[self.arg[made[mine]]] = key[mine], self.layer[made[mine]]
            self.name[own], self.at[own] = names[self.arg[own]], layers[self.arg[own]]

    def alike(self, m: int) -> bool:
        """Whether layers m and m + 1 are the same in every run that passes both, references taken by distance."""
        here = {int(r): i for i, r in enumerate(self.run) if self.of_layer[i] == m}
        there = {int(r): i for i, r in enumerate(self.run) if self.of_layer[i] == m + 1}
        low, high = np.full(len(set(self.run.tolist())), 1 << 30), np.full(len(set(self.run.tolist())), -1)
        np.minimum.at(low, self.run, self.of_layer)
        np.maximum.at(high, self.run, self.of_layer)
        for run in {*here, *there}:
            if high[run] <= m or low[run] > m:
                continue  # the run stays on one side of the cut between them
            if run not in here or run not in there or not self._same(here[run], there[run]):
                return False
        return True

    def _same(self, i: int, j: int) -> bool:
        a, b = slice(self.start[i], self.end[i]), slice(self.start[j], self.end[j])
        if a.stop - a.start != b.stop - b.start:
            return False
        named = self.name[a] >= 0
        refers = np.isin(self.kind[a], _STORAGES + _HANDLES)
        size = self.trace.sizes()
        alloc = self.kind[a] == Event.ALLOC.value
        return bool(
            (self.kind[a] == self.kind[b]).all()
            and (self.stream[a] == self.stream[b]).all()
            and (self.name[a] == self.name[b]).all()
            and (self.at[a] - self.layer[a] == self.at[b] - self.layer[b])[named].all()
            and (self.arg[a] == self.arg[b])[~named & (~refers | ~alloc)].all()
            and (size[self.arg[a][alloc]] == size[self.arg[b][alloc]]).all()
        )


def growths(trace: Trace, depths: list[int]) -> list[Growth]:
    """Where and by how much each stage grows. Raises NotPeriodic, or ValueError if the trace is the deeper one."""
    return _growths(_Named(trace), depths)


def _growths(named: _Named, depths: list[int]) -> list[Growth]:
    out, first = [], 0
    for traced, wanted in zip(named.trace.depths, depths, strict=True):
        if wanted < traced:
            raise ValueError(f"{traced} layers were traced, {wanted} are asked for")
        if wanted > traced:
            # the last layer is never like the one before it, and the first never like the second
            inner = range(first + 1, first + traced - 2)
            after = next((m for m in inner if named.alike(m)), None)
            if after is None:
                raise NotPeriodic(f"no two of {traced} traced layers are alike")
            out.append(Growth(after, wanted - traced))
        first += traced
    return out


def expand(trace: Trace, depths: list[int]) -> Expanded:
    """The events of stages of ``depths`` layers. Raises as :func:`growths`."""
    named = _Named(trace)
    grow = _growths(named, depths)
    layers = sum(trace.depths)
    extras = np.zeros(layers + 1, dtype=np.int64)
    for g in grow:
        extras[g.after] = g.extra
    moved = np.arange(layers) + np.concatenate([[0], np.cumsum(extras[:-1])])[:layers]
    stage = np.repeat(np.arange(len(trace.depths)), trace.depths)
    args, relative = _resolve(named, moved, stage, sum(depths))
    order, shift = _order(named, extras)
    kind, stream, layer = named.kind[order], named.stream[order], named.layer[order]
    moved = np.concatenate([moved, [-1]])  # so that layer -1 stays outside
    layer = np.where(layer < 0, -1, moved[layer] + shift)
    return Expanded(kind, args[order] + shift * relative[order], stream, layer,
                    _templates(named, moved, extras, sum(depths)))  # fmt: skip


def _resolve(named: _Named, moved: Ints, stage: Ints, total: int) -> tuple[Ints, Ints]:
    """New argument of every event of the shallow trace, and 1 where it moves with a clone's layer.

    Named things get key x layers + layer; the others follow, in the order of their raw numbers. Within a stage the
    distance between layers counts, from elsewhere, or from outside of layers, the layer itself.
    """
    key, at, here = named.name, named.at, named.layer
    has = key >= 0
    near = has & (here >= 0)
    near[near] = stage[here[near]] == stage[at[near]]
    there = np.where(has, moved[np.maximum(at, 0)], 0)
    there[near] = moved[here[near]] + at[near] - here[near]
    refers = np.isin(named.kind, _STORAGES + _HANDLES)
    args = np.where(has, key * total + there, np.where(refers, named.keys * total + named.arg, named.arg))
    return args, near.astype(np.int64)


def _order(named: _Named, extras: Ints) -> tuple[Ints, Ints]:
    """Index into the shallow events and layer shift of every deep event."""
    order, shift, at = [], [], 0
    runs, layers = named.run, named.of_layer
    falling = {int(runs[i]) for i in range(len(runs) - 1) if runs[i] == runs[i + 1] and layers[i + 1] < layers[i]}
    for i in np.flatnonzero(extras[layers] > 0).tolist():
        extra, start, end = int(extras[layers[i]]), int(named.start[i]), int(named.end[i])
        down = int(runs[i]) in falling
        until = start if down else end
        steps = np.arange(extra, 0, -1) if down else np.arange(1, extra + 1)
        order += [np.arange(at, until), np.tile(np.arange(start, end), extra)]
        shift += [np.zeros(until - at, dtype=np.int64), np.repeat(steps, end - start)]
        at = until
    order.append(np.arange(at, len(named.kind)))
    shift.append(np.zeros(len(named.kind) - at, dtype=np.int64))
    return np.concatenate(order), np.concatenate(shift)


def _templates(named: _Named, moved: Ints, extras: Ints, total: int) -> Ints:
    """New storage number -> raw storage number that has its size, stream and category."""
    base, count = named.keys * total, len(named.trace.storages)
    out = np.full(base + count, -1, dtype=np.int64)
    out[base:] = np.arange(count)
    made = np.flatnonzero((named.kind == Event.ALLOC.value) & (named.name >= 0))
    raw, layer = named.arg[made], named.at[made]
    place = named.name[made] * total + moved[layer]
    out[place] = raw
    for m in np.flatnonzero(extras).tolist():
        mine = layer == m
        for step in range(1, int(extras[m]) + 1):
            out[place[mine] + step] = raw[mine]
    return out
