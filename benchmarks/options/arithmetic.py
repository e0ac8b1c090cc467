"""Options that change arithmetic: those of every local training, of sharing, and of the run's numerics."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

from reference import rate
from toys import Ground, Played, trainings_of
from trying import PLAIN, Trials

from potluck.core.ground.errors import ConfigError
from potluck.engine.numerics.numerics import Numerics
from potluck.parts.means import MeanRule

EXPONENTIAL = "schedule.rule=exponential schedule.factor=0.5"
STEPS = "schedule.rule=steps schedule.factor=0.1 schedule.milestones=[1,2]"
COSINE = "schedule.rule=cosine schedule.rounds=2"
TOGETHER = f"persist=true weight_decay=0.1 clip_norm=0.5 {EXPONENTIAL}"

OF_TRAINING = [
    ("momentum=0.9", "", "sgd", False),
    ("weight_decay=0.1", "", "sgd", False),
    ("clip_norm=0.001", "", "sgd", False),
    (EXPONENTIAL, "", "sgd", False),
    ("lr=0.0", "", "sgd", False),
    ("epochs=2", "", "sgd", False),
    ("steps=1", "", "sgd", False),
    ("batch_size=5", "", "sgd", False),
    ("persist=true", "momentum=0.9", "sgd", True),
    (f"momentum=0.9 {TOGETHER} epochs=2 batch_size=5", "", "sgd", True),
    ("persist=true", "", "adam", True),
    (TOGETHER, "", "adam", True),
    (f"optimizer=adamw weight_decay=0.1 {COSINE}", "", "adam", True),
    (f"optimizer=rmsprop persist=true steps=3 {STEPS}", "", "adam", True),
]
"""The option, what it stands beside, the base, and whether the second reading tries it: all of them, some together."""

BESIDE = {"fedmd.public_training": "public_labels=true"}
"""Trainings that there are beside another option alone."""

OF_ONE_BATCH = "fedktl.server_training", "fedre.server_training", "hypemefed.server_training"
"""Trainings whose examples here are fewer than a batch: an epoch is one step, whose momentum is the gradient."""

OF_TWINS = {"fedmd": "digest_loss=mse"}
"""Options beside which rules are tried: the sign of a distance to a consensus of equals is rounding's."""

WITHOUT_NORMS = Ground(batchnorm=False)
"""Adam takes a full step for a gradient that is rounding alone, as that of a bias before a BatchNorm."""

ROUNDING = 1e-9
BF16 = 2.0**-4
"""How much of the way a run of one round may differ, in the L2 norm, from one in single precision."""


def try_trainings(trials: Trials) -> None:
    """The options of every local training against the second reading."""
    for field in trainings_of(trials.method):
        place = f"{trials.name}.{field}"
        always, more = BESIDE.get(place, ""), [("momentum=0.9", "epochs=2", "sgd", False)] * (place in OF_ONE_BATCH)
        for words, beside, base, second in OF_TRAINING + more:
            ground = trials.ground if base == "sgd" else WITHOUT_NORMS
            trials.option(of(field, words), base, f"{always} {of(field, beside)}".strip(), second=second, ground=ground)


def of(field: str, words: str) -> str:
    """Words of a local training as words of its method."""
    return " ".join(f"{field}.{word}" for word in words.split())


