"""The Gaussian mechanism, for features that leave a client and for sums of weights: noise, and the privacy spent.

For features it is that of FedIN's revision, appendix D, with what its claim needs: features are clipped, so that its
assumption D.1 holds; they come from weights that were not trained on the example to be replaced; the logarithm of eq.
22 is the natural one; noise is given as a standard deviation. `docs/concepts/privacy.md` states what is proven, and
what is not protected.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from functools import partial
from os import urandom
from typing import Annotated, Literal, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from potluck.core.federation import ClientId
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.fields import Checked, above, below
from potluck.core.method import Releases
from potluck.core.nets.modes import mode
from potluck.core.requests.fit import Observed
from potluck.core.roles import Client
from potluck.parts.features import observed
from potluck.parts.sharing import HasWeights, SharesWeights

log = logging.getLogger(__name__)
Calibration = Literal["analytic", "classical"]

_PAIR = 2
"""The number of features that are released for an example: s_in and s_out."""

_OF_ONE_PROCESS = "In this run one process had all replies and all noise, from which nobody was protected."
_OF_NODES = (
    "Against a server that does not keep to the protocol it holds for nodes that list their peers, and for no others."
)

_BITS = 52
"""Random bits of a uniform number, so that it and the half step beside it are exact in double precision."""

FURTHEST = 8.3
"""More than the largest size of the noise that can be drawn, in standard deviations: the 2^-53 quantile is 8.21."""


def sigma_for(epsilon: float, delta: float, sensitivity: float, calibration: Calibration = "analytic") -> float:
    """The least standard deviation of Gaussian noise that makes one release (epsilon, delta)-private.

    Args:
        epsilon: above 0, finite.
        delta: between 0 and 1.
        sensitivity: how far two neighbouring inputs can move the result, in L2; above 0, finite.
        calibration: "analytic" is exact (Balle and Wang 2018, theorem 8) at any epsilon. "classical" is eq. 22,
            Delta sqrt(2 ln(1.25 / delta)) / epsilon, which is proved for epsilon below 1 and protects too little above.

    Raises:
        ValueError: a number is out of its range, or there is no such calibration.
    """
    _positive("epsilon", epsilon)
    _positive("sensitivity", sensitivity)
    if not 0 < delta < 1:
        raise ValueError(f"delta: expected a number between 0 and 1, found {delta}")
    if calibration not in get_args(Calibration):
        raise ValueError(f"calibration: expected 'analytic' or 'classical', found {calibration!r}")
    if calibration == "analytic":
        return _least(lambda sigma: delta_of(sigma, epsilon, sensitivity) <= delta)
    if epsilon >= 1:
        raise ValueError(f"epsilon: the classical calibration holds below 1, found {epsilon}; use 'analytic'")
    return classical_sigma(epsilon, delta, sensitivity)


def classical_sigma(epsilon: float, delta: float, sensitivity: float) -> float:
    """Eq. 22, whether or not it holds at this epsilon."""
    return sensitivity * math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def delta_of(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """The exact delta of one Gaussian release (Balle and Wang 2018, theorem 8).

    Phi(a) - exp(epsilon) Phi(b) with a = d / 2s - e s / d and b = -d / 2s - e s / d, d the sensitivity. Since
    epsilon = (b^2 - a^2) / 2, both terms are exp(-a^2 / 2) times a scaled complementary error function, so that
    nothing overflows and their difference keeps its digits.
    """
    half, tilt = sensitivity / (2 * sigma), epsilon * sigma / sensitivity
    a = half - tilt
    scale = 0.5 * math.exp(-a * a / 2)
    if a > 0:
        return 0.5 * math.erfc(-a / math.sqrt(2)) - scale * _erfcx(half + tilt)
    return scale * (_erfcx(-a) - _erfcx(half + tilt))


def epsilon_of(sigma: float, delta: float, releases: int, sensitivity: float = 1.0) -> float:
    """The least epsilon that this many Gaussian releases satisfy together.

    Args:
        sigma: the standard deviation of each one's noise.
        delta: of all together.
        releases: how many there are.
        sensitivity: how far two neighbouring inputs can move each result, in L2.

    Raises:
        ValueError: there are no releases, which have no epsilon.
    """
    if releases < 1:
        raise ValueError(f"releases: expected at least 1, found {releases}")
    together = sigma / math.sqrt(releases)
    return _least(lambda epsilon: delta_of(together, epsilon, sensitivity) <= delta)


@dataclass(frozen=True)
class FeaturePrivacy(Checked):
    """Releases features of single examples, clipped and with calibrated noise, and accounts for the privacy spent.

    An example's s_in and s_out are clipped to the norm `clip` each, so replacing one training example moves one
    released pair by at most 2 sqrt(2) clip, and no other pair at all; every number gets Gaussian noise of the standard
    deviation that makes one release (epsilon, delta)-private.

    Attributes:
        clip: bound of the L2 norm of an example's s_in and of its s_out.
        epsilon: of one release, that is of one answer of a client.
        delta: of one release, and of all of a client's releases together in the run's statement.
        calibration: of the noise: "analytic" is exact at any epsilon; "classical" is the revision's eq. 22, for epsilon
            below 1. See `sigma_for`.

    Raises:
        ValueError: a number is out of its range, or the noise would not fit into single precision.
    """

    clip: Annotated[float, above(0)]
    epsilon: Annotated[float, above(0)]
    delta: Annotated[float, above(0), below(1)]
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        largest = torch.finfo(torch.float32).max
        if not self.clip + 10 * self.sigma < largest:
            raise ConfigError(
                f"clip: found {self.clip:g}, whose noise does not fit into float32; expected a smaller one"
            )

    @property
    def sensitivity(self) -> float:
        """How far replacing one example can move its pair of clipped features."""
        return 2 * math.sqrt(_PAIR) * self.clip

    @property
    def sigma(self) -> float:
        """Standard deviation of the noise on every number that is released."""
        return sigma_for(self.epsilon, self.delta, self.sensitivity, self.calibration)

    def release(self, client: Client, features: Callable[[Tensor], Observed], count: int) -> Observed:
        """Private features of `count` of the client's training examples, or of as many as it has.

        To be called before the model is trained, while its weights and buffers are those that the server sent. The
        examples are drawn by the call's key, without replacement; the choice is not secret. Each goes through the model
        by itself, in evaluation mode and without augmentation, so its features depend on no other example, whatever the
        model's layers are. A row that is not finite is released as zeros, with noise: a refusal would reveal whether
        the data caused it.

        Args:
            client: the client; the release is added to its count.
            features: of inputs (1, ...) by the client's model: s_in (1, ...) and s_out (1, ...).
            count: of examples.

        Returns:
            s_in and s_out (n, ...), rows aligned; nothing if there are no examples.

        Raises:
            ValueError: the weights or buffers hold NaN or infinite numbers, or `features` gives no pair.
        """
        _check_finite(client.model)
        rows = torch.randperm(len(client.train), generator=client.rng)[:count]
        with mode(client.model, training=False), torch.no_grad():
            seen = [features(client.train.batch(row)[0]) for row in rows.split(1)] if len(rows) else []
        if any(len(pair) != _PAIR for pair in seen):
            raise ValueError(f"found the features {', '.join(seen[0])}; the sensitivity is that of a pair")
        found = {name: torch.cat([pair[name] for pair in seen]) for name in (seen[0] if seen else ())}
        client.releases += bool(found)
        return self.protect(found)

    def protect(self, features: Mapping[str, Tensor]) -> Observed:
        """Clipped and noisy copies of features (n, ...), by name and in their own precision."""
        sigma = self.sigma
        return {name: (self._clipped(f) + sigma * _noise(f.shape)).to(f.dtype) for name, f in features.items()}

    def spent(self, releases: int) -> float:
        """The least epsilon that this many releases satisfy together, at the same delta.

        Gaussian releases of one sensitivity compose to a single one with sigma / sqrt(releases), also if each is chosen
        after the ones before were seen (Dong, Roth and Su 2022, corollary 3.3).

        Raises:
            ValueError: there are no releases, which have no epsilon.
        """
        return epsilon_of(self.sigma, self.delta, releases, self.sensitivity)

    def statement(self, releases: Mapping[ClientId, Releases]) -> str:
        """The statement of the privacy that a run's features have spent, and of its limits."""
        whole = (
            "Weights and BatchNorm's statistics are sent as they are, so no epsilon can be stated for the run as a"
            " whole."
        )
        client, most = _most(releases)
        if not most.at_most:
            return f"No features were released, so no epsilon is stated for them. {whole}"
        return (
            f"Features: epsilon {_rounded_up(self.spent(most.at_most))} at delta {self.delta:g} for replacing one"
            f" training example of {_whose(releases)}. Client {client} released features {most}; no client did so more"
            " often. This holds for the features alone, whatever weights the client was sent. Their noise comes from"
            f" the operating system, so another run of this seed differs. {whole}"
        )

    def _clipped(self, features: Tensor) -> Tensor:
        """In double precision; each row no longer than `clip`, and zero if it is not finite."""
        rows = features.detach().double().flatten(1)
        finite = rows.isfinite().all(1, keepdim=True)
        if not bool(finite.all()):
            wrong = int((~finite).sum())
            log.warning("features of %d of %d examples are not finite; zeros stand for them", wrong, len(rows))
        rows = torch.where(finite, rows, 0.0)
        return (rows * (self.clip / rows.norm(dim=1, keepdim=True).clamp(min=self.clip))).view(features.shape)


