"""What a kernel or a collective costs on a device: a few physical rules and at most eight constants. No torch.

Rates are datasheet values times a calibrated fraction (:class:`Constants`). The clock of the compute units follows the
power limit, the memory's does not. What is fixed here, by physics or by a library's source, is not fitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Literal

from bench.sim.events import Collective, Op, span
from bench.sim.hardware import Hardware

Bound = Literal["compute", "memory", "launch"]

CLOCK_EXPONENT = 0.4
"""Clock ~ (power limit / design power) ^ e. Dynamic power is C V^2 f: e = 1/3 while the voltage follows the clock, 1/2
as leakage and memory take their share; 0.4 is the geometric middle, chosen before any fit."""

CONTENTION = 0.3
"""Share of a collective's time that it takes from the compute beside it: NCCL's channels hold up to 32 of 132 SMs, and
use memory bandwidth."""

BACKWARD_ATTENTION = 0.79
"""Rate of the attention backward over the forward: FlashAttention-2 reports about 0.8 on A100 and H100 (five matmuls
with a recomputed softmax and atomics, against two)."""

TILES: tuple[tuple[int, int, float], ...] = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.8))
"""Output tiles (m, n) of one SM's GEMM kernel and their relative rate: the smaller, the less operands are reused."""
PROLOGUE = 1e-6
"""Seconds in which the operand pipeline of a wave of tiles fills: two trips to device memory."""

ATTENTION_BLOCK = 128
"""Rows of a query block: a causal kernel computes whole blocks on the diagonal."""

PROTOCOLS: tuple[tuple[float, float], ...] = ((1.0, 1.0), (0.18, 0.25))
"""NCCL's Simple and LL protocols: latency a hop and bandwidth, of Simple's (src/graph/tuning.cc: 0.6 of 3.4 us over
NVLink and 2.7 of 14 us over the network; LL sends a flag with every 4 bytes)."""


@dataclass(frozen=True)
class Constants:
    """The calibrated fractions. The defaults are priors from the literature, before any fit; their sources are in
    :data:`PRIORS`.

    ``gemm_bf16`` (and wider dtypes), ``gemm_fp8``: of the dense peak of the dtype at the clock that the power limit
    allows, for a GEMM of whole waves. ``attention``: of that peak, forward. ``hbm``: of the memory bandwidth, streaming
    kernels. ``scale_up``, ``scale_out``: of the link, large collectives. ``async_hidden``: share of a decomposed
    collective that its GEMM hides. ``chip_spread``: standard deviation of the speed of equal GPUs at one power limit.
    """

    gemm_bf16: float = 0.75
    gemm_fp8: float = 0.65
    attention: float = 0.35
    hbm: float = 0.80
    scale_up: float = 0.80
    scale_out: float = 0.84
    async_hidden: float = 0.60
    chip_spread: float = 0.016

    @classmethod
    def of(cls, hardware: Hardware) -> Constants:
        """A device's constants; one that it does not have keeps its prior."""
        known = {f.name for f in fields(cls)}
        return cls(**{name: c.value for name, c in hardware.constants.items() if name in known})


def slowest(ranks: int, spread: float) -> float:
    """Speed of the slowest of ``ranks`` GPUs over the mean one's: all wait for it in every collective.

    The expected minimum of normal values of standard deviation ``spread``, by Blom's approximation.
    """
    return 1 + spread * NormalDist().inv_cdf((1 - 0.375) / (ranks + 0.25))


CONSTANTS = tuple(f.name for f in fields(Constants))

PRIORS: dict[str, tuple[float, str]] = {
    "gemm_bf16": (0.15, "large cuBLAS GEMMs reach 70-80 % of the peak at the clock that the power allows"),
    "gemm_fp8": (0.15, "large FP8 GEMMs reach 60-70 % of the peak at the clock that the power allows"),
    "attention": (0.2, "FlashAttention-2 uses 35 % of an H100 (arXiv 2407.08608, abstract)"),
    "hbm": (0.15, "streaming kernels reach 75-90 % of the memory bandwidth"),
    "scale_up": (0.15, "large NCCL collectives in a host reach 350-380 of 450 GB/s"),
    "scale_out": (0.2, "large NCCL collectives over one rail reach 40-45 of 50 GB/s"),
    "async_hidden": (0.3, "a decomposition in as many chunks as ranks hides at most 7/8, less its own overhead"),
    "chip_spread": (0.5, "8 % between slowest and fastest of about a hundred equal GPUs, five standard deviations "
                         "(Sinha et al., SC 2022, arXiv 2208.11035)"),
}  # fmt: skip
"""Standard deviation of each constant's logarithm before any fit, and where its default comes from."""


