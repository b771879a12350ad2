"""Brings run folders and the scheduler into agreement: a run whose job has ended without a result gets one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import scheduler, store
from bench.endings import Outcome, classify
from bench.measure import empty
from bench.ranks import read_ranks
from bench.result import RunResult, Status
from bench.spec import RunSpec
from bench.store import RunDir
from bench.summary import summarize

Record = dict[str, Any]
"""``job.json`` of a run: name (of the submission), task (in its array), job_id (``12_3``; null until sbatch has
answered), cluster, submitted_at (unix seconds), log, code_id."""


def open_jobs(results: Path) -> dict[RunDir, Record]:
    """Every run below ``results`` that was submitted and has no result, with its record."""
    found = {}
    for path in sorted(results.glob(f"**/r[0-9][0-9][0-9]*/{store.JOB}")):
        run = RunDir(path.parent)
        if not run.result.exists():
            found[run] = json.loads(path.read_text())
    return found


def reconcile(results: Path) -> dict[RunDir, tuple[Status, str]]:
    """(status, reason) of every submitted run that had no result; where that is final, it has one now.

    Live ones are ``queued`` or ``running``. Raises SchedulerError where the scheduler can not be asked: then nothing is
    known, and nothing is changed.
    """
    records = open_jobs(results)
    if not records:
        return {}
    here = scheduler.cluster_name()
    job_ids = identify(records)
    jobs = scheduler.jobs(i for run, i in job_ids.items() if i is not None and records[run]["cluster"] == here)
    found: dict[RunDir, tuple[Status, str]] = {}
    for run, record in records.items():
        job_id = job_ids[run]
        if record["cluster"] != here:
            found[run] = "queued", f"a job of cluster {record['cluster']}; this shell talks to {here}"
            continue
        status, reason = scheduler.verdict({**record, "job_id": job_id}, jobs.get(job_id) if job_id else None)
        if status not in ("queued", "running") and not run.result.exists():
            status, reason = close(run, record, status, reason)
        found[run] = status, reason
    return found


def identify(records: dict[RunDir, Record]) -> dict[RunDir, str | None]:
    """The job id of each run: as recorded, or, where the submitting process died too early, by the unique name."""
    unknown = {r["name"]: r["submitted_at"] for r in records.values() if r["job_id"] is None}
    mains = {name: scheduler.find(name, since) for name, since in unknown.items()}
    ids: dict[RunDir, str | None] = {}
    for run, record in records.items():
        main = mains.get(record["name"])
        ids[run] = record["job_id"] or (f"{main}_{record['task']}" if main else None)
    return ids


def close(run: RunDir, record: Record, status: Status, reason: str) -> tuple[Status, str]:
    """Write the result that the run's own job could not write, from the rank files and the scheduler's word.

    A run whose ranks have all done their last step is ok, however its job ended.
    """
    spec = RunSpec.from_dict(json.loads(run.spec.read_text()))
    logs = read_ranks(run)
    ending = classify(logs, spec.config.train.steps, spec.world_size, Outcome(0.0, 1, (status, reason)))
    if status == "lost" and any(log.error for log in logs):
        failure = classify(logs, spec.config.train.steps, spec.world_size, Outcome(0.0, 1))
        ending = replace(failure, reason=f"{failure.reason}; {reason}")
    result: RunResult = empty(spec, run, ending)
    try:
        if spec.engine == "measure":
            result = summarize(result, spec, run)
        result = replace(result, repeat=run.repeat, sweep=run.sweep, code_id=record["code_id"], command=spec.command())
        store.write_result(run, result)
    except OSError as error:
        return ending.status, f"{ending.reason}; its result can not be written: {error.strerror}"
    return result.status, result.reason or ""
