"""List scheduling. References: timelines small enough to draw by hand, and the closed forms of pipeline bubbles."""

import numpy as np
import pytest

from bench.sim.events import Collective, Event, Op
from bench.sim.expand import Expanded
from bench.sim.pipeline import Rank, lay_out
from bench.sim.schedule import Breakdown, play, price

OPS = {"a": (2.0, "compute"), "b": (1.0, "memory"), "step": (0.5, "memory")}
COMM = {"gather": (5.0, "out"), "reduce": (3.0, "out"), "tp": (3.0, "up")}


class Fixed:
    """Prices by name; nothing is hidden or contended unless told."""

    contention = 0.0
    async_tp_hidden = 0.75

    def op(self, op):
        return OPS[op.name]

    def collective(self, c):
        return COMM[c.axis][0]

    def link(self, c):
        return COMM[c.axis][1]


TABLE = [
    *(Op(name, "pointwise", (), (), phase="optim" if name == "step" else "fwd") for name in OPS),
    *(Collective("all_gather", 1.0, axis, 8, 1) for axis in COMM),
]
INDEX = {entry.name if isinstance(entry, Op) else entry.axis: i for i, entry in enumerate(TABLE)}


def run(*rows, table=TABLE, **changes):
    """Rows: ("a",) or ("gather", stream) runs it, ("record"|"wait", handle, stream) orders streams."""
    prices = Fixed()
    for name, value in changes.items():
        setattr(prices, name, value)
    kind, arg, stream = [], [], []
    for name, *rest in rows:
        if name in ("record", "wait"):
            kind.append(Event.RECORD if name == "record" else Event.WAIT)
            arg.append(rest[0])
            stream.append(rest[1])
        else:
            kind.append(Event.OP if name in OPS else Event.COLLECTIVE)
            arg.append(INDEX[name])
            stream.append(rest[0] if rest else 0)
    columns = [np.asarray(c, dtype=np.int64) for c in (kind, arg, stream)]
    events = Expanded(*columns, np.full(len(kind), -1), np.zeros(0, dtype=np.int64))
    told = []
    streams = play(events, 0, len(kind), price(table, prices), lambda *entry: told.append(entry))
    streams.settle()
    return streams, told


def test_overlap_and_exposed_rest():
    # the gather (5) runs beside a (2) and b (1): 2 of it are waited for, then a again
    streams, told = run(("gather", 1), ("record", 1, 1), ("a",), ("b",), ("wait", 1, 0), ("a",))
    assert streams.end == 7
    assert streams.parts.to_dict() == {"compute": 4, "memory_bound": 1, "exposed_comm": {"gather": 2}, "bubble": 0,
                                       "optimizer": 0}  # fmt: skip
    assert ("all_gather gather", 1, 0.0, 5.0) in told and ("a", 0, 5.0, 2.0) in told
    assert streams.parts.total == streams.end


def test_prefetch_hides_what_comes_early():
    late = run(("a",), ("gather", 1), ("record", 1, 1), ("wait", 1, 0), ("a",))[0]
    waits = run(("a",), ("record", 0, 0), ("wait", 0, 1), ("gather", 1), ("record", 1, 1), ("wait", 1, 0), ("a",))[0]
    early = run(("gather", 1), ("record", 1, 1), ("a",), ("a",), ("b",), ("wait", 1, 0), ("a",))[0]
    # without an order between the streams the gather starts at zero, wherever it stands in the program
    assert (late.end, waits.end, early.end) == (7, 9, 7)
    assert early.parts.exposed_comm == {}


def test_collective_on_the_compute_stream_is_exposed():
    streams = run(("a",), ("tp",), ("step",))[0]
    assert streams.parts.to_dict()["exposed_comm"] == {"tp": 3.0}
    assert (streams.parts.optimizer, streams.end) == (0.5, 5.5)


def test_one_link_class_is_shared():
    assert run(("gather", 1), ("reduce", 2))[0].end == 8
    assert run(("gather", 1), ("tp", 2))[0].end == 5


