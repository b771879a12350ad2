"""Verdicts of published figures. Reference: the stated rule, by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench.result import RunResult, Value
from bench.spec import from_overrides
from bench.store import claim, write_json
from reports.__main__ import main

ROW = "tt202412_8b_8gpu_fsdp"


def stored(results: Path, tps: Value) -> None:
    """A simulated run of the row whose published throughput is 5,762 tokens/s a GPU."""
    spec = from_overrides([f"published={ROW}", "engine=simulate"])
    folder = claim(results, "published", spec.run_id)
    write_json(folder.spec, spec.to_dict())
    result = RunResult(spec.run_id, "ok", spec.to_dict(), engine="simulate", world_size=8, metrics={"tps_per_gpu": tps})
    folder.result.write_text(replace(result, command=spec.command()).to_json())


@pytest.mark.parametrize(
    ("value", "half", "verdict"),
    [(5800, 0.05, "reproduced"), (6200, 0.05, "inconclusive"), (7000, 0.05, "refuted"), (5800, 0.5, "inconclusive")],
)
def test_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float, half: float, verdict: str) -> None:
    """5,762 against 5,800 +-5 % is inside; 6,200 between one and two widths; 7,000 beyond two; +-50 % says nothing."""
    stored(tmp_path, Value(value, value * (1 - half), value * (1 + half), 0.8, 1, "tokens/s"))
    assert main(["verdicts", str(tmp_path), "--json"]) == 0
    found = {entry["claim_id"]: entry for entry in json.loads(capsys.readouterr().out)}
    entry = next(e for name, e in found.items() if "memory" not in name.lower() and "gain" not in name)
    assert entry["verdict"] == verdict and "simulated" in entry["text"]
    memory = next(e for name, e in found.items() if "memory" in name.lower())
    assert memory["verdict"] == "unsupported"
    assert main(["verdicts", str(tmp_path)]) == 0
    assert "reproduced: " in capsys.readouterr().out
