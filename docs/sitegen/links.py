"""Names in code font lead to their pages: keys, commands, methods, and classes of the public vocabulary."""

from importlib import import_module
from typing import Any

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

import potluck
from sitegen.methods import own_methods
from sitegen.reference import commands, public_names, words


class CodeLinks(SphinxPostTransform):
    """Turns `run.rounds`, `potluck compare ...`, `fedavg` and `Fit` into links, but on their own pages."""

    default_priority = 5

    def run(self, **options: Any) -> None:
        """Wrap each name that has a page."""
        places, here = _places(self.env), self.env.docname
        for node in list(self.document.findall(nodes.literal)):
            if _inside(node, nodes.reference, nodes.title, nodes.term):
                continue
            place = places.get(_name(node.astext()))
            if place and place[0] != here:
                uri = self.app.builder.get_relative_uri(here, place[0]) + (f"#{place[1]}" if place[1] else "")
                node.replace_self(nodes.reference("", "", node.deepcopy(), internal=True, refuri=uri))


def _inside(node: nodes.Node, *kinds: type[nodes.Node]) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, kinds):
            return True
    return False


def _name(text: str) -> str:
    """What a text in code font names: `potluck run fedavg` the command, `run.rounds=3` the key."""
    words = text.split()
    if words[:1] == ["potluck"] and len(words) > 1:
        return " ".join(words[:2])
    return text.partition("=")[0].strip()


def _places(env: Any) -> dict[str, tuple[str, str]]:
    """Page and anchor by name."""
    found = {name: (f"methods/{name}", "") for name in own_methods()}
    found |= {f"potluck {name}": ("reference/command-line", nodes.make_id(f"potluck {name}")) for name in commands()}
    for (kind, name), place in env.domains.standard_domain.objects.items():
        if kind == "confval":
            found[name] = place
    objects = env.domains.python_domain.objects
    flat, rooms = words()
    homes = {name: f"potluck.{home}" for name, home in potluck._HOMES.items()}
    named = [(f"potluck.{name}", home, name) for name, home in homes.items()]
    named += [(f"fl.{name}", home, name) for name, home in flat.items()]
    named += [
        (f"fl.{room}.{name}", home, name) for room, home in rooms.items() for name in public_names(import_module(home))
    ]
    for written, home, name in named:
        entry = objects.get(f"{home}.{name}")
        if entry:
            found[written] = (entry.docname, entry.node_id)
            if name[0].isupper():
                found.setdefault(name, found[written])
    return found
