"""The server, with all that it holds and two of the clients, learns no other's numbers; no client lies unnoticed."""

import itertools
import random

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from potluck.core.ground.errors import PotluckError
from potluck.core.message import Message
from potluck.secure import steps
from potluck.secure.agreement import Agreement, SecureRefusal
from potluck.secure.client import SecureClient
from potluck.secure.coverage import Coverage, Summand, whole_piece
from potluck.secure.masks import public_half, sealed_box
from potluck.secure.server import SecureServer
from potluck.secure.shamir import secret_from
from potluck.secure.steps import as_bytes, as_tensor, ids
from potluck.secure.together import answered, public_keys
from potluck.testing.summing import half_of

CLIENTS = 7  # of which five must be there, so that two help the server in vain
ALL = Coverage({"w": Summand((64,))}, [{"w": whole_piece((64,))}], dict.fromkeys(range(CLIENTS), 0))


def refuses(told):
    return pytest.raises(SecureRefusal, match=told)


def said(action, *arguments):
    """Why an action is refused; empty if it is not."""
    try:
        action(*arguments)
    except PotluckError as error:
        return str(error)
    return ""


class Played:
    """A round up to some step, with an honest server, whose place the test then takes."""

    def __init__(self, one, step, leaving=()):
        self.one, self.server, self.halves = one, SecureServer(one.agreement), {}
        while self.server.step < step:
            now = self.server.step
            for client in self.server.asked:
                if (client, now) not in leaving:
                    self.server.take(client, self.answer(client, self.server.request(client)))
            self.server.close()

    def answer(self, client, request, step=None):
        step = self.server.step if step is None else step
        if step == 0:
            self.halves[client] = half_of(request, client, self.one.identities)
        return answered(self.halves[client], step, request, self.one.addends[client])

    def refused_by(self, requests, told):
        """The clients that refuse what they are sent, for this reason."""
        reasons = {client: said(self.answer, client, request) for client, request in requests.items()}
        return {client for client, reason in reasons.items() if told in reason and "\n" not in reason}


@pytest.fixture
def play(trial):
    return lambda step, leaving=(), coverage=ALL: Played(trial(CLIENTS, coverage), step, leaving)


# The server swaps keys.


def test_a_client_refuses_a_round_with_a_key_that_is_no_peers(trial):
    one = trial(CLIENTS, ALL)
    swapped = {**one.agreement.keys, 3: Ed25519PrivateKey.generate().public_key().public_bytes_raw()}
    other = Agreement("tried", 1, swapped, ALL, one.agreement.numbers)
    for client in range(CLIENTS):
        with refuses("another key for client 3" if client == 3 else "not among the peers .* owner: 3"):
            half_of(other.encode(), client, one.identities)


def test_a_client_refuses_a_key_for_masks_that_its_client_did_not_sign(play):
    """The server puts its own key in a client's place, to know the masks that others have in common with it."""
    for column in ("masks", "boxes"):
        played = play(1)
        forged = Message.decode(played.server.request(0))
        forged[column][3] = as_tensor(public_half(bytes(range(32))))
        others = dict.fromkeys([client for client in range(CLIENTS) if client != 3], forged.encode())
        assert played.refused_by(others, "client 3's signature is not its own") == set(others)


def test_a_client_refuses_keys_that_were_signed_for_another_round(trial):
    one = trial(CLIENTS, ALL)
    next_round = Agreement("tried", 2, one.agreement.keys, ALL, one.agreement.numbers)
    old, new = Played(one, 1), half_of(next_round.encode(), 0, one.identities)
    new.keys()
    with refuses("signature is not its own, or of something else"):
        new.boxes(old.server.request(0))


def test_a_client_refuses_a_list_without_its_own_keys(play):
    played = play(1)
    message = Message.decode(played.server.request(0))
    without = Message(**{name: message[name][1:] for name in message})
    assert played.refused_by({0: without.encode()}, "lacks this client's own keys") == {0}


# It invents clients.


