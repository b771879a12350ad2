"""Parity verdicts, from each layout's own steps. Reference: the deviations that the synthetic curves are made with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from bench.result import Value
from bench.store import STEPS
from reports import loss, points, report

TP = {"parallel": {"dp_shard": 2, "tp": 2}, "train": {"local_batch_size": 4}}
ONE = {"parallel": {"dp_shard": 1}, "train": {"local_batch_size": 8}}


def judged(folder: Path, shift: float, sections: dict[str, Any] = TP, **changes: Any) -> loss.Parity:
    synthetic.write(folder, synthetic.result(synthetic.spec(**ONE), 2000), losses=synthetic.decay())
    made = replace(synthetic.result(synthetic.spec(**sections), 900), **changes)
    synthetic.write(folder, made, losses=synthetic.decay(shift=shift))
    (verdict,) = loss.parity(points.load(folder))
    return verdict


def test_agrees_within_rounding(tmp_path: Path) -> None:
    v = judged(tmp_path, 1e-4)
    assert (v.verdict, v.steps) == ("agrees", 20)
    assert v.loss == pytest.approx(1e-4, rel=1e-6)
    assert v.grad_norm is not None and 0 < v.grad_norm < 1e-4


def test_a_wrong_gradient_deviates(tmp_path: Path) -> None:
    """A relative deviation of 2e-3 is four times the bf16 allowance, and invisible in a plot."""
    assert judged(tmp_path, 2e-3).verdict == "deviates"


def test_a_wrong_run_does_not_lead(tmp_path: Path) -> None:
    """The faster TP run deviates: FSDP leads, and a notice says what would have led."""
    judged(tmp_path / "in", 2e-3)
    synthetic.write(
        tmp_path / "in", synthetic.result(synthetic.spec(parallel={"dp_shard": 4}), 500), losses=synthetic.decay()
    )
    made = report.make(tmp_path / "in", tmp_path)
    lead = made.headlines[0]
    assert lead.best is not None and lead.best.name == "FSDP 4"
    (notice,) = [n for n in made.notices if n.kind == "faster but rejected"]
    assert notice.points[0].name == "FSDP 2 · TP 2" and "gradient norm deviates" in notice.text


def test_a_noise_floor_widens_the_limit(tmp_path: Path) -> None:
    """Two equal runs differ by 3e-3: a layout that differs by 2e-3 can not be told from noise."""
    again = replace(synthetic.result(synthetic.spec(**ONE), 2000), repeat=1, started_at="2026-03-02T00:00:00+00:00")
    synthetic.write(tmp_path, again, losses=synthetic.decay(shift=3e-3))
    v = judged(tmp_path, 2e-3)
    assert v.verdict == "agrees" and v.tolerance is not None and v.tolerance[0] == pytest.approx(3e-3, rel=0.01)
    assert "noise floor of 2 equal runs" in v.text


@pytest.mark.parametrize(
    ("sections", "changes", "why"),
    [
        ({**TP, "train": {"local_batch_size": 4, "seed": 1}}, {}, "no one-rank run"),
        ({**TP, "precision": {"float8": "rowwise"}}, {}, "no one-rank run"),
        (TP, {"evidence": {"init_digest": "other", "data_digest": "da7a"}}, "another initialisation"),
        (TP, {"evidence": {"init_digest": "1n17", "data_digest": "other"}}, "another batch order"),
        (TP, {"evidence": {}}, "initialisation was not recorded"),
        (TP, {"environment": {"fingerprint": "another machine"}}, "another code or machine"),
    ],
)
def test_everything_else_is_not_comparable(tmp_path: Path, sections: Any, changes: Any, why: str) -> None:
    v = judged(tmp_path, 0.0, sections, **changes)
    assert (v.verdict, v.loss) == ("not comparable", None)
    assert why in v.text


def test_no_sentinel_is_plotted_or_compared(tmp_path: Path) -> None:
    folder = synthetic.write(tmp_path, synthetic.result(synthetic.spec(), 1000), losses=[5.0, 4.0, 3.0, 2.0])
    rows = [json.loads(line) for line in (folder / STEPS).read_text().splitlines()]
    rows[1]["loss"], rows[2]["loss"] = -1.0, float("nan")
    (folder / STEPS).write_text("".join(json.dumps(r) + "\n" for r in rows))
    c = loss.curve(folder)
    assert c.loss == (5.0, None, None, 2.0)
    assert [s for s, _, _ in loss.deviations(c, c)] == [1, 4]


def test_precision_loss_against_the_same_layout(tmp_path: Path) -> None:
    """6.30 (6.28 to 6.32) less 6.25 (6.24 to 6.26): +0.05, half-width sqrt(0.02^2 + 0.01^2) = 0.0224."""
    for float8, x, half in (("off", 6.25, 0.01), ("rowwise", 6.30, 0.02)):
        r = synthetic.result(synthetic.spec(precision={"float8": float8}), 1000)
        figure = Value(x, x - half, x + half, 0.95, 5, "nats")
        synthetic.write(tmp_path, replace(r, metrics={**r.metrics, "final_loss": figure}))
    (cost,) = loss.precision_losses(points.load(tmp_path))
    assert (cost.verdict, cost.base.flat["precision.float8"]) == ("worse", "off")
    assert cost.loss.value == pytest.approx(0.05) and cost.loss.low == pytest.approx(0.05 - 0.02236, abs=1e-4)
