import math

import pytest
import torch

from potluck.core.errors import ConfigError
from potluck.experiment.presets import experiment_for
from potluck.methods import get_method
from potluck.privacy import FeaturePrivacy, classical_sigma, delta_of, sigma_for

DELTA = 1e-6


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


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (-1.0, 0.1), (float("nan"), 0.1), (1.0, 0.0), (1.0, 1.0)])
def test_numbers_out_of_range_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match=r"^(epsilon|delta): expected a number"):
        sigma_for(epsilon, delta, 1.0)


def test_a_clip_of_zero_is_refused():
    with pytest.raises(ValueError, match="clip: expected above 0"):
        FeaturePrivacy(clip=0.0, epsilon=1.0, delta=DELTA)


def test_every_example_is_clipped_by_itself_and_short_ones_are_left():
    mechanism = FeaturePrivacy(clip=2.0, epsilon=1e6, delta=0.5)  # next to no noise
    features = torch.tensor([[3.0, 4.0], [0.6, 0.8], [0.0, 0.0]])
    protected = mechanism.protect({"s_in": features}, torch.Generator().manual_seed(0))["s_in"]
    assert torch.allclose(protected, torch.tensor([[1.2, 1.6], [0.6, 0.8], [0.0, 0.0]]), atol=0.02)


def test_noise_has_the_calibrated_deviation_and_comes_from_the_generator_given():
    mechanism = FeaturePrivacy(clip=0.1, epsilon=1.0, delta=DELTA)
    features = {"s_in": torch.zeros(50, 20, 4), "s_out": torch.zeros(50, 80)}
    noisy, again = (mechanism.protect(features, torch.Generator().manual_seed(3)) for _ in range(2))
    for name, tensor in noisy.items():
        assert float(tensor.std()) == pytest.approx(mechanism.sigma, rel=0.05)
        assert torch.equal(tensor, again[name])
    assert mechanism.sigma == pytest.approx(sigma_for(1.0, DELTA, 2 * math.sqrt(2) * 0.1))


def test_replacing_an_example_moves_the_clipped_pair_by_no_more_than_the_sensitivity():
    mechanism = FeaturePrivacy(clip=1.5, epsilon=1e6, delta=0.5)
    generator = torch.Generator().manual_seed(0)
    worst = torch.tensor([[1.0, 0.0]])
    pairs = [{"s_in": sign * 100 * worst, "s_out": sign * 100 * worst} for sign in (1, -1)]
    one, other = (mechanism.protect(pair, generator) for pair in pairs)
    moved = torch.cat([one[name] - other[name] for name in one]).norm()
    assert float(moved) == pytest.approx(mechanism.sensitivity, rel=0.02)


def test_more_releases_spend_more_and_the_accountant_never_claims_less_than_is_spent():
    mechanism = FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5)
    spent = [mechanism.spent(releases) for releases in (1, 4, 16)]
    assert spent[0] < spent[1] < spent[2]
    for releases, epsilon in zip((1, 4, 16), spent, strict=True):
        # n releases of one Gaussian mechanism are exactly one with sigma / sqrt(n) (Dong, Roth, Su 2022, cor. 3.3).
        exact = delta_of(mechanism.sigma / math.sqrt(releases), epsilon, mechanism.sensitivity)
        assert exact <= 1e-5
        assert delta_of(mechanism.sigma / math.sqrt(releases), 0.7 * epsilon, mechanism.sensitivity) > 1e-5


def test_fedin_says_what_it_spent_or_why_it_can_say_nothing():
    fedin = get_method("fedin")
    assert fedin().privacy_statement({0: 5}) is None
    assert "no private mechanism" in fedin(noise=0.8).privacy_statement({0: 5})
    private = fedin(privacy=FeaturePrivacy(clip=0.1, epsilon=1.0, delta=1e-5))
    statement = private.privacy_statement({0: 2, 1: 7})
    assert f"epsilon {private.privacy.spent(7):.3g} at delta 1e-05" in statement
    assert "7 times" in statement
    assert "Weights are sent as they are" in statement


def test_without_the_accountant_private_features_are_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'potluck\[privacy\]'"):
        FeaturePrivacy(clip=1.0, epsilon=1.0, delta=DELTA)


def test_privacy_is_set_like_every_other_hyper_parameter():
    experiment = experiment_for("fedin", ["method.privacy={clip=1.0, epsilon=2.0, delta=1e-5}"])
    assert experiment.method.privacy == FeaturePrivacy(1.0, 2.0, 1e-5)
    for wrong in ("{clip=1.0, epsilon=0.0, delta=1e-5}", "{clip=1.0, epsilon=2.0, delta=1e-5, sigma=1.0}"):
        with pytest.raises(ConfigError, match=r"method\.privacy"):
            experiment_for("fedin", [f"method.privacy={wrong}"])