@dataclass(frozen=True)
class SumPrivacy(Checked):
    """Sums of which no single client's part can be told: each client adds Gaussian noise of its own to what it adds.

    A client's update is no longer than the clip in L2, so leaving it out moves a sum by at most that. However many
    leave that may, the noise of those who stay is together `noise_multiplier` times the clip, or more.

    Attributes:
        noise_multiplier: the least standard deviation of the noise in a sum, in clips.
        delta: of all that a client adds in a run together, in the run's statement.
    """

    noise_multiplier: Annotated[float, above(0)]
    delta: Annotated[float, above(0), below(1)]

    def deviation(self, clip: float, members: int, may_leave: int) -> float:
        """The standard deviation of the noise that each client adds to a number.

        Args:
            clip: the longest update.
            members: how many clients of the exchange have this number.
            may_leave: how many clients of the exchange may leave, or help whoever sees the sum, all together.
        """
        return self.noise_multiplier * clip / math.sqrt(max(1, members - may_leave))

    def noisy(
        self,
        values: Mapping[str, Tensor],
        clip: float,
        blocks: Iterable[tuple[NDArray[np.int64], int]],
        may_leave: int,
    ) -> dict[str, Tensor]:
        """What a client adds to sums, with its noise, in double precision.

        Args:
            values: its tensors by name.
            clip: the longest update.
            blocks: numbers that the same clients have: where they lie among the client's own, int64 (n,), which are
                those of its tensors by name in ascending order, one after the other, and how many clients have them.
            may_leave: as of `deviation`.

        Raises:
            ValueError: the blocks do not name each number once, so that one would have no noise.
        """
        names = sorted(values)
        deviations = torch.zeros(sum(values[name].numel() for name in names), dtype=torch.float64)
        for places, members in blocks:
            deviations[torch.from_numpy(places)] += self.deviation(clip, members, may_leave)
        if not bool((deviations > 0).all()):
            raise ValueError("a number that is to be summed is in no block, and would have no noise")
        noise = deviations * _noise(deviations.shape)
        parts = noise.split([values[name].numel() for name in names])
        return {
            name: values[name].double() + part.view(values[name].shape) for name, part in zip(names, parts, strict=True)
        }

    def spent(self, releases: int) -> float:
        """The least epsilon that this many sums satisfy together, at the same delta.

        As of `FeaturePrivacy.spent`; that cohorts are drawn makes it no smaller here.

        Raises:
            ValueError: there are no releases, which have no epsilon.
        """
        return epsilon_of(self.noise_multiplier, self.delta, releases)

    def statement(self, releases: Mapping[ClientId, Releases], alone: bool) -> str:
        """The statement of the privacy that a run's sums have spent, of its adversary and its limits.

        Args:
            releases: by client, how often it has added to sums.
            alone: whether one process carried out all of it.
        """
        whole = (
            "Numbers of examples, mean losses, notes and results of evaluation are told without noise, so no epsilon"
            " can be stated for the run as a whole."
        )
        client, most = _most(releases)
        if not most.at_most:
            return f"Nothing was added to sums, so no epsilon is stated for weights. {whole}"
        count = sum(of.at_most > 0 for of in releases.values())
        return (
            f"Weights: epsilon {_rounded_up(self.spent(most.at_most))} at delta {self.delta:g} for all that one client"
            f" adds to sums, against nothing, of any of the {count} clients that added to them. Client {client} did so"
            f" {most}; no client did so more often. This holds against who sees the sums, if of each exchange's clients"
            " fewer than a third leave or tell their noise, both together. The noise comes from the operating system,"
            f" so another run of this seed differs. {whole} {_OF_ONE_PROCESS if alone else _OF_NODES}"
        )


