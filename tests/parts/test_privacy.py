import logging
import math
import random
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from potluck.core.ground.errors import ConfigError
from potluck.core.ground.rng import fold_in
from potluck.core.method import Releases
from potluck.core.requests.examples import Examples
from potluck.core.roles import Client
from potluck.experiment.settings.presets import experiment_for
from potluck.methods import get_method
from potluck.parts import privacy
from potluck.parts.privacy import FeaturePrivacy, classical_sigma, delta_of, sigma_for

DELTA = 1e-6
NAN, INF = float("nan"), float("inf")


def integrated_delta(sigma: float, epsilon: float) -> float:
    """delta = integral of max(0, p - e^epsilon q) for p = N(1, sigma^2), q = N(0, sigma^2): the definition."""
    x = torch.linspace(1 - 14 * sigma, 1 + 14 * sigma, 400_001, dtype=torch.float64)
    p = torch.exp(-((x - 1) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    q = torch.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
    return float(torch.trapezoid((p - math.exp(epsilon) * q).clamp(min=0), x))


@pytest.mark.parametrize(("sigma", "epsilon"), [(0.5, 10.0), (1.0, 1.0), (4.0, 1.0), (3.0, 0.1)])
def test_delta_is_that_of_the_definition(sigma, epsilon):
    assert delta_of(sigma, epsilon) == pytest.approx(integrated_delta(sigma, epsilon), rel=1e-5, abs=1e-12)


def test_the_papers_example_needs_less_than_it_says_by_its_formula_and_more_by_the_exact_one():
    # C = 0.1, epsilon = 10: eq. 22 with the natural logarithm gives 0.10598; the paper's 0.127 has base 2.
    by_hand = 0.2 * math.sqrt(2 * math.log(1.25e6)) / 10
    assert classical_sigma(10, DELTA, 0.2) == pytest.approx(by_hand) == pytest.approx(0.1059760505)
    assert 0.2 * math.sqrt(2 * math.log2(1.25e6)) / 10 == pytest.approx(0.1273, abs=1e-4)
    assert delta_of(by_hand, 10, 0.2) > DELTA
    assert sigma_for(10, DELTA, 0.2) == pytest.approx(0.1082173659, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 10.0, 60.0])
def test_the_analytic_sigma_is_the_least_that_suffices(epsilon):
    sigma = sigma_for(epsilon, DELTA, 3.0)
    assert delta_of(sigma, epsilon, 3.0) <= DELTA
    assert delta_of(0.999 * sigma, epsilon, 3.0) > DELTA


def test_the_classical_calibration_wastes_below_one_and_is_refused_from_one_on():
    assert sigma_for(0.5, DELTA, 0.2, "classical") == pytest.approx(2.11952, abs=1e-5)
    assert sigma_for(0.5, DELTA, 0.2) == pytest.approx(1.61152, abs=1e-5)
    with pytest.raises(ValueError, match="classical calibration holds below 1, found 10"):
        sigma_for(10, DELTA, 0.2, "classical")


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.1), (-1.0, 0.1), (NAN, 0.1), (INF, 0.1), (1.0, 0.0), (1.0, 1.0), (1.0, NAN)]
)
def test_numbers_out_of_range_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match=r"^(epsilon|delta): expected a number"):
        sigma_for(epsilon, delta, 1.0)


@pytest.mark.parametrize("clip", [0.0, -1.0, NAN, INF])
def test_a_clip_that_bounds_nothing_is_refused(clip):
    with pytest.raises(ValueError, match="clip: expected"):
        FeaturePrivacy(clip=clip, epsilon=1.0, delta=DELTA)


def test_noise_that_does_not_fit_into_what_is_sent_is_refused():
    with pytest.raises(ValueError, match=r"clip: found 1e\+38, whose noise"):
        FeaturePrivacy(clip=1e38, epsilon=1e-3, delta=DELTA)


def test_a_calibration_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match=r"calibration: expected 'analytic' or 'classical', found 'exact'"):
        FeaturePrivacy(clip=1.0, epsilon=0.5, delta=DELTA, calibration="exact")


# What many releases spend


