"""One class is one number in the whole federation, whatever numbers the clients' own data sets have for it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.ground.errors import DataError
from potluck.data.dataset import Dataset, Description
from potluck.data.federate import MatchedClasses


def named(*classes: str, name: str = "pets") -> Description:
    return Description(name, (2,), len(classes), classes)


def numbered(count: int, name: str = "digits") -> Description:
    return Description(name, (2,), count)


def holding(description: Description) -> Dataset:
    """A data set with one example of each class, in order."""
    inputs, targets = torch.zeros(description.num_classes, 2), torch.arange(description.num_classes)
    name, number, classes = description.name, description.num_classes, description.classes
    return Dataset(name, inputs, targets, inputs, targets, number, classes=classes)


def test_classes_are_those_of_all_sorted() -> None:
    own = {"a": named("cat", "dog", "zebra"), "b": named("ant", "dog", "owl")}
    task = MatchedClasses.matching(named("cat", "dog", "owl"), own)
    assert task.classes == ("ant", "cat", "dog", "owl", "zebra")
    labels = {who: task.relabelled(holding(description), who) for who, description in own.items()}
    assert labels["a"].train_targets.tolist() == labels["a"].test_targets.tolist() == [1, 2, 4]
    assert labels["b"].train_targets.tolist() == [0, 2, 3]
    assert labels["b"].num_classes == 5
    assert labels["b"].classes == task.classes


def test_classes_are_in_the_common_order_if_clients_bring_none_of_their_own() -> None:
    task = MatchedClasses.matching(named("owl", "cat", "dog"), {"a": named("cat", "owl"), "b": named("dog")})
    assert task.classes == ("owl", "cat", "dog")
    assert task.relabelled(holding(named("cat", "owl")), "a").train_targets.tolist() == [1, 0]
    assert task.relabelled(holding(named("dog")), "b").train_targets.tolist() == [2]


@given(
    common=st.sets(st.sampled_from("abcdefgh"), min_size=1),
    own=st.lists(st.sets(st.sampled_from("abcdefghij"), min_size=1), max_size=4),
)
def test_every_example_keeps_its_class(common: set[str], own: list[set[str]]) -> None:
    descriptions = {str(who): named(*sorted(classes)) for who, classes in enumerate(own)}
    task = MatchedClasses.matching(named(*sorted(common)), descriptions)
    assert set(task.classes) == common.union(*own)
    for who, description in descriptions.items():
        targets = task.relabelled(holding(description), who).train_targets
        assert [task.classes[target] for target in targets] == list(description.class_names)


def test_numbers_are_those_of_the_common_data_set() -> None:
    """An archive without the highest classes is welcome; its numbers follow the classes wherever they go."""
    task = MatchedClasses.matching(named("cat", "dog", "owl"), {"a": numbered(2), "b": named("ant")})
    assert task.classes == ("ant", "cat", "dog", "owl")
    assert task.relabelled(holding(numbered(2)), "a").train_targets.tolist() == [1, 2]


def test_where_all_have_numbers_the_largest_counts() -> None:
    task = MatchedClasses.matching(numbered(9), {"a": numbered(3), "b": numbered(12)})
    assert task.classes == tuple(map(str, range(12)))
    for count in (3, 9, 12):
        data = task.relabelled(holding(numbered(count)), "it")
        assert data.train_targets.tolist() == list(range(count))
        assert (data.num_classes, data.classes) == (12, None)


def test_folders_called_by_numbers_are_those_numbers() -> None:
    folder = named("0", "10", "2")  # as a listing sorts them
    task = MatchedClasses.matching(numbered(11), {"a": folder})
    assert task.relabelled(holding(folder), "a").train_targets.tolist() == [0, 10, 2]


@pytest.mark.parametrize(
    ("common", "own", "message"),
    [
        (
            numbered(3),
            named("cat", "dog"),
            r"^client 0 names its classes, cat, dog, and digits numbers them; name them",
        ),
        (
            named("cat", "dog"),
            numbered(3),
            r"^client 0 numbers its classes up to 2, and pets has 2, cat, dog; name them",
        ),
        (named("cat", "dog"), named("Cat"), r"^client 0 calls a class 'Cat', and pets 'cat'; spell it alike$"),
        (named("polar bear"), named(" polar  bear"), r"^client 0 calls a class ' polar  bear', and pets 'polar bear'"),
        (numbered(3), named("1", "02"), r"^client 0 calls a class '02', and digits '2'; spell it alike$"),
    ],
)
def test_names_that_cannot_be_matched_are_told(common: Description, own: Description, message: str) -> None:
    with pytest.raises(DataError, match=message):
        MatchedClasses.matching(common, {"client 0": own})


def test_a_class_that_the_federation_lacks_is_told() -> None:
    task = MatchedClasses.matching(named("cat", "dog", "owl"))
    with pytest.raises(DataError, match=r"^client 3: class 'dgo' is none of the 3 of pets; nearest: dog"):
        task.relabelled(holding(named("cat", "dgo")), "client 3")
