"""The cost model against arithmetic done by hand from the datasheet of one device."""

from dataclasses import replace

import pytest

from bench.sim.cost import CLOCK_EXPONENT, CONSTANTS, Constants, Cost, slowest
from bench.sim.events import Collective, Op
from bench.sim.hardware import load

H100 = load("h100_80g")
ONES = replace(Constants(**dict.fromkeys(CONSTANTS, 1.0)), chip_spread=0.016)


def gemm(m, n, k, dtype="bf16"):
    size = {"bf16": 2, "fp8": 1, "fp32": 4}[dtype]
    return Op("mm", "gemm", (((m, k), dtype), ((k, n), dtype)), (((m, n), "bf16"),), 2.0 * m * n * k,
              (m * k + k * n) * size, m * n * 2, (1, m, n, k))  # fmt: skip


def collective(kind, size, stride, gib=1.0):
    return Collective(kind, gib * 2**30, "dp_shard", size, stride)


def test_a_large_gemm_is_waves_of_tiles_and_the_writing_of_them():
    # 16384 x 14336 in tiles of 128 x 256 is 7168 tiles: 55 waves of 132 SMs.
    seconds, bound = Cost(H100, ONES).op(gemm(16384, 14336, 4096))
    tile = 2 * 128 * 256 * 4096 / (989.4e12 / 132)
    expected = 55 * (tile + 1e-6) + 2 * 16384 * 14336 / 3.35e12 + 4e-6
    assert bound == "compute" and seconds == pytest.approx(expected)


def test_float8_gains_less_where_k_is_small():
    def gain(k):
        cost = Cost(H100, ONES)
        return cost.op(gemm(16384, 4096, k))[0] / cost.op(gemm(16384, 4096, k, "fp8"))[0]

    assert 1 < gain(512) < gain(4096) < gain(65536) < 2.001


def test_fp8_doubles_and_fp32_takes_its_own_peak():
    cost = Cost(H100, ONES)
    bf16, fp8, fp32 = (cost.gemm_rate(gemm(8192, 8192, 8192, d)) for d in ("bf16", "fp8", "fp32"))
    assert fp8 / bf16 == pytest.approx(1978.9 / 989.4)
    assert fp32 / bf16 == pytest.approx(66.9 / 989.4)


def test_a_small_gemm_loses_to_waves_and_a_thin_one_to_memory():
    cost = Cost(H100, ONES)
    assert cost.op(gemm(128, 128, 65536))[0] > 60 * 2 * 128 * 128 * 65536 / 989.4e12
    assert cost.op(gemm(16, 16384, 16384))[1] == "memory"
    assert cost.op(gemm(16, 16, 16))[1] == "launch"


def test_power_limits_the_clock_of_compute_and_not_the_memory():
    capped = Cost(replace(H100, power=(500, 700)), ONES)
    factor = (5 / 7) ** CLOCK_EXPONENT
    assert 5 / 7 < factor < 1
    assert capped.gemm_rate(gemm(8192, 8192, 8192)) == pytest.approx(factor * Cost(H100, ONES).gemm_rate(
        gemm(8192, 8192, 8192)))  # fmt: skip
    copy = Op("copy_", "copy", (), (), 0, 2**30, 2**30)
    assert capped.op(copy) == Cost(H100, ONES).op(copy)
    assert capped.op(copy)[0] == pytest.approx(2 * 2**30 / 3.35e12 + 4e-6)


def test_many_gpus_wait_for_the_slowest():
    # The expected minimum of n normal values in standard deviations, from tables of order statistics.
    assert slowest(1, 0.02) == 1
    assert (1 - slowest(8, 0.02)) / 0.02 == pytest.approx(1.424, abs=0.02)
    assert (1 - slowest(100, 0.02)) / 0.02 == pytest.approx(2.508, abs=0.02)
    assert slowest(16384, 0.02) > 0.9


