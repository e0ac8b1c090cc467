"""Methods that need only sums: from secure ones, each makes what it makes of the replies themselves."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass

import pytest
from torch import Tensor
from torch.testing import assert_close

from potluck.core.roles import Failure
from potluck.engine.executors.choice import ChosenExecutor
from potluck.engine.executors.sequential import Sequential
from potluck.experiment.running.run import Run
from potluck.experiment.running.secure_sums import pieces_of
from potluck.experiment.settings.schema import RunConfig
from potluck.methods import get_method, list_methods
from potluck.testing.worlds import World, quick, toy_federation

LEAVING = (1, 6, 7, 9)  # of sixteen, a quarter


class Leaving(Sequential):
    """Some clients leave after their training: what they have learnt stays with them."""

    def run(self, host, tasks):
        for outcome in super().run(host, tasks):
            left = outcome.client in LEAVING
            yield Failure(outcome.client, "left", "it has left", kind="absence") if left else outcome


def tensors_in(value, path=""):
    if isinstance(value, Tensor):
        yield path, value
    elif is_dataclass(value):
        for spec in fields(value):
            yield from tensors_in(getattr(value, spec.name), f"{path}.{spec.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}.{key}")


def after(method, world, secure, executor=None, **config):
    """What the server makes of rounds, tensors by path, and their records."""
    choice = ChosenExecutor(executor or Sequential(), "sequential", 1, "")
    config = RunConfig(**{"rounds": 1, "secure_sums": secure, "common_test": False, **config})
    run = Run(method, toy_federation(world), config, choice=choice)
    result = run.run()
    state = run._state
    if type(method).__name__ == "FD":  # it keeps the reports, of which it sends means
        state = method._averages(state, 0, 4)
    return dict(tensors_in(state)), result.rounds


SUMMING = [
    ("fedavg", []),
    ("fedavg", ["sharing.scope=architecture", "sharing.buffers=local"]),
    ("fedprox", []),
    ("fedopt", ["optimizer=momentum"]),
    ("fednova", []),
    ("ditto", []),
    ("fedbabu", []),
    ("pfedme", []),
    ("scaffold", ["control_weighting=samples"]),
    ("scaffold", ["option=gradient"]),
    ("fedin", []),
    ("heterofl", ["levels=[1.0, 0.5]"]),
    ("heterofl", ["levels=[1.0, 0.5]", "leave_out=[0.5]"]),
    ("fedrolex", ["levels=[1.0, 0.5]"]),
    ("fjord", ["levels=[1.0, 0.5]"]),
    ("depthfl", ["levels=[1.0, 0.5]"]),
    ("fedproto", []),
    ("fedproto", ["weighting=samples"]),
    ("fd", ["averaged=all"]),
    ("lgfedavg", []),
    ("lgfedavg", ["weighting=uniform"]),
    *((name, []) for name in ("apfl", "fedala", "fedbn", "fedmlb", "fedntd", "fedper", "fedrep", "moon", "perfedavg")),
    *((name, []) for name in ("incoavg", "incomoon", "inconova", "incoprox", "incoscaffold")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "assignments"), SUMMING)
def test_from_secure_sums_a_method_makes_what_it_makes_of_the_replies(name, assignments):
    method = quick(get_method(name), assignments)
    world = World(clients=16, batchnorm=True, labels=3).fit_for(method)
    plain, secure = (after(method, world, one, Leaving(), tolerate_failures=True) for one in (None, True))
    (record,) = secure[1]
    assert record.lost is None
    assert {int(client) for client in record.failed} == set(LEAVING)
    assert record.secure["summed"] > 0
    assert (record.secure["local"], record.secure["lost"], record.secure["clipped"]) == (0, 0, 0)
    assert plain[0].keys() == secure[0].keys()
    for path, tensor in plain[0].items():
        assert_close(secure[0][path], tensor, rtol=1e-5, atol=1e-5, msg=lambda text, path=path: f"{path}: {text}")


def test_methods_say_whether_sums_suffice_them():
    suffices = {name for name in list_methods() if not get_method(name)().needs_single_replies}
    tried = {name for name, _ in SUMMING}
    assert suffices == tried - {"fd"}  # so that each is tried
    assert suffices.isdisjoint({"fedtgp", "fedgh", "fedre", "feddf", "fedet", "local", "ktpfl", "fedfomo", "slimfl"})
    assert "averaged = 'all'" in get_method("fd")().needs_single_replies
    assert quick(get_method("fd"), ["averaged=all"]).needs_single_replies == ""
    assert quick(get_method("fedavg"), ["sharing.scope=none"]).needs_single_replies == "it averages nothing"


@pytest.mark.parametrize(("name", "assignments"), [("heterofl", ["levels=[1.0, 0.5]"]), ("fedavg", [])])
def test_a_client_without_a_reply_has_the_pieces_of_one_with_a_reply_but_for_rows_of_classes(name, assignments):
    method = quick(get_method(name), assignments)
    config = RunConfig(secure_sums=True, executor="sequential")
    run = Run(method, toy_federation(World(clients=6, labels=2).fit_for(method)), config)
    try:
        run.load()
        sums, engine = run._sums, run._engine
        blanks = pieces_of(sums._asked_first(engine, run._state, 1, range(6)))
        heard = {}

        def listening(one):
            asked = one.handler, one.messages, one.place.server
            heard[one.handler] = pieces_of(
                {
                    client: sums._of(asked[0], client, asked[1][client], reply, asked[2])
                    for client, reply in one.replies.items()
                }
            )
            return sums(one)

        engine._sums = listening
        engine.round(1, run._state, [*range(6)])
    finally:
        run.close()
    for client, pieces in heard["local_update"].items():
        different = {tensor for tensor in pieces if blanks[client][tensor] != pieces[tensor]}
        assert pieces.keys() == blanks[client].keys()
        assert different == ({"all/weights/head.weight", "all/weights/head.bias"} if name == "heterofl" else set())