def _most(releases: Mapping[ClientId, Releases]) -> tuple[ClientId, Releases]:
    """The client that has released most often, and how often; none of none."""
    return max(releases.items(), key=lambda item: item[1].at_most, default=(0, Releases()))


P = TypeVar("P", bound=HasWeights)


class ReleasesFeatures(SharesWeights[P]):
    """A method whose clients send features beside weights: as they are, or by a private mechanism.

    Deriving from it fills the half of the contract that speaks of privacy; the attributes are fields of the method's
    own.

    Attributes:
        feature_training: whether features are sent at all.
        feature_batch: pairs that a client sends.
        noise: of features in training, which is no private mechanism.
        privacy: the mechanism; None sends features as they are.
    """

    feature_training: bool
    feature_batch: int
    noise: float
    privacy: FeaturePrivacy | None

    def __post_init__(self) -> None:
        if self.privacy and not self.sharing.averages:
            raise ConfigError(
                "sharing.scope: found 'none' beside privacy; a network that a client keeps was trained on the examples"
                " whose features it would release, and nothing bounds how that shapes them; expected 'layer',"
                " 'architecture' or 'model'"
            )
        if self.privacy and self.sharing.buffers == "local":
            raise ConfigError(
                "sharing.buffers: found 'local' beside privacy; a client's own statistics would shape the features that"
                " are released, and nothing bounds how; expected 'average' or 'drop'"
            )

    @property
    def exchanges_more(self) -> bool:
        """Whether features are sent."""
        return self.feature_training

    @property
    def releases_privately(self) -> bool:
        """Whether features leave clients, clipped and with noise."""
        return self.privacy is not None and self.feature_training

    def released(
        self, client: Client, count: int, features: Callable[[Tensor], Observed] | None = None
    ) -> Observed | None:
        """Private pairs of `count` of the client's examples, see `FeaturePrivacy.release`; None without a mechanism.

        Args:
            client: the client.
            count: of examples.
            features: of inputs; by default those of the client's network.
        """
        if self.privacy is None or not self.feature_training:
            return None
        return self.privacy.release(client, features or partial(observed, client.model), count)

    def privacy_statement(self, releases: Mapping[ClientId, Releases]) -> str | None:
        """What the features have spent, or why no epsilon can be stated of noisy ones."""
        if self.privacy is None:
            reason = "noise on the scale of the features themselves is no private mechanism"
            return f"No epsilon can be stated: {reason}." if self.noise else None
        return self.privacy.statement(releases)