def test_a_client_refuses_to_sum_with_clients_that_nobody_knows(trial):
    """All others are the server's own: the sum would be the one client's numbers."""
    one = trial(CLIENTS, ALL)
    own = one.identities[0]
    invented = {client: Ed25519PrivateKey.generate() for client in range(1, CLIENTS)}
    keys = public_keys({0: own, **invented})
    agreement = Agreement("tried", 1, keys, ALL, one.agreement.numbers).encode()
    with refuses("not among the peers of this client's owner: 1, 2, 3, 4, 5"):
        SecureClient(agreement, 0, own, public_keys(one.identities).values())


def test_a_client_refuses_a_peer_that_is_counted_twice(trial):
    one = trial(CLIENTS, ALL)
    honest = one.agreement.encode()
    twice = bytearray(honest)
    key, other = one.agreement.keys[1], one.agreement.keys[2]
    twice[honest.index(other) : honest.index(other) + 32] = key
    with refuses("two clients with one key"):
        Agreement.decode(bytes(twice))


# It asks for what it must not have.


def test_a_client_tells_of_each_client_one_of_its_two_secrets_alone(play):
    played = play(4, leaving={(6, 2)})
    shares = Message.decode(played.answer(0, played.server.request(0)))
    half = played.halves[0]
    own = [half._shares[client] for client in range(CLIENTS)]
    told = [as_bytes(row) for row in shares["shares"]]
    assert told == [*(seeds for _, seeds in own[:6]), own[6][0]]


def test_a_client_that_was_asked_with_one_list_of_survivors_answers_no_other(play):
    """With client 6 among the survivors, and once more without it, the server would have both of its secrets."""
    played = play(3)
    lists = [Message(clients=ids(some)).encode() for some in (range(CLIENTS), range(CLIENTS - 1))]
    for client in range(CLIENTS - 1):
        assert played.answer(client, lists[0])
        with refuses("asked for its signature again, and for others than before"):
            played.answer(client, lists[1])
        with refuses("has ended the round"):
            played.answer(client, lists[0])


def test_clients_that_were_told_different_survivors_tell_no_shares(play):
    """Two helpers of the server sign both lists; five signatures of one list are then not to be had."""
    played = play(3)
    with_six, without = frozenset(range(CLIENTS)), frozenset(range(CLIENTS - 1))
    told = {0: with_six, 1: with_six, 6: with_six, 2: without, 3: without}
    signatures = {
        client: Message.decode(played.answer(client, Message(clients=ids(told[client])).encode()))["signature"]
        for client in told
    }
    for said, client in ((with_six, 0), (without, 2)):
        signed = steps.survivors_signed(played.server._session, with_six, said)
        of_helpers = {one: as_tensor(played.one.identities[one].sign(signed)) for one in (4, 5)}
        signers = {**of_helpers, **{one: s for one, s in signatures.items() if told[one] == said}}
        listed = sorted(signers)
        few = Message(clients=ids(listed), signatures=torch.stack([signers[one] for one in listed]))
        if len(listed) < played.one.agreement.needed:
            with refuses("expected 5 to 7"):
                played.answer(client, few.encode(), 4)
        else:  # three honest ones and two helpers: that list has its five, and the other one cannot have them
            assert said == with_six
            assert played.answer(client, few.encode(), 4)
    with refuses("has ended the round"):  # the others tell nothing
        played.answer(2, few.encode(), 4)


def test_a_client_signs_no_list_of_survivors_that_lacks_it(play):
    """Else the server would get its secret as of one that has left, beside its words."""
    played = play(3)
    for client in range(CLIENTS):
        without = Message(clients=ids([one for one in range(CLIENTS) if one != client])).encode()
        with refuses("lacks this client, whose words were sent"):
            played.answer(client, without)


def test_signatures_of_another_list_are_none(play):
    played = play(3)
    without = Message(clients=ids(range(CLIENTS - 1))).encode()
    for client in range(CLIENTS - 1):
        played.answer(client, without)
    signed = steps.survivors_signed(played.server._session, frozenset(range(CLIENTS)), frozenset(range(CLIENTS)))
    signatures = torch.stack([as_tensor(played.one.identities[one].sign(signed)) for one in range(CLIENTS - 1)])
    with refuses("signature is not its own, or of something else"):
        played.answer(0, Message(clients=ids(range(CLIENTS - 1)), signatures=signatures).encode(), 4)


