"""Every method with its variants on toy federations, three rounds: the digest of each tensor that is left.

    python benchmarks/same_values.py values.json
    PYTHONPATH=path/to/another/src python benchmarks/same_values.py others.json
    python benchmarks/same_values.py --compare others.json values.json [--renamed pool=weights ...]

For a change that must change no number: run it with both versions of the package, and compare. What is left is the
server's last state, every client's model for inference, the global model and the notes of the last round; all bit for
bit. `--renamed` says which fields of states have other names in the second file. The command exits with 1 if anything
differs, and lists it.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

from potluck.core.nets.weights import weights_of
from potluck.engine.rounds.engine import Engine
from potluck.methods import get_method, list_methods
from potluck.testing.worlds import World, assigned, quick, toy_federation

ROUNDS = 3


def leaves(tree: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a nested value holds, by dotted place."""
    if is_dataclass(tree) and not isinstance(tree, type):
        tree = {spec.name: getattr(tree, spec.name) for spec in fields(tree)}
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{name}.{key}")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from leaves(value, f"{name}.{place}")
    else:
        yield name, tree


def digest(value: Any) -> str:
    """Of a tensor its type, shape and bytes; of anything else its words."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        content = tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    return repr(value)


def played(name: str, words: tuple[str, ...]) -> dict[str, str]:
    """The digests of one method's run with these `key=value` words; why, where the toy federation refuses them."""
    method = quick(get_method(name), words)
    federation = toy_federation(World().fit_for(method))
    engine = Engine(method, federation)
    state = engine.start()
    report: Any = None
    for number in range(1, ROUNDS + 1):
        state, report = engine.round(number, state, sorted(federation.sites))
    found = dict(leaves(state, "state"))
    found |= {f"notes.{key}": value for key, value in getattr(report, "notes", {}).items()}
    models = {f"client {id}": engine.inference_model(state, id) for id in federation.sites}
    for whose, model in {**models, "global": engine.global_model(state)}.items():
        found |= {f"{whose}.{key}": tensor for key, tensor in (weights_of(model) if model else {}).items()}
    return {key: digest(value) for key, value in found.items()}


def compare(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]], renamed: dict[str, str]) -> list[str]:
    """A line for each run that differs."""
    lines: list[str] = []
    for run in sorted(before.keys() | after.keys()):
        one = {translated(key, renamed): value for key, value in before.get(run, {}).items()}
        other = after.get(run, {})
        unlike = sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
        if unlike:
            lines.append(f"{run}: {len(unlike)} of {len(one)} differ: {', '.join(unlike[:3])}")
    return lines


def translated(key: str, renamed: dict[str, str]) -> str:
    """A place in a state with the names that its fields have now."""
    top, *parts = key.split(".")
    return ".".join([top, renamed.get(parts[0], parts[0]), *parts[1:]]) if top == "state" and parts else key


def main() -> None:
    """Play, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="where to write, or two to compare")
    parser.add_argument("--compare", action="store_true", help="compare two files")
    parser.add_argument("--renamed", nargs="+", default=[], metavar="OLD=NEW", help="fields of states")
    options = parser.parse_args()
    if options.compare:
        before, after = (json.loads(path.read_text()) for path in options.files)
        lines = compare(before, after, dict(pair.split("=") for pair in options.renamed))
        print("\n".join(lines) or f"{len(before)} runs, {sum(map(len, before.values()))} values: all the same")
        sys.exit(int(bool(lines)))
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    for name in list_methods():
        for variant, changes in {"": {}, **get_method(name).variants}.items():
            try:
                found[f"{name} {variant}".strip()] = played(name, assigned(changes))
            except Exception as error:
                found[f"{name} {variant}".strip()] = {"failed": " ".join(str(error).split())}
    options.files[0].write_text(json.dumps(found, indent=1))
    print(f"{len(found)} runs, {sum(map(len, found.values()))} values")


if __name__ == "__main__":
    main()
