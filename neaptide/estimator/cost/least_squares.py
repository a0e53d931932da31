"""Fits linear step-time formulas with the least relative error and non-negative coefficients."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

ROUNDS = 10
SMALL_ERROR = 0.05
"""Larger relative errors count linearly, not squared, so that a stalled step does not bend the fit."""


def nonnegative_solve(gram: Array, target: Array, start: Array | None = None) -> Array:
    """Minimises ``x'Gx/2 - t'x`` over x >= 0 by active sets (Lawson and Hanson 1974, algorithm 23.10).

    ``gram`` is small, symmetric and positive semi-definite, with a diagonal of about one. ``start`` is a first guess.
    """
    size = len(target)
    x = np.zeros(size) if start is None else start
    free = x > 0.0
    tolerance = 1e-10 * max(float(np.abs(target).max(initial=0.0)), 1e-300)
    for _ in range(10 * size):
        while free.any():
            trial = np.zeros(size)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], target[free], rcond=1e-12)[0]
            blocked = free & (trial <= 0.0)
            if not blocked.any():
                x = trial
                break
            # Walk towards the trial until the first coefficient reaches zero, and hold that one at zero.
            step = x[blocked] / np.maximum(x[blocked] - trial[blocked], 1e-300)
            x = x + float(step.min()) * (trial - x)
            free &= ~blocked | (x > 1e-12 * np.abs(x).max(initial=0.0))
            x[~free] = 0.0
        slope = np.where(free, -np.inf, target - gram @ x)
        best = int(np.argmax(slope))
        if slope[best] <= tolerance:
            break
        free[best] = True
    return x


def fit_relative(
    features: Array, seconds: Array, penalty: Array | None = None, penalty_target: Array | None = None
) -> Array:
    """Coefficients c >= 0 for which ``features @ c`` is closest to ``seconds`` in relative error.

    Args:
        features: [samples, coefficients], not negative.
        seconds: [samples], positive.
        penalty, penalty_target: rows whose squared distance ``(penalty @ c - penalty_target)**2`` is added to the
            sum of squared relative errors.
    """
    rows = features / seconds[:, None]
    if penalty is None or penalty_target is None:
        penalty, penalty_target = np.zeros((0, rows.shape[1])), np.zeros(0)
    scale = np.sqrt((rows**2).sum(axis=0) + (penalty**2).sum(axis=0))
    scale[scale == 0.0] = 1.0
    rows, penalty = rows / scale, penalty / scale
    weights = np.ones(len(rows))
    x: Array = np.zeros(rows.shape[1])
    for _ in range(ROUNDS):
        weighted = rows * weights[:, None]
        x = nonnegative_solve(
            weighted.T @ rows + penalty.T @ penalty, weighted.sum(axis=0) + penalty.T @ penalty_target, x
        )
        weights = SMALL_ERROR / np.maximum(np.abs(rows @ x - 1.0), SMALL_ERROR)
    coefficients: Array = x / scale
    return coefficients
