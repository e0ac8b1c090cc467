"""A secure sum is the plain sum, whoever leaves when, and of blocks that too few cover it is none."""

import itertools

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from potluck.core.ground.errors import ConfigError, WireError
from potluck.core.nets.weights import mean_where_present
from potluck.secure.agreement import LEAST, Agreement, SecureRefusal
from potluck.secure.coverage import Coverage, Summand, whole_piece
from potluck.secure.fixed import FixedPoint
from potluck.secure.server import SecureServer
from potluck.secure.together import Addend, answered, summed_together
from potluck.testing.summing import half_of, secure_round


def plain(agreement, addends, survivors):
    """The sums and weights computed one coordinate at a time in Python's integers, as who sees all would."""
    coverage, unit = agreement.coverage, 2.0**agreement.numbers.bits
    found = {}
    for name, summand in coverage.summands.items():
        sums, weights = {}, {}
        cover = {}
        for client, kind in coverage.kinds.items():
            if (piece := coverage.pieces[kind].get(name)) is None:
                continue
            listed = [[at for start, stop in spans for at in range(start, stop)] for spans in piece]
            addend = addends[client]
            for place in itertools.product(*(range(len(one)) for one in listed)):
                at = tuple(one[i] for one, i in zip(listed, place, strict=True))
                cover.setdefault(at, set()).add(client)
                if client not in survivors:
                    continue
                w = {"one": 1, "client": addend.weight}.get(summand.weighing)
                w = int(addend.row_weights[name][place[0]]) if w is None else w
                value = min(
                    max(float(addend.values[name][place]), -agreement.numbers.largest), agreement.numbers.largest
                )
                sums[at] = sums.get(at, 0) + w * round(value * unit)  # to even, as NumPy
                weights[at] = weights.get(at, 0) + w
        enough = [at for at in sums if len(cover[at] & survivors) >= agreement.least]
        whole = [torch.zeros(summand.shape, dtype=torch.int64) for _ in range(2)]
        for tensor, numbers in zip(whole, (sums, weights), strict=True):
            for at in enough:
                tensor[at] = numbers[at]
        found[name] = whole
    return found


def check_plain(trial, sums):
    expected = plain(trial.agreement, trial.addends, frozenset(sums.survivors))
    assert expected.keys() == sums.sums.keys()
    for name, (numbers, weights) in expected.items():
        assert torch.equal(sums.sums[name], numbers), name
        assert torch.equal(sums.weights[name], weights), name


LEAVING = {
    "nobody": {},
    "three before the first step": {1: 0, 4: 0, 7: 0},
    "three when they have sent keys": {0: 1, 1: 1, 9: 1},
    "three when all have their shares": {0: 2, 5: 2, 8: 2},
    "three when their words have come": {2: 3, 3: 3, 4: 3},
    "three before they tell shares": {2: 4, 6: 4, 9: 4},
    "one at each of three steps": {2: 0, 6: 2, 9: 4},
}


@pytest.mark.parametrize("leaving", LEAVING.values(), ids=LEAVING)
def test_the_secure_sum_is_the_plain_one_bit_for_bit_with_thirty_percent_leaving(trial, leaving):
    one = trial(10)
    sums = secure_round(one.agreement, one.identities, one.addends, leaving)
    assert frozenset(sums.survivors) == {client for client in range(10) if leaving.get(client, 5) > 2}
    check_plain(one, sums)


@pytest.mark.parametrize("bits", [4, 30])
def test_the_sum_is_the_plain_one_in_words_of_either_size(trial, bits):
    one = trial(6, numbers=FixedPoint(largest=4.0, bits=bits, weight=9))
    assert one.agreement.word == {4: 32, 30: 64}[bits]
    check_plain(one, secure_round(one.agreement, one.identities, one.addends))


def test_a_server_that_is_stopped_after_every_answer_goes_on_within_the_round(trial):
    one = trial(4)
    check_plain(one, secure_round(one.agreement, one.identities, one.addends, {2: 3}, stops=True))