def test_a_client_does_not_repeat_a_round(trial):
    """The same numbers summed over two sets of clients would show the numbers of those in one alone."""
    one = trial(CLIENTS, ALL)
    for after in (1, 2):
        with refuses(f"found round 1; expected one after {after}"):
            SecureClient(
                one.agreement.encode(), 0, one.identities[0], public_keys(one.identities).values(), after=after
            )
    played = Played(one, 3)
    for step in range(3):  # nor a step of it
        with refuses("again, and for others than before" if step == 0 else "has ended the round"):
            answered(played.halves[0], step or 1, b"other", one.addends[0])


def test_a_client_answers_no_step_before_the_one_that_comes_first(play):
    played = play(1)
    with refuses("before the step that comes first"):
        played.halves[0].words(b"", played.one.addends[0].values)


def test_a_client_agrees_to_no_fewer_clients_than_its_owner_says(trial):
    one = trial(CLIENTS, ALL)
    with refuses("sums over 3 clients; expected at least 5"):
        SecureClient(one.agreement.encode(), 0, one.identities[0], public_keys(one.identities).values(), least=5)


# It tells different clients different things.


def test_clients_that_were_told_different_coverage_refuse_each_others_keys(trial):
    """To some, block by block, it names many who cover it, to others few."""
    one = trial(CLIENTS, ALL)
    two_kinds = [{"w": whole_piece((64,))}, {"w": (((0, 32),),)}]
    other = Coverage(ALL.summands, two_kinds, {client: int(client > 2) for client in range(CLIENTS)})
    versions = [Agreement("tried", 1, one.agreement.keys, coverage, one.agreement.numbers) for coverage in (ALL, other)]
    halves = {client: half_of(versions[client % 2].encode(), client, one.identities) for client in range(CLIENTS)}
    keys = {client: Message.decode(half.keys()) for client, half in halves.items()}
    columns = {
        "masks": torch.stack([keys[client]["mask"] for client in keys]),
        "boxes": torch.stack([keys[client]["box"] for client in keys]),
        "signatures": torch.stack([keys[client]["signature"] for client in keys]),
    }
    for half in halves.values():
        with refuses("signature is not its own, or of something else"):
            half.boxes(Message(clients=ids(range(CLIENTS)), **columns).encode())


def test_clients_that_were_told_different_lists_of_keys_open_no_boxes(play):
    """Client 0 is shown a cohort without client 6; nobody else is."""
    played = play(1)
    message = Message.decode(played.server.request(0))
    shorter = Message(**{name: message[name][:-1] for name in message}).encode()
    played.answer(0, shorter)
    for client in range(1, CLIENTS):
        played.server.take(client, played.answer(client, played.server.request(client)))
    rows = [Message.decode(played.server._answers[1][sender])["boxes"][0] for sender in range(1, CLIENTS - 1)]
    with refuses("0 of 5 boxes open; the others may have been told something else"):
        played.answer(0, Message(clients=ids(range(CLIENTS - 1)), boxes=torch.cat(rows)).encode(), 2)


def test_a_client_that_was_shown_fewer_boxes_has_nobody_who_takes_its_masks_off(play):
    """Client 0 is told that 3 and 6 sent no boxes, so that 1, 2 and the helpers 4, 5 alone mask with it.

    If all others told 1 and 2 to have left, the server would have all masks of client 0.
    """
    played = play(2)
    full = {client: played.server.request(client) for client in range(CLIENTS)}
    shown = [0, 1, 2, 4, 5]
    size = steps.box_bytes(played.one.agreement, 1, frozenset(range(CLIENTS)))
    boxes = dict(zip(range(1, CLIENTS), Message.decode(full[0])["boxes"].split(size), strict=True))
    fewer = Message(clients=ids(shown), boxes=torch.cat([boxes[one] for one in shown[1:]])).encode()
    for client in range(CLIENTS):
        played.answer(client, fewer if client == 0 else full[client])
    without = Message(clients=ids([0, 3, 4, 5, 6])).encode()
    signers = {client: Message.decode(played.answer(client, without, 3))["signature"] for client in (3, 4, 5, 6)}
    with refuses("expected some of the clients of the step before"):
        played.answer(0, without, 3)  # it knows nothing of 3 and 6, and would be the fifth to sign
    few = Message(clients=ids(signers), signatures=torch.stack([*signers.values()])).encode()
    assert said(played.answer, 3, few, 4).endswith("expected 5 to 7")


