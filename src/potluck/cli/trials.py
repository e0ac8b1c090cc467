"""What `potluck check` tries on a model, a partition, data or a metric of the user's own."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from potluck.core.ground.errors import DataError
from potluck.core.ground.rng import Key, isolated
from potluck.core.tasks.own_metrics import own_metric
from potluck.data.datasets import load
from potluck.data.partition import get_partition
from potluck.experiment.federation.parts import PartKind
from potluck.models import get_model
from potluck.testing import Check

_SHAPES = ((1, 8, 8), (1, 28, 28), (3, 32, 32), (20,))
_CLASSES, _CLIENTS, _EXAMPLES = 10, 7, 40
_CLOSE = 1e-9


def trials_of(reference: str, kind: PartKind) -> list[Check]:
    """The checks for a part of a file, by its kind."""
    return [Check(trial.__name__, partial(trial, reference)) for trial in _TRIALS[kind]]


def reads_inputs_of_some_usual_shape(reference: str) -> None:
    """Returns logits (n, classes), finite, in training and in evaluation, for one shape of inputs at least."""
    refusals: list[tuple[int, Exception]] = []
    for shape in _SHAPES:
        steps = 0
        try:
            for _ in _steps_of_a_net(reference, shape):
                steps += 1
            return
        except AssertionError:
            raise
        except Exception as error:  # made for inputs of another shape
            refusals.append((steps, error))
    raise max(refusals, key=lambda refusal: refusal[0])[1]  # of the shape with which it came furthest


def has_the_same_first_weights_for_the_same_seed(reference: str) -> None:
    """Nothing but torch's generator is drawn from."""
    shape = _shape_of(reference)
    first, again = (_built(reference, shape).state_dict() for _ in range(2))
    differing = [name for name in first if not torch.equal(first[name], again[name])]
    assert not differing, f"{differing[0]} differs when it is built again; draw from torch's generator alone"


def gives_each_client_rows_of_its_own(reference: str) -> None:
    """For several clients and for one, with all classes and with one missing."""
    targets = torch.arange(_CLASSES).repeat(_EXAMPLES)
    for labels in (targets, targets[targets != 3]):
        for clients in (_CLIENTS, 1):
            get_partition(reference)()(labels, clients, Key((0,)))


def depends_on_nothing_but_the_seed(reference: str) -> None:
    """The same key gives the same parts."""
    targets = torch.arange(_CLASSES).repeat(_EXAMPLES)
    first, again = (get_partition(reference)()(targets, _CLIENTS, Key((0,))) for _ in range(2))
    same = all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert same, "two calls with one key give other parts; draw from `key.generator()` alone"


def has_examples_of_every_class(reference: str) -> None:
    """In the training part; loading checks shapes, types and numbers."""
    found = load(reference)
    if found.task.has_classes:
        missing = sorted(set(range(found.num_classes)) - set(found.train_targets.tolist()))
        assert not missing, f"no training example is of class {missing[0]}; number classes from 0 without gaps"


def adds_up(reference: str) -> None:
    """Measured on two halves and on single examples, sums are those of the whole, to rounding."""
    metric, (outputs, targets) = own_metric(reference), _predictions()
    whole = metric.sums(outputs, targets)
    for cuts in ((0, 20, _EXAMPLES), tuple(range(_EXAMPLES + 1))):
        pieces = [metric.sums(outputs[a:b], targets[a:b]) for a, b in pairwise(cuts)]
        for name, total in whole.items():
            summed = torch.stack([piece[name] for piece in pieces]).sum(0)
            close = torch.allclose(summed.double(), total.double(), rtol=_CLOSE, atol=_CLOSE)
            assert close, f"{name} over {len(pieces)} pieces is {summed.tolist()}, over the whole {total.tolist()}"


def is_a_number_whatever_is_predicted(reference: str) -> None:
    """Also where outputs are NaN or infinite, and for a single example."""
    metric, (outputs, targets) = own_metric(reference), _predictions()
    for found in (outputs, outputs * torch.inf, outputs[:1]):
        value = metric.value(metric.sums(found, targets[: len(found)]))
        assert value is None or abs(value) < torch.inf, f"it is {value}"


def _built(reference: str, shape: tuple[int, ...]) -> nn.Module:
    with isolated(Key(("check", reference))):
        return get_model(reference)(_CLASSES, shape)


def _shape_of(reference: str) -> tuple[int, ...]:
    """The first usual shape for which a model can be built and run."""
    for shape in _SHAPES:
        try:
            _built(reference, shape).eval()(torch.zeros(2, *shape))
        except Exception:  # made for inputs of another shape
            continue
        return shape
    raise DataError(f"{reference} reads none of the shapes {', '.join(map(str, _SHAPES))}")


def _steps_of_a_net(reference: str, shape: tuple[int, ...]) -> Iterator[str]:
    """Build a net and use it; what each step was that succeeded."""
    net = _built(reference, shape)
    yield "built"
    inputs = torch.randn(4, *shape, generator=Key(("check",)).generator())
    for mode in (net.eval(), net.train()):
        outputs: Tensor = mode(inputs)
        yield "computed"
        found = tuple(outputs.shape)
        assert found == (4, _CLASSES), f"returns shape {found} for inputs {shape}; expected (4, {_CLASSES}), logits"
        assert outputs.isfinite().all(), f"returns NaN or infinity for inputs {shape}, with its first weights"
    net(inputs).square().sum().backward()
    dead = [name for name, weight in net.named_parameters() if weight.requires_grad and weight.grad is None]
    assert not dead, f"the outputs do not depend on {dead[0]}; leave it out, or freeze it"


def _predictions() -> tuple[Tensor, Tensor]:
    generator = Key(("check",)).generator()
    return torch.randn(_EXAMPLES, _CLASSES, generator=generator), torch.arange(_EXAMPLES) % _CLASSES


_TRIALS: dict[PartKind, tuple[Callable[[str], None], ...]] = {
    "model": (reads_inputs_of_some_usual_shape, has_the_same_first_weights_for_the_same_seed),
    "partition": (gives_each_client_rows_of_its_own, depends_on_nothing_but_the_seed),
    "data set": (has_examples_of_every_class,),
    "metric": (adds_up, is_a_number_whatever_is_predicted),
}
