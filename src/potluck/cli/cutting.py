"""`potluck inspect MODEL`: into which parts a network is cut, and where it can be."""

import math
from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn

from potluck.cli.plan import parsed_shape
from potluck.core.ground.errors import ConfigError
from potluck.core.ground.inputs import Form, InputShape, shown
from potluck.core.ground.rng import Key, isolated
from potluck.core.nets.scale import FULL, Cuts, built
from potluck.core.nets.splitting import SplitPlan, Splits, plan_of, split_problem
from potluck.experiment.federation.assemble import builder_of
from potluck.experiment.settings.schema import ModelSpec
from potluck.models.contract import StagedNet, places
from potluck.models.split import split


def print_cuts(
    model: str, num_classes: int, input_shape: InputShape, cut: Sequence[str] = (), *, tokens: bool = False
) -> None:
    """Print the parts of a network, and the places where it can be cut.

    Args:
        model: a name that `federation.models` takes.
        num_classes: of the task.
        input_shape: of one example.
        cut: names of what the extractor ends with, of what further stages do, and of the head, if they are chosen.
        tokens: whether inputs are whole numbers.

    Raises:
        ConfigError: there is no such model, it cannot be built, or it cannot be cut there.
    """
    if len(cut) == 1:
        raise ConfigError("--cut: found 1 of them; expected two or more: what the extractor ends with, and the head")
    builder = builder_of(ModelSpec(model, {}, tuple(cut)), num_classes, input_shape)
    with isolated(Key(("inspect",))):
        net = built(builder, FULL, model, Cuts(input_shape), Splits(input_shape, not tokens))
    if (problem := split_problem(net)) is not None:
        raise ConfigError(f"{model}: {problem}")
    console = Console(highlight=False)
    weights = sum(weight.numel() for weight in net.parameters())
    shape = shown(input_shape) if isinstance(input_shape, Mapping) else " x ".join(map(str, input_shape))
    console.print(escape(f"{model}: {type(net).__name__}, inputs of {shape}, {weights:,} weights"), soft_wrap=True)
    console.print(_parts(net, input_shape))
    if isinstance(net, StagedNet):
        console.print(f"stages: {', '.join(places(net))}", soft_wrap=True)
        return
    plan = plan_of(net)
    console.print(escape(f"stages: {', '.join(map(str, plan.stages))}"), soft_wrap=True)
    if problem := plan.stages_problem:
        console.print(escape(f"its stages cannot be trained apart: it {problem}"), soft_wrap=True)
    _print_places(console, plan, model)


def inputs_of(text: str, *, tokens: bool) -> InputShape:
    """The shape in text such as "3x32x32", or of inputs with names, such as "ids=64,mask=64,age=1:float32".

    Args:
        text: the shapes.
        tokens: whether named inputs are whole numbers of which the text does not say what they are.

    Raises:
        ConfigError: it is no such text.
    """
    if "=" not in text:
        return parsed_shape(text)
    found = dict[str, Form]()
    for one in text.split(","):
        name, _, rest = one.partition("=")
        shape, _, dtype = rest.partition(":")
        kind = getattr(torch, dtype or ("int64" if tokens else "float32"), None)
        if not name or not isinstance(kind, torch.dtype):
            raise ConfigError(f"--shape {one!r}: expected a name, sizes and perhaps a type, such as ids=64:int64")
        found[name] = Form(parsed_shape(shape), kind)
    return found


def _parts(net: nn.Module, input_shape: InputShape) -> Table:
    """A row for each of the three parts."""
    parts = split(net)
    sizes = {name: weight.numel() for name, weight in net.named_parameters()}
    last = parts.last_names() & sizes.keys()
    inner = parts.intermediate_names - last
    s_in, s_out = (_shown(shape) for shape in parts.feature_shapes(input_shape))
    table = Table("part", "layers", "gives")
    table.add_column("weights", justify="right")
    for part, names, gives in (
        ("extractor", sizes.keys() - inner - last, s_in),
        ("intermediate", inner, s_out),
        ("classifier", last, "outputs"),
    ):
        layers = dict.fromkeys(name.rpartition(".")[0] for name in sizes if name in names)
        table.add_row(part, escape(_shortened(list(layers))), gives, f"{sum(sizes[name] for name in names):,}")
    return table


def _print_places(console: Console, plan: SplitPlan, model: str) -> None:
    """The places where a network can be cut, and how to choose."""
    table = Table("place", "one example", "")
    words = {stage.end: f"stage {stage} ends" for stage in plan.stages}
    words |= {plan.extractor: "the extractor ends", plan.features: "the head reads it"}
    for place in plan.places:
        table.add_row(escape(str(place)), _shown(place.shape), escape(words.get(place, "")))
    console.print(table)
    said = '"<fc" is what fc reads, "fc" what it puts out, "fc#2" what it puts out when it is called again;'
    console.print(
        f'{said} as the head, which is named last, "fc" is what it reads, and ">fc" what it puts out', soft_wrap=True
    )
    for reason in plan.left_out:
        console.print(escape(f"left out {reason}"), soft_wrap=True)
    if problem := plan.head_problem():
        console.print(escape(f"the head cannot be taken out: {problem}"), soft_wrap=True)
    head = plan.features.path if plan.features.side == "in" else f">{plan.features}"
    console.print(escape(f"to choose: {{name = '{model}', cut = ['{plan.extractor}', '{head}']}}"), soft_wrap=True)


def _shortened(layers: list[str]) -> str:
    """The first and the last of many names."""
    return ", ".join(layers) if len(layers) <= 4 else f"{layers[0]} to {layers[-1]}"


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) + (f" = {math.prod(shape):,}" if len(shape) > 1 else "")
