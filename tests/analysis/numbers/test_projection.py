import numpy as np
import pytest

from potluck.analysis.numbers.projection import neighbours, principal, silhouette


@pytest.fixture
def draws():
    return np.random.default_rng(5)


def test_principal__is_along_the_leading_eigenvectors_of_the_covariance(draws):
    features = draws.normal(size=(40, 5)) * [1, 5, 0.5, 3, 0.1] + 7
    values, vectors = np.linalg.eigh(np.cov(features.T))
    expected = (features - features.mean(0)) @ vectors[:, [-1, -2]]
    found = principal(features)
    np.testing.assert_allclose(np.abs(found), np.abs(expected), atol=1e-9)
    np.testing.assert_allclose(found.var(0, ddof=1), values[[-1, -2]])
    np.testing.assert_array_equal(principal(features[:, :1])[:, 1], 0)
    np.testing.assert_allclose(principal(-features), -found, atol=1e-9)


def test_silhouette__is_what_its_definition_says(draws):
    features, labels = draws.normal(size=(12, 3)), [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    gaps = np.linalg.norm(features[:, None] - features[None], axis=2)
    shares = []
    for at, own in enumerate(labels):
        means = {
            other: np.mean([gaps[at, to] for to, label in enumerate(labels) if label == other and to != at])
            for other in set(labels)
        }
        inside, outside = means[own], min(value for other, value in means.items() if other != own)
        shares.append((outside - inside) / max(inside, outside))
    assert silhouette(features, labels) == pytest.approx(np.mean(shares))
    assert silhouette(features, [0] * 12) is None
    assert silhouette(features, range(12)) is None


def test_neighbours__keeps_clusters_apart_and_is_always_the_same(draws):
    features = np.concatenate([draws.normal(size=(20, 6)), draws.normal(size=(20, 6)) + 30])
    found = neighbours(features)
    assert found.shape == (40, 2)
    assert silhouette(found, [0] * 20 + [1] * 20) > 0.6
    np.testing.assert_array_equal(found, neighbours(features))


@pytest.mark.parametrize("width", [1, 4])
def test_neighbours__of_equal_features_and_of_one_number(draws, width):
    assert not neighbours(np.ones((20, width))).any()
    assert np.isfinite(neighbours(draws.normal(size=(20, width)))).all()
