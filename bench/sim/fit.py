"""Fit of the cost model's constants to published rows, and what a prediction is worth that was not fitted. No torch.

Least squares on the logarithm of throughput, with Gaussian priors on the logarithms of the constants. A soft loss keeps
one row that the model does not understand from bending the others. Every fold is fitted from scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from bench.sim.cost import CONSTANTS, Constants

Floats = npt.NDArray[np.float64]

PRIOR_SPREAD: dict[str, float] = {
    "gemm_bf16": 0.15, "gemm_fp8": 0.15, "attention": 0.2, "hbm": 0.15, "scale_up": 0.15, "scale_out": 0.2,
    "async_hidden": 0.3, "contention": 0.4,
}  # fmt: skip
"""Standard deviation of each constant's logarithm before any fit: how far the literature's values lie apart."""

NOISE = 0.03
"""Standard deviation of a published throughput's logarithm. One nominal configuration that was published twice, half a
year apart, differs by 2.4 % and 7.6 %; a table's entry is one reading without repeats."""

LARGEST = math.log(0.98)
SOFT = 1.5
"""Residuals beyond so many standard deviations count linearly."""
LEVEL = 0.8


@dataclass(frozen=True)
class Point:
    """One published throughput: ``tps`` [tokens/s a GPU] with its rounding, and the model's answer to constants."""

    id: str
    table: str
    workload: str
    tps: float
    rounding: float
    predict: Callable[[Constants], float]

    @property
    def noise(self) -> float:
        """Reading and rounding, of the logarithm (a rounding is uniform: width / sqrt(12))."""
        return math.hypot(NOISE, self.rounding / self.tps / math.sqrt(12))


@dataclass(frozen=True)
class Fit:
    """Constants and the covariance of their logarithms."""

    constants: Constants
    covariance: Floats

    def spread(self) -> dict[str, float]:
        return dict(zip(CONSTANTS, np.sqrt(np.diag(self.covariance)).tolist(), strict=True))


@dataclass(frozen=True)
class Prediction:
    """A throughput and the standard deviation of its logarithm that constants, reading and rounding explain."""

    value: float
    spread: float


def to_log(c: Constants) -> Floats:
    return np.log([getattr(c, name) for name in CONSTANTS])


def from_log(x: Floats) -> Constants:
    return Constants(**dict(zip(CONSTANTS, np.exp(x).tolist(), strict=True)))


def fit(points: Sequence[Point], start: Constants | None = None) -> Fit:
    """The constants that ``points`` and the priors agree on. ``start`` only saves steps: the minimum is the same."""
    prior = to_log(Constants())
    spread = np.asarray([PRIOR_SPREAD[name] for name in CONSTANTS])

    def residuals(x: Floats) -> Floats:
        c = from_log(x)
        rows = [math.log(p.predict(c) / p.tps) / p.noise for p in points]
        return np.concatenate([rows, (x - prior) / spread])

    found = least_squares(
        residuals, prior if start is None else to_log(start), bounds=(-np.inf, LARGEST), loss="soft_l1", f_scale=SOFT,
        diff_step=1e-3, xtol=1e-4, ftol=1e-5, max_nfev=30,
    )  # fmt: skip
    return Fit(from_log(found.x), np.linalg.inv(found.jac.T @ found.jac))


def predict(point: Point, fitted: Fit) -> Prediction:
    """The throughput of ``point``, with the fit's uncertainty carried over by its sensitivities."""
    value = point.predict(fitted.constants)
    gradient = sensitivities(point.predict, fitted.constants)
    return Prediction(value, math.sqrt(float(gradient @ fitted.covariance @ gradient) + point.noise**2))


def sensitivities(of: Callable[[Constants], float], at: Constants) -> Floats:
    """Derivative of log ``of`` by the logarithm of every constant."""
    x, step = to_log(at), 1e-3
    base = math.log(of(at))
    # a step down, since a fraction near one must not pass it
    return np.asarray([(base - math.log(of(from_log(x - step * np.eye(len(x))[i])))) / step for i in range(len(x))])


def interval_factor(errors: Iterable[tuple[float, float]], level: float = LEVEL) -> float:
    """Half-width of an interval in units of a prediction's spread, from (error, spread) of held-out predictions.

    The smallest factor that covers at least ``level`` of them, one more miss assumed (split conformal prediction).
    """
    ratios = sorted(abs(error) / spread for error, spread in errors)
    if not ratios:
        return 1.2816
    rank = min(len(ratios), math.ceil(level * (len(ratios) + 1)))
    return ratios[rank - 1]
