"""Fit, folds and intervals on rows whose truth is known; files that they write; rows of other collections."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import yaml

from bench import published
from bench.published import Figure, foreign
from bench.sim import fidelity, fit, scores
from bench.sim.cost import CONSTANTS, PRIORS, Constants
from bench.sim.hardware import read
from bench.sim.scores import TPS, Case
from bench.spec import HARDWARE_DIR

TRUTH = replace(Constants(), gemm_bf16=0.62, hbm=0.9, scale_up=0.7)
WORK = {"gemm": (0.62, 0.05, 0.05), "memory": (0.2, 0.7, 0.1), "links": (0.3, 0.1, 0.6), "mixed": (0.4, 0.3, 0.3)}
"""Seconds of a made-up row in GEMMs, memory and scale-up links at the true constants."""


def seconds(shares, c):
    gemm, memory, links = shares
    return gemm * TRUTH.gemm_bf16 / c.gemm_bf16 + memory * TRUTH.hbm / c.hbm + links * TRUTH.scale_up / c.scale_up


def point(name, shares, factor=1.0):
    return fit.Point(name, name, name, 1000 / seconds(shares, TRUTH) * factor, 1.0, lambda c: 1000 / seconds(shares, c))


POINTS = [point(name, shares) for name, shares in WORK.items()]


def test_fit_finds_the_constants_that_made_the_rows():
    many = [replace(p, id=f"{p.id}{i}") for p in POINTS for i in range(30)]
    found = fit.fit(many)
    for name in ("gemm_bf16", "hbm", "scale_up"):
        assert getattr(found.constants, name) == pytest.approx(getattr(TRUTH, name), rel=0.02)
    # What no row depends on stays at its prior, as uncertain as before.
    assert found.constants.attention == pytest.approx(Constants().attention, rel=1e-3)
    assert found.spread()["attention"] == pytest.approx(PRIORS["attention"][0], rel=1e-3)
    assert found.spread()["gemm_bf16"] < 0.1 * PRIORS["gemm_bf16"][0]


def test_one_row_that_is_not_understood_bends_the_fit_little():
    clean = fit.fit(POINTS * 5)
    bent = fit.fit([*POINTS * 5, point("outlier", WORK["gemm"], factor=0.6)])
    assert abs(math.log(bent.constants.gemm_bf16 / clean.constants.gemm_bf16)) < 0.03


def test_a_prediction_is_less_certain_far_from_what_was_fitted():
    gemm_only = fit.fit([replace(POINTS[0], id=str(i)) for i in range(20)])
    near, far = (fit.predict(fit.linearize(p, gemm_only.constants), gemm_only) for p in (POINTS[0], POINTS[2]))
    assert fit.NOISE <= near.spread < far.spread


def test_interval_factor_is_the_conformal_quantile():
    errors = np.random.default_rng(0).normal(0, 1, 999)
    factor = fit.interval_factor((float(e), 1.0) for e in errors)
    assert factor == pytest.approx(1.2816, rel=0.1)  # 80 % of a normal lies within 1.2816 standard deviations
    assert fit.interval_factor([(0.1, 1.0), (0.5, 1.0)]) == 0.5
    assert fit.interval_factor([]) == pytest.approx(1.2816)


@dataclass(frozen=True)
class Known(Case):
    """A row whose step time is known in closed form."""

    shares: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def seconds(self, constants):
        tokens = self.spec.config.tokens_per_step / self.spec.world_size
        return tokens / 1000 * seconds(self.shares, constants)


def known(row_id, shares, factor=1.0):
    row = published.rows()[row_id]
    figure = Figure(round(1000 / seconds(shares, TRUTH) * factor), "tokens/s", 1.0)
    return Known(replace(row, figures={TPS: figure}), row.spec(), None, shares)


@pytest.fixture(scope="module")
def result():
    cases = [known(row, list(WORK.values())[i % 4]) for i, row in enumerate(published.rows())]
    return scores.score(cases)


def test_every_fold_leaves_its_workload_out(result):
    trained = {s.case.row.workload for s in result.scores if s.case.trains}
    assert set(result.folds) == trained and len({c.gemm_bf16 for c in result.folds.values()}) == len(trained)
    faults = [row for row in published.rows().values() if row.fault]
    assert len(faults) == 4
    for s in result.scores:
        # Neither a pipeline, nor a device with carried-over constants, nor a run known to be faulty is fitted.
        p = s.case.spec.config.parallel
        out = p.pp > 1 or s.case.spec.hardware.device == "h200" or s.case.row.fault is not None
        assert (s.case.row.id in result.trained) == (not out)


def test_scores_of_a_right_model_are_small_covered_and_have_the_right_signs(result):
    groups = result.groups()
    assert groups["tps_per_gpu: non-PP h100_96g_hbm2e"]["mean_abs"] < 0.02
    assert groups["tps_per_gpu: known upstream fault"]["n"] == 4
    assert result.coverage() >= 0.65
    big = [p for p in result.pairs() if abs(p["published"]) > 0.02]
    assert big and all(p["sign_ok"] for p in big)


def test_document_has_the_keys_of_the_contract(result):
    data = fidelity.document(result, 1.0)
    assert {"rows", "groups", "pairs", "coverage_80", "median_half_width", "constants", "wall_s"} <= set(data)
    row = "id metric published predicted low high error_in error_table error_workload group assumptions"
    assert set(row.split()) == set(data["rows"][0])
    assert len(data["constants"]) <= 8
    assert any("program.kv_expanded=True: torchtitan" in a for a in data["rows"][0]["assumptions"])


def test_constants_are_written_into_a_file_that_reads_back(result, tmp_path):
    path = tmp_path / "device.yaml"
    path.write_text((HARDWARE_DIR / "h100_96g_hbm2e.yaml").read_text())
    fidelity.write_constants(result, path)
    hardware = read(path)
    assert set(hardware.constants) == set(CONSTANTS)
    assert hardware.constants["hbm"].value == pytest.approx(result.fit.constants.hbm, rel=1e-3)
    assert hardware.constants["hbm"].fitted_on == tuple(result.trained)
    assert hardware.errors["time"] == pytest.approx(result.half_width(TPS), rel=0.01)


def test_rows_of_another_collection(tmp_path):
    raw = {
        "id": "x", "source": {"title": "t", "repo": "pytorch/torchtitan", "path": "p", "commit": "c", "table": "1",
                              "date": "2024-12 (runs)"},
        "model": {"name": "Llama 3.1 8B"}, "n_gpus": 16, "seq_len": 8192, "local_batch_size": 2, "compile": True,
        "hardware": {"gpu": "NVIDIA H100 SXM (HBM2e)", "power_limit_w": 500, "memory_as_published": None},
        "parallelism": {"dp_replicate": 1, "dp_shard": None, "tp": 1, "cp": 1, "pp": 1, "schedule": None,
                        "async_tp": False},
        "activation_checkpoint": "selective (per-op)", "tps_per_gpu": 6600.5, "memory_gib": 70.0,
    }  # fmt: skip
    strange = [{**raw, "id": "gpt", "model": {"name": "GPT 7B"}}, {**raw, "id": "few", "seq_len": None}]
    strange.append({"id": "empty"})
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump([raw, *strange]))
    rows, skipped = foreign.read(path)
    assert [r.id for r in rows] == ["x"] and set(skipped) == {"gpt", "few", "empty"}
    spec = rows[0].spec()
    assert spec.config.parallel.dp_shard == 16 and spec.hardware.power_w == 500
    assert spec.program.kv_expanded and spec.config.optim.impl == "foreach"
    assert rows[0].figures["tps_per_gpu"].rounding == pytest.approx(0.1)
