"""The agent of one node: runs this node's ranks through torch's elastic agent and reports how each ended.

    python -m bench.node --nproc 8 [--nnodes 2 --rdzv-endpoint HOST:PORT --rdzv-id ID] SPEC_JSON RUN_DIR

``bench run`` starts one on its own machine; a SLURM job starts one a node (one task a node) with the same rendezvous
endpoint and id. The elastic agent is the only source of RANK and WORLD_SIZE. There are no restarts here: a restart is a
new attempt of the whole run, from its last checkpoint.

The ranks are forked from a server that has imported torch once: on two cores eight ranks are up in 3 s instead of 11.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import uuid
from multiprocessing import forkserver
from pathlib import Path
from types import FrameType

from bench.ranks import read_ranks
from bench.store import RunDir
from bench.tether import end_with_parent

PRELOAD = ["bench.tethered", "torch", "torch.distributed", "trainer_core.train"]
"""What the fork server imports, once for all ranks."""
INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables of an outer launcher that must not reach a rank."""


def rank_main(module: str, spec: str, run_dir: str) -> None:
    """A rank: ``python -m module spec run_dir``, in a process that the fork server made.

    SIGUSR1 prints the stacks of all threads into the log: the supervisor sends it to the ranks of a run that hangs.
    """
    end_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    sys.argv = [module, spec, run_dir]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code:
            raise


def report(run: RunDir, failures: dict[int, tuple[int, int]]) -> None:
    """Append rank -> (pid, exit code) of the ranks that the agent saw fail first."""
    with open(run.agents, "a") as file:
        for rank, (pid, code) in failures.items():
            row = {"kind": "exit", "time": time.time(), "host": socket.gethostname(), "rank": rank, "pid": pid}
            file.write(json.dumps({**row, "exit_code": code}) + "\n")


def forward(run: RunDir, began: float) -> None:
    """Pass SIGUSR2 (a time limit is near) on to this node's ranks, which then write a checkpoint and end."""

    def handler(signum: int, frame: FrameType | None) -> None:
        for log in read_ranks(run):
            if log.start and log.started_since(began) and log.start["host"] == socket.gethostname():
                os.kill(log.start["pid"], signum)

    signal.signal(signal.SIGUSR2, handler)


def start_fork_server(preload: list[str]) -> None:
    """Start the server that imports once and forks the ranks.

    A scheduler signals the whole process group: the server, and a rank that is not ready yet, must outlive the signals
    that ask for a checkpoint.
    """
    multiprocessing.set_forkserver_preload(preload)
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGTERM, signal.SIGUSR2)}
    forkserver.ensure_running()
    for signum, old in before.items():
        signal.signal(signum, old)


def end_when_superseded(run: RunDir) -> None:
    """End this node's processes, without a word, once another supervisor owns the run folder.

    A scheduler that lost touch with a node starts the run anew elsewhere, while the old ranks live on.
    """
    mine = run.owner.read_bytes() if run.owner.exists() else None
    while mine is None or (run.owner.exists() and run.owner.read_bytes() == mine):
        time.sleep(1.0)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def own_address(endpoint: str) -> str:
    """The address by which this machine reaches ``HOST:PORT``, and so can be reached from there: node names of a
    scheduler need not resolve. Connecting a UDP socket sends nothing."""
    host, _, port = endpoint.rpartition(":")
    family, kind, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as s:
        s.connect(address)
        return str(s.getsockname()[0])


def launch(args: argparse.Namespace) -> int:
    """Run the ranks of this node; 0 when all ended well, else 1."""
    start_fork_server(PRELOAD if args.module == "trainer_core" else PRELOAD[:-1])

    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch
    from torch.numa.binding import AffinityMode, NumaOptions

    run = RunDir(Path(args.run_dir))
    config = LaunchConfig(
        min_nodes=args.nnodes,
        max_nodes=args.nnodes,
        nproc_per_node=args.nproc,
        run_id=args.rdzv_id or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=args.rdzv_endpoint or "localhost:0",
        rdzv_configs={"timeout": args.rdzv_timeout},
        local_addr=own_address(args.rdzv_endpoint) if args.rdzv_endpoint else "localhost",
        numa_options=None if args.numa == "none" else NumaOptions(AffinityMode(args.numa)),
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
    )
    forward(run, time.time())
    threading.Thread(target=end_when_superseded, args=(run,), daemon=True).start()
    try:
        elastic_launch(config, rank_main)(args.module, args.spec, args.run_dir)
    except ChildFailedError as error:
        report(run, {rank: (f.pid, f.exitcode) for rank, f in error.failures.items()})
        return 1
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.node", description="Run this node's ranks of one run.")
    p.add_argument("--nproc", type=int, required=True, help="ranks on this node")
    p.add_argument("--nnodes", type=int, default=1)
    p.add_argument("--rdzv-endpoint", help="HOST:PORT of the first node; needed with several nodes")
    p.add_argument("--rdzv-id", help="one id for all nodes of the run")
    p.add_argument("--rdzv-timeout", type=int, default=600, help="seconds to wait for all nodes")
    p.add_argument("--module", default="trainer_core", help="what a rank runs, as python -m MODULE SPEC RUN_DIR")
    p.add_argument("--numa", default="none", help="bind a rank to its GPU's: node, socket, exclusive, core-complex")
    p.add_argument("--parent", type=int, help="end when this parent process does")
    p.add_argument("spec")
    p.add_argument("run_dir")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.nnodes > 1 and not (args.rdzv_endpoint and args.rdzv_id):
        parser().error("several nodes need --rdzv-endpoint and --rdzv-id, the same on each")
    end_with_parent(args.parent or os.getppid())
    for name in INHERITED:
        os.environ.pop(name, None)
    return launch(args)


if __name__ == "__main__":
    sys.exit(main())
