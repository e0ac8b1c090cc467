"""Every method's own options: each field of its dataclass with a few other values."""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from toys import Ground
from trying import Trials

from potluck.core.ground.fields import Bound
from potluck.core.requests.fit import LocalTraining

GIVEN: dict[str, list[str]] = {
    "levels": ["[1.0,0.5]", "[1.0,0.25]"],
    "widths": ["[1.0,0.9,0.8,0.5]"],
    "depths": ["[1.0,0.5,0.5,0.25]"],
    "ladder": ["[0.3,1.0]"],
    "weights": ["[0.9,0.1]"],
    "decoded": ["[0.2,0.4]"],
    "noise_batches": ["1"],
    "leave_out": ["[0.5]"],
    "privacy": ["{clip=1.0,epsilon=1.0,delta=1e-5}"],
}
"""Values of fields whose annotation does not say what they may be."""

OVER = "avg", "moon", "nova", "prox", "scaffold"
OF_SHARING = "weighting=uniform", "buffers=local", "buffers=drop", "combine.rule=median", "combine.rule=clipped"
BESIDE: dict[str, list[tuple[str, str]]] = {
    "cronus": [
        ("aggregation=rule", "combine.rule=median"),
        ("aggregation=rule", "combine.trim=0.4"),
        ("variance=0.001", "outliers=0.4"),
        ("outliers=0.4", "variance=0.001"),
    ],
    "fd": [("averaged=all", "combine.rule=median")],
    "feddpa": [("clipped=true", "bound=0.25"), ("clipped=true", "noise_multiplier=0.1")],
    "fedfomo": [("training.lr=0.1", "peers=2")],
    "ktpfl": [("update=projected", "coefficient_lr=0.2")],
    "fedin": [
        ("rule=exact", "granularity=whole"),
        ("rule=exact", "granularity=kernel"),
        ("noise=0.5", "noise_multiplies=variance"),
        ("noise=0.5", "noise_sigma=channel"),
        ("noise=0.5", "noise_sigma=feature"),
    ],
    "fedtgp": [("threshold=100.0", "margin=farthest")],
    "hypemefed": [("", "rank=1")],
    "rhfl": [("training.lr=1.0", "scale=sum")],
    "fiarse": [("ladder=[0.3,1.0]", "grow_every=2")],
    **{f"inco{base}": [("", "inco.clip=0.001"), ("", "inco.cap=0.1")] for base in OVER},
    **{name: [("sharing.scope=layer", f"sharing.{words}") for words in OF_SHARING] for name in ("felo", "velo")},
}
"""By method, options that matter beside others alone: those others, and the option."""

ELSEWHERE = {"splitmix.scaler": Ground(batchnorm=False)}
"""Options that are tried on another federation than their method's others: here, of networks without norms."""


def try_own(trials: Trials) -> None:
    """Every field, and some fields beside others."""
    for key, value, wide in values_of(trials.made("", "own")):
        beside = key.replace("trim", "rule=trimmed") if key.endswith("combine.trim") else ""
        ground = ELSEWHERE.get(f"{trials.name}.{key}", trials.ground)
        trials.option(f"{key}={value}", "sgd" if wide else "own", beside, second=wide, ground=ground)
    for beside, words in BESIDE.get(trials.name, []):
        trials.option(words, "own", beside, ground=trials.ground)


def values_of(holder: Any, prefix: str = "") -> Iterator[tuple[str, str, bool]]:
    """Key, other value, and whether it chooses between ways to compute."""
    hints = get_type_hints(type(holder), include_extras=True)
    for spec in fields(holder):
        key, value = f"{prefix}{spec.name}", getattr(holder, spec.name)
        if isinstance(value, LocalTraining):
            continue
        if is_dataclass(value):
            yield from values_of(value, f"{key}.")
        elif isinstance(value, bool):
            yield key, json.dumps(not value), True
        elif get_origin(hints[spec.name]) is Literal:
            yield from ((key, word, True) for word in get_args(hints[spec.name]) if word != value)
        elif key.endswith("combine.trim"):  # of three clients, one at each end
            yield key, "0.4", False
        elif isinstance(value, int | float):
            yield from ((key, json.dumps(other), False) for other in numbers(value, hints[spec.name]))
        else:
            yield from (
                (key, other, False) for other in GIVEN[spec.name] if other != json.dumps(value).replace(" ", "")
            )


def numbers(value: Any, hint: Any) -> list[Any]:
    """Double, and 0 or half, as far as bounds allow; else a bound."""
    bounds = [bound for bound in get_args(hint) if isinstance(bound, Bound)]
    tried = [1, 2] if value == 0 and isinstance(value, int) else [0.5, 1.0] if value == 0 else [2 * value, 0, value / 2]
    tried = [int(other) if isinstance(value, int) else float(other) for other in tried]
    allowed = [other for other in tried if other != value and all(bound.holds(other, bound.limit) for bound in bounds)]
    limits = [bound.limit for bound in bounds if bound.words in ("at least", "at most") and bound.limit != value]
    return list(dict.fromkeys([*allowed[:2], *(limits if len(allowed) < 2 else [])]))
