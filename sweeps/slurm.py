"""The SLURM launcher: points become job arrays, and submitting returns at once.

A submission is a folder ``<results>/.jobs/NAME/``: the job script (its text is submitit's), ``tasks.json`` (the run
folder of each array task) and the jobs' logs. Every run folder is claimed, and its ``job.json`` written, before sbatch
is called; so whatever happens to this process, each point is either not there or known to ``bench status``. submitit's
own way, pickles that are renamed after sbatch has answered, loses the points of a submitter that dies in between.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from bench import run as bench_run
from bench import scheduler, store
from bench.reconcile import reconcile
from bench.spec import ROOT, code_id
from bench.store import RunDir
from sweeps.cluster import Cluster
from sweeps.local import build
from sweeps.points import OwnKeys, Point
from sweeps.work import Outcome, exit_code, outcome, read_rows, store_invalid, summary_line, todo, write_manifest

JOBS = ".jobs"
TASKS = "tasks.json"


class Script(SlurmExecutor):
    """submitit's job script around a command of ours. The command replaces the batch shell: it gets the signals."""

    @classmethod
    def affinity(cls) -> int:
        """A script can be written where there is no SLURM."""
        return 2

    @classmethod
    def text(cls, folder: Path, command: str, count: int, **parameters: Any) -> str:
        """Raises ValueError for a parameter that submitit does not know, with the ones it knows."""
        script = cls(folder=folder)
        extra = {"output": f"{_percent(folder)}/%A_%a.log", **parameters.pop("additional_parameters", {})}
        values = {**parameters, "additional_parameters": extra, "use_srun": False, "stderr_to_stdout": True}
        script.update_parameters(**{k: _escape(v) for k, v in values.items()}, wckey=None)
        if count:
            script.parameters["map_count"] = count
        return script._make_submission_file_text(command, "")


def _percent(path: Path) -> str:
    """sbatch reads %j and the like in the name of a log file."""
    return str(path).replace("%", "%%")


def _escape(value: Any) -> Any:
    """sbatch takes a backslash for an escape even in single quotes, and submitit quotes as for a shell."""
    if isinstance(value, dict):
        return {k: _escape(v) for k, v in value.items()}
    return value.replace("\\", "\\\\") if isinstance(value, str) else value


@dataclass(frozen=True)
class Array:
    """Points of one job array: they ask for the same nodes."""

    name: str
    points: list[Point]
    nodes: int
    ranks: int

    def script(self, folder: Path, cluster: Cluster) -> str:
        requeue = {"requeue" if cluster.max_attempts > 1 else "no-requeue": True}
        parameters = cluster.sbatch_parameters(self.nodes, self.ranks)
        extra = {**requeue, **parameters.pop("additional_parameters")}
        command = f"exec {_python(cluster)} -m sweeps.task {shlex.quote(str(folder))}"
        return Script.text(
            folder, command, len(self.points), job_name=self.name, array_parallelism=cluster.array_parallelism,
            setup=[*cluster.setup_lines(), _our_path()],
            additional_parameters={"signal": f"B:USR2@{cluster.signal_s}", **extra}, **parameters,
        )  # fmt: skip


def _python(cluster: Cluster) -> str:
    """The interpreter of the supervisor, outside any container."""
    return shlex.quote(sys.executable if cluster.container or not cluster.python else cluster.python)


def _our_path() -> str:
    return f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"


def arrays(runs: Sequence[Point], cluster: Cluster, prefix: str) -> list[Array]:
    """``runs`` by the nodes they need, in arrays of at most ``cluster.max_array``."""
    by_shape: dict[tuple[int, int], list[Point]] = defaultdict(list)
    for point in runs:
        assert point.spec is not None
        by_shape[cluster.shape(point.spec)].append(point)
    found: list[Array] = []
    for (nodes, ranks), points in by_shape.items():
        for start in range(0, len(points), cluster.max_array):
            name = f"{prefix}-{len(found)}"
            found.append(Array(name, points[start : start + cluster.max_array], nodes, ranks))
    return found


def launch(
    jobs: Sequence[Sequence[str]], own: OwnKeys, dryrun: str | None = None, report: str = "build/report"
) -> int:
    """Submit every point that is neither finished nor queued already; the exit code. Raises ConfigError.

    ``dryrun``: a folder for the job scripts, instead of submitting them. ``report``: where ``report=after`` builds it.
    """
    cluster = Cluster.load(own.cluster or "", own.cluster_changes)
    points = build(jobs)
    if points and all(p.problems for p in points):
        print("\n".join(f"{p.name or 'the plan'}: {p.reason}" for p in points), file=sys.stderr)
        print(summary_line([Outcome(p, "invalid") for p in points]))
        return 2
    results = Path(own.results).resolve()
    prefix = f"meshmark-{time.strftime('%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    if dryrun is not None:
        runs = [p for p in points if not p.problems]
        return write_scripts(arrays(runs, cluster, "array"), cluster, results, Path(dryrun))
    try:
        where = scheduler.require()
        bench_run.require_writable(results)
        reconcile(results)
    except scheduler.SchedulerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    stored = read_rows(results, points)
    store_invalid(points, results, stored)
    write_manifest(points, results)
    runs = todo(points, stored, None, own.only == "failed")
    submitted, failure = submit_all(arrays(runs, cluster, prefix), cluster, results, where)
    if own.report == "after" and submitted:
        submitted.append(submit_report(submitted, cluster, results, prefix, Path(report)))
    return conclude(points, results, submitted, failure)


