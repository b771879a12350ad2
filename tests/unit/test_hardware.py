"""bench/hardware: datasheet arithmetic, units, and a faulty file refused with its line."""

import pytest

from bench.sim.hardware import Hardware, load, read, resolve
from bench.spec import HARDWARE_DIR, HardwareRef
from trainer_core.config import ConfigError

DEVICES = ("a100_80g", "h100_80g", "h100_96g_hbm2e", "h200", "b200", "gb200", "mi300x", "cpu")


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_loads(name):
    hardware = load(name)
    assert hardware.kind == ("cpu" if name == "cpu" else "cuda")
    assert 0 < len(hardware.constants) <= 8
    assert all(0 < c.value < 1 for c in hardware.constants.values())
    assert hardware.power[0] <= hardware.power[1]


def test_peaks_equal_units_times_clock():
    # FLOP a clock of one SM: 4096 dense bf16 on Hopper, 2048 on Ampere, 8192 on Blackwell (vendor whitepapers).
    for name, flop in (("h100_80g", 4096), ("a100_80g", 2048), ("b200", 8192)):
        hardware = load(name)
        assert hardware.units * flop * hardware.clock == pytest.approx(hardware.peak["bf16"], rel=0.005)
    assert load("h100_80g").peak["fp8"] == pytest.approx(2 * load("h100_80g").peak["bf16"], rel=1e-3)


def test_published_runs_part_is_not_the_retail_one():
    theirs, retail = load("h100_96g_hbm2e"), load("h100_80g")
    assert (theirs.memory_bandwidth, theirs.power) == (2.4e12, (500, 700))
    assert (retail.memory_bandwidth, retail.power) == (3.35e12, (700, 700))


def test_unknown_device_lists_the_known():
    with pytest.raises(ConfigError, match=r"h2000 is not one of .*h200.*mi300x") as error:
        load("h2000")
    assert error.value.problems[0].nearest == "h200"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("unit: TB/s, ", "", r":\d+: memory.bandwidth has no unit"),
        (', source: "NVIDIA H200 datasheet; compute as H100 SXM"}\nlaunch', "}\nlaunch", "power.design has no source"),
        ("unit: TB/s", "unit: TB", r"the unit 'TB', needed is GB/s or TB/s"),
        ("  bandwidth: {value: 4.8", "  bandwith: {value: 4.8", r"memory.bandwith is not a known quantity"),
        ("value: 4.8", "value: fast", r"the value 'fast', a positive number"),
    ],
)
def test_faulty_file_is_refused_with_its_line(tmp_path, old, new, message):
    text = (HARDWARE_DIR / "h200.yaml").read_text()
    assert old in text
    path = tmp_path / "x.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message) as error:
        read(path)
    if "memory" in message:
        line = next(i for i, row in enumerate(path.read_text().splitlines(), 1) if "value: 4.8" in row)
        assert f":{line}: " in str(error.value)


def test_a_site_changes_links_and_nodes():
    site = resolve(HardwareRef("h200", gpus_per_node=4, internode_gbps=200, oversubscription=2))
    assert (site.gpus_per_node, site.domain) == (4, 4)
    assert site.scale_out.bandwidth == 25e9 and site.oversubscription == 2
    assert resolve(HardwareRef("gb200")).domain == 72
    assert isinstance(load(str(HARDWARE_DIR / "h200.yaml")), Hardware)