def test_a_signature_is_of_the_boxes_that_were_shown_too(play):
    played = play(2)
    full = {client: played.server.request(client) for client in range(CLIENTS)}
    shown = [0, 1, 2, 4, 5]
    size = steps.box_bytes(played.one.agreement, 1, frozenset(range(CLIENTS)))
    boxes = dict(zip(range(1, CLIENTS), Message.decode(full[0])["boxes"].split(size), strict=True))
    fewer = Message(clients=ids(shown), boxes=torch.cat([boxes[one] for one in shown[1:]])).encode()
    survivors = Message(clients=ids(shown)).encode()
    signatures = []
    for client in shown:
        played.answer(client, fewer if client == 0 else full[client])
        signatures.append(Message.decode(played.answer(client, survivors, 3))["signature"])
    listed = Message(clients=ids(shown), signatures=torch.stack(signatures)).encode()
    assert "client 0's signature is not its own, or of something else" in said(played.answer, 1, listed, 4)
    assert "client 1's signature is not its own, or of something else" in said(played.answer, 0, listed, 4)


# It looks at what it has.


def test_words_look_random_whatever_is_summed(play):
    played = play(2)
    request = played.server.request(0)
    data = Message.decode(played.halves[0].words(request, {"w": torch.zeros(64)}))["words"]
    words = data.numpy().view("<u8")
    high = words / 2.0**64
    assert len(set(words.tolist())) == 64
    assert 0.3 < high.mean() < 0.7  # the mean of 64 even draws is within 0.2 but for one time in 10^7
    again = Played(played.one, 3)
    assert not np.array_equal(Message.decode(again.server._answers[2][0])["words"].numpy().view("<u8"), words)


def test_two_helpers_shares_give_no_secret(play):
    played = play(3)
    agreement = played.one.agreement
    held = [played.halves[helper]._shares[0] for helper in (1, 2)]
    for number, secret in enumerate([played.halves[0]._mask, *played.halves[0]._seeds.values()]):
        shares = {agreement.holder(helper): held[i][number] for i, helper in enumerate((1, 2))}
        try:
            assert secret_from(shares) != secret
        except ValueError:
            continue


def test_of_what_too_few_are_left_nobody_tells_a_seed_and_the_words_stay_masked(play):
    """Three cover a block, and one has left: the others' words of it came, and no share that is told unmasks them."""
    kinds = [{"all": whole_piece((2,)), "three": whole_piece((5,))}, {"all": whole_piece((2,))}]
    coverage = Coverage(
        {"all": Summand((2,)), "three": Summand((5,))}, kinds, {client: int(client > 2) for client in range(CLIENTS)}
    )
    played = play(4, leaving={(2, 2)}, coverage=coverage)
    agreement = played.one.agreement
    (three,) = [number for number, block in enumerate(coverage.blocks) if len(block.clients) == 3]
    told = {
        share for client in played.server.asked for share in rows(played.answer(client, played.server.request(client)))
    }
    for half, client in itertools.product(played.halves.values(), (0, 1)):
        if client in half._shares and half._client != 2:
            place = agreement.summed_of(client, frozenset(range(CLIENTS))).index(three)
            assert half._shares[client][1 + place] not in told
            assert half._shares[client][2 - place] in told


def rows(answer):
    return [as_bytes(row) for row in Message.decode(answer)["shares"]]


# Clients lie.


def test_the_server_refuses_keys_that_are_not_signed_or_hide_nothing(play):
    played = play(0)
    server, agreement = played.server, played.one.agreement
    honest = Message.decode(played.answer(0, server.request(0)))
    with refuses("keys of client 1: client 1's signature"):
        server.take(1, honest.encode())
    weak = bytes(32)
    signature = played.one.identities[2].sign(steps.keys_signed(agreement, 2, weak, weak))
    with refuses("keys of client 2: a public key is one that hides nothing"):
        server.take(2, Message(mask=as_tensor(weak), box=as_tensor(weak), signature=as_tensor(signature)).encode())
    server.take(0, honest.encode())
    with refuses("client 0 has answered otherwise before"):
        server.take(0, half_of(server.request(0), 0, played.one.identities).keys())
    with refuses("which is not asked at this step"):
        server.take(CLIENTS, honest.encode())
    assert server.answered == {0}


