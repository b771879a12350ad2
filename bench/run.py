"""One run, whatever its engine: claim a folder, run, always leave a result. ``bench run`` and ``bench summarize``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import environment, store
from bench.cli import FAILED, OK, USAGE, UsageError, emit, problem_text
from bench.endings import Ending
from bench.measure import empty, measure
from bench.result import RunResult
from bench.spec import RunSpec, check, code_id, from_overrides
from bench.store import RunDir
from bench.summary import summarize as summarize_run
from bench.supervise import OnProgress, Progress, cancel_on_signals
from trainer_core.config import ConfigError

DEFAULT_SWEEP = "runs"


def run(
    spec: RunSpec, results: Path, sweep: str = "", on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
) -> RunResult:  # fmt: skip
    """Run ``spec`` once in a new folder below ``results``. Raises OSError where no folder can be made there."""
    return execute(spec, claim(spec, results, sweep), on_progress=on_progress, cancel=cancel)


def claim(spec: RunSpec, results: Path, sweep: str = "") -> RunDir:
    """A new folder for one run of ``spec``, with its spec.json: a queued point."""
    folder = store.claim(results, sweep or DEFAULT_SWEEP, spec.run_id)
    store.write_json(folder.spec, spec.to_dict())
    return folder


def execute(
    spec: RunSpec, folder: RunDir, *, launcher: Sequence[str] = (), agent_args: Sequence[str] = (),
    module: str = "trainer_core", on_progress: OnProgress | None = None, cancel: threading.Event | None = None,
    keep: Callable[[RunResult], RunResult | None] | None = None,
) -> RunResult:  # fmt: skip
    """Run ``spec`` in a claimed folder and write result.json, last; an unfinished attempt there is gone on with.

    ``launcher`` (srun, its options and the interpreter) and ``agent_args`` (--nnodes, --rdzv-endpoint, --rdzv-id,
    --nproc) start one agent a node on other machines. ``keep`` has the last word on the result: None leaves the folder
    to a later attempt. Else, whatever happens here, an exception of our own included, a result is written.
    """
    store.own(folder)
    store.reserve(folder)
    cancel = cancel or threading.Event()
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    with cancel_on_signals(cancel):
        try:
            errors, _ = check(spec)
            if errors:
                result = empty(spec, folder, Ending("invalid", "; ".join(p.message for p in errors)))
            elif spec.engine == "measure":
                result = measure(spec, folder, module=module, launcher=launcher, agent_args=agent_args, cancel=cancel,
                                 on_progress=on_progress)  # fmt: skip
            elif spec.engine == "simulate":
                from bench.sim.engine import simulate

                result = simulate(spec)
            else:
                reason = "engine=torchtitan is not built in; engine=measure runs Meshmark's own trainer"
                result = empty(spec, folder, Ending("unsupported", reason))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            row = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            result = empty(spec, folder, Ending("failed", f"in Meshmark itself: {text}", error=row))
        result = replace(
            result, repeat=folder.repeat, sweep=folder.sweep, started_at=started, code_id=code_id(spec.hardware.device),
            environment={**environment.capture(), **result.environment}, command=spec.command(),
        )  # fmt: skip
        final = keep(result) if keep else result
        if final is None:
            return result
        store.write_result(folder, final)
    return final


def open_folder(path: Path) -> tuple[RunDir, RunSpec]:
    """A run folder and its spec. Raises UsageError for one that is none."""
    folder = RunDir(path)
    try:
        return folder, RunSpec.from_dict(json.loads(folder.spec.read_text()))
    except (OSError, json.JSONDecodeError) as error:
        raise UsageError(f"{path} is not a run folder: {error}") from None


def require_writable(results: Path) -> None:
    """Raises UsageError before anything starts where ``results`` can not be written."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=results):
            return
    except OSError as error:
        raise UsageError(f"{results} can not be written ({error.strerror}): choose another folder with -o") from None


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for python -m sweeps")
    p.add_argument("-o", "--output", type=Path, default=Path("results"), metavar="DIR", help="results folder")
    p.add_argument("--sweep", default=DEFAULT_SWEEP, metavar="NAME", help="folder below DIR")
    p.add_argument("--into", type=Path, metavar="RUN_DIR", help="run the spec.json of a claimed run folder there")
    p.add_argument("--json", action="store_true", help="print result.json")


