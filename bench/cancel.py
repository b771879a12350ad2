"""``bench cancel RESULTS``: end every job and every local run below a results folder; each keeps its row, cancelled."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from bench import scheduler, store
from bench.cli import FAILED, OK, UsageError
from bench.reconcile import identify, open_jobs, reconcile
from bench.store import RunDir

WAIT_S = 60.0
"""How long jobs and runs may take to end (SLURM's KillWait is 30 s)."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("results", type=Path)


def main(args: argparse.Namespace) -> int:
    if not args.results.is_dir():
        raise UsageError(f"{args.results} is not a folder")
    records = open_jobs(args.results)
    local = [run for run in store.run_dirs(args.results) if run not in records and not run.result.exists()]
    try:
        scheduler.cancel(i for i in identify(records).values() if i is not None)
        for run in local:
            stop(run)
        left = wait(args.results, local)
    except scheduler.SchedulerError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    print(f"cancelled {len(records)} submitted and {len(local)} local runs" + (f"; {left} still end" if left else ""))
    return FAILED if left else OK


def stop(run: RunDir) -> None:
    """Ask the supervisor of a run on this machine to end it."""
    if store.owner_lives(run):
        os.kill(json.loads(run.owner.read_text())["pid"], signal.SIGTERM)


def wait(results: Path, local: list[RunDir]) -> int:
    """How many runs have no result once all have or the time is over. The results of jobs are written here."""
    deadline = time.monotonic() + WAIT_S
    while True:
        live = sum(status in ("queued", "running") for status, _ in reconcile(results).values())
        live += sum(bool(store.owner_lives(run)) and not run.result.exists() for run in local)
        if not live or time.monotonic() > deadline:
            return live
        time.sleep(0.5)
