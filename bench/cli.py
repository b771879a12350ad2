"""The commands of ``python -m bench``: one line each, imported only when called. No torch.

A command's module has ``add_arguments(parser)`` and ``main(args) -> exit code``; another prefix where a module holds
several (``describe:validate_arguments, validate``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from bench.result import finite
from trainer_core.config import ConfigError, Problem

OK, FAILED, USAGE, NO_VERDICT, INTERNAL = range(5)
"""Exit codes."""

COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("bench.run", "", "one supervised run"),
    "seed": ("bench.seed", "", "initial parameters as a checkpoint that runs of every layout start from"),
    "summarize": ("bench.run", "summarize", "compute a run's metrics again from its rank files"),
    "describe": ("bench.describe", "", "parameters, FLOPs, degrees and state of a plan"),
    "validate": ("bench.describe", "validate", "whether a plan can run, and what is nearest to it"),
    "mfu": ("bench.mfu", "", "utilisation that a throughput means"),
    "status": ("bench.status", "", "every point of a results folder: queued, running, done, failed, lost"),
    "calibrate": ("bench.sim.calibrate", "", "measure this device and write its hardware file"),
    "fidelity": ("bench.sim.fidelity", "", "predicted against published: errors, intervals, constants"),
    "cancel": ("bench.cancel", "", "end every job and run of a results folder"),
    "profile-report": ("bench.profile_report", "", "top operations, overlap and exposed communication of a profile"),
    "trace": ("bench.sim.engine", "trace", "timeline of a simulated step for Chrome or Perfetto"),
    "doctor": ("bench.doctor", "", "is this machine fit to measure?"),
}
"""Name -> (module, prefix of its two functions, help)."""


class UsageError(Exception):
    """What the user can put right: printed as it is, exit code 2."""


def emit(data: Any, as_json: bool, text: str) -> None:
    """The one document of ``--json``, or the text for people."""
    print(json.dumps(finite(data), indent=1, allow_nan=False, ensure_ascii=False) if as_json else text)


def problem_dicts(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [asdict(p) for p in problems]


def problem_text(problems: Sequence[Problem], word: str = "error") -> str:
    lines = []
    for p in problems:
        near = p.nearest if isinstance(p.nearest, (list, tuple)) else [p.nearest]
        near = [n for n in near if n is not None]
        lines.append(f"{word}: {p.message}" + (f" (nearest: {' or '.join(map(str, near))})" if near else ""))
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m bench", description="Measure, predict and inspect training runs.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, _, text) in COMMANDS.items():
        commands.add_parser(name, help=text, description=text, add_help=False)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; never lets an exception out as exit code 1."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in COMMANDS:
        parser().parse_args(argv)
        return USAGE
    module, prefix, text = COMMANDS[argv[0]]
    as_json = "--json" in argv
    try:
        home = importlib.import_module(module)
        own = argparse.ArgumentParser(prog=f"python -m bench {argv[0]}", description=text)
        getattr(home, f"{prefix}_arguments" if prefix else "add_arguments")(own)
        return int(getattr(home, prefix or "main")(own.parse_intermixed_args(argv[1:])))
    except ConfigError as error:
        if as_json:
            emit({"valid": False, "errors": problem_dicts(error.problems), "warnings": []}, True, "")
        print(problem_text(error.problems), file=sys.stderr)
        return USAGE
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except Exception:
        traceback.print_exc()
        return INTERNAL
