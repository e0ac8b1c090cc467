"""Methods that need only sums: from secure ones, each makes what it makes of the replies themselves."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from potluck.core.message import Message
from potluck.core.nets.slicing import Indices
from potluck.core.roles import Failure
from potluck.engine.executors.sequential import Sequential
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.parts.submodels import select, whole
from potluck.secure.agreement import Agreement
from potluck.secure.coverage import Coverage, Summand, piece_at
from potluck.secure.fixed import FixedPoint
from potluck.testing.summing import Addend, new_identities, public_keys, secure_round
from potluck.testing.worlds import World, quick, toy_federation

LEAVING = (1, 6, 7)  # of twelve, three tenths
NUMBERS = FixedPoint(largest=64.0, bits=24, weight=1000)


@dataclass(frozen=True)
class Read:
    """A tensor of a reply as it is summed: where it lies in which whole, and what it counts."""

    value: Tensor
    shape: tuple[int, ...]
    place: Indices
    weighing: str


def layers(reply, weighing):
    """Entries of tensors by name, each the whole of its layer. Whole numbers (counters) are not summed."""
    return {
        f"{entry}/{name}": Read(tensor, tuple(tensor.shape), whole({name: tensor})[name], counts)
        for entry, counts in weighing.items()
        for name, tensor in reply.get(entry, {}).items()
        if tensor.is_floating_point()
    }


def slices(method, server, sent, reply, weighing):
    """The weights of a narrow net, which lie in the full one's."""
    places, full = method.submodel(server, sent["rate"]), dict(server.build().named_parameters())
    return {
        f"weights/{name}": Read(tensor, tuple(full[name].shape), places[name], weighing)
        for name, tensor in reply["weights"].items()
    }


def rows(entry, reply, labels, classes):
    """Rows of those classes that a client has."""
    tensor = reply[entry]
    return {entry: Read(tensor, (classes, tensor.shape[1]), (labels, slice(0, tensor.shape[1])), "one")}


def read(name, handler, method, server, sent, reply):
    """What is summed of a reply, and the client's weight; the rest passes as it is."""
    weight = int(reply.get("examples", reply.get("batches", 1)))
    if name == "fedproto":
        return rows("prototypes", reply, reply["counts"].nonzero()[:, 0], server.num_classes), 1
    if name == "fd":
        return rows("means", reply, reply["labels"], server.num_classes), 1
    if handler == "measure":
        return layers(reply, {"statistics": "client"}), weight
    if name in ("heterofl", "fedrolex"):
        return slices(method, server, sent, reply, "one"), 1
    if name == "fjord":
        parts = slices(method, server, sent, reply, "client")
        return {**parts, **layers(reply, {"tracked": "client"})}, weight
    entries = {"scaffold": ("dy", "dc", "buffers"), "lgfedavg": ("shared",)}.get(name, ("weights", "buffers"))
    counts = "client" if name in ("fedavg", "fedprox", "lgfedavg") else "one"
    return layers(reply, dict.fromkeys(entries, counts)), weight if counts == "client" else 1


class Summing(Sequential):
    """Has some clients leave after their training; the server sees of the others' tensors the secure means alone.

    With `secure` False it sees the replies themselves.
    """

    def __init__(self, name, method, secure):
        self.name, self.method, self.secure, self.engine, self.exchanges = name, method, secure, None, 0

    def run(self, host, tasks):
        calls = {}

        def noted(task):
            call = task.make()
            calls[call.client] = call
            return call

        outcomes = list(super().run(host, [replace(task, make=lambda task=task: noted(task)) for task in tasks]))
        stay = [outcome for outcome in outcomes if outcome.client not in LEAVING]
        left = [Failure(client, "left", "it has left") for client in LEAVING if client in calls]
        if self.secure:
            stay = self.summed(calls, {outcome.client: outcome for outcome in outcomes}, [one.client for one in stay])
        return iter(sorted([*stay, *left], key=lambda outcome: outcome.client))

    def summed(self, calls, answers, stay):
        self.exchanges += 1
        replies = {client: Message.decode(answer.payload) for client, answer in answers.items()}
        found = {client: self.of_reply(calls[client], replies[client]) for client in replies}
        coverage, addends = agreed_on(found)
        identities = new_identities(replies)
        agreement = Agreement("toy", self.exchanges, public_keys(identities), coverage, NUMBERS)
        leaving = {client: 2 for client in replies if client not in stay}
        sums = secure_round(agreement, identities, addends, leaving)
        assert (sums.local, sums.lost) == (0, 0)
        means = sums.means({name: torch.zeros(summand.shape) for name, summand in coverage.summands.items()})
        return [
            replace(answers[client], payload=with_means(replies[client], found[client][0], means).encode())
            for client in stay
        ]

    def of_reply(self, call, reply):
        server = self.engine.server(call.round)
        return read(self.name, call.handler, self.method, server, Message.decode(call.payload), reply)


def agreed_on(found):
    """The coverage of these clients, and what they add."""
    summands = {key: Summand(part.shape, part.weighing) for parts, _ in found.values() for key, part in parts.items()}
    pieces = [{key: piece_at(p.place, p.shape) for key, p in parts.items()} for parts, _ in found.values()]
    addends = {
        client: Addend({key: part.value for key, part in parts.items()}, weight)
        for client, (parts, weight) in found.items()
    }
    return Coverage(summands, pieces, {client: kind for kind, client in enumerate(found)}), addends


def with_means(reply, parts, means):
    """The reply with the means in place of its own tensors."""
    changed = {name: dict(value) if isinstance(value, Mapping) else value for name, value in reply.items()}
    for key, part in parts.items():
        value = select({key: means[key]}, {key: part.place})[key].to(part.value.dtype)
        entry, _, name = key.partition("/")
        if name:
            changed[entry][name] = value
        else:
            changed[entry] = value
    return Message(**changed)


def tensors_in(value, path=""):
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value):
        for spec in fields(value):
            yield from tensors_in(getattr(value, spec.name), f"{path}.{spec.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}.{key}")


def after_a_round(name, assignments, secure):
    """What the server makes of a round, tensors by path."""
    cls = get_method(name)
    method = quick(cls, assignments)
    world = World(clients=12, batchnorm=True).fit_for(method)
    executor = Summing(name, method, secure)
    engine = Engine(method, toy_federation(world), executor=executor, tolerate_failures=True)
    executor.engine = engine
    state, report = engine.round(1, engine.start(), sorted(engine.federation.sites))
    assert report.lost is None, report.lost
    assert set(report.failures) == set(LEAVING)
    if name == "fd":  # it keeps the reports, of which it sends means
        state = method._averages(state, 0, engine.federation.num_classes)
    return dict(tensors_in(state))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "assignments"),
    [
        ("fedavg", []),
        ("fedprox", []),
        ("scaffold", []),
        ("fedin", []),
        ("heterofl", ["levels=[1.0, 0.5]"]),
        ("fedrolex", ["levels=[1.0, 0.5]"]),
        ("fjord", ["levels=[1.0, 0.5]"]),
        ("depthfl", ["levels=[1.0, 0.5]"]),
        ("fedproto", []),
        ("fd", ["averaged=all"]),
        ("lgfedavg", []),
    ],
)
def test_from_secure_sums_a_method_makes_what_it_makes_of_the_replies(name, assignments):
    plain, secure = (after_a_round(name, assignments, one) for one in (False, True))
    assert plain.keys() == secure.keys()
    for path, tensor in plain.items():
        assert_close(secure[path], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")