def test_a_client_that_is_asked_again_says_the_same_again(trial):
    one, server, halves = trial(4), None, {}
    server = SecureServer(one.agreement)
    while not server.done:
        for client in server.asked:
            request, step = server.request(client), server.step
            if step == 0:
                halves[client] = half_of(request, client, one.identities)
            first, second = (answered(halves[client], step, request, one.addends[client]) for _ in range(2))
            assert first == second
            server.take(client, first)
            server.take(client, second)
        server.close()
    check_plain(one, server.sums())


def test_numbers_beyond_the_largest_are_clipped_by_their_client_which_counts_them(trial):
    one = trial(3, Coverage({"w": Summand((4,))}, [{"w": whole_piece((4,))}], dict.fromkeys(range(3), 0)))
    one.addends[1] = Addend({"w": torch.tensor([1.0, -9.0, 1e9, 8.0])})
    sums = secure_round(one.agreement, one.identities, one.addends)
    check_plain(one, sums)
    half = half_of(one.agreement.encode(), 1, one.identities)
    half._boxed = frozenset(range(3))
    half._units(one.addends[1].values, 1, {})
    assert half.clipped == 2


def test_means_are_those_of_federated_averaging(trial):
    summands = {"w": Summand((3, 2), "client"), "top": Summand((2,), "client")}
    kinds = [{"w": whole_piece((3, 2))}, {"w": whole_piece((3, 2)), "top": whole_piece((2,))}]
    one = trial(8, Coverage(summands, kinds, {client: client % 2 for client in range(8)}))
    sums = secure_round(one.agreement, one.identities, one.addends)
    keep = {"w": torch.zeros(3, 2), "top": torch.zeros(2), "other": torch.ones(1)}
    values = [one.addends[client].values for client in range(8)]
    expected = mean_where_present(values, [one.addends[client].weight for client in range(8)], keep)
    assert_close(sums.means(keep), expected, rtol=0, atol=2.0**-19)


def test_what_fewer_than_three_cover_stays_with_them_and_is_counted(trial):
    summands = {"all": Summand((2,)), "two": Summand((5,))}
    kinds = [{"all": whole_piece((2,))}, {"all": whole_piece((2,)), "two": whole_piece((5,))}]
    one = trial(6, Coverage(summands, kinds, {0: 1, 1: 1, 2: 0, 3: 0, 4: 0, 5: 0}))
    sums = secure_round(one.agreement, one.identities, one.addends)
    check_plain(one, sums)
    assert (sums.local, sums.lost) == (5, 0)
    assert torch.equal(sums.means({"two": torch.full((5,), 7.0)})["two"], torch.full((5,), 7.0))
    assert "5 numbers stayed with their clients" in str(sums)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_what_fewer_than_three_are_left_of_is_not_summed(trial, step):
    """The clients' words of the block may have come: its masks stay on them."""
    summands = {"all": Summand((2,)), "three": Summand((5,))}
    kinds = [{"all": whole_piece((2,))}, {"all": whole_piece((2,)), "three": whole_piece((5,))}]
    one = trial(7, Coverage(summands, kinds, {0: 1, 1: 1, 2: 1, 3: 0, 4: 0, 5: 0, 6: 0}))
    sums = secure_round(one.agreement, one.identities, one.addends, {1: step})
    check_plain(one, sums)
    assert (sums.local, sums.lost) == (0, 0 if step == 3 else 5)
    assert bool(sums.weights["three"].any()) == (step == 3)


def test_a_round_may_ask_for_more_than_three(trial):
    one = trial(6, least=4)
    assert one.agreement.least == 4
    check_plain(one, secure_round(one.agreement, one.identities, one.addends))


def test_the_weights_that_follow_from_sums_over_nested_blocks_are_named(trial):
    summands = {"w": Summand((2,), "client"), "top": Summand((2,), "client")}
    kinds = [{"w": whole_piece((2,))}, {"w": whole_piece((2,)), "top": whole_piece((2,))}]
    one = trial(6, Coverage(summands, kinds, {client: int(client > 0) for client in range(6)}))
    sums = secure_round(one.agreement, one.identities, one.addends)
    assert sums.told == {0}
    assert int(sums.weights["w"][0] - sums.weights["top"][0]) == one.addends[0].weight
    assert "the weights of 1 clients follow" in str(sums)