def conclude(points: Sequence[Point], results: Path, submitted: list[str], failure: Exception | None) -> int:
    """Say what was submitted and what each point is now; the exit code."""
    if failure:
        print(f"error: {failure}", file=sys.stderr)
        if not submitted:
            return 2
    if submitted:
        print(f"jobs {' '.join(submitted)}; follow them with: python -m bench status {shlex.quote(str(results))}")
    rows = read_rows(results, points)
    outcomes = [outcome(p, rows[p.sweep], None) for p in points]
    for o in outcomes:
        if o.status not in ("ok", "queued", "running"):
            print(f"{o.status}: {o.point.name or o.point.run_id}: {o.reason}", file=sys.stderr)
    print(summary_line(outcomes), flush=True)
    settled = [Outcome(o.point, "ok") if o.status in ("queued", "running") else o for o in outcomes]
    return 1 if failure else exit_code(settled)


def write_scripts(found: Sequence[Array], cluster: Cluster, results: Path, folder: Path) -> int:
    """The job scripts alone, and what they would run: nothing is claimed, nothing submitted."""
    folder.mkdir(parents=True, exist_ok=True)
    for array in found:
        path = folder / f"{array.points[0].sweep}-{cluster.name}-{array.name}.sh"
        names = "".join(f"# task {i}: {p.name or p.run_id}\n" for i, p in enumerate(array.points))
        path.write_text(f"{array.script(results / JOBS / array.name, cluster)}\n{names}")
        print(path)
    return 0


def submit_all(
    found: Sequence[Array], cluster: Cluster, results: Path, where: str
) -> tuple[list[str], scheduler.SchedulerError | None]:
    """(ids of the accepted jobs, what the scheduler said to the first that it did not accept)."""
    ids: list[str] = []
    for array in found:
        try:
            ids.append(submit(array, cluster, results, where))
        except scheduler.SchedulerError as error:
            return ids, error
    return ids, None


def submit(array: Array, cluster: Cluster, results: Path, where: str) -> str:
    """Claim a folder for every point, then call sbatch. A rejected array leaves nothing behind."""
    folder = results / JOBS / array.name
    folder.mkdir(parents=True)
    (folder / "job.sh").write_text(array.script(folder, cluster))
    (folder / "cluster.json").write_text(json.dumps(cluster.to_dict(), indent=1))
    runs: list[RunDir] = []
    record: dict[str, Any] = {"name": array.name, "job_id": None, "cluster": where, "submitted_at": time.time()}
    for point in array.points:
        assert point.spec is not None
        run = bench_run.claim(point.spec, results, point.sweep)
        task = {"task": len(runs), "log": str(folder / "none"), "code_id": code_id(point.spec.hardware.device)}
        store.write_json(run.job, {**record, **task}, durable=False)
        runs.append(run)
    tasks = {"runs": [str(run.path) for run in runs], "nodes": array.nodes, "ranks": array.ranks}
    store.write_json(folder / TASKS, tasks)
    try:
        job_id = _sbatch(folder / "job.sh", array.name, record["submitted_at"])
    except scheduler.SchedulerError:
        for path in [*(run.path for run in runs), folder]:
            shutil.rmtree(path)
        for run in runs:
            with contextlib.suppress(OSError):  # other repeats of the point are there
                run.path.parent.rmdir()
        raise
    for number, run in enumerate(runs):
        names = {"job_id": f"{job_id}_{number}", "log": str(folder / f"{job_id}_{number}.log")}
        store.write_json(run.job, {**json.loads(run.job.read_text()), **names}, durable=False)
    return job_id


def _sbatch(script: Path, name: str, since: float) -> str:
    """The id of the submitted job; also of one that is in the queue although sbatch failed, as by a time-out."""
    try:
        return scheduler.submit(script)
    except scheduler.SchedulerError:
        with contextlib.suppress(scheduler.SchedulerError):
            accepted = scheduler.find(name, since)
            if accepted:
                return accepted
        raise


def submit_report(ids: Sequence[str], cluster: Cluster, results: Path, prefix: str, out: Path) -> str:
    """A job that builds the report once all others have ended, however they ended."""
    folder = results / JOBS / f"{prefix}-report"
    folder.mkdir(parents=True)
    small = replace(cluster, gpu_request="none", cpus_per_task=None, exclusive=None)
    parameters = small.sbatch_parameters(1, 1)
    extra = {"output": f"{_percent(folder)}/%j.log", **parameters.pop("additional_parameters")}
    python, where, to = _python(cluster), shlex.quote(str(results)), shlex.quote(str(out.resolve()))
    command = f"{python} -m bench status {where}; exec {python} -m reports build {where} -o {to}"
    text = Script.text(
        folder, command, 0, job_name=f"{prefix}-report", setup=[*cluster.setup_lines(), _our_path()],
        dependency=f"afterany:{':'.join(ids)}", additional_parameters=extra, **parameters,
    )  # fmt: skip
    (folder / "job.sh").write_text(text)
    return scheduler.submit(folder / "job.sh")