def main(args: argparse.Namespace) -> int:
    if args.into and args.overrides:
        raise UsageError("--into takes the spec from the folder, so KEY=VALUE can not be given with it")
    folder, spec = open_folder(args.into) if args.into else (None, from_overrides(args.overrides))
    errors, warnings = check(spec)
    if errors:
        raise ConfigError(errors)
    if warnings:
        print(problem_text(warnings, "warning"), file=sys.stderr)
    if folder:
        require_writable(folder.path)
        folders = [folder]
    else:
        require_writable(args.output)
        count = spec.run.repeats if spec.run.repeat_as == "run" else 1
        folders = [claim(spec, args.output, args.sweep) for _ in range(count)]
    results = []
    for folder in folders:
        show = _Line(spec) if sys.stderr.isatty() else None
        results.append(execute(spec, folder, on_progress=show))
        print(f"{folder.path}: {results[-1].status}", file=sys.stderr)
        if results[-1].status == "cancelled":
            break
    data = [json.loads(r.to_json()) for r in results]
    texts = [text(r, f) for r, f in zip(results, folders, strict=False)]
    emit(data if len(folders) > 1 else data[0], args.json, "\n".join(texts))
    return exit_code(results)


def exit_code(results: Sequence[RunResult]) -> int:
    if any(r.status == "invalid" for r in results):
        return USAGE
    return OK if all(r.status == "ok" for r in results) else FAILED


class _Line:
    """One live line on a terminal."""

    def __init__(self, spec: RunSpec):
        self.steps = spec.config.train.steps

    def __call__(self, p: Progress) -> None:
        where = f"step {p.step}/{self.steps}" if p.step else p.phase
        speed = f"  {p.tps:,.0f} tokens/s" if p.tps else ""
        loss = f"  loss {p.loss:.4f}" if p.loss is not None else ""
        end = "\n" if p.step == self.steps else ""
        print(f"\r{where}{speed}{loss}\x1b[K", end=end, file=sys.stderr, flush=True)


def text(result: RunResult, folder: RunDir) -> str:
    """A result for people: the ending, then each figure with its interval or why there is none."""
    head = f"{result.status}: {result.steps_done} of {result.steps_requested} steps, {result.world_size} ranks"
    lines = [head, *([f"  {result.reason}"] if result.reason else [])]
    if result.status != "ok" and folder.log.exists():
        lines.append(f"  log: {folder.log}")
    for name, v in result.metrics.items():
        if v.value is None:
            lines += [f"  {name:18} n/a ({v.reason})"] if result.status == "ok" else []
            continue
        span = f"  [{v.low:,.4g}, {v.high:,.4g}] at {v.level:.0%}" if v.low is not None and v.high is not None else ""
        word = " simulated" if result.engine == "simulate" else ""
        lines.append(f"  {name:18} {v.value:,.6g} {v.unit}{word}{span} n={v.n}")
    return "\n".join(lines)


def summarize_arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("run_dir", type=Path)
    p.add_argument("--json", action="store_true")


def summarize(args: argparse.Namespace) -> int:
    """The figures of a run, again from its rank files; result.json is read for the ending and left as it is."""
    folder, spec = open_folder(args.run_dir)
    try:
        ending = store.load_result(folder)
    except FileNotFoundError:
        ending, _ = store.unfinished(folder)
    except ValueError as error:
        ending = empty(spec, folder, Ending("corrupt", f"result.json: {error}"))
    if ending.engine != "measure":
        raise UsageError(f"{args.run_dir} was not measured (engine={ending.engine}): it has no rank files")
    kept = {k: v for k, v in ending.evidence.items() if k == "error"}
    found = summarize_run(replace(ending, evidence=kept), spec, folder)
    data: dict[str, Any] = json.loads(found.to_json())
    emit(data, args.json, text(found, folder))
    return OK
