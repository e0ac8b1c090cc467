"""What the columns of a table are, as settings say it."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from potluck.core.ground.fields import Checked, above, at_least, at_most, below, require

MOST_DIFFERENT = 200
"""The most different names of a column of the inputs. Numbers of people or of documents would have thousands."""


@dataclass(frozen=True)
class Columns(Checked):
    """How the columns of a table are read.

    Numbers are standardised: less their mean and divided by their deviation, both over the training rows of
    `federation.dataset`. A name is a row of zeros with a one in the place of the name among those of these rows, or
    without a one if it is not among them. Clients with files of their own are read with these means and names.

    Attributes:
        target: the column that is predicted.
        inputs: the columns that it is predicted from; by default all that are not named elsewhere here.
        names: columns of the inputs whose values are names although they look like numbers, such as postal codes.
            Columns of text are names in any case, unless they are `text`.
        text: columns of the inputs that are texts, to be read token by token; several are joined, each in a line.
        tokens: how many tokens of a text are read.
        tokenizer: a file of the library `tokenizers`, `tokenizer.json`, that says what a token is. Default: a byte.
        by: the column that says whose a row is, such as a hospital; `federation.partition = "natural"` makes a client
            of each.
        group: the column that says which rows belong together, such as those of one patient: none is for training in
            part and for tests in part.
        test: share of the rows that is for tests, of each owner's, if the file has no test part.
        missing: what to do about missing numbers: "refuse" them, or take the "mean". A missing name is a name that
            nobody has, and a missing text an empty one.
        known: means, deviations and names, if they are not to be found in the data, and the content of the tokenizer's
            file; a server tells them to its nodes.
    """

    target: str | None = None
    inputs: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    text: tuple[str, ...] = ()
    tokens: Annotated[int, at_least(1), at_most(100_000)] = 64
    tokenizer: str | None = None
    by: str | None = None
    group: str | None = None
    test: Annotated[float, above(0), below(1)] = 0.2
    missing: Literal["refuse", "mean"] = "refuse"
    known: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        require(self.tokenizer is None or bool(self.text), "tokenizer", "none without columns of text", self.tokenizer)
        told = self.known is not None and self.tokenizer is not None
        require(not told, "tokenizer", "none beside `known`, which has its content", self.tokenizer)

    @property
    def besides(self) -> tuple[str, ...]:
        """The columns that are not inputs by themselves."""
        return tuple(name for name in (self.target, self.by, self.group) if name is not None)
