"""Flower's SecAgg+ sums tensors of equal shapes; where it applies, both give the same."""

import numpy as np
import pytest
import torch
from flwr.common.secure_aggregation import ndarrays_arithmetic as arithmetic
from flwr.common.secure_aggregation.quantization import dequantize, quantize
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

from potluck.secure.coverage import Coverage, Summand, whole_piece
from potluck.secure.fixed import FixedPoint
from potluck.secure.together import Addend
from potluck.testing.summing import secure_round

CLIPPING, TARGET, MODULUS = 8.0, 2**20, 2**32
SHAPES = {"bias": (5,), "weight": (4, 3)}


def secaggplus(values, weights, left):
    """The weighted mean of the survivors by Flower's functions, in the order of its mod and its workflow."""
    dimensions = [(1,), *(SHAPES[name] for name in sorted(SHAPES))]
    seeds = {(i, j): f"{min(i, j)},{max(i, j)}!".encode().ljust(8) for i in values for j in values if i != j}
    own = {i: f"own {i}".encode().ljust(8) for i in values}

    def masked(i):
        quantised = quantize([values[i][name].numpy() for name in sorted(SHAPES)], CLIPPING, TARGET)
        whole = [np.array([weights[i]]), *arithmetic.parameters_multiply(quantised, weights[i])]
        whole = [part.astype(np.int64) for part in whole]
        whole = arithmetic.parameters_addition(whole, pseudo_rand_gen(own[i], MODULUS, dimensions))
        for j in values:
            if j != i:
                change = arithmetic.parameters_addition if i > j else arithmetic.parameters_subtraction
                whole = change(whole, pseudo_rand_gen(seeds[i, j], MODULUS, dimensions))
        return arithmetic.parameters_mod(whole, MODULUS)

    survivors = [i for i in values if i not in left]
    total = [np.zeros(shape, np.int64) for shape in dimensions]
    for i in survivors:
        total = arithmetic.parameters_addition(total, masked(i))
        total = arithmetic.parameters_subtraction(total, pseudo_rand_gen(own[i], MODULUS, dimensions))
        for j in left:
            change = arithmetic.parameters_subtraction if i > j else arithmetic.parameters_addition
            total = change(total, pseudo_rand_gen(seeds[i, j], MODULUS, dimensions))
    factor, parts = arithmetic.factor_extract(arithmetic.parameters_mod(total, MODULUS))
    means = dequantize(arithmetic.parameters_multiply(parts, 1 / int(factor)), CLIPPING, TARGET)
    return int(factor), dict(zip(sorted(SHAPES), means, strict=True))


@pytest.mark.parametrize("left", [(), (2, 5, 6)])
def test_for_equal_shapes_the_weighted_mean_is_that_of_secagg_plus(trial, left):
    """On multiples of both units, which Flower's random rounding leaves as they are, the means agree exactly."""
    generator = torch.Generator().manual_seed(7)
    summands = {name: Summand(shape, "client") for name, shape in SHAPES.items()}
    whole = {name: whole_piece(shape) for name, shape in SHAPES.items()}
    one = trial(10, Coverage(summands, [whole], dict.fromkeys(range(10), 0)), numbers=FixedPoint(8.0, 16, 9))
    addends = {
        client: Addend(
            {n: torch.randint(-120, 120, shape, generator=generator) / 16 for n, shape in SHAPES.items()},
            1 + client % 9,
        )
        for client in range(10)
    }
    sums = secure_round(one.agreement, one.identities, addends, dict.fromkeys(left, 2))
    values = {client: addend.values for client, addend in addends.items()}
    weight, means = secaggplus(values, {client: addend.weight for client, addend in addends.items()}, left)
    assert set(sums.weights["bias"].tolist()) == {weight}
    found = sums.means({name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()})
    for name in SHAPES:
        np.testing.assert_allclose(found[name].numpy(), means[name], rtol=0, atol=1e-9)
