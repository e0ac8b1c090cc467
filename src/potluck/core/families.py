"""Families of methods, by what clients and server exchange: a method says its own, and lists and pages follow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Methods that exchange things of one kind.

    Attributes:
        title: their heading.
        intro: what they have in common.
    """

    title: str
    intro: str


FAMILIES = {
    "alone": Family(
        "Without a federation", "The bounds of all comparisons: each client for itself, and all data in one place."
    ),
    "weights": Family(
        "Averages of weights",
        "Clients send weights or updates, which are averaged over the clients that have a layer in common.",
    ),
    "parts": Family(
        "Parts of one large model",
        "Every client trains as much of one model as its capacity allows: fewer channels, fewer layers, fewer weights,"
        " or fewer at a time.",
    ),
    "common": Family(
        "A small model beside one's own",
        "Clients have models of any kind, and train a small common one beside it, which alone is averaged or merged.",
    ),
    "public": Family(
        "Predictions on public data",
        "Clients with models of any kind teach one another, or the server, on examples that all of them have.",
    ),
    "classes": Family(
        "Features, prototypes and predictions by class",
        "Clients with models of any kind exchange what their networks make of examples or of classes.",
    ),
    "other": Family("Others", "Methods whose authors name no family."),
}
"""By the word that a method says, in the order of lists."""
