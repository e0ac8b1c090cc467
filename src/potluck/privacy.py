"""The Gaussian mechanism for features that leave a client: clipping, calibration, and what many releases spend.

FedIN's revision, appendix D, without its slips: natural logarithm in eq. 22, noise given as a standard deviation,
and clipping that makes its assumption D.1 (features of bounded norm) true.
"""

import importlib.util
import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from potluck.core.fields import Checked, above, below

Calibration = Literal["analytic", "classical"]


def sigma_for(epsilon: float, delta: float, sensitivity: float, calibration: Calibration = "analytic") -> float:
    """The least standard deviation of Gaussian noise that makes one release (epsilon, delta)-private.

    Args:
        epsilon: above 0.
        delta: between 0 and 1.
        sensitivity: how far two neighbouring inputs can move the result, in L2.
        calibration: "analytic" is exact (Balle and Wang 2018, theorem 8) at any epsilon. "classical" is eq. 22,
            Delta sqrt(2 ln(1.25 / delta)) / epsilon, which is proved for epsilon below 1 and protects too little above.

    Raises:
        ValueError: a number is out of its range.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon: expected a number above 0, found {epsilon}")
    if not 0 < delta < 1:
        raise ValueError(f"delta: expected a number between 0 and 1, found {delta}")
    if calibration == "classical":
        if epsilon >= 1:
            raise ValueError(f"epsilon: the classical calibration holds below 1, found {epsilon}; use 'analytic'")
        return classical_sigma(epsilon, delta, sensitivity)
    return _analytic_sigma(epsilon, delta) * sensitivity


def classical_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Eq. 22, whether or not it holds at this epsilon."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def delta_of(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """The exact delta of one Gaussian release: Phi(d/2s - es/d) - exp(e) Phi(-d/2s - es/d), d the sensitivity."""
    half, tilt = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    return _normal_cdf(half - tilt) - math.exp(epsilon + _log_normal_cdf(-half - tilt))


@dataclass(frozen=True)
class FeaturePrivacy(Checked):
    """Clips the features of each example and adds calibrated noise before they leave a client.

    Each example's s_in and s_out are clipped to the norm `clip`, so replacing one example moves the pair by at most
    2 sqrt(2) clip; both get Gaussian noise of the standard deviation that makes one release (epsilon, delta)-private.

    Attributes:
        clip: bound of the L2 norm of an example's s_in and of its s_out.
        epsilon: of one release, that is of one round that a client takes part in.
        delta: of one release, and of the whole run in its statement.
        calibration: see `sigma_for`.
    """

    clip: Annotated[float, above(0)]
    epsilon: Annotated[float, above(0)]
    delta: Annotated[float, above(0), below(1)]
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        sigma_for(self.epsilon, self.delta, 1.0, self.calibration)
        if importlib.util.find_spec("opacus") is None:
            raise ValueError("epsilon: accounting for it needs the extra: pip install 'potluck[privacy]'")

    @property
    def sensitivity(self) -> float:
        """How far replacing one example can move its pair of clipped features."""
        return 2 * math.sqrt(2) * self.clip

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on every number that is released."""
        return sigma_for(self.epsilon, self.delta, self.sensitivity, self.calibration)

    def protect(self, pairs: dict[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Clipped and noisy copies of features (n, ...), by name."""
        return {name: self._protected(features, rng) for name, features in pairs.items()}

    def spent(self, releases: int) -> float:
        """An epsilon that holds for `releases` releases together, at the same delta, by Renyi accounting."""
        from opacus.accountants import RDPAccountant

        accountant = RDPAccountant()
        accountant.history = [(self.sigma / self.sensitivity, 1.0, releases)]  # no credit for sampling clients
        return float(accountant.get_epsilon(delta=self.delta))

    def _protected(self, features: Tensor, rng: torch.Generator) -> Tensor:
        norms = features.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, *[1] * (features.dim() - 1))
        clipped = features * (self.clip / norms).clamp(max=1.0)
        return clipped + self.sigma * torch.randn(features.shape, generator=rng)


def _analytic_sigma(epsilon: float, delta: float) -> float:
    """By bisection at sensitivity 1: delta falls as sigma grows."""
    low, high = 1e-6, 1.0
    while delta_of(high, epsilon) > delta:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle, epsilon) > delta else (low, middle)
    return high


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def _log_normal_cdf(x: float) -> float:
    """Logarithm of the normal distribution function, also far out where the function itself underflows."""
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))
