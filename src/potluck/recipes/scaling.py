"""The one rule by which a recipe's experiments are made smaller, for trials on a small machine.

With a scale s below 1:

- rounds, clients and training images are s times the paper's, so that each client has as many images as in the paper;
- there are at least two rounds, and at least so many clients that in every row of the table each architecture, if they
  are dealt in turn, and each capacity occurs, and not fewer than `CLIENTS`; a table that compares numbers of clients
  keeps them;
- the share of clients that is drawn each round is the paper's, unless fewer would be drawn than there are
  architectures or capacities, or fewer than `CLIENTS`; never more than the paper draws;
- each client has at least `IMAGES` images on average, which matters only for the smallest scales;
- the width of networks falls with the square root of s, so that their multiplications fall with s; in steps of a
  sixteenth, not below a quarter of the paper's nor below `CHANNELS`. Networks without such an option stay whole;
- models are evaluated `EVALUATIONS` times or a little less often, instead of after every round;
- whole numbers that a recipe names in `scales`, such as the batches of a distillation, are s times the paper's; those
  that count rounds fall as the rounds do, and those of examples are at least `IMAGES`.

Depths, numbers of local epochs, batch sizes, learning rates and capacities stay: they are what the papers vary or fix.
A scaled run answers how the methods order on a small budget. It is not the paper's experiment.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from potluck.core.ground.errors import ConfigError
from potluck.experiment.settings.resolve import resolve
from potluck.experiment.settings.schema import Experiment
from potluck.experiment.settings.tables import Tree
from potluck.models import get_model

CLIENTS = 4
"""The fewest clients, also of those that are drawn each round."""
IMAGES = 32
"""The fewest training images of a client, on average, and the fewest that a distillation learns from."""
CHANNELS = 16
"""Networks are not made narrower than this, in their first layer."""
EVALUATIONS = 20
"""How often a scaled run evaluates its models, at most."""


@dataclass(frozen=True)
class Size:
    """The size of an experiment.

    Attributes:
        rounds: the number of rounds.
        clients: the number of clients.
        cohort: the clients drawn each round.
        images: training images, all clients together; None if not known.
        width: of each model that has such an option, in its first layer, in order of size.
        every: rounds between evaluations.
    """

    rounds: int
    clients: int
    cohort: int
    images: int | None
    width: tuple[int, ...]
    every: int

    @property
    def words(self) -> str:
        """The size in words."""
        rounds = f"{self.rounds} round{'s' if self.rounds > 1 else ''}, {self.cohort} of {self.clients} clients in each"
        if self.images is None:
            return rounds
        return f"{rounds}, {self.images:,} training images ({round(self.images / self.clients)} for each client)"


def check_scale(scale: float) -> None:
    """Check that a scale is above 0 and at most 1.

    Raises:
        ConfigError: it is not.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale {scale:g}: expected a number above 0 and at most 1, such as 0.1")


def scaled(
    full: Experiment, scale: float, images: int, kinds: int, further: Sequence[str] = (), *, keep_clients: bool = False
) -> Experiment:
    """The experiment made smaller by the rule above; the same one at scale 1.

    Args:
        full: the paper's experiment.
        scale: above 0 and at most 1.
        images: how many training images the data set has.
        kinds: the largest number of architectures or capacities in any row of the setting, so that all rows have the
            same clients.
        further: dotted keys of whole numbers, or lists of them, that shrink too.
        keep_clients: whether the number of clients stays, since the table compares numbers of them.

    Raises:
        ConfigError: `further` names something that is not a whole number.
    """
    check_scale(scale)
    if scale == 1:
        return full
    tree, before = full.tree(), size_of(full, images)
    federation, run = tree["federation"], tree["run"]
    fewest = max(kinds, CLIENTS)
    clients = before.clients if keep_clients else min(before.clients, max(round(scale * before.clients), fewest))
    cohort = min(before.cohort, clients, max(round(before.cohort / before.clients * clients), fewest))
    rounds = min(before.rounds, max(round(scale * before.rounds), 2))
    least = max(IMAGES, 2 * getattr(full.partition, "min_examples", 1))
    share = min(1.0, max(scale * full.federation.train_fraction, least * clients / images))
    federation |= {"clients": clients, "train_fraction": share}
    federation["models"] = [_narrower(model, scale) for model in federation["models"]]
    if "server_model" in federation:
        federation["server_model"] = _narrower(federation["server_model"], scale)
    every = max(full.run.evaluate_every, math.ceil(rounds / EVALUATIONS))
    run |= {"rounds": rounds, "cohort_fraction": cohort / clients, "evaluate_every": every}
    for key in further:
        _shrink(tree, key, rounds / before.rounds if _of_rounds(key) else scale)
    return resolve(tree, "scaled recipe")


