"""Every method that `potluck list` shows, Potluck's own and those of other packages, through its checks."""

from dataclasses import dataclass, replace

import pytest

from potluck.core.message import Message
from potluck.core.method import on_client
from potluck.core.roles import Replies
from potluck.core.schema import Schema, like, number
from potluck.methods import get_method, list_methods
from potluck.testing import Check, checks_of
from potluck.testing.checks.clients import leaves_a_layer_to_its_owners, lets_go_of_streamed_replies
from potluck.testing.checks.networks import leaves_alone_what_nobody_covers, trains_no_more_than_fits
from potluck.testing.checks.statements import declares_its_replies, names_its_variants

FILE = "src/potluck/methods/{}.py"

QUICK = ("names_its_variants", "hyper_parameters_round_trip")
"""Of a variant: what takes a moment; the other checks carry the mark `slow`."""


LONG = (
    "learns_a_toy_task",
    "resumes_to_the_same_bytes",
    "merges_together_what_was_asked_apart",
    "gives_the_same_bytes_on_workers",
    "agrees_when_stacked",
    "cuts_any_network_alike",
    "reads_named_inputs_alike",
    "keeps_what_is_frozen",
    "is_deterministic",
    "works_with_newcomers",
    "means_the_same_class_everywhere",
    "asks_nothing_of_classes_that_a_client_lacks",
    "declares_its_replies",
    "lets_go_of_streamed_replies",
    "limit: ",
)
"""Of a method's defaults: what takes longest, for all methods some minutes; these checks carry the mark `slow`."""


def marks(name, check):
    quick = not check.name.startswith(LONG) if check.variant is None else check.name.endswith(QUICK)
    return (pytest.mark.rotates(FILE.format(name)), *(() if quick else (pytest.mark.slow,)))


CHECKS = [
    pytest.param(check, id=f"{name}: {check.name}", marks=marks(name, check))
    for name in list_methods()
    for check in checks_of(get_method(name))
]


class Silent(get_method("fedavg")):
    """Declares nothing."""

    def replies(self, handler, member, message, server):
        return None


class Careless(get_method("fedavg")):
    """Lets a client claim any number of examples."""

    def replies(self, handler, member, message, server):
        return Schema(**{**self.sharing.expected(member, message), "examples": number(0, 10**20)})


class Narrow(get_method("fedavg")):
    """Forgets an entry that it sends."""

    def replies(self, handler, member, message, server):
        return Schema(weights=like(message["weights"]))


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Silent, "local_update has no declaration of its reply"),
        (Careless, "the reply of local_update may have in examples"),
        (Narrow, "a reply of local_update does not fit its declaration: buffers is not expected"),
    ],
)
def test_declares_its_replies_finds_a_declaration_that_is_missing_or_wrong(method, complaint):
    with pytest.raises(AssertionError, match=complaint):
        declares_its_replies(method)


class Hoards(get_method("fedavg")):
    """Streams, and keeps all that came."""

    def round(self, state, cohort, server):
        replies = dict(cohort.stream(self.local_update, self.sharing.send(state.weights, cohort, server)))
        return replace(state, weights=self.sharing.merge(state.weights, Replies(replies, {}), server.roster))


def test_lets_go_of_streamed_replies_finds_a_method_that_keeps_them():
    lets_go_of_streamed_replies(get_method("fedavg"))
    lets_go_of_streamed_replies(get_method("fedmd"))  # asks, and may keep what it was told
    with pytest.raises(AssertionError, match="4 replies were in memory together"):
        lets_go_of_streamed_replies(Hoards)


class Greedy(get_method("heterofl")):
    """Has everyone train the full net."""

    def rate(self, member, server):
        return 1.0


class Forgetful(get_method("heterofl")):
    """A client keeps a tensor to itself."""

    def replies(self, handler, member, message, server):
        return None

    @on_client
    def local_update(self, client, message):
        reply = yield from super().local_update(client, message)
        weights = dict(list(reply["weights"].items())[1:])
        return Message(weights=weights, labels=reply["labels"])


class Shrinking(get_method("heterofl")):
    """Moves weights that no client has trained."""

    def round(self, state, cohort, server):
        state = super().round(state, cohort, server)
        return replace(state, weights={name: 0.99 * tensor for name, tensor in state.weights.items()})


@pytest.mark.parametrize(
    ("check", "method", "complaint"),
    [
        (trains_no_more_than_fits, Greedy, r"a client of capacity 0\.5 trains \d+ weights; \d+ fit"),
        (trains_no_more_than_fits, Forgetful, "local_update replies other tensors or shapes than it was sent"),
        (leaves_alone_what_nobody_covers, Shrinking, r"\d+ weights of .* have changed, of which \d+ were trained"),
    ],
)
def test_what_a_method_does_wrong_with_slices_is_found(check, method, complaint):
    check(get_method("heterofl"))
    with pytest.raises(AssertionError, match=complaint):
        check(method)


class Diluted(get_method("fedavg")):
    """Counts a client that lacks a layer as one that has left it as it was."""

    def round(self, state, cohort, server):
        replies = cohort.ask(self.local_update, self.sharing.send(state.weights, cohort, server))
        merged = self.sharing.merge(state.weights, replies, server.roster)
        drawn, answered = len(replies), self.sharing.owners(server.roster, among=replies)
        pool = {
            group: {
                name: old.lerp(merged[group][name], answered[group].get(name, drawn) / drawn)
                if old.is_floating_point()
                else merged[group][name]
                for name, old in weights.items()
            }
            for group, weights in state.weights.items()
        }
        return type(state)(pool)


class Forgetful(get_method("fedavg")):
    """Lets a layer of which nobody has sent anything fade."""

    def round(self, state, cohort, server):
        faded = {
            g: {n: w * 0.5 if w.is_floating_point() else w for n, w in ws.items()} for g, ws in state.weights.items()
        }
        return super().round(type(state)(faded), cohort, server)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Diluted, r"stages\.hidden2.* differs after a round with all from what it is with its owners"),
        (Forgetful, r"stages\.hidden2.* differs after a round with the others from what it is with nobody"),
    ],
)
def test_leaves_a_layer_to_its_owners__notices_who_counts_others(method, complaint):
    with pytest.raises(AssertionError, match=complaint):
        leaves_a_layer_to_its_owners(method)


@dataclass(frozen=True)
class Optional(get_method("fedavg")):
    """Does what it should with its defaults, and declares nothing under an option."""

    declared: bool = True
    variants = {"undeclared": {"declared": False}}

    def replies(self, handler, member, message, server):
        return super().replies(handler, member, message, server) if self.declared else None


def test_checks_of__notices_what_only_a_variant_does_wrong():
    declares_its_replies(Optional)
    (check,) = [found for found in checks_of(Optional) if found.name == "undeclared: declares_its_replies"]
    assert check.variant == "undeclared"
    with pytest.raises(AssertionError, match="local_update has no declaration of its reply"):
        check.run()


@pytest.mark.parametrize("variants", [{"same": {}}, {"one": {"declared": False}, "other": {"declared": False}}])
def test_names_its_variants__refuses_those_that_check_nothing_new(variants, monkeypatch):
    names_its_variants(Optional)
    monkeypatch.setattr(Optional, "variants", variants)
    with pytest.raises(AssertionError, match=f"the variant '{list(variants)[-1]}' is the same method as"):
        names_its_variants(Optional)


@pytest.mark.parametrize("check", CHECKS)
def test_method_conforms(check: Check):
    check.run()
