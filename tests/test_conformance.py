"""Every method that `potluck list` shows, Potluck's own and those of other packages, through its checks."""

import pytest

from potluck.core.schema import Schema, like, number
from potluck.methods import get_method, list_methods
from potluck.testing import Check, checks_of
from potluck.testing.conformance import declares_its_replies

CHECKS = [
    pytest.param(check, id=f"{name}: {check.name}") for name in list_methods() for check in checks_of(get_method(name))
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


@pytest.mark.parametrize("check", CHECKS)
def test_method_conforms(check: Check):
    check.run()
