"""Where runs lie on disk, and the only code that knows the file names. No torch.

``<results>/<sweep>/<run_id>/r000/`` holds ``spec.json``, ``ranks/<r>.jsonl``, ``steps.jsonl``, ``log.txt`` and, written
last and by rename, ``result.json``: its presence means that the run is done.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.result import RunResult, finite

RESULT, SPEC, STEPS, LOG, RANKS = "result.json", "spec.json", "steps.jsonl", "log.txt", "ranks"


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
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


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
        return RunDir(path)


def write_json(path: Path, data: Any) -> None:
    """Strict JSON, whole or not at all: written beside, flushed, renamed."""
    write_text(path, json.dumps(finite(data), indent=1, allow_nan=False))


def write_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


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