@dataclass
class Cost:
    """Prices of one device among ``ranks`` that wait for each other: implements :class:`bench.sim.events.Prices`."""

    hardware: Hardware
    constants: Constants | None = None
    ranks: int = 1
    contention: float = field(init=False)
    async_tp_hidden: float = field(init=False)

    def __post_init__(self) -> None:
        self.constants = c = self.constants or Constants.of(self.hardware)
        self.contention, self.async_tp_hidden = CONTENTION, c.async_hidden
        limit, design = self.hardware.power
        self._clock = float((limit / design) ** CLOCK_EXPONENT) * slowest(self.ranks, c.chip_spread)
        self._memory = c.hbm * self.hardware.memory_bandwidth

    def op(self, op: Op) -> tuple[float, Bound]:
        """(seconds, what bounds it) of one kernel: the larger of compute and memory time, and its launches."""
        assert self.constants is not None
        compute = 0.0
        if op.kind == "gemm" and op.flops:
            compute = self._gemm(op)
        elif op.kind == "attention":
            compute = self._attention(op)
        memory = (op.bytes_read + op.bytes_written) / self._memory
        launch = op.launches * self.hardware.launch
        seconds = max(compute, memory) + launch
        if launch > max(compute, memory):
            return seconds, "launch"
        return seconds, "compute" if compute >= memory else "memory"

    def _gemm(self, op: Op) -> float:
        """Seconds of a GEMM (batch, m, n, k): waves of tiles, each a pipeline to fill, k steps and a tile to write.

        The tensor cores wait while a tile is written, so that small k costs more, and twice as much in Float8, where
        the steps are half as long. The best tile is taken, as the library's heuristics do.
        """
        rate, batch, m, n, k = self.gemm_rate(op), *op.dims
        if self.hardware.kind == "cpu":
            return op.flops / rate
        best = math.inf
        for tile_m, tile_n, share in TILES:
            tiles = batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
            waves = math.ceil(tiles / self.hardware.units)
            steps = 2.0 * tile_m * tile_n * k / (share * rate / self.hardware.units)
            best = min(best, waves * (steps + PROLOGUE))
        return best + op.bytes_written / self._memory

    def gemm_rate(self, op: Op) -> float:
        """FLOP/s of whole waves: peak of the operands' dtype x clock x calibrated fraction."""
        assert self.constants is not None
        dtype = next((d for _, d in op.inputs if d in ("fp8", "fp4")), op.inputs[0][1])
        name = {"fp8": "fp8", "fp4": "fp8", "bf16": "bf16", "fp16": "bf16"}.get(dtype, "fp32")
        peak = self.hardware.peak.get(name, self.hardware.peak["bf16"])
        fraction = self.constants.gemm_fp8 if name == "fp8" else self.constants.gemm_bf16
        return peak * self._clock * fraction

    def _attention(self, op: Op) -> float:
        """Seconds of a fused attention; ``flops`` counts the causal triangle, the kernel computes whole blocks."""
        assert self.constants is not None
        _, _, _, q_len, kv_len, _, causal, backward = op.dims
        dtype = "fp32" if op.inputs and op.inputs[0][1] == "fp32" else "bf16"
        rate = self.hardware.peak[dtype] * self._clock * self.constants.attention
        rate *= BACKWARD_ATTENTION if backward else 1.0
        blocks = 1 + ATTENTION_BLOCK / max(min(q_len, kv_len), ATTENTION_BLOCK) if causal else 1.0
        return op.flops * blocks / rate

    def collective(self, c: Collective) -> float:
        """Seconds of one collective alone on its links: NCCL's rings and trees over what the group crosses.

        Per rank of n, ring traffic is (n-1)/n of the message, twice for an all-reduce; a node takes in what its ranks
        do not hold over the rails of the group's ranks on it. A ring passes every rank, a tree their logarithm.
        """
        if c.size <= 1:
            return 0.0
        on_node, nodes = self._span(c)
        steps = 2 if c.kind == "all_reduce" else 1
        up, out = self._traffic(c, on_node, nodes)
        up_hop, out_hop = self.hardware.scale_up.latency, self.hardware.scale_out.latency
        if c.kind in ("send", "recv"):
            hops = out_hop if nodes > 1 else up_hop
        elif c.kind == "all_to_all":
            hops = max(out_hop if nodes > 1 else 0.0, up_hop)
        else:
            ring = (c.size - nodes) * up_hop + (nodes * out_hop if nodes > 1 else 0.0)
            tree = (on_node - 1) * up_hop + math.ceil(math.log2(nodes)) * out_hop
            hops = steps * (min(ring, tree) if c.kind in ("all_reduce", "broadcast") else ring)
        return 2 * up_hop + min(latency * hops + max(up, out) / rate for latency, rate in PROTOCOLS)

    def link(self, c: Collective) -> Literal["up", "out"]:
        """The class of links that a collective is bound by."""
        return "out" if self._span(c)[1] > 1 else "up"

    def _span(self, c: Collective) -> tuple[int, int]:
        if c.kind in ("send", "recv"):
            return span(2, c.stride, self.hardware.domain)
        return span(c.size, c.stride, self.hardware.domain)

    def _traffic(self, c: Collective, on_node: int, nodes: int) -> tuple[float, float]:
        """(seconds on the scale-up links, seconds on the rails) at full bandwidth."""
        assert self.constants is not None
        up = self.constants.scale_up * self.hardware.scale_up.bandwidth
        out = self.constants.scale_out * self.hardware.scale_out.bandwidth / self.hardware.oversubscription
        if c.kind in ("send", "recv"):
            return (0.0, c.bytes / out) if nodes > 1 else (c.bytes / up, 0.0)
        if c.kind == "all_to_all":
            away = (c.size - on_node) / c.size if nodes > 1 else 0.0
            return c.bytes * (on_node - 1) / c.size / up, c.bytes * away / out
        steps = 2 if c.kind == "all_reduce" else 1
        inside = steps * c.bytes * (c.size - 1) / c.size / up if on_node > 1 else 0.0
        across = steps * c.bytes * (nodes - 1) / nodes / (on_node * out) if nodes > 1 else 0.0
        return inside, across
