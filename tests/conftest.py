"""What all tests share: parts of the system that a test may need, and the promised limits it measures."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "slurm": (("slurmctld",), "apt-get install slurm-wlm slurmctld slurmd slurm-client munge slurmdbd mariadb-server"),
    "chromium": (("chromium", "chromium-browser", "google-chrome"), "apt-get install chromium"),
    "compiler": (("g++",), "apt-get install g++"),
}
"""Part -> (commands of which one must exist, how to get it). Each is a marker: ``@pytest.mark.slurm``."""


def require(part: str) -> None:
    """Skip, and say so, where ``part`` is missing; fail where MESHMARK_REQUIRE names it (as .ci/run does)."""
    commands, way_out = PARTS[part]
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    if any(shutil.which(command, path=path) for command in commands):
        return
    text = f"{part} is not installed: {way_out}"
    if part in os.environ.get("MESHMARK_REQUIRE", "").split(","):
        pytest.fail(f"{text} (MESHMARK_REQUIRE names it)")
    pytest.skip(text)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for part in PARTS:
        if item.get_closest_marker(part):
            require(part)


BUDGETS = pytest.StashKey[list[dict[str, Any]]]()


LENIENCE = 3
"""In the whole suite other tests load the machine, so a limit may be exceeded so many times; make budgets holds it."""


@pytest.fixture
def budget(request: pytest.FixtureRequest) -> Callable[[str, float, float, str], None]:
    """``budget(name, measured, limit, unit)``: record a promised limit, and fail where it is exceeded."""
    rows = request.config.stash.setdefault(BUDGETS, [])
    factor = 1 if request.config.getoption("markexpr") == "budget" else LENIENCE

    def hold(name: str, measured: float, limit: float, unit: str) -> None:
        rows.append({"name": name, "limit": limit, "measured": measured, "unit": unit, "ok": measured <= limit})
        assert measured <= limit * factor, f"{name}: {measured:.3g} {unit}, the limit is {limit:g} {unit}"

    return hold


def pytest_sessionfinish(session: pytest.Session) -> None:
    """``make budgets`` reads what was measured in build/budgets.json."""
    rows = session.config.stash.get(BUDGETS, [])
    if rows:
        path = ROOT / "build" / "budgets.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(sorted(rows, key=lambda r: str(r["name"])), indent=1) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for row in config.stash.get(BUDGETS, []):
        word = "ok" if row["ok"] else "EXCEEDED"
        figures = f"{row['measured']:.3g} of {row['limit']:g} {row['unit']}"
        terminalreporter.write_line(f"budget {row['name']}: {figures} {word}")
