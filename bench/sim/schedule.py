"""List scheduling of a traced step on streams: when each kernel and collective runs, and where the time goes. No torch.

Every stream takes its work in program order; a WAIT holds a stream until a RECORD of another one. The host runs ahead.
Collectives of one link class (scale-up or scale-out) follow each other: two at once would share the bandwidth and end
no sooner. A collective takes ``contention`` of its time from the compute that runs beside it.

Time is booked where the compute stream spends it: ``compute`` (kernels bound by arithmetic), ``memory_bound`` (by bytes
or launches), ``optimizer``, ``exposed_comm`` by mesh axis (waits, collectives on the compute stream, contention), and
``bubble`` (a pipeline stage without work).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.sim.events import Collective, Event, Op, Prices
from bench.sim.expand import Expanded

Floats = npt.NDArray[np.float64]
Listener = Callable[[str, int, float, float], None]
"""Called with (name, stream, start, seconds) of everything that runs."""


@dataclass
class Breakdown:
    """Seconds of one rank's step (or of a part of it)."""

    compute: float = 0.0
    memory_bound: float = 0.0
    optimizer: float = 0.0
    bubble: float = 0.0
    exposed_comm: dict[str, float] = field(default_factory=dict)

    def expose(self, axis: str, seconds: float) -> None:
        if seconds > 0:
            self.exposed_comm[axis] = self.exposed_comm.get(axis, 0.0) + seconds

    def add(self, other: Breakdown, times: float = 1.0) -> None:
        self.compute += times * other.compute
        self.memory_bound += times * other.memory_bound
        self.optimizer += times * other.optimizer
        self.bubble += times * other.bubble
        for axis, seconds in list(other.exposed_comm.items()):
            self.expose(axis, times * seconds)

    @property
    def total(self) -> float:
        return self.compute + self.memory_bound + self.optimizer + self.bubble + sum(self.exposed_comm.values())

    def to_dict(self) -> dict[str, Any]:
        return {"compute": self.compute, "memory_bound": self.memory_bound, "exposed_comm": dict(self.exposed_comm),
                "bubble": self.bubble, "optimizer": self.optimizer}  # fmt: skip


@dataclass
class PriceList:
    """Prices of a trace's table: seconds of every entry, and the part of the breakdown that it belongs to."""

    seconds: Floats
    part: npt.NDArray[np.int8]  # 0 compute, 1 memory_bound, 2 optimizer, 3 collective
    axes: list[str]
    links: list[str]
    names: list[str]
    contention: float


def price(table: list[Op | Collective], prices: Prices) -> PriceList:
    """Ask the cost model once for every distinct kernel and collective."""
    seconds, part, axes, links, names = [], [], [], [], []
    for entry in table:
        if isinstance(entry, Op):
            cost, bound = prices.op(entry)
            part.append(2 if entry.phase == "optim" else 0 if bound == "compute" else 1)
            axes.append("")
            links.append("")
            names.append(entry.name)
        else:
            cost = prices.collective(entry)
            if entry.overlap == "async_tp":
                cost *= 1 - prices.async_tp_hidden
            part.append(3)
            axes.append(entry.axis)
            links.append(prices.link(entry))
            names.append(f"{entry.kind} {entry.axis}")
        seconds.append(cost)
    return PriceList(np.asarray(seconds), np.asarray(part, dtype=np.int8), axes, links, names, prices.contention)