def test_attention_counts_the_blocks_on_the_diagonal():
    def attention(causal, backward):
        return Op("flash", "attention", (), (), 1e12, 0, 0, (2, 32, 8, 8192, 8192, 128, causal, backward))

    cost = Cost(H100, ONES)
    full = cost.op(attention(0, 0))[0]
    assert full == pytest.approx(1e12 / 989.4e12 + 4e-6)
    assert cost.op(attention(1, 0))[0] / full == pytest.approx(1 + 128 / 8192, rel=1e-3)
    assert cost.op(attention(0, 1))[0] > 1.2 * full


def test_collectives_in_a_node_take_ring_traffic():
    cost = Cost(H100, ONES)
    gather = cost.collective(collective("all_gather", 8, 1))
    assert gather == pytest.approx(2**30 * 7 / 8 / 450e9, rel=0.02)
    assert cost.collective(collective("reduce_scatter", 8, 1)) == pytest.approx(gather)
    assert cost.collective(collective("all_reduce", 8, 1)) == pytest.approx(2 * gather, rel=0.02)
    assert cost.collective(collective("all_to_all", 8, 1)) == pytest.approx(2**30 * 7 / 8 / 450e9, rel=0.02)
    assert cost.collective(collective("all_gather", 1, 1)) == 0


def test_collectives_across_nodes_take_the_rails_of_the_ranks_on_each():
    cost = Cost(H100, ONES)
    # FSDP beside TP 8: one rank a node, so one 50 GB/s rail; FSDP over whole nodes: eight rails feed a node.
    beside_tp = cost.collective(collective("all_gather", 32, 8))
    assert beside_tp == pytest.approx(2**30 * 31 / 32 / 50e9, rel=0.03)
    whole = cost.collective(collective("all_gather", 128, 1))
    assert 2**30 * 127 / 128 / 450e9 < whole < 2**30 / 300e9
    p2p = cost.collective(collective("send", 8, 64))
    assert p2p == pytest.approx(2**30 / 50e9, rel=0.01)
    assert cost.collective(collective("send", 8, 1)) == pytest.approx(2**30 / 450e9, rel=0.01)


def test_a_small_all_reduce_is_latency_and_grows_slower_than_the_ring():
    cost = Cost(H100, ONES)
    small = [cost.collective(replace(collective("all_reduce", n, 1), bytes=4.0)) for n in (8, 64, 512)]
    # NCCL's tuning table puts an 8-byte all-reduce over 8 H100 at about 15 us.
    assert 8e-6 < small[0] < 25e-6
    assert small[0] < small[1] < small[2] < 8 * small[1]


def test_oversubscription_and_a_larger_domain():
    fabric = replace(H100, oversubscription=2.0)
    gather = collective("all_gather", 32, 8)
    assert Cost(fabric, ONES).collective(gather) > 1.9 * Cost(H100, ONES).collective(gather)
    assert Cost(load("gb200"), ONES).collective(collective("all_gather", 64, 1)) < 2**30 / 700e9


def test_a_published_device_has_at_most_eight_constants_and_all_matter():
    hardware = load("h100_96g_hbm2e")
    assert len(CONSTANTS) <= 8 and set(hardware.constants) <= set(CONSTANTS)
    work = [gemm(8192, 8192, 8192), gemm(8192, 8192, 8192, "fp8"), Op("copy_", "copy", (), (), 0, 2**30, 2**30),
            Op("flash", "attention", (), (), 1e12, 0, 0, (2, 32, 8, 8192, 8192, 128, 1, 0))]  # fmt: skip
    links = [collective("all_gather", 8, 1), collective("all_gather", 32, 8)]

    def prices(c):
        cost = Cost(hardware, c, ranks=64)
        return [cost.op(o)[0] for o in work] + [cost.collective(x) for x in links] + [
            cost.async_tp_hidden]  # fmt: skip

    base = prices(Constants())
    for name in CONSTANTS:
        changed = prices(replace(Constants(), **{name: getattr(Constants(), name) * 1.1}))
        assert sum(a != b for a, b in zip(base, changed, strict=True)) >= 1, name
