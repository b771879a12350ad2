"""Where runs lie on disk, and the only code that knows the file names. No torch.

``<results>/<sweep>/<run_id>/r000/`` holds ``spec.json``, ``ranks/<r>.jsonl``, ``steps.jsonl``, ``log.txt`` and, written
last and by rename, ``result.json``: its presence means that the run is done. ``owner.json`` names the process that is
at work on it, ``job.json`` the scheduler's job, ``agents.jsonl`` how ranks ended.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.result import RunResult, Status, finite
from bench.spec import RunSpec

RESULT, SPEC, STEPS, LOG, RANKS = "result.json", "spec.json", "steps.jsonl", "log.txt", "ranks"
OWNER, JOB, AGENTS = "owner.json", "job.json", "agents.jsonl"
RESERVE, RESERVE_BYTES = ".reserve", 64 * 1024


@dataclass(frozen=True)
class RunDir:
    """The folder of one run."""

    path: Path

    @property
    def result(self) -> Path:
        return self.path / RESULT

    @property
    def spec(self) -> Path:
        return self.path / SPEC

    @property
    def steps(self) -> Path:
        return self.path / STEPS

    @property
    def log(self) -> Path:
        return self.path / LOG

    @property
    def ranks(self) -> Path:
        return self.path / RANKS

    def rank_file(self, rank: int) -> Path:
        return self.ranks / f"{rank}.jsonl"

    @property
    def owner(self) -> Path:
        return self.path / OWNER

    @property
    def job(self) -> Path:
        return self.path / JOB

    @property
    def agents(self) -> Path:
        return self.path / AGENTS

    @property
    def repeat(self) -> int:
        """The number in the folder's name: 2 for r002."""
        digits = "".join(c for c in self.path.name[1:4] if c.isdigit())
        return int(digits or 0)

    @property
    def sweep(self) -> str:
        return self.path.parent.parent.name


def claim(results: Path, sweep: str, run_id: str) -> RunDir:
    """A new ``rNNN`` folder that no other process has: mkdir is the lock."""
    parent = results / sweep / run_id
    parent.mkdir(parents=True, exist_ok=True)
    number = sum(1 for _ in parent.glob("r*"))
    while True:
        path = parent / f"r{number:03d}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
            continue
        (path / RANKS).mkdir()
        own(RunDir(path))
        return RunDir(path)


def own(run: RunDir) -> None:
    """Say that this process is at work on the run: with no result and no living owner it is lost."""
    pid = os.getpid()
    write_json(run.owner, {"host": socket.gethostname(), "pid": pid, "created": _created(pid)}, durable=False)


