"""``bench calibrate`` on this CPU: what it writes is a hardware file whose rates the cost model gives back."""

import pytest

from bench.sim import calibrate
from bench.sim.cost import Constants, Cost
from bench.sim.hardware import load


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    path = tmp_path_factory.mktemp("calibrate") / "here.yaml"
    lines: list[str] = []
    path.write_text(calibrate.calibrate(lines.append))
    assert any("GB/s" in line and "ranks" in line for line in lines)
    return load(str(path))


def test_a_measured_device_is_complete(device):
    assert device.kind == "cpu" and device.memory_bytes > 2**30
    measured = [c for c in device.constants.values() if c.fitted_on and "bench calibrate" in c.source]
    assert len(measured) == 5
    assert 1e9 < device.peak["fp32"] < 1e13 and 1e8 < device.memory_bandwidth < 1e12
    assert 1e-7 < device.launch < 1e-3 and 1e6 < device.scale_up.bandwidth < 1e12


def test_the_cost_model_gives_back_the_measured_gemm(device):
    # On one thread the time of a GEMM is its FLOPs over the calibrated rate; the machine may be busy with other things.
    shape = calibrate.GEMMS["cpu"][2]
    priced = Cost(device, Constants.of(device)).op(calibrate.gemm_op(*shape, "fp32"))[0]
    assert priced == pytest.approx(calibrate.time_gemm(*shape, "fp32", "cpu"), rel=0.7)


def test_gpu_fractions_are_ideal_over_measured(monkeypatch):
    # A device that runs everything at half of its datasheet has fractions of one half.
    h100 = load("h100_80g")
    ideal = Cost(h100, calibrate.ONES)
    monkeypatch.setattr(calibrate, "time_gemm", lambda m, n, k, dtype, device: 2 * (
        ideal.op(calibrate.gemm_op(m, n, k, dtype))[0] - h100.launch))  # fmt: skip
    monkeypatch.setattr(calibrate, "time_copy", lambda device: h100.memory_bandwidth / 2)
    attention = calibrate.attention_ops(calibrate.ATTENTION["cuda"], "bf16")
    twice = 2 * sum(ideal.op(op)[0] - h100.launch for op in attention)
    monkeypatch.setattr(calibrate, "time_attention", lambda shape, device: twice)
    found = calibrate.fractions(h100, "cuda", lambda line: None)
    assert found == pytest.approx({"gemm_bf16": 0.5, "gemm_fp8": 0.5, "attention": 0.5, "hbm": 0.5})