@dataclass
class Streams:
    """The clock of every stream while events are played."""

    prices: PriceList
    listener: Listener | None = None
    time: dict[int, float] = field(default_factory=dict)
    link_free: dict[str, float] = field(default_factory=dict)
    last_axis: dict[int, str] = field(default_factory=dict)
    marks: dict[int, tuple[float, str]] = field(default_factory=dict)
    running: list[tuple[float, float, str]] = field(default_factory=list)
    parts: Breakdown = field(default_factory=Breakdown)

    def now(self, stream: int) -> float:
        return self.time.get(stream, 0.0)

    def compute(self, seconds: float) -> None:
        """Kernels of the compute stream, slowed by the collectives that run beside them."""
        start = self.now(0)
        end = start + seconds
        if self.running:
            self.running = [r for r in self.running if r[1] > start]
            for begin, finish, axis in self.running:
                beside = min(end, finish) - max(start, begin)
                if beside > 0:
                    lost = self.prices.contention * beside
                    self.parts.expose(axis, lost)
                    end += lost
        self.time[0] = end

    def collective(self, index: int, stream: int) -> None:
        axis, link = self.prices.axes[index], self.prices.links[index]
        start = max(self.now(stream), self.link_free.get(link, 0.0))
        end = start + float(self.prices.seconds[index])
        if stream == 0:
            self.parts.expose(axis, end - self.now(0))
        else:
            self.running.append((start, end, axis))
        self.time[stream] = self.link_free[link] = end
        self.last_axis[stream] = axis
        if self.listener:
            self.listener(self.prices.names[index], stream, start, end - start)

    def record(self, handle: int, stream: int) -> None:
        self.marks[handle] = self.now(stream), self.last_axis.get(stream, "")

    def wait(self, handle: int, stream: int) -> None:
        until, axis = self.marks.get(handle, (0.0, ""))
        if until > self.now(stream):
            if stream == 0:
                self.parts.expose(axis or "other", until - self.now(0))
            self.time[stream] = until
            if stream != 0 and axis:
                self.last_axis[stream] = axis

    def settle(self) -> None:
        """Let the compute stream wait for everything: the end of a step, or of an action."""
        late = max(self.time, key=self.now, default=0)
        if late != 0 and self.now(late) > self.now(0):
            self.parts.expose(self.last_axis.get(late, "other"), self.now(late) - self.now(0))
            self.time[0] = self.now(late)

    @property
    def end(self) -> float:
        return max(self.time.values(), default=0.0)


def play(events: Expanded, start: int, stop: int, prices: PriceList, listener: Listener | None = None) -> Streams:
    """Run the events [start, stop), all streams beginning at zero; the streams' clocks and the breakdown."""
    streams = Streams(prices, listener)
    kind, arg, stream = events.kind[start:stop], events.arg[start:stop], events.stream[start:stop]
    op = (kind == Event.OP.value) & (stream == 0)
    cost = np.zeros(len(kind))
    cost[op] = prices.seconds[arg[op]]
    parts = np.bincount(prices.part[arg[op]], weights=cost[op], minlength=4) if op.any() else np.zeros(4)
    streams.parts.compute, streams.parts.memory_bound, streams.parts.optimizer = map(float, parts[:3])
    before = np.concatenate([[0.0], np.cumsum(cost)])
    busy = (~op & (kind != Event.ALLOC.value) & (kind != Event.FREE.value) & (kind != Event.MARK.value)).nonzero()[0]
    done = 0.0
    kinds, args, where = kind[busy].tolist(), arg[busy].tolist(), stream[busy].tolist()
    for i, k, a, s in zip(busy.tolist(), kinds, args, where, strict=True):
        if s == 0 and before[i] > done:
            if listener:
                first = int(np.searchsorted(before, done, "right")) - 1
                _tell(listener, streams.now(0), op, cost, arg, prices, first, i)
            streams.compute(float(before[i] - done))
            done = float(before[i])
        if k == Event.OP.value:
            streams.time[s] = streams.now(s) + float(prices.seconds[a])
        elif k == Event.COLLECTIVE.value:
            streams.collective(a, s)
        elif k == Event.RECORD.value:
            streams.record(a, s)
        else:
            streams.wait(a, s)
    if before[-1] > done:
        if listener:
            first = int(np.searchsorted(before, done, "right")) - 1
            _tell(listener, streams.now(0), op, cost, arg, prices, first, len(kind))
        streams.compute(float(before[-1] - done))
    return streams


def _tell(
    listener: Listener, now: float, op: Any, cost: Floats, arg: Any, prices: PriceList, first: int, last: int
) -> None:
    """Report the kernels of the compute stream in [first, last) one after the other."""
    for i in range(first, last):
        if op[i]:
            listener(prices.names[int(arg[i])], 0, now, float(cost[i]))
            now += float(cost[i])


def step_bounds(events: Expanded, marks: list[tuple[str, int]]) -> tuple[int, int]:
    """Where the last traced step begins and ends."""
    rows = np.flatnonzero(events.kind == Event.MARK.value)
    at = [int(r) for r in rows if marks[int(events.arg[r])][0] in ("step", "end")]
    return at[-2], at[-1]
