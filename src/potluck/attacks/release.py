"""The audit of a run's private releases, through the client's own handler.

The unit of the claim is one training example of one client, so that is what a canary is. The attacker is the server, of
whom the claim says that it knows every key and chooses all other examples: it repeats the client's call as often as it
likes, with noise so small that it shows which row is whose and what is in it, and with the call's own noise, which it
finds again if it comes from the key.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from potluck.attacks.audit import EpsilonBound, audit, forms
from potluck.attacks.overheard import Heard
from potluck.core.ground.errors import ConfigError
from potluck.core.message import Message
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Observed
from potluck.core.roles import Failure
from potluck.engine.client.runtime import ClientRuntime
from potluck.engine.rounds.engine import Engine
from potluck.parts.privacy import FeaturePrivacy, ReleasesFeatures

FEATURES = "features"
"""The entry of a reply that holds what was released."""

_QUIET = 1e9  # an epsilon whose noise is lost beside what it is added to
_COPIES = 2  # of a candidate, to see its features
_AMPLIFIED = 100.0  # so that clipping, if it is done, has something to do
_SAME = 1e-3  # of the noise: what two releases with the same noise differ by at most


@dataclass(frozen=True)
class ReleaseAudit:
    """The two bounds of one private release.

    Attributes:
        client: whose release was audited.
        upper: the epsilon that the accountant states.
        found: what the attack shows.
        distance: how far the canaries' two forms were apart, as a share of what the claim allows for.
        repeated: canaries whose noise was found again by repeating the call.
    """

    client: int
    upper: float
    found: EpsilonBound
    distance: float
    repeated: int

    @property
    def holds(self) -> bool:
        """Whether the lower bound lies below the stated epsilon."""
        return self.found.lower <= self.upper


def claim_of(method: object) -> FeaturePrivacy | None:
    """The mechanism by which a method's clients release features; None if they release nothing privately."""
    return method.privacy if isinstance(method, ReleasesFeatures) and method.releases_privately else None


def audit_release(engine: Engine, heard: Heard, canaries: int, seed: int) -> ReleaseAudit:
    """Guess, of each of a client's training examples, which of two forms it had, from one private release.

    Args:
        engine: whose method releases features privately.
        heard: what passed between the server and the client, which had features in it.
        canaries: how many examples the client is given.
        seed: of the coins.

    Raises:
        ConfigError: the client sent no features, or failed with every pair of forms.
    """
    method = engine.method
    privacy = claim_of(method)
    if privacy is None or FEATURES not in heard.reply:
        raise ConfigError(f"client {heard.client}: found no private release in its reply, so there is none to audit")
    loud = _Repeated(engine, heard, replace(method, feature_batch=canaries))
    quiet = _Repeated(engine, heard, replace(_quietened(method), feature_batch=canaries))
    pair, one, other = _farthest(quiet)
    coins = torch.tensor(forms(canaries, seed))
    owners = _owners(quiet, pair, one, other, canaries)
    released = loud(pair, coins.int())
    scores = ((released - other).square().sum(1) - (released - one).square().sum(1)).double()
    again = [loud(pair, torch.full((canaries,), form)) for form in (1, 0)]
    gaps = torch.stack([(released - found).abs().max(1).values for found in again])
    same = gaps <= _SAME * privacy.sigma
    scores[same[0]], scores[same[1] & ~same[0]] = math.inf, -math.inf
    found = audit(coins[owners].tolist(), scores.tolist(), privacy.delta)
    distance = float((one - other).norm()) / privacy.sensitivity
    return ReleaseAudit(heard.client, privacy.spent(1), found, distance, int(same.any(0).sum()))


def without_noise(engine: Engine, heard: Heard) -> Observed:
    """What a client would have released with next to no noise, in the same order; the attacker does not know it.

    Raises:
        ConfigError: the call failed.
    """
    runtime = ClientRuntime(_quietened(engine.method), engine.federation, engine.seed, engine.runtime.computing)
    return _released(runtime, heard)


def _quietened(method: Any) -> Any:
    return replace(method, privacy=replace(method.privacy, epsilon=_QUIET, calibration="analytic"))


def _released(runtime: ClientRuntime, heard: Heard) -> Observed:
    """The features in a client's reply when its calls are carried out again.

    Raises:
        ConfigError: there are none, or it fails.
    """
    for call in heard.calls:
        answer = runtime.run(call)
        if isinstance(answer, Failure):
            raise ConfigError(f"the attack stopped: {answer}")
        reply = Message.decode(answer.payload)
        if FEATURES in reply:
            return reply[FEATURES]
    raise ConfigError(f"client {heard.client}: found no features in its reply")


class _Repeated:
    """A client's call, repeated with canaries for its training examples."""

    def __init__(self, engine: Engine, heard: Heard, method: Any) -> None:
        self.site = engine.federation.sites[heard.client]
        self._engine, self._heard, self._method = engine, heard, method

    def __call__(self, pair: Sequence[Tensor], coins: Tensor) -> Tensor:
        """What is released, one row of numbers for each canary, of those forms that the coins say (1 the first)."""
        first, second = pair
        inputs = torch.where(coins.bool().view(-1, *[1] * (first.dim() - 1)), first, second)
        targets = self.site.train.labels[:1].expand(len(coins), *self.site.train.labels.shape[1:])
        site = replace(self.site, train=Examples(inputs, targets.clone()))
        federation = replace(self._engine.federation, sites={site.id: site})
        runtime = ClientRuntime(self._method, federation, self._engine.seed, self._engine.runtime.computing)
        rows = [part.flatten(1) for _, part in sorted(_released(runtime, self._heard).items())]
        return torch.cat(rows, 1).double()


def _farthest(quiet: _Repeated) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Two inputs whose features are far apart, among some examples and what they become, and their features."""
    few = quiet.site.train.batch(torch.arange(min(4, len(quiet.site.train)))).inputs
    if not isinstance(few, Tensor):
        raise ConfigError("the audit needs inputs of one tensor, and those here have names")
    changed = [few * factor for factor in (_AMPLIFIED, -_AMPLIFIED)] if few.is_floating_point() else []
    pool, found = torch.cat([few, *changed]), list[tuple[Tensor, Tensor]]()
    problems: list[ConfigError] = []
    for one in pool.split(1):
        try:
            found.append((one, quiet((one, one), torch.ones(_COPIES))[0]))
        except ConfigError as problem:  # such as a training that diverges on it
            problems.append(problem)
    if len(found) < 2:
        raise problems[0]
    seen = torch.stack([features for _, features in found])
    apart = torch.cdist(seen, seen)
    first, second = divmod(int(apart.argmax()), len(found))
    return (found[first][0], found[second][0]), found[first][1], found[second][1]


def _owners(quiet: _Repeated, pair: Sequence[Tensor], one: Tensor, other: Tensor, canaries: int) -> Tensor:
    """Which canary each released row is of, read bit by bit: the key decides it, whatever the examples are."""
    places, owners = torch.arange(canaries), torch.zeros(canaries, dtype=torch.int64)
    for bit in range(max(1, (canaries - 1).bit_length())):
        rows = quiet(pair, places >> bit & 1)
        nearer = (rows - one).square().sum(1) < (rows - other).square().sum(1)
        owners += nearer.long() << bit
    return owners
