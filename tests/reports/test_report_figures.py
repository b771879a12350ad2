"""Arithmetic by hand, like-for-like comparison, the map's axes. References: the formulas in the docstrings."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import synthetic

from bench.result import RunResult, Value
from reports import compare, figures, heatmap, interval, points, report, strategy
from reports.compare import Baselines
from reports.strategy import TECHNIQUES

BY_NAME = {t.name: t for t in TECHNIQUES}


def load(folder: Path, *results: RunResult) -> list[points.Point]:
    for r in results:
        synthetic.write(folder, r)
    return points.load(folder)


def test_ratio_by_hand() -> None:
    """200 (190 to 212) over 100 (96 to 105): ln sides 0.05129, 0.05827 and 0.04082, 0.04879."""
    r = interval.ratio(Value(200, 190, 212, 0.95, 5), Value(100, 96, 105, 0.95, 9))
    low, high = math.sqrt(0.05129**2 + 0.04879**2), math.sqrt(0.05827**2 + 0.04082**2)
    assert (r.value, r.n, r.level) == (2, 5, 0.95)
    assert (r.low, r.high) == (pytest.approx(2 * math.exp(-low), rel=1e-4), pytest.approx(2 * math.exp(high), rel=1e-4))
    assert interval.ratio(Value(2, 1, 3, 0.95), Value(1, 0.5, 2, 0.8)).low is None  # two levels make no interval


def test_equal_runs_are_pooled_by_student_t() -> None:
    """1, 2, 3: mean 2, s = 1, t(0.975, 2) = 4.3027, half-width 4.3027 / sqrt(3) = 2.4841."""
    v = interval.pool([Value(1, 0.9, 1.1, 0.95, 5), Value(2), Value(3)])
    assert (v.value, v.n, v.level) == (2, 3, 0.95)
    assert (v.low, v.high) == (pytest.approx(-0.4841, abs=1e-3), pytest.approx(4.4841, abs=1e-3))
    assert interval.pool([Value(5, 4, 6, 0.95, 7)]) == Value(5, 4, 6, 0.95, 7)


def test_a_gain_needs_a_like_for_like_baseline(tmp_path: Path) -> None:
    """compile has one; TP's only candidate has another global batch, so it has none, and says so."""
    plain, fast = synthetic.spec(), synthetic.spec(compile={"enable": True})
    tp = synthetic.spec(parallel={"dp_shard": 2, "tp": 2}, train={"local_batch_size": 2, "global_batch_size": 4})
    found = load(tmp_path, *(synthetic.result(s, x) for s, x in ((plain, 1000), (fast, 1200), (tp, 900))))
    effects = {e.technique.name: e for e in compare.effects(found)}
    assert effects["compile"].best.speed.value == pytest.approx(1.2)
    assert effects["compile"].best.base is not None and effects["compile"].best.base.name == "FSDP 4"
    assert effects["tp"].best.base is None
    assert "global batch 8 instead of 4" in (effects["tp"].best.speed.reason or "")


def test_a_layout_keeps_gpus_and_global_batch(tmp_path: Path) -> None:
    """FSDP 2 x TP 2 against FSDP 4: the sharding and the local batch follow from the degree."""
    base, tp = synthetic.spec(), synthetic.spec(parallel={"dp_shard": 2, "tp": 2}, train={"local_batch_size": 4})
    found = load(tmp_path, synthetic.result(base, 1000), synthetic.result(tp, 800))
    pair = Baselines(found).pair(next(p for p in found if p.name.startswith("FSDP 2")), BY_NAME["tp"])
    assert pair.base is not None and pair.speed.value == pytest.approx(0.8)


@pytest.mark.parametrize(
    "other",
    [{"engine": "simulate"}, {"code_id": "another"}, {"environment": {"fingerprint": "another machine"}}],
    ids=["engine", "code", "machine"],
)
def test_unlike_runs_are_never_compared(tmp_path: Path, other: dict[str, object]) -> None:
    slow = synthetic.result(synthetic.spec(engine=str(other.get("engine", "measure"))), 1000)
    fast = synthetic.result(synthetic.spec(compile={"enable": True}), 1200)
    found = load(tmp_path, replace(slow, **{k: v for k, v in other.items() if k != "engine"}), fast)
    (effect,) = compare.effects(found)
    assert effect.best.base is None and effect.best.speed.value is None
    made = report.make(tmp_path, tmp_path)
    assert all(h.gain.value is None for h in made.headlines) and len(made.headlines) == 2
    assert {r["advice"] for r in made.rows} == {"fastest"}  # each in its own scope


def test_the_ladder_climbs_one_technique_a_rung(tmp_path: Path) -> None:
    recipes = [{}, {"compile": {"enable": True}}, {"compile": {"enable": True}, "precision": {"float8": "rowwise"}}]
    found = load(tmp_path, *(synthetic.result(synthetic.spec(**r), 1000 + 100 * i) for i, r in enumerate(recipes)))
    rungs = compare.ladder(max(found, key=lambda p: p.tps.value or 0), Baselines(found))
    assert [p.name for p in rungs] == ["FSDP 4", "FSDP 4 · compile", "FSDP 4 · compile · float8 rowwise"]


