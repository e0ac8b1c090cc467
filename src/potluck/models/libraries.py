"""Networks of other libraries by name: `timm:resnet18`, and `hf:CONFIG.json` of Hugging Face's transformers.

They are built for the task's classes and inputs, with initial weights of their own; nothing is downloaded. Inputs that
have names are given to them by name: those of text are `input_ids` and `attention_mask` with transformers. Whatever a
method asks of their parts is answered by their dataflow. Options are numbers, and go to the library: a server's
experiment may choose those of a model that a node's owner has named, and text could lead to files.
"""

import importlib
import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from potluck.core.ground.discovery import CONFIG_PREFIX, config_file, standing_for
from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.ground.inputs import InputShape, shown
from potluck.core.nets.scale import collecting_options


def library_model(name: str) -> Callable[..., nn.Module] | None:
    """The builder of a network of another library; None if the name is of none.

    Raises:
        ConfigError: the library is not installed.
    """
    library, _, model = name.partition(":")
    if library not in _BUILDERS:
        return None
    package, make = _BUILDERS[library]
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"models: {name}: {package} is not installed: pip install 'potluck[{library}]'")

    def build(num_classes: int, input_shape: InputShape, **options: Any) -> nn.Module:
        for key, value in options.items():
            if not all(isinstance(one, (int, float)) for one in (value if isinstance(value, list) else [value])):
                raise ConfigError(f"models: {name}: {key}: found {value!r}; expected numbers, true or false")
        return make(model, num_classes, input_shape, options)

    build.__doc__ = f"{model} of {package}. Its options are those of {package}, as far as they are numbers."
    return collecting_options(build)


def _of_timm(model: str, num_classes: int, input_shape: InputShape, options: Mapping[str, Any]) -> nn.Module:
    timm: Any = importlib.import_module("timm")

    known = timm.list_models()
    if model not in known:  # among them are no names with a colon or slash, which would lead to the hub
        raise ConfigError(f"models: timm has no {model!r}; nearest: {', '.join(nearest(model, known))}")
    if "pretrained" in options:
        raise ConfigError(f"models: timm:{model}: pretrained: weights are not downloaded; name a file: weights")
    if isinstance(input_shape, Mapping) or len(input_shape) != 3:
        raise ConfigError(f"models: timm:{model}: inputs {shown(input_shape)}; expected (channels, height, width)")
    form = timm.get_pretrained_cfg(model)
    sized = {"img_size": input_shape[1:]} if form is not None and form.fixed_input_size else {}
    return timm.create_model(model, num_classes=num_classes, in_chans=input_shape[0], **{**sized, **options})


def _of_transformers(place: str, num_classes: int, input_shape: InputShape, options: Mapping[str, Any]) -> nn.Module:
    transformers: Any = importlib.import_module("transformers")

    fields, name = _fields(f"{CONFIG_PREFIX}{place}"), f"{CONFIG_PREFIX}{place}"
    kind = fields.pop("model_type", None)
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"models: {name}: model_type: found {kind!r}; expected one of transformers")
    config = transformers.AutoConfig.for_model(kind, **{**fields, **options, "num_labels": num_classes})
    image = _image(input_shape)
    if image:
        for key, value in (("num_channels", image[0]), ("image_size", image[1])):
            if hasattr(config, key):
                setattr(config, key, value)
    found = [one for one in fields.get("architectures") or () if str(one).endswith("Classification")]
    if found:
        return getattr(transformers, found[0])(config)
    auto = "AutoModelForImageClassification" if image else "AutoModelForSequenceClassification"
    return getattr(transformers, auto).from_config(config)


def _image(input_shape: InputShape) -> tuple[int, ...]:
    """The shape of an image, alone or by the name that transformers have for it; none if there is no image."""
    if isinstance(input_shape, Mapping):
        return input_shape["pixel_values"].shape if "pixel_values" in input_shape else ()
    return input_shape if len(input_shape) == 3 else ()


def _fields(name: str) -> dict[str, Any]:
    file = config_file(name)
    assert file is not None
    try:
        fields = json.loads(standing_for(file.resolve()).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"models: {name}: {file} cannot be read: {error}; expected a config.json") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"models: {name}: {file}: found {type(fields).__name__}; expected a table of settings")
    return fields


_BUILDERS: Mapping[str, tuple[str, Callable[..., nn.Module]]] = {
    "timm": ("timm", _of_timm),
    "hf": ("transformers", _of_transformers),
}
"""By prefix, the package and what builds a network of it."""