@pytest.mark.parametrize("clients", [3, 10, 100, 1000])
def test_thirty_percent_may_leave(clients, trial):
    agreement = trial(
        clients, Coverage({"w": Summand((1,))}, [{"w": whole_piece((1,))}], dict.fromkeys(range(clients), 0))
    ).agreement
    assert agreement.needed <= clients - int(0.3 * clients)
    assert 3 * agreement.needed > 2 * clients


def test_that_thirty_percent_may_leave_holds_for_every_number():
    assert all(2 * n // 3 + 1 <= n - int(0.3 * n) for n in range(3, 10_000))


@pytest.mark.parametrize("step", range(5))
def test_with_too_few_left_nothing_is_summed_and_one_line_says_so(trial, step):
    one = trial(7)
    with pytest.raises(SecureRefusal, match=r"4 of 7 clients sent \w+, and 5 must; nothing is summed") as told:
        secure_round(one.agreement, one.identities, one.addends, {0: step, 3: step, 5: step})
    assert "\n" not in str(told.value)


def test_what_was_saved_is_read_or_refused(trial):
    one = trial(3)
    server = SecureServer(one.agreement)
    server.take(1, half_of(server.request(1), 1, one.identities).keys())
    data = server.save()
    assert SecureServer.restored(data).answered == {1}
    for wrong in (b"", data[:-1], data[: len(data) // 2], half_of(server.request(1), 1, one.identities).keys()):
        with pytest.raises(WireError):
            SecureServer.restored(wrong)


def test_an_agreement_comes_back_from_its_bytes(trial):
    one = trial(5).agreement
    again = Agreement.decode(one.encode())
    assert again.encode() == one.encode()
    assert again.digest == one.digest
    assert again.coverage.summands == one.coverage.summands
    assert [block.clients for block in again.coverage.blocks] == [block.clients for block in one.coverage.blocks]
    for block, other in zip(again.coverage.blocks, one.coverage.blocks, strict=True):
        assert np.array_equal(block.positions, other.positions)


def test_an_agreement_among_two_or_with_sums_that_overflow_is_refused(trial):
    with pytest.raises(ConfigError, match=f"found 2 clients; expected at least {LEAST}"):
        trial(2)
    with pytest.raises(ConfigError, match="expected at most 64"):
        trial(5, numbers=FixedPoint(largest=2.0**20, bits=33, weight=2000))
    with pytest.raises(ConfigError, match="found 5 clients; expected at least 6"):
        trial(5, least=6)


def test_in_one_process_the_sums_are_the_same_and_bytes_are_counted(trial):
    one = trial(clients=10)
    course = summed_together(one.agreement, one.identities, one.addends, left=[2, 7])
    expected = secure_round(one.agreement, one.identities, one.addends, leaving={2: 2, 7: 2})
    assert course.refusal == ""
    assert course.sums.survivors == expected.survivors == (0, 1, 3, 4, 5, 6, 8, 9)
    assert all(torch.equal(course.sums.sums[name], tensor) for name, tensor in expected.sums.items())
    assert set(course.bytes_up) == set(course.bytes_down) == set(range(10))
    words = 8 * sum(block.words for block in one.coverage.blocks if 0 in block.members)
    assert course.bytes_up[0] > words
    assert course.bytes_up[2] < course.bytes_up[3]  # keys and boxes alone


def test_in_one_process_too_few_are_a_refusal_and_no_error(trial):
    one = trial(clients=10)
    course = summed_together(one.agreement, one.identities, one.addends, left=[1, 2, 3, 4])
    assert course.sums is None
    assert course.refusal == "secure sums: 6 of 10 clients sent words, and 7 must; nothing is summed in this round"
    assert all(count > 0 for count in course.bytes_up.values())