def test_a_box_that_does_not_open_costs_its_sender_alone(play):
    """Client 3 sends client 0 something else than a box: the others' shares of its secrets are enough."""
    played = play(1)
    for client in range(CLIENTS):
        answer = Message.decode(played.answer(client, played.server.request(client)))
        if client == 3:
            answer["boxes"][0] = torch.zeros_like(answer["boxes"][0])
        played.server.take(client, answer.encode())
    played.server.close()
    finish(played)
    assert played.server.sums().survivors == tuple(range(CLIENTS))


def test_shares_of_something_else_are_noticed_and_named(play):
    """Client 3 gives all others shares of another seed than the one that it has bound itself to, and masks with."""
    played = play(1)
    for client in range(CLIENTS):
        half = played.halves[client]
        answer = played.answer(client, played.server.request(client))
        if client == 3:
            message = Message.decode(answer)
            other = bytes(len(message["boxes"][0]) - 16)
            boxes = [sealed_box(half._box_key(3, one), other) for one in range(CLIENTS) if one != 3]
            answer = Message(hashes=message["hashes"], boxes=torch.stack([as_tensor(box) for box in boxes])).encode()
        played.server.take(client, answer)
    played.server.close()
    finish(played)
    with refuses("the shares of client 3's secrets give none of them, so that it, or one who told them, lies"):
        played.server.sums()


def test_a_share_that_was_changed_when_it_was_told_is_noticed(play):
    played = play(4)
    for client in range(CLIENTS):
        message = Message.decode(played.answer(client, played.server.request(client)))
        if client == 2:
            message["shares"][4, 32] ^= 1
        played.server.take(client, message.encode())
    played.server.close()
    with refuses("the shares of client 4's secrets"):
        played.server.sums()


def finish(played):
    while not played.server.done:
        for client in played.server.asked:
            played.server.take(client, played.answer(client, played.server.request(client)))
        played.server.close()


# Anybody sends anything.


def mutated(data, draw):
    """The bytes with some changed, cut off or added."""
    kind = draw.randrange(4)
    if kind == 0:
        return data[: draw.randrange(len(data))]
    if kind == 1:
        return data + bytes(draw.randrange(1, 40))
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        changed[draw.randrange(len(changed) if kind == 2 else min(len(changed), 600))] = draw.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("step", range(5))
def test_mutated_bytes_are_read_or_refused_in_one_line_and_nothing_else(play, step):
    draw, played = random.Random(step), play(step)
    request = played.server.request(0)
    honest = played.answer(0, request)
    for _ in range(60):
        assert "\n" not in said(played.server.take, 1 if step == 4 else 0, mutated(honest, draw))
        half = played.halves[0]
        half._given, half._ended = half._given[:step], ""  # as if it had not been asked
        assert "\n" not in said(played.answer, 0, mutated(request, draw))


def test_what_is_longer_than_any_answer_is_not_read(play):
    played = play(3)
    with refuses("found 200000 bytes; expected at most"):
        played.server.take(0, bytes(200_000))


@pytest.mark.parametrize(
    ("values", "more", "told"),
    [
        ({"w": torch.zeros(63)}, {}, "shape"),
        ({}, {}, "expected the tensors of the agreement"),
        ({"w": torch.zeros(64)}, {"weight": 101}, "a weight of 101; expected 1 to 100"),
        ({"w": torch.zeros(64)}, {"weight": 0}, "a weight of 0"),
        ({"w": torch.full((64,), torch.nan)}, {}, "not finite"),
    ],
    ids=["shape", "names", "too heavy", "no weight", "not a number"],
)
def test_a_client_adds_nothing_but_what_was_agreed(play, values, more, told):
    played = play(2)
    with pytest.raises(ValueError, match=told):
        played.halves[0].words(played.server.request(0), values, **more)
    with refuses("has ended the round"):
        played.answer(0, played.server.request(0))