def _whose(releases: Mapping[ClientId, Releases]) -> str:
    """For whose examples a statement holds."""
    count = sum(of.at_most > 0 for of in releases.values())
    return (
        "the one client that released features" if count == 1 else f"any of the {count} clients that released features"
    )


def _noise(shape: torch.Size) -> Tensor:
    """Standard normal numbers in double precision, drawn from the operating system alone.

    There is no generator in between: knowing some of the noise reveals nothing of the rest, and a forked process has no
    state to share.
    """
    count = shape.numel()
    if not count:
        return torch.zeros(shape, dtype=torch.float64)
    words = torch.frombuffer(bytearray(urandom(8 * count)), dtype=torch.int64)
    uniform = ((words & (2**_BITS - 1)).double() + 0.5) * 2.0**-_BITS
    return torch.special.ndtri(uniform).view(shape)


def _check_finite(net: nn.Module) -> None:
    for name, tensor in net.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} came with NaN or infinite numbers; no features are released from such a model")


def _least(suffices: Callable[[float], bool]) -> float:
    """The least number from 0 on that suffices, to the last digits and never less; larger ones must suffice too."""
    low, high = 0.0, 1.0
    while not suffices(high):
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _rounded_up(value: float) -> str:
    """Three digits, rounded up."""
    return f"{Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(value):g}"


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}: expected a number above 0, found {value}")


def _erfcx(x: float) -> float:
    """exp(x^2 / 2) erfc(x / sqrt(2)), also far out where the complementary error function itself underflows."""
    return float(torch.special.erfcx(torch.tensor(x / math.sqrt(2), dtype=torch.float64)))
