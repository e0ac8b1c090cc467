"""What runs were made with, in words."""

import pytest

from potluck.analysis.provenance import provenance, stretches
from potluck.analysis.read import read_run
from potluck.core.ground.errors import CheckpointError

OLD, NEW = "a" * 40, "b" * 40
FACTS = {
    "potluck_commit": NEW,
    "potluck_dirty": False,
    "python": "3.12.1",
    "packages": {"potluck": "0.1.0", "torch": "2.9.0", "numpy": "2.3.0"},
    "machine": "Linux x86_64, 2 cores for torch",
    "computing": {"device": "cpu"},
}


def test_of_a_resumed_run_each_fact_says_to_which_round_it_held(store_run):
    old = {**FACTS, "potluck_commit": OLD, "potluck_dirty": True, "packages": {"potluck": "0.1.0", "torch": "2.8.0"}}
    earlier = [{**old, "last_round": 2}, {**old, "last_round": 4, "packages": FACTS["packages"]}]
    run = read_run(store_run(**FACTS, earlier=earlier))
    assert [last for last, _ in stretches(run)] == [2, 4, 6]
    found = provenance(run)
    assert found.commit == found.potluck_commit == f"{OLD[:12]} with changes to round 4, then {NEW[:12]}"
    assert found.packages == {
        "potluck": "0.1.0",
        "torch": "2.8.0 to round 2, then 2.9.0",
        "numpy": "– to round 2, then 2.3.0",
    }
    assert (found.python, found.machine) == ("3.12.1", FACTS["machine"])


def test_what_resumed_a_run_that_was_complete_has_made_nothing_of_it(store_run):
    run = read_run(store_run(**FACTS, earlier=[{**FACTS, "potluck_commit": OLD, "last_round": 6}]))
    assert provenance(run).commit == OLD[:12]


def test_a_device_that_is_not_the_processor_is_named_beside_the_machine(store_run):
    run = read_run(store_run(**{**FACTS, "computing": {"device": "NVIDIA H200"}}))
    assert provenance(run).machine == f"{FACTS['machine']}; device NVIDIA H200"


@pytest.mark.parametrize("earlier", [["?"], 3, [{**FACTS}], [{**FACTS, "last_round": "two"}]])
def test_a_damaged_list_of_earlier_facts_is_refused_in_words(store_run, earlier):
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged: of `earlier`"):
        stretches(read_run(store_run(**FACTS, earlier=earlier)))
