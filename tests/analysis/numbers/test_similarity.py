"""CKA and CCA against their properties, and against formulas written otherwise."""

import numpy as np
import pytest
from sklearn.cross_decomposition import CCA

from potluck.analysis.numbers.similarity import canonical, cka, directions, gram, unbiased_cka


@pytest.fixture
def draws():
    return np.random.default_rng(3)


def cka_of(one, other):
    return cka([gram(one), gram(other)])[0, 1]


def unbiased_of(one, other, batch=256):
    return unbiased_cka([gram(one), gram(other)], batch)[0, 1]


def canonical_of(one, other, kept=1.0):
    return canonical(directions(one, kept), directions(other, kept))


def rotation(draws, width):
    return np.linalg.qr(draws.normal(size=(width, width)))[0]


def test_cka__is_one_with_itself_and_does_not_change_with_rotation_scale_or_shift(draws):
    x, y = draws.normal(size=(40, 6)), draws.normal(size=(40, 9))
    assert cka_of(x, x) == pytest.approx(1, abs=1e-12)
    turned = 3.7 * x @ rotation(draws, 6) + 5
    assert cka_of(x, turned) == pytest.approx(1, abs=1e-12)
    assert cka_of(turned, y) == pytest.approx(cka_of(x, y), abs=1e-12)
    assert unbiased_of(turned, y) == pytest.approx(unbiased_of(x, y), abs=1e-12)
    assert cka_of(x, y) == cka_of(y, x)
    stretched = x * np.array([100, 1, 1, 1, 1, 1])
    assert cka_of(stretched, y) != pytest.approx(cka_of(x, y), abs=1e-3)


def test_cka__is_that_of_the_formula_in_feature_form(draws):
    x = draws.normal(size=(50, 3, 4))  # maps are flattened
    y = x.reshape(50, 12) @ draws.normal(size=(12, 7)) + draws.normal(size=(50, 7))
    a, b = x.reshape(50, 12) - x.reshape(50, 12).mean(0), y - y.mean(0)
    norm = np.linalg.norm
    assert cka_of(x, y) == pytest.approx(norm(b.T @ a) ** 2 / (norm(a.T @ a) * norm(b.T @ b)), abs=1e-12)


def test_cka__of_wide_maps_is_summed_over_their_columns(draws):
    x = draws.normal(size=(6, 9000)).astype(np.float32)
    centred = x.astype(np.float64) - x.astype(np.float64).mean(0)
    np.testing.assert_allclose(gram(x), centred @ centred.T, atol=1e-8)


def hsic(k, l):  # noqa: E741
    """HSIC₁ as Song et al. write it, with sums over all indices."""
    n, k, l = len(k), k - np.diag(np.diag(k)), l - np.diag(np.diag(l))  # noqa: E741
    one = np.ones(n)
    middle = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ l) + middle - 2 / (n - 2) * (one @ k @ l @ one)) / (n * (n - 3))


def test_unbiased_cka__is_the_ratio_of_means_over_batches_of_the_formula_on_uncentred_matrices(draws):
    x, y = draws.normal(size=(13, 20)) + 2, draws.normal(size=(13, 30))
    y[:, :10] += x[:, :10]
    parts = [slice(0, 5), slice(5, 9), slice(9, 13)]  # nearly equally many
    xy, xx, yy = (
        np.mean([hsic(a[part] @ a[part].T, b[part] @ b[part].T) for part in parts]) for a, b in ((x, y), (x, x), (y, y))
    )
    assert unbiased_of(x, y, batch=5) == pytest.approx(xy / np.sqrt(xx * yy), abs=1e-12)
    by_batch = [unbiased_of(x[part], y[part]) for part in parts]
    assert unbiased_of(x, y, batch=5) != pytest.approx(np.mean(by_batch), abs=1e-6)


def test_unbiased_cka__of_independent_data_is_around_0_where_the_exact_one_grows_with_the_width(draws):
    pairs = [(draws.normal(size=(50, 20)), draws.normal(size=(50, 30))) for _ in range(60)]
    assert np.mean([cka_of(*pair) for pair in pairs]) == pytest.approx(0.32, abs=0.05)
    assert abs(np.mean([unbiased_of(*pair) for pair in pairs])) < 0.02


def test_cka__of_what_does_not_vary_is_not_a_number(draws):
    assert np.isnan(cka_of(np.ones((8, 3)), draws.normal(size=(8, 3))))
    with pytest.raises(ValueError, match="at least 4 examples, found 3"):
        unbiased_of(np.ones((3, 2)), np.ones((3, 2)))


def test_canonical__is_what_scikit_learn_finds(draws):
    x = draws.normal(size=(80, 4))
    y = np.column_stack([x[:, 0] + draws.normal(size=80), x[:, 1] - x[:, 2], draws.normal(size=80)])
    model = CCA(n_components=3, max_iter=5000, tol=1e-12).fit(x, y)
    left, right = model.transform(x, y)
    expected = [np.corrcoef(left[:, i], right[:, i])[0, 1] for i in range(3)]
    found = canonical_of(x, y)
    assert found.mean == pytest.approx(np.mean(expected), abs=1e-5)
    assert found.squared == pytest.approx(np.mean(np.square(expected)), abs=1e-5)


def test_canonical__does_not_change_with_invertible_maps_but_its_weights_do(draws):
    x, y = draws.normal(size=(60, 5)), draws.normal(size=(60, 8))
    y[:, 0] += 2 * x[:, 0]
    mixed = x @ draws.normal(size=(5, 5)) + 1
    assert canonical_of(x, x).mean == pytest.approx(1)
    assert canonical_of(mixed, y).mean == pytest.approx(canonical_of(x, y).mean, abs=1e-9)
    stretched = x * np.array([1000, 1, 1, 1, 1])
    assert canonical_of(stretched, y).weighted > canonical_of(x, y).mean + 0.2
    assert canonical_of(stretched, y).weighted == pytest.approx(canonical_of(y, stretched).weighted)


def test_canonical__weighs_as_projections_do(draws):
    x, y = draws.normal(size=(70, 3)) * [5, 1, 1], draws.normal(size=(70, 6))
    y[:, 0] += x[:, 1]
    a, b = x - x.mean(0), y - y.mean(0)

    def root(m):
        values, vectors = np.linalg.eigh(m)
        return vectors @ np.diag(values**-0.5) @ vectors.T

    u, found, _ = np.linalg.svd(root(a.T @ a) @ a.T @ b @ root(b.T @ b), full_matrices=False)
    variates = a @ root(a.T @ a) @ u
    weights = [sum(abs(variates[:, i] @ a[:, j]) for j in range(3)) for i in range(3)]
    assert canonical_of(x, y).weighted == pytest.approx(np.average(found, weights=weights), abs=1e-9)


def test_canonical__keeps_the_directions_with_most_variance(draws):
    shared = draws.normal(size=(50, 2)) * 10
    x = np.column_stack([shared, 0.01 * draws.normal(size=(50, 6))])
    y = np.column_stack([shared @ rotation(draws, 2), 0.01 * draws.normal(size=(50, 6))])
    assert canonical_of(x, y, kept=0.99).mean == pytest.approx(1, abs=1e-3)
    assert canonical_of(x, y).mean < 0.7


def test_canonical__says_nothing_where_directions_are_as_many_as_examples(draws):
    assert canonical_of(draws.normal(size=(20, 9)), draws.normal(size=(20, 11))) is None
    assert canonical_of(np.ones((20, 3)), draws.normal(size=(20, 2))) is None
    assert canonical_of(draws.normal(size=(20, 9)), draws.normal(size=(20, 10))).mean < 1
