"""A rank that follows the trainer's protocol in milliseconds a step, and goes wrong where ``fault.json`` says.

Run by the node agent as ``python -m fake_rank SPEC RUN_DIR``. Fault: {"kind", "rank", "step"}.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class Log:
    def __init__(self, run: Path):
        self.path = run / "ranks" / f"{RANK}.jsonl"

    def __call__(self, kind: str, **values: object) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps({"kind": kind, "time": time.time(), **values}) + "\n")


def fail(kind: str) -> None:
    if kind == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "sleep":
        time.sleep(1000)
    if kind == "raise":
        raise ValueError("planted in rank 1")
    if kind == "eat":
        eaten = []
        while True:
            eaten.append(b"x" * (64 << 20))
            time.sleep(0.05)
    if kind == "quit":
        sys.exit(0)


def train(spec: dict, run: Path, log: Log) -> None:
    import torch
    import torch.distributed as dist

    fault = json.loads((run / "fault.json").read_text()) if (run / "fault.json").exists() else {}
    if WORLD > 1:
        dist.init_process_group("gloo")
    steps = spec["train"]["steps"]
    for step in range(1, steps + 1):
        if fault.get("step") == step and fault["rank"] in (RANK, -1):
            fail(fault["kind"])
        time.sleep(fault.get("step_s", 0.01))
        if WORLD > 1:
            dist.all_reduce(torch.ones(1))
        log("step", step=step, loss=5.0 / step if RANK == WORLD - 1 else None, grad_norm=1.0, lr=1e-3, tokens=1000,
            step_time_s=0.01 * (1 + RANK), peak_active_gib=None, peak_reserved_gib=None, peak_rss_gib=0.1 + RANK,
            alloc_retries=0, recompiles=0, excluded=None)  # fmt: skip
    log("evidence", evidence={"layout": {"layers": 1}, "pid": os.getpid()})
    log("end", steps_done=steps)
    if fault.get("kind") == "abort_after" and fault["rank"] == RANK:
        os.abort()


def main() -> None:
    spec, run = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    log = Log(run)
    log("start", rank=RANK, pid=os.getpid(), host=os.uname().nodename)
    print(f"rank {RANK} is up", flush=True)
    try:
        train(spec, run, log)
    except Exception as error:
        log("error", rank=RANK, type=type(error).__name__, message=str(error), traceback=traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    main()
