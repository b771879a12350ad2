"""Classification of endings. Reference: the contract's statuses, and the cause that a person would name."""

import pytest

from bench.endings import Outcome, classify
from bench.ranks import RankLog


def log(rank: int, *, steps: int = 0, end: bool = False, error: tuple[str, str] | None = None, time: float = 10.0,
        loss: float | None = 2.0) -> RankLog:  # fmt: skip
    """A rank that started at 1 s, did ``steps`` steps, and then ended, failed at ``time``, or fell silent."""
    out = RankLog(rank)
    out.add({"kind": "start", "time": 1.0, "rank": rank, "pid": 1, "host": "h"})
    for n in range(1, steps + 1):
        out.add({"kind": "step", "time": 1.0 + n, "step": n, "loss": loss, "grad_norm": 1.0})
    if error:
        out.add({"kind": "error", "time": time, "rank": rank, "type": error[0], "message": error[1], "traceback": "T"})
    if end:
        out.add({"kind": "end", "time": time, "steps_done": steps})
    return out


def outcome(code: int = 1, **values) -> Outcome:
    return Outcome(0.0, code, **values)


PEER = ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), "oom"),
        (("RuntimeError", "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (("MemoryError", ""), "oom"),
        (("AcceleratorError", "CUDA error: an illegal memory access was encountered"), "failed"),
        (("ValueError", "planted"), "failed"),
        (("Unsupported", "c4 needs the network"), "unsupported"),
    ],
)
def test_what_an_error_means(error, status):
    ending = classify([log(0, steps=2, error=error)], 6, 1, outcome())
    assert (ending.status, ending.first_failed_rank) == (status, 0) and ending.reason.startswith(f"rank 0: {error[0]}")
    assert ending.error["traceback"] == "T"


def test_a_peers_complaint_is_not_the_cause():
    """Rank 0 complained first by the clock, but of rank 1's death."""
    logs = [log(0, steps=2, error=PEER, time=9.0), log(1, steps=2, error=("ValueError", "planted"), time=9.5)]
    assert classify(logs, 6, 2, outcome()).first_failed_rank == 1


def test_the_silent_rank_was_killed():
    logs = [log(0, steps=2, error=PEER), log(1, steps=2), log(2, steps=2, error=PEER)]
    ending = classify(logs, 6, 3, outcome(exits={0: 1}))
    assert (ending.status, ending.first_failed_rank) == ("failed", 1)
    ending = classify(logs, 6, 3, outcome(exits={1: -11}, log_tail="Fatal Python error: Segmentation fault\n"))
    assert ending.reason == "rank 1 was ended by SIGSEGV: Fatal Python error: Segmentation fault"
    assert classify(logs, 6, 3, outcome(exits={1: -9}, kernel_oom=True)).status == "oom"


def test_of_two_real_errors_the_earlier():
    logs = [log(0, error=("KeyError", "b"), time=9.2), log(1, error=("ValueError", "a"), time=9.1)]
    assert classify(logs, 6, 2, outcome()).first_failed_rank == 1


def test_the_supervisors_word():
    stopped = [log(0, steps=3), log(1, steps=2)]
    ending = classify(stopped, 6, 2, outcome(-9, stopped=("hung", "no progress")))
    assert (ending.status, ending.first_failed_rank) == ("hung", 1), "rank 1 is the furthest behind"
    assert classify(stopped, 6, 2, outcome(-9, stopped=("timeout", "wall"))).status == "timeout"


def test_what_the_ranks_wrote_outweighs_the_exit_code():
    done = [log(0, steps=6, end=True), log(1, steps=6, end=True)]
    assert classify(done, 6, 2, outcome(0)).reason is None
    aborted = classify(done, 6, 2, outcome(1, exits={1: -6}))
    assert aborted.status == "ok" and "rank 1 was ended by SIGABRT" in aborted.reason
    assert classify(done, 6, 2, outcome(-9, stopped=("cancelled", "by a signal"))).status == "ok"
    assert classify(done, 6, 4, outcome(0)).status == "incomplete", "two ranks never came up"
    early = [log(0, steps=4, end=True)]
    assert classify(early, 6, 1, outcome(0)).status == "incomplete"
    assert classify(early, 6, 1, outcome(0)).reason == "exit code 0, but only 4 of 6 steps are done"


def test_not_finite():
    assert classify([log(0, steps=6, end=True, loss=float("nan"))], 6, 1, outcome(0)).status == "diverged"
    named = log(0, steps=5)
    named.add({"kind": "step", "time": 9.0, "step": 6, "loss": None, "grad_norm": 1.0, "not_finite": ["loss"]})
    assert classify([named], 6, 1, outcome(0)).reason == "loss or gradient norm is not finite in step 6"


def test_lines_of_an_earlier_attempt_do_not_count():
    old = log(0, steps=6, end=True)
    ending = classify([old], 6, 1, Outcome(100.0, 1, log_tail="ImportError: no module\n", exits={0: 1}))
    assert (ending.status, ending.reason) == ("failed", "rank 0 exited with code 1: ImportError: no module")


def test_a_launcher_that_vanished():
    assert classify([], 6, 1, outcome(-9)).status == "lost"
    assert classify([], 6, 1, outcome(-9, kernel_oom=True)).status == "oom"
