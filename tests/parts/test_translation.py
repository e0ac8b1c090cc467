"""Common features: the maps against other formulas, and what clients agree on. FedIN's: `test_fedin_translation.py`."""

import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError
from potluck.parts import translation
from potluck.parts.means import Aggregate
from potluck.parts.translation import Translation, agreed


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# The maps


@pytest.mark.parametrize("count", [30, 5])  # more rows than features, and fewer
def test_a_map_is_the_ridge_regression_that_least_squares_with_further_rows_gives(count):
    x, y, ridge = draws(count, 8), draws(count, 3, seed=1), 0.3
    found = translation._regression(y, x, ridge)
    own, theirs = x - x.mean(0), y - y.mean(0)
    penalty = ridge * own.square().sum(1).mean()
    rows = torch.cat([own, penalty.sqrt() * torch.eye(8, dtype=x.dtype)])
    expected = torch.linalg.lstsq(rows, torch.cat([theirs, torch.zeros(8, 3, dtype=x.dtype)])).solution
    assert_close(found.matrix, expected)
    assert_close(found(x), own @ expected + y.mean(0))


def test_a_map_of_features_that_never_change_gives_the_mean():
    x, y = torch.ones(6, 3), draws(6, 2).float()
    assert_close(translation._regression(y, x, 1.0)(x), y.mean(0).expand(6, 2))


def test_whitened_numbers_have_no_correlation_and_no_others_such_are_nearer():
    x = draws(50, 4) @ draws(4, 4, seed=1) + 3
    found = translation._whitened(x)
    assert_close(found.mean(0), torch.zeros(4, dtype=x.dtype))
    assert_close(found.T @ found / 50, torch.eye(4, dtype=x.dtype))
    for seed in range(20):
        turned = found @ torch.linalg.qr(torch.eye(4, dtype=x.dtype) + 0.1 * draws(4, 4, seed=seed))[0]
        assert (x - found).norm() < (x - turned).norm()


def test_rounds_of_agreement_end_at_the_directions_that_all_clients_together_predict_best():
    """The leading eigenvectors of the sum of the clients' hat matrices: the correlation analysis by its definition."""
    own, ridge, width, n = [draws(30, 5, seed=i) for i in range(3)], 0.2, 2, 30
    hats = torch.zeros(n, n, dtype=torch.float64)
    for x in (x - x.mean(0) for x in own):
        penalty = ridge * x.square().sum(1).mean()
        hats += x @ torch.linalg.inv(x.T @ x + penalty * torch.eye(5, dtype=x.dtype)) @ x.T
    expected = torch.linalg.eigh(hats).eigenvectors[:, -width:]
    common = {"rows": torch.arange(n), **{place: translation._components(own[0], width) for place in ("s_in", "s_out")}}
    for _ in range(300):
        said = [
            {place: translation._regression(common[place], x, ridge)(x) for place in ("s_in", "s_out")} for x in own
        ]
        common = agreed(common, said, Aggregate())
    for place in ("s_in", "s_out"):
        assert_close(common[place] @ common[place].T / n, expected @ expected.T)


def test_agreement_without_a_word_from_anybody_stays():
    common = {"rows": torch.arange(3), "s_in": draws(3, 1), "s_out": draws(3, 1)}
    assert agreed(common, [], Aggregate()) == common


# Refusals


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"anchors": 6}, r"anchors: expected more than the 6 common features of an example, found 6"),
        ({"s_in": 0}, "s_in"),
        ({"ridge": 0.0}, "ridge"),
    ],
)
def test_a_translation_that_cannot_be_fitted_is_refused(options, problem):
    with pytest.raises(ConfigError, match=problem):
        Translation(**{"s_in": 6, "s_out": 4, "anchors": 40, **options})
