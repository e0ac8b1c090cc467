"""Inputs of networks: one tensor, or several by name, such as an image and the columns of a table.

Every tensor has one row for each example. A network with named inputs is called with those that its `forward` names,
see `potluck.core.nets.entrance`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Size, Tensor

from potluck.core.ground.errors import ConfigError

Inputs = Tensor | Mapping[str, Tensor]


class Form(NamedTuple):
    """A tensor without its numbers.

    Attributes:
        shape: of one example's.
        dtype: of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype


InputShape = tuple[int, ...] | Mapping[str, Form]
"""The shape of one prepared input, or of each of the named ones with its type."""


def by_name(inputs: Inputs) -> Mapping[str, Tensor]:
    """The tensors by name; one tensor alone has the name ""."""
    return inputs if isinstance(inputs, Mapping) else {"": inputs}


def each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs with every tensor changed."""
    if isinstance(inputs, Mapping):
        return {name: change(tensor) for name, tensor in inputs.items()}
    return change(inputs)


def rows_of(inputs: Inputs, at: Tensor | slice | None) -> Inputs:
    """Some of the rows, of every tensor; None makes a batch of one of a single example."""
    return each(inputs, lambda tensor: tensor[at])


def joined_inputs(batches: Sequence[Inputs], join: Callable[[list[Tensor]], Tensor]) -> Inputs:
    """Several inputs of the same names as one, such as by `torch.stack` or `torch.cat`."""
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: join([by_name(batch)[name] for batch in batches]) for name in first}
    return join([batch for batch in batches if isinstance(batch, Tensor)])


def count_of(inputs: Inputs) -> int:
    """How many rows there are."""
    return len(first_of(inputs))


def first_of(inputs: Inputs) -> Tensor:
    """The only tensor, or the first of the named ones."""
    return next(iter(by_name(inputs).values()))


def shape_of(inputs: Inputs) -> InputShape:
    """The shape of one example, of inputs (n, ...)."""
    if isinstance(inputs, Mapping):
        return {name: Form(tuple(tensor.shape[1:]), tensor.dtype) for name, tensor in inputs.items()}
    return tuple(inputs.shape[1:])


def one_shape(input_shape: InputShape) -> tuple[int, ...]:
    """The shape of one prepared input, where there is one tensor alone.

    Raises:
        ConfigError: inputs are named.
    """
    if isinstance(input_shape, Mapping):
        raise ConfigError(f"inputs {shown(input_shape)}; expected one tensor alone here, without a name")
    return tuple(input_shape)


def positions_of(input_shape: InputShape) -> int:
    """How many positions an example has, of the first of named inputs."""
    first = next(iter(input_shape.values())).shape if isinstance(input_shape, Mapping) else input_shape
    return first[0]


def shown(input_shape: InputShape) -> str:
    """A shape as messages and tables show it: `(3, 32, 32)`, or `ids (64), mask (64)`."""
    if not isinstance(input_shape, Mapping):
        return str(tuple(input_shape))
    return ", ".join(f"{name} ({', '.join(map(str, form.shape))})" for name, form in input_shape.items())


def sized(input_shape: InputShape, batch: int, make: Callable[[Form], Tensor]) -> Inputs:
    """Inputs of a batch, of what `make` gives for each form with the batch as its first dimension.

    One tensor alone is of torch's default type, as networks are.
    """
    if isinstance(input_shape, Mapping):
        return {name: make(Form((batch, *form.shape), form.dtype)) for name, form in input_shape.items()}
    return make(Form((batch, *input_shape), torch.get_default_dtype()))


def zeros(form: Form) -> Tensor:
    """A tensor of zeros."""
    return torch.zeros(Size(form.shape), dtype=form.dtype)