def owner_lives(run: RunDir) -> bool | None:
    """Whether the owner still runs; None where that can not be told from here (another machine, no owner named)."""
    try:
        owner = json.loads(run.owner.read_text())
        host, pid, created = owner["host"], owner["pid"], owner["created"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return _created(pid) == created if host == socket.gethostname() else None


def _created(pid: int) -> str | None:
    """When the process began (clock ticks since boot, field 22 of /proc/PID/stat); None for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def write_json(path: Path, data: Any, durable: bool = True) -> None:
    """Strict JSON, whole or not at all: written beside, flushed, renamed."""
    write_text(path, json.dumps(finite(data), indent=1, allow_nan=False), durable)


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """``durable`` waits for the disk, so that the file outlives a crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    os.replace(temporary, path)


def reserve(run: RunDir) -> None:
    """Keep room for the result on the disk: a run that fills it can then still say so."""
    with open(run.path / RESERVE, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)


def write_result(run: RunDir, result: RunResult) -> None:
    """The last file of a run. Where the disk has no room left, the reason says so: most likely that is the cause."""
    full = os.statvfs(run.path).f_bavail * os.statvfs(run.path).f_frsize < RESERVE_BYTES
    (run.path / RESERVE).unlink(missing_ok=True)
    if full and result.status != "ok":
        result = replace(result, reason=f"no space left in {run.path}; {result.reason}")
    write_text(run.result, result.to_json())


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that is perhaps still being written: a last line without its end is left out."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            return
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            yield row


def run_dirs(results: Path) -> list[RunDir]:
    """Every run folder below ``results``, in path order."""
    found = {path.parent for name in (SPEC, RESULT) for path in results.glob(f"**/r[0-9][0-9][0-9]*/{name}")}
    return [RunDir(path) for path in sorted(found)]


def load_result(run: RunDir) -> RunResult:
    """The result of one folder. Raises FileNotFoundError where it is not done, ValueError where it is not readable."""
    return RunResult.from_dict(json.loads(run.result.read_text()))


def load_all(results: Path) -> list[RunResult]:
    """One row a run folder below ``results``, in path order; never raises, and counts a copied folder once.

    A folder that can not be read is ``corrupt``, one without a result is ``running``, ``queued`` or ``lost``.
    """
    return [result for _, result in rows(results)]


def rows(results: Path) -> list[tuple[RunDir, RunResult]]:
    """:func:`load_all`, each row with its folder."""
    return _distinct(run_dirs(results))


def _distinct(runs: list[RunDir]) -> list[tuple[RunDir, RunResult]]:
    seen: set[str] = set()
    found = []
    for run in runs:
        row, identity = _row(run)
        if identity is None or identity not in seen:
            found.append((run, row))
        seen |= {identity} if identity else set()
    return found


def _row(run: RunDir) -> tuple[RunResult, str | None]:
    """The row of a folder, and what a copy of it has in common with it (None for one that can not be told)."""
    try:
        raw = run.result.read_bytes()
    except FileNotFoundError:
        return unfinished(run)
    except OSError as error:
        return _broken(run, f"result.json can not be read: {error.strerror}"), None
    if not raw.strip():
        return _broken(run, "result.json is empty"), None
    constants: list[str] = []

    def constant(text: str) -> float:
        constants.append(text)
        return math.nan

    try:
        data = json.loads(raw, parse_constant=constant)
        result = RunResult.from_dict(data)
    except (ValueError, TypeError, AttributeError) as error:
        return _broken(run, f"result.json is not a whole result: {error}"), None
    return _held_to_account(result, constants), hashlib.sha256(raw).hexdigest()


def _held_to_account(result: RunResult, constants: list[str]) -> RunResult:
    """A stored "ok" is believed only where its own figures agree."""
    if result.status != "ok":
        return result
    loss = result.metrics.get("final_loss")
    if loss is not None and loss.value is not None and not math.isfinite(loss.value):
        return replace(result, status="diverged", reason=f"the final loss is {loss.value}")
    if constants:
        return replace(result, status="corrupt", reason=f"result.json holds {constants[0]}, which is no JSON number")
    if result.engine != "simulate" and result.steps_done != result.steps_requested:
        reason = f"{result.steps_done} of {result.steps_requested} steps done"
        return replace(result, status="incomplete", reason=reason)
    return result


def unfinished(run: RunDir) -> tuple[RunResult, str | None]:
    """The row of a folder without a result: running or queued while its owner lives, else lost."""
    try:
        raw = run.spec.read_bytes()
        spec = json.loads(raw)
        steps = spec["train"]["steps"], spec["parallel"]["world_size"], spec["engine"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return _broken(run, f"no result, and spec.json is not readable: {error}"), None
    lives = owner_lives(run)
    started = any(run.ranks.glob("*.jsonl"))
    status: Status = "running" if started else "queued"
    reason = None
    if run.job.exists() and not lives:
        reason = "a scheduler's job: bench status asks it"
    elif not lives:
        status, reason = "lost", "it ended without a result: its supervisor is gone"
    row = RunResult(run.path.parent.name, status, spec, run.repeat, sweep=run.sweep, engine=steps[2], reason=reason,
                    steps_requested=steps[0], world_size=steps[1])  # fmt: skip
    owner = run.owner.read_bytes() if run.owner.exists() else None
    return row, hashlib.sha256(raw + owner).hexdigest() if owner else None


def _broken(run: RunDir, reason: str) -> RunResult:
    try:
        spec = json.loads(run.spec.read_text())
    except (OSError, ValueError):
        spec = {}
    spec = spec if isinstance(spec, dict) else {}
    return RunResult(run.path.parent.name, "corrupt", spec, run.repeat, sweep=run.sweep, reason=reason)


def current(row: RunResult, code_id: str, fingerprint: str | None) -> bool:
    """Whether a stored row is of this code and this machine (None: any).

    A simulated result does not depend on the machine that computed it, and neither does a plan's being invalid.
    """
    anywhere = fingerprint is None or row.engine == "simulate" or row.status == "invalid"
    return row.code_id == code_id and (anywhere or row.environment.get("fingerprint") == fingerprint)


def finished(results: Path, spec: RunSpec, code_id: str, fingerprint: str) -> list[RunResult]:
    """The stored results, of any sweep, that make ``spec`` finished: ok, of the same code and machine."""
    runs = [RunDir(path.parent) for path in sorted(results.glob(f"*/{spec.run_id}/r[0-9][0-9][0-9]*/{RESULT}"))]
    return [r for _, r in _distinct(runs) if r.status == "ok" and current(r, code_id, fingerprint)]