def size_of(experiment: Experiment, images: int | None) -> Size:
    """The size of an experiment, given how many training images its data set has, if that is known."""
    federation, run = experiment.federation, experiment.run
    models = [{"name": spec.name, **spec.options} for spec in experiment.named_models]
    widths = {width[0] for model in models for width in _widths(model).values()}
    return Size(
        rounds=run.rounds,
        clients=federation.clients,
        cohort=max(1, int(run.cohort_fraction * federation.clients + 1e-9)),
        images=None if images is None else round(federation.train_fraction * images),
        width=tuple(sorted(widths)),
        every=run.evaluate_every,
    )


def changes(full: Size, small: Size) -> list[str]:
    """What has become of the paper's size, one item for each thing that changed."""
    pairs: dict[str, tuple[Any, Any]] = {
        "rounds": (full.rounds, small.rounds),
        "clients": (full.clients, small.clients),
        "drawn each round": (full.cohort, small.cohort),
        "training images": (_count(full.images), _count(small.images)),
        "width of networks": (", ".join(map(str, full.width)), ", ".join(map(str, small.width))),
        "evaluated every": (f"{full.every} rounds", f"{small.every} rounds"),
    }
    if small.images is None:
        del pairs["training images"]
    return [f"{what} {before} → {after}" for what, (before, after) in pairs.items() if before != after]


def _count(images: int | None) -> str:
    return "" if images is None else f"{images:,}"


def _widths(model: Mapping[str, Any]) -> dict[str, list[int]]:
    """The options of a model that are its width, as given or by default."""
    parameters = inspect.signature(get_model(model["name"])).parameters
    found = {name: model.get(name, parameters[name].default) for name in ("width", "widths") if name in parameters}
    return {name: list(value) if isinstance(value, (list, tuple)) else [value] for name, value in found.items()}


def _narrower(model: str | Tree, scale: float) -> str | Tree:
    table: Tree = {"name": model} if isinstance(model, str) else dict(model)
    for name, widths in _widths(table).items():
        sixteenths = max(4, round(16 * math.sqrt(scale)))
        least = min(1.0, CHANNELS / widths[0])
        share = max(least, sixteenths / 16)
        if share < 1:
            narrow = [round(share * width) for width in widths]
            table[name] = narrow if name == "widths" else narrow[0]
    return table


def _of_rounds(key: str) -> bool:
    """Whether a key counts rounds, which have a smallest number."""
    return "rounds" in key or key.endswith("milestones")


def _shrink(tree: Tree, key: str, share: float) -> None:
    """Make a whole number in the tables smaller, or all those of a list."""
    *tables, last = key.split(".")
    place: Any = tree
    for name in tables:
        place = place.get(name) if isinstance(place, dict) else None
    value = place.get(last) if isinstance(place, dict) else None
    numbers: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
        raise ConfigError(f"scales: {key}: expected a whole number to make smaller, found {value!r}")
    fewest = IMAGES if last.endswith("examples") else 1  # BatchNorm cannot learn from one
    small = [min(number, max(fewest, round(share * number))) for number in numbers]
    place[last] = sorted(set(small)) if isinstance(value, list) else small[0]