def composed_delta(sigma: float, releases: int, epsilon: float, step: float = 1e-3) -> float:
    """delta of releases with sensitivity 1 from the definition of the privacy loss, by numbers alone.

    The loss log p / q of one release at x ~ p = N(1, sigma^2) against q = N(0, sigma^2) is (2 x - 1) / (2 sigma^2).
    Its distribution is put on a grid and convolved with itself; delta is the mean of max(0, 1 - exp(epsilon - loss)).
    """
    x = np.linspace(1 - 12 * sigma, 1 + 12 * sigma, 2_000_001)
    density = np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    loss = (2 * x - 1) / (2 * sigma**2)
    low = math.floor(loss[0] / step)
    one = np.bincount(np.rint(loss / step).astype(int) - low, weights=density / density.sum())
    size = releases * len(one)
    many = np.fft.irfft(np.fft.rfft(one, size) ** releases, size)
    losses = (np.arange(size) + releases * low) * step
    return float((many * np.clip(1 - np.exp(epsilon - losses), 0, None)).sum())


@pytest.mark.parametrize("releases", [1, 3, 20])
def test_what_is_spent_is_what_the_privacy_loss_integrates_to(releases):
    mechanism = FeaturePrivacy(clip=0.3, epsilon=1.0, delta=1e-5)
    epsilon = mechanism.spent(releases)
    found = composed_delta(mechanism.sigma / mechanism.sensitivity, releases, epsilon)
    assert found == pytest.approx(1e-5, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
def test_what_is_spent_is_exact_and_never_too_little(epsilon):
    mechanism = FeaturePrivacy(clip=0.1, epsilon=epsilon, delta=1e-5)
    assert mechanism.spent(1) == pytest.approx(epsilon, rel=1e-9)
    for releases in (1, 2, 17, 1000):
        spent, sigma = mechanism.spent(releases), mechanism.sigma / math.sqrt(releases)
        assert delta_of(sigma, spent, mechanism.sensitivity) <= 1e-5
        assert delta_of(sigma, (1 - 1e-9) * spent, mechanism.sensitivity) > 1e-5


def test_what_is_spent_stays_a_number_however_many_releases_there_are():
    mechanism = FeaturePrivacy(clip=0.1, epsilon=8.0, delta=1e-12)
    few, many = mechanism.spent(10**6), mechanism.spent(2**31)
    assert few < many < INF


def test_nothing_released_has_no_epsilon():
    with pytest.raises(ValueError, match="releases: expected at least 1, found 0"):
        FeaturePrivacy(clip=1.0, epsilon=1.0, delta=DELTA).spent(0)


# What is released


class Mixes(nn.Module):
    """A layer that looks at the whole batch, also in evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 100 * x.mean(0, keepdim=True)


@pytest.fixture
def silent(monkeypatch):
    """No noise, so that it can be seen what it is added to."""
    monkeypatch.setattr(privacy, "_noise", partial(torch.zeros, dtype=torch.float64))


def client_with(inputs: torch.Tensor, net: nn.Module, number: int = 0) -> Client:
    data = Examples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    draws = fold_in(0, "client", number).generator()
    return Client(number, net, {}, data, data, 1.0, draws, None, F.cross_entropy, 1, "net", Callable, Callable)


def released(inputs: torch.Tensor, net: nn.Module, mechanism: FeaturePrivacy, count: int = 100) -> torch.Tensor:
    """s_in and s_out of every example, side by side, in the order of the examples if all are taken."""
    client = client_with(inputs, net)
    found = mechanism.release(client, lambda x: {"s_in": (h := net(x)), "s_out": 2 * h}, count)
    order = torch.randperm(len(inputs), generator=client_with(inputs, net).rng)[:count]
    return torch.cat([found["s_in"], found["s_out"]], 1)[order.argsort()]


NETS = {
    "linear": lambda: nn.Linear(4, 6),
    "batchnorm": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)),
    "mixes": lambda: nn.Sequential(nn.Linear(4, 6), Mixes()),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6, 1e30])
def test_replacing_an_example_moves_its_own_pair_alone_and_by_no_more_than_the_sensitivity(silent, name, scale):
    mechanism, net = FeaturePrivacy(clip=1.5, epsilon=1.0, delta=DELTA), NETS[name]()
    draws = torch.Generator().manual_seed(0)
    inputs, others = (scale * torch.randn(12, 4, generator=draws) for _ in range(2))
    before = released(inputs, net, mechanism)
    for place in range(12):
        neighbour = torch.where((torch.arange(12) == place)[:, None], others, inputs)
        moved = (released(neighbour, net, mechanism) - before).norm(dim=1)
        assert moved[place] <= mechanism.sensitivity * (1 + 1e-6)
        assert moved.sum() == moved[place]


def test_the_sensitivity_is_reached(silent):
    mechanism = FeaturePrivacy(clip=1.5, epsilon=1.0, delta=DELTA)
    one, other = (released(torch.full((1, 4), sign * 100.0), nn.Identity(), mechanism) for sign in (1.0, -1.0))
    assert float((one - other).norm()) == pytest.approx(mechanism.sensitivity) == pytest.approx(2 * math.sqrt(2) * 1.5)


def test_every_example_is_clipped_by_itself_and_short_ones_are_left(silent):
    mechanism = FeaturePrivacy(clip=2.0, epsilon=1.0, delta=DELTA)
    features = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0], [3e38, 0.0]])
    protected = mechanism.protect({"s_in": features, "s_out": features.view(4, 1, 2)})
    expected = torch.tensor([[1.2, 1.6], [0.6, 0.8], [0.0, 0.0], [2.0, 0.0]])
    assert torch.allclose(protected["s_in"], expected)
    assert torch.allclose(protected["s_out"], expected.view(4, 1, 2))


def test_a_row_that_is_not_finite_is_released_as_zeros_and_tells_nothing(silent, caplog):
    mechanism = FeaturePrivacy(clip=2.0, epsilon=1.0, delta=DELTA)
    features = torch.tensor([[INF, 1.0], [0.6, 0.8], [NAN, 0.0], [-INF, INF]])
    with caplog.at_level(logging.WARNING):
        protected = mechanism.protect({"s_in": features})["s_in"]
    assert protected.tolist() == [[0, 0], [pytest.approx(0.6), pytest.approx(0.8)], [0, 0], [0, 0]]
    assert "features of 3 of 4 examples are not finite" in caplog.text


@pytest.mark.parametrize("wrong", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["0.weight", "1.running_var"])
def test_a_model_that_came_with_infinite_weights_or_statistics_is_refused_by_name(wrong, where):
    net = NETS["batchnorm"]()
    net.state_dict()[where].view(-1)[2] = wrong
    client = client_with(torch.zeros(3, 4), net)
    with pytest.raises(ValueError, match=rf"^{where} came with NaN or infinite numbers"):
        FeaturePrivacy(1.0, 1.0, DELTA).release(client, lambda x: {"s_in": x, "s_out": net(x)}, 3)
    assert client.releases == 0


def test_the_model_is_left_as_it_was():
    net = NETS["batchnorm"]()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    released(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), net, FeaturePrivacy(1.0, 1.0, DELTA))
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_a_release_is_counted_and_takes_distinct_examples():
    client = client_with(torch.arange(20.0).view(10, 2), nn.Identity())
    mechanism = FeaturePrivacy(clip=100.0, epsilon=1e6, delta=0.5)  # next to no noise
    found = mechanism.release(client, lambda x: {"s_in": x, "s_out": x}, 7)
    assert client.releases == 1
    assert len({round(float(row[0])) for row in found["s_in"]}) == len(found["s_out"]) == 7
    assert mechanism.release(client_with(torch.zeros(0, 2), nn.Identity()), lambda x: {}, 7) == {}


def test_the_sensitivity_holds_for_pairs_and_nothing_else_is_released():
    with pytest.raises(ValueError, match="found the features s_in; the sensitivity is that of a pair"):
        FeaturePrivacy(1.0, 1.0, DELTA).release(client_with(torch.zeros(3, 2), nn.Identity()), lambda x: {"s_in": x}, 3)


# Noise


def test_noise_is_normal_and_has_the_calibrated_deviation():
    mechanism = FeaturePrivacy(clip=0.1, epsilon=1.0, delta=DELTA)
    noisy = mechanism.protect({"s_in": torch.zeros(500, 20, 4), "s_out": torch.zeros(500, 80)})
    assert mechanism.sigma == pytest.approx(sigma_for(1.0, DELTA, 2 * math.sqrt(2) * 0.1))
    for tensor in noisy.values():
        found = torch.special.ndtr(tensor.double().flatten() / mechanism.sigma).sort().values
        gap = (found - torch.linspace(0, 1, len(found), dtype=torch.float64)).abs().max()
        assert gap < 0.02  # of 40,000 numbers; once in 1e13 draws more


def test_noise_differs_whatever_every_generator_was_seeded_with(global_generator_unchanged):
    mechanism, features = FeaturePrivacy(1.0, 1.0, DELTA), {"s_in": torch.zeros(40, 50)}
    draws: list[torch.Tensor] = []
    state = torch.default_generator.get_state()
    for _ in range(2):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        draws.append(mechanism.protect(features)["s_in"].flatten() / mechanism.sigma)
    torch.default_generator.set_state(state)
    assert abs(float(draws[0] @ draws[1]) / 2000) < 8 / math.sqrt(2000)


def test_every_bit_of_noise_comes_from_the_operating_system_and_none_is_used_twice(monkeypatch):
    asked: list[int] = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return b"\xff" * count

    monkeypatch.setattr(privacy, "urandom", urandom)
    mechanism = FeaturePrivacy(clip=1.0, epsilon=1.0, delta=DELTA)
    noisy = mechanism.protect({"s_in": torch.zeros(3, 5), "s_out": torch.zeros(3, 2, 2)})
    assert asked == [8 * 15, 8 * 12]
    highest = 8.209536151601387 * mechanism.sigma  # the quantile of 1 - 2^-53
    for tensor in noisy.values():
        assert torch.allclose(tensor, torch.full_like(tensor, highest), rtol=1e-5)


# Statements


def shown(statement: str) -> float:
    return float(statement.split("epsilon ")[1].split()[0])


@pytest.mark.parametrize("releases", [1, 2, 3, 5, 11, 1000, 10**6])
def test_a_statement_rounds_up(releases):
    mechanism = FeaturePrivacy(clip=0.1, epsilon=0.7, delta=1e-5)
    epsilon = shown(mechanism.statement({3: Releases(releases)}))
    assert mechanism.spent(releases) <= epsilon <= 1.01 * mechanism.spent(releases)


def test_fedin_says_what_it_spent_or_why_it_can_say_nothing():
    fedin = get_method("fedin")
    assert fedin().privacy_statement({}) is None
    assert "no private mechanism" in fedin(noise=0.8).privacy_statement({})
    private = fedin(privacy=FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5))
    statement = private.privacy_statement({0: Releases(2), 1: Releases(7), 2: Releases(5)})
    assert "at delta 1e-05" in statement
    assert private.privacy.spent(7) <= shown(statement) < 1.01 * private.privacy.spent(7)
    assert "for replacing one training example of any of the 3 clients that released features. " in statement
    assert "Client 1 released features 7 times; no client did so more often." in statement
    assert "another run of this seed differs" in statement
    assert "Weights and BatchNorm's statistics are sent as they are, so no epsilon can be stated" in statement


def test_what_may_have_been_released_counts_too():
    private = get_method("fedin")(privacy=FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5))
    statement = private.privacy_statement({0: Releases(4), 1: Releases(3, unheard=2)})
    assert private.privacy.spent(5) <= shown(statement) < 1.01 * private.privacy.spent(5)
    assert "Client 1 released features at most 5 times (3 for certain, and 2 requests were not answered)" in statement


def test_a_statement_says_for_how_many_clients_it_holds():
    private = get_method("fedin")(privacy=FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5))
    alone = private.privacy_statement({0: Releases(), 4: Releases(1)})
    assert "example of the one client that released features. Client 4 released features 1 time;" in alone
    several = private.privacy_statement({0: Releases(), 4: Releases(1), 5: Releases(0, unheard=1)})
    assert "example of any of the 2 clients that released features." in several


@pytest.mark.parametrize("found", [{}, {0: Releases(0)}])
def test_no_epsilon_is_claimed_where_nothing_was_sent(found):
    private = get_method("fedin")(privacy=FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5))
    statement = private.privacy_statement(found)
    assert statement.startswith("No features were released, so no epsilon is stated for them.")
    assert "delta" not in statement


def test_privacy_is_set_like_every_other_hyper_parameter():
    experiment = experiment_for("fedin", ["method.privacy={clip=1.0, epsilon=2.0, delta=1e-5}"])
    assert experiment.method.privacy == FeaturePrivacy(1.0, 2.0, 1e-5)
    for wrong in ("{clip=1.0, epsilon=0.0, delta=1e-5}", "{clip=1.0, epsilon=2.0, delta=1e-5, sigma=1.0}"):
        with pytest.raises(ConfigError, match=r"method\.privacy"):
            experiment_for("fedin", [f"method.privacy={wrong}"])