def test_advice(tmp_path: Path) -> None:
    """Intervals are +-1 %: 1000 is the fastest, 995 as fast, 900 needs less memory, 800 more than it: dominated."""
    runs = [(1000, 4.0, "ok"), (995, 4.5, "ok"), (900, 2.0, "ok"), (800, 3.0, "ok"), (1, 1.0, "oom")]
    results = [
        synthetic.result(synthetic.spec(train={"loss_chunks": i + 1}), t, s, m) for i, (t, m, s) in enumerate(runs)
    ]  # type: ignore[arg-type]
    unstable = synthetic.result(synthetic.spec(train={"loss_chunks": 9}), 2000)
    unstable = replace(unstable, metrics={**unstable.metrics, "stability": Value(3.0, n=20, unit="count")})
    found = load(tmp_path, *results, unstable)
    words = {p.flat["train.loss_chunks"]: a.word for p, a in compare.advise(found, []).items()}
    assert words == {1: "fastest", 2: "as fast", 3: "trade-off", 4: "dominated", 5: "rejected", 9: "rejected"}
    deviating = [p for p in found if p.flat["train.loss_chunks"] == 1]
    assert compare.advise(found, deviating)[deviating[0]].word == "rejected"


def test_equal_runs_are_one_cell(tmp_path: Path) -> None:
    r = synthetic.result(synthetic.spec(), 1000)
    again = replace(r, repeat=1, started_at="2026-03-02T00:00:00+00:00", metrics={"tps_per_gpu": Value(1100.0)})
    lost = replace(synthetic.result(synthetic.spec(), 1, "hung"), repeat=2, started_at="2026-03-03T00:00:00+00:00")
    (point,) = load(tmp_path, r, again, lost)
    assert (point.ok, point.tps.value, point.tps.n) == (True, 1050, 2)
    assert point.reason == "1 of 3 runs ended as hung"


def test_a_run_of_unknown_machine_joins_the_only_one(tmp_path: Path) -> None:
    """With a second machine it could be of either, and the headings tell the groups apart."""
    bad = synthetic.result(synthetic.spec(compile={"enable": True}), 1, "invalid", environment={}, code_id="")
    load(tmp_path, synthetic.result(synthetic.spec(), 1000), bad)
    (headline,) = report.make(tmp_path, tmp_path).headlines
    assert (headline.failed, len(headline.points)) == (1, 2)
    synthetic.write(tmp_path, synthetic.result(synthetic.spec(), 900, environment={"fingerprint": "b"}), "other")
    headlines = report.make(tmp_path, tmp_path).headlines
    assert len({h.text for h in headlines}) == len(headlines) == 3


def test_axes_are_the_two_that_fill_the_map(tmp_path: Path) -> None:
    synthetic.forty(tmp_path)
    four = [p for p in points.load(tmp_path) if p.flat["parallel.world_size"] == 4]
    x, y = heatmap.choose(four, heatmap.axes(four))
    assert {x.key, y.key} == {"layout", "recipe"}
    cells = heatmap.cells(four, x, y, heatmap.by_speed)
    assert len(cells) == 40
    failed = [c for c in cells.values() if c.best is None]
    assert sorted(p.status for c in failed for p in c.failed) == ["hung", "oom", "oom"]


def test_a_winner_is_told_by_what_the_axes_leave_open(tmp_path: Path) -> None:
    specs = [synthetic.spec(compile={"enable": c}, ac={"mode": a}) for c in (False, True) for a in ("none", "full")]
    found = load(tmp_path, *(synthetic.result(s, 1000 + i) for i, s in enumerate(specs)))
    ac = heatmap.Axis("ac.mode", "checkpointing", lambda p: p.flat["ac.mode"])
    cells = heatmap.cells(found, ac, heatmap.NOTHING, heatmap.by_speed)
    told = heatmap.details(found, heatmap.axes(found), ac, heatmap.NOTHING)
    assert heatmap.winner(cells["none", "all"], told) == "compile"


@pytest.mark.parametrize("dark", [False, True])
def test_text_keeps_its_contrast(dark: bool) -> None:
    """WCAG 2.1 asks for 4.5 between text and its ground, for 3 between a curve and its ground."""
    v = figures.variables(dark)
    assert min(figures.contrast(v[f"h{i}"], v[f"t{i}"]) for i in range(figures.HEAT)) >= 4.5
    assert min(figures.contrast(v[name], v["surface"]) for name in ("ink", "muted", "accent", "bad")) >= 4.5
    assert min(figures.contrast(v[f"s{i}"], v["surface"]) for i in range(figures.SERIES)) >= 3


def test_names_tell_runs_apart() -> None:
    flats = [strategy.flatten(synthetic.spec(data={"seq_len": n}).to_dict()) for n in (256, 512)]
    assert strategy.names(flats) == ["FSDP 4 · sequence 256", "FSDP 4 · sequence 512"]
