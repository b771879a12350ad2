"""``python -m reports``: results in; page, tables, figures out. Exit codes: 0 done, 2 nothing to do or to write to."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m reports", description=__doc__.split(":")[1].split(". Exit")[0].strip()
    )
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="write a report about a folder of results")
    build.add_argument("results", type=Path, help="a results folder")
    build.add_argument("-o", "--out", type=Path, default=Path("build/report"), help="default: %(default)s")
    diff = commands.add_parser("diff", help="what differs between two runs: settings, environment, figures")
    diff.add_argument("runs", nargs=2, metavar="RUN", help="a run's folder, or a run id below --results")
    diff.add_argument("--results", type=Path, default=Path("results"), help="default: %(default)s")
    diff.add_argument("--json", action="store_true", help="one JSON document on stdout")
    judged = commands.add_parser("verdicts", help="published figures that the runs answer: do they hold?")
    judged.add_argument("results", type=Path, help="a results folder")
    judged.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    if args.command == "verdicts":
        return _verdicts(args.results, args.json)
    return _build(args.results, args.out) if args.command == "build" else _diff(args.runs, args.results, args.json)


def _build(results: Path, out: Path) -> int:
    if not results.is_dir():
        print(f"{results} is no folder: give the folder that python -m sweeps or bench run wrote into", file=sys.stderr)
        return 2
    from reports.build import build

    try:
        made = build(results, out)
    except OSError as error:
        why = f"{error.strerror or error}: {error.filename or out}"
        print(f"{out} can not be written ({why}): give -o a folder that you may write into", file=sys.stderr)
        return 2
    print(out / "index.html")
    if made.points:
        return 0
    print(f"{results} holds no run: the report says so and nothing else", file=sys.stderr)
    return 2


def _verdicts(results: Path, as_json: bool) -> int:
    if not results.is_dir():
        print(f"{results} is no folder: give the folder of a sweep over published rows", file=sys.stderr)
        return 2
    from reports.verdicts import verdicts, write

    write(verdicts(results), as_json)
    return 0


def _diff(runs: Sequence[str], results: Path, as_json: bool) -> int:
    from reports.diff import diff, locate, write

    try:
        a, b = (locate(run, results) for run in runs)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    write(diff(a, b), as_json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
