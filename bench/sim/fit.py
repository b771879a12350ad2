"""Fit of the cost model's constants to published rows, and what a prediction is worth that was not fitted. No torch.

Least squares on the logarithm of throughput, with Gaussian priors on the logarithms of the constants. A Cauchy loss
keeps rows that the model does not understand from bending the others. Every fold is fitted from scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from bench.sim.cost import CONSTANTS, PRIORS, Constants

Floats = npt.NDArray[np.float64]

NOISE = 0.03
"""Standard deviation of a published throughput's logarithm. One nominal configuration that was published twice, half a
year apart, differs by 2.4 % and 7.6 %; a table's entry is one reading without repeats."""

LARGEST = math.log(0.98)
SOFT = 1.5
"""Residuals beyond so many standard deviations pull less the larger they are."""
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


LINEAR = ("async_hidden", "chip_spread")
"""Constants that a step time is linear in; it is a sum of terms inverse to the others, which are rates."""


@dataclass(frozen=True)
class Line:
    """A point near some constants: what each term of its step time comes to, relative to the whole.

    ``shares[i]`` is the derivative of the logarithm of the throughput by the logarithm of constant i: for a rate, the
    share of the step that goes with its inverse. Exact while the same kernels and collectives bound the step.
    """

    point: Point
    at: Floats
    tps: float
    shares: Floats

    def log_tps(self, x: Floats) -> float:
        """Logarithm of the throughput at constants of logarithm ``x``."""
        change = np.where(IS_LINEAR, 1 - np.exp(x - self.at), np.exp(self.at - x) - 1)
        return math.log(self.tps) - math.log(max(1 + float(self.shares @ change), 1e-3))


IS_LINEAR = np.asarray([name in LINEAR for name in CONSTANTS])


def linearize(point: Point, at: Constants) -> Line:
    """One evaluation of the model, and one for each constant."""
    x, step = to_log(at), 1e-2
    tps = point.predict(at)
    # a step down, since a fraction near one must not pass it
    shifted = [point.predict(from_log(x - step * row)) for row in np.eye(len(x))]
    with_step = np.where(IS_LINEAR, 1 - math.exp(-step), math.exp(step) - 1)
    return Line(point, x, tps, (tps / np.asarray(shifted) - 1) / with_step)


def solve(lines: Sequence[Line]) -> Fit:
    """The constants that the rows and the priors agree on, from the priors."""
    prior = to_log(Constants())
    spread = np.asarray([PRIORS[name][0] for name in CONSTANTS])

    def residuals(x: Floats) -> Floats:
        rows = [(line.log_tps(x) - math.log(line.point.tps)) / line.point.noise for line in lines]
        return np.concatenate([rows, (x - prior) / spread])

    found = least_squares(residuals, prior, bounds=(-np.inf, LARGEST), loss="cauchy", f_scale=SOFT)
    return Fit(from_log(found.x), np.linalg.inv(found.jac.T @ found.jac))


def fit(points: Sequence[Point], rounds: int = 4) -> Fit:
    """Fit from the priors, the model taken anew at each round's result."""
    found = Fit(Constants(), np.eye(len(CONSTANTS)))
    for _ in range(rounds):
        before = to_log(found.constants)
        found = solve([linearize(point, found.constants) for point in points])
        if np.abs(to_log(found.constants) - before).max() < 0.01:
            break
    return found


def predict(line: Line, fitted: Fit) -> Prediction:
    """The throughput of a point by the whole model, with the fit's uncertainty carried over by its shares."""
    value = line.point.predict(fitted.constants)
    return Prediction(value, math.sqrt(float(line.shares @ fitted.covariance @ line.shares) + line.point.noise**2))


def interval_factor(errors: Iterable[tuple[float, float]], level: float = LEVEL) -> float:
    """Half-width of an interval in units of a prediction's spread, from (error, spread) of held-out predictions.

    The smallest factor that covers at least ``level`` of them, one more miss assumed (split conformal prediction).
    """
    ratios = sorted(abs(error) / spread for error, spread in errors)
    if not ratios:
        return 1.2816
    rank = min(len(ratios), math.ceil(level * (len(ratios) + 1)))
    return ratios[rank - 1]