def test_contention_takes_from_compute():
    streams = run(("gather", 1), ("a",), ("a",), contention=0.5)[0]
    # 4 s of kernels beside a gather of 5: it takes half of the 4 s that they overlap
    assert streams.parts.exposed_comm["gather"] == pytest.approx(2.0)
    assert streams.end == pytest.approx(6.0)


def test_async_tp_hides_its_share():
    table = [*TABLE[:-1], Collective("all_gather", 1.0, "tp", 8, 1, overlap="async_tp")]
    assert run(("tp",), table=table)[0].end == pytest.approx(0.75)


def test_work_left_at_the_end_is_waited_for():
    streams = run(("a",), ("gather", 1))[0]
    assert streams.end == 5
    assert streams.parts.exposed_comm == {"gather": 3.0}


def one_f_one_b(stages: int, microbatches: int) -> dict[int, list[str]]:
    table = {}
    for s in range(stages):
        warm = min(microbatches, stages - s)
        row = [f"{s}F{m}" for m in range(warm)]
        for m in range(microbatches):
            row.append(f"{s}B{m}")
            if warm + m < microbatches:
                row.append(f"{s}F{warm + m}")
        table[s] = row
    return table


def gpipe(stages: int, microbatches: int) -> dict[int, list[str]]:
    return {s: [f"{s}{k}{m}" for k in "FB" for m in range(microbatches)] for s in range(stages)}


def ranks(stages: int, microbatches: int, forward: float = 1.0, backward: float = 2.0) -> list[Rank]:
    costs = {"F": Breakdown(compute=forward), "B": Breakdown(compute=backward)}
    return [Rank(actions={(0, k): [c] * microbatches for k, c in costs.items()}) for _ in range(stages)]


@pytest.mark.parametrize("table", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (8, 8), (8, 32)])
def test_bubble_is_the_closed_form(table, stages, microbatches):
    """GPipe and 1F1B: (p - 1) / (m + p - 1) of the time is bubble (Narayanan et al. 2021)."""
    placement = [[s] for s in range(stages)]
    line = lay_out(table(stages, microbatches), ranks(stages, microbatches), placement, transfer=0.0)
    assert line.seconds == pytest.approx(3 * (microbatches + stages - 1))
    assert line.bubble_frac == pytest.approx((stages - 1) / (microbatches + stages - 1))
    assert line.parts.total == pytest.approx(line.seconds)


def test_the_slowest_stage_sets_the_pace():
    slow = ranks(4, 16)
    slow[1] = ranks(1, 16, 2.0, 4.0)[0]
    line = lay_out(one_f_one_b(4, 16), slow, [[s] for s in range(4)], 0.0)
    # 1 until its first input, 2 until the first gradient is back from two stages (at 9, its three forwards end at 7),
    # 16 x 6 of work, 2 for the first stage's last backward
    assert line.seconds == pytest.approx(1 + 2 + 16 * 6 + 2)
    assert line.parts.compute == 96 and line.busy == [48, 96, 48, 48]


def test_transfers_lengthen_the_fill_and_the_drain():
    free, slow = (lay_out(gpipe(4, 4), ranks(4, 4), [[s] for s in range(4)], t).seconds for t in (0.0, 0.25))
    assert slow - free == pytest.approx(2 * 3 * 0.25)


def test_lockstep_is_never_faster():
    table = {0: ["0F0", "0F1", "", "0B0", "0B1"], 1: ["", "1F0", "1B0", "1F1", "1B1"]}
    packed = {r: [a for a in row if a] for r, row in table.items()}
    uneven = ranks(2, 2)
    uneven[0].actions[0, "F"] = [Breakdown(compute=3.0)] * 2
    free = lay_out(packed, uneven, [[0], [1]], 0.0)
    held = lay_out(table, uneven, [[0], [1]], 0.0, lockstep=True)
    assert held.seconds >= free.seconds


def test_lists_that_wait_in_a_circle_are_refused():
    with pytest.raises(ValueError, match="wait for each other"):
        lay_out({0: ["0B0", "0F0"], 1: ["1F0", "1B0"]}, ranks(2, 1), [[0], [1]], 0.0)
