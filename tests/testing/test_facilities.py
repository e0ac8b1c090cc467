"""What the contract offers to methods is used by at least one of them, so that the conformance suite covers it."""

import pytest

from potluck.core.requests.beside_training import Gradient, NormStatistics, Predict
from potluck.core.requests.examples import Examples
from potluck.core.requests.fit import Fit
from potluck.core.roles import Client, Server
from potluck.engine.rounds.cohort import RoundCohort
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method
from potluck.models.contract import Exit
from potluck.parts.sharing import Means
from potluck.parts.submodels import CoverageMean
from potluck.testing.worlds import World, quick, run_rounds, toy_federation

USED_BY = {
    "replies one at a time": "fedavg",
    "modules of its own": "fedgen",
    "notes of clients": "fedin",
    "notes of the server": "scaffold",
    "columns": "fedgkt",
    "predictions": "fedfomo",
    "parts": "fedgkt",
    "gradients": "scaffold option=gradient",
    "statistics": "heterofl",
    "frozen nets": "moon",
    "gradients combined": "fedin",
    "corrections after a step": "scaffold",
    "turns": "fedorion",
    "observations": "fedin",
    "lasting optimisers": "local training.persist=true",
    "weights of a client's own in a mean": "scaffold",
    "weights by layer": "feddyn",
    "sub-models": "fedrolex",
    "rows that count": "heterofl",
    "nets of a width": "heterofl",
    "exits": "mfedepth",
}


@pytest.mark.slow
@pytest.mark.parametrize(("facility", "subject"), USED_BY.items())
def test_every_facility_of_the_contract_is_used_by_a_method(facility, subject, monkeypatch):
    name, *overrides = subject.split()
    found = _watch(monkeypatch)
    method = quick(get_method(name), overrides)
    run_rounds(Engine(method, toy_federation(World(batchnorm=True).fit_for(method))), 2)
    assert facility in found


def _watch(patch):
    """The facilities that are used from now on."""
    found = set()

    def watch(owner, attribute, uses):
        original = getattr(owner, attribute)

        def watched(self, *args, **kwargs):
            answer = original(self, *args, **kwargs)
            found.update(uses(self, *args, **kwargs))
            return answer

        patch.setattr(owner, attribute, watched)

    always = lambda facility: lambda *args, **kwargs: [facility]  # noqa: E731
    watch(RoundCohort, "stream", always("replies one at a time"))
    watch(Client, "module", always("modules of its own"))
    watch(Server, "module", always("modules of its own"))
    watch(Client, "note", lambda self, **numbers: ["notes of clients"] * bool(numbers))
    watch(Server, "note", lambda self, **numbers: ["notes of the server"] * bool(numbers))
    watch(Examples, "with_columns", always("columns"))
    watch(Predict, "__post_init__", lambda self: ["predictions", *["parts"] * (self.parts != "outputs")])
    watch(Gradient, "__post_init__", always("gradients"))
    watch(NormStatistics, "__post_init__", always("statistics"))
    watch(Fit, "__post_init__", _of_fit)
    watch(Means, "add", _of_means)
    watch(CoverageMean, "add", lambda *args: ["sub-models", *["rows that count"] * bool(args[-1])])
    watch(Exit, "__init__", always("exits"))
    watch(Server, "build", lambda server, *args, width=1.0, **kwargs: ["nets of a width"] * (width != 1.0))
    return found


def _of_fit(fit):
    offered = {
        "frozen nets": fit.frozen,
        "gradients combined": fit.combine,
        "corrections after a step": fit.after_step,
        "turns": fit.turns,
        "observations": fit.keep,
        "lasting optimisers": fit.training.persist,
    }
    return [facility for facility, chosen in offered.items() if chosen]


def _of_means(means, id, reply):
    shares = [share(means._roster[id], reply) for share in means._entries.values() if share is not None]
    return ["weights of a client's own in a mean"] * bool(shares) + [
        "weights by layer" for share in shares if isinstance(share, dict)
    ]


def test_quick__gives_plain_descent_a_rate_of_its_own_and_leaves_the_servers_trainings():
    sgd = quick(get_method("fedavg"), ['training.optimizer="sgd"'], plain_lr=0.1)
    assert sgd.training.lr == 0.01  # the method's own default is Adam
    own = quick(get_method("fedorion"), plain_lr=0.1)
    assert (own.training.optimizer, own.training.lr, own.server_training.lr) == ("sgd", 0.1, 0.01)