def hold_properties(trials: Trials) -> None:
    """What must be equal whatever the method does with it."""
    plain, adam = trials.run("", "sgd"), {"base": "adam", "ground": WITHOUT_NORMS, "rounds": 1}
    for field in trainings_of(trials.method):
        lasting = f"{field}.persist=true"
        trials.equal(f"{lasting} with plain SGD", plain, trials.run(lasting, "sgd"))
        trials.equal(f"{lasting} in one round", trials.run("", **adam), trials.run(lasting, **adam))
        constant = of(field, EXPONENTIAL.replace("0.5", "1.0"))
        trials.equal(f"{field}.schedule with the factor 1", plain, trials.run(constant, "sgd"))
        trials.equal(f"{field}.clip_norm=1e9", plain, trials.run(f"{field}.clip_norm=1e9", "sgd"))
        falling = of(field, STEPS)
        trials.equal(f"{field}.schedule as each round's rate", trials.run(falling, "sgd"), stepwise(trials, field))
    alike = Ground(alike=True)
    of_epochs, of_steps = (trials.run(f"training.{words}", "sgd", alike) for words in ("epochs=2", "steps=4"))
    trials.equal("training.steps as many as in the epochs", of_epochs, of_steps)
    hold_numerics(trials)
    hold_sharing(trials)


def stepwise(trials: Trials, field: str) -> Played:
    """A run in which each round has a method of its own, with that round's learning rate and no schedule."""

    def make(number: int) -> Any:
        plain, falling = trials.made("", "sgd"), getattr(trials.made(of(field, STEPS), "sgd"), field)
        return replace(plain, **{field: replace(getattr(plain, field), lr=rate(falling, number))})

    try:
        return trials.play(make, "sgd")
    except ConfigError as error:
        return Played("refused", str(error))


def hold_numerics(trials: Trials) -> None:
    """With bf16, one round goes nearly the same way, with norms and without; a run with Adam ends in finite numbers."""
    low = Numerics(precision="bf16")
    for name, ground in (("precision=bf16", PLAIN), ("precision=bf16 without norms", WITHOUT_NORMS)):
        before, one, other = (
            trials.run("", "single", ground, rounds=rounds, computing=computing)
            for rounds, computing in ((0, Numerics()), (1, Numerics()), (1, low))
        )
        if other.end != "ran":
            trials.note(name, other.end, other.why)
        elif (off := other.way(one) / max(one.way(before), 1e-9)) <= BF16:
            trials.note(name, "holds")
        else:
            trials.note(name, "differs", f"by {off:.2g} of the way of one round")
    found = trials.run("", "own", computing=low)
    trials.note("precision=bf16 with Adam", "holds" if found.end == "ran" else found.end, found.why)


def hold_sharing(trials: Trials) -> None:
    """What options of averaging come to where they cannot matter."""
    for name, value in values_of(trials.made("", "sgd")):
        if name == "sharing.scope":
            one, other = each(trials, name, ("layer", "architecture"), Ground(architectures=1))
            trials.equal(f"{name} with one architecture", one, other)
        elif name == "sharing.buffers":
            average, *others = each(trials, name, ("average", "local", "drop"), WITHOUT_NORMS)
            for buffers, run in zip(("local", "drop"), others, strict=True):
                trials.equal(f"{name}={buffers} without buffers", average, run)
        elif value in ("samples", "uniform"):
            one, other = each(trials, name, ("samples", "uniform"), Ground(alike=True))
            trials.equal(f"{name} with equally many examples", one, other, ROUNDING)
        elif name.endswith("combine.rule"):
            rules, ground = get_args(MeanRule), Ground(False, 1, twins=True)
            whole = " ".join(f"{field}.batch_size=64" for field in trainings_of(trials.method))  # no order counts
            mean, *others = each(trials, name, rules, ground, f"{whole} {OF_TWINS.get(trials.name, '')}")
            for rule, run in zip(rules[1:], others, strict=True):
                trials.equal(f"{name}={rule} of three twins", mean, run, ROUNDING)


def each(trials: Trials, name: str, words: tuple[str, ...], ground: Ground, beside: str = "") -> list[Played]:
    """A run with each of an option's words."""
    return [trials.run(f"{beside} {name}={word}", "sgd", ground) for word in words]


def values_of(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names and values of all fields of a dataclass, nested ones included."""
    for spec in fields(holder):
        name, value = f"{prefix}{spec.name}", getattr(holder, spec.name)
        yield from values_of(value, f"{name}.") if is_dataclass(value) else [(name, value)]
