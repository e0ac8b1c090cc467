"""Every task, by its name in configurations."""

from collections.abc import Mapping

from potluck.core.ground.errors import ConfigError, nearest
from potluck.core.tasks.binary import Binary
from potluck.core.tasks.classification import Classification
from potluck.core.tasks.multilabel import MultiLabel
from potluck.core.tasks.next_token import NextToken
from potluck.core.tasks.regression import Regression
from potluck.core.tasks.task import Task
from potluck.core.tasks.token_classification import TokenClassification

CLASSIFICATION = Classification()
TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (CLASSIFICATION, Binary(), MultiLabel(), Regression(), NextToken(), TokenClassification())
}
"""Every task by its name in configurations."""


def task_named(name: str) -> Task:
    """The task of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; nearest: {nearest(name, TASKS, 1)[0]}; all: {', '.join(TASKS)}")
    return TASKS[name]
