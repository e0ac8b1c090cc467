import pytest
import torch

from potluck.core.ground.errors import ConfigError, DataError
from potluck.core.ground.rng import Key
from potluck.data.partition import get_partition

OWNERS = torch.tensor([3, 0, 3, 1, 1, 3, 0, 5, 1])


def divided(clients, **options):
    return [part.tolist() for part in get_partition("natural")(**options)(OWNERS, clients, Key(("natural",)))]


def test_every_client_is_one_owner_in_the_order_of_their_numbers():
    assert divided(4) == [[1, 6], [3, 4, 8], [0, 2, 5], [7]]


def test_with_fewer_clients_than_owners_those_with_the_most_examples_are_clients():
    assert divided(2) == [[3, 4, 8], [0, 2, 5]]
    assert divided(3) == [[1, 6], [3, 4, 8], [0, 2, 5]]


def test_too_few_owners_are_refused():
    with pytest.raises(DataError, match="3 clients, but 2 owners with at least 3 examples each; ask for fewer clients"):
        divided(3, min_examples=3)
    with pytest.raises(DataError, match="9 clients, but 4 owners with at least 1 examples each"):
        divided(9)
    with pytest.raises(ConfigError, match="min_examples"):
        get_partition("natural")(min_examples=0)
