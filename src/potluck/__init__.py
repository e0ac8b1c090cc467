"""Potluck: federated learning where every client brings its own model."""

import importlib
import logging
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library stays silent until it is listened to

# Names are imported when they are first used: `import potluck` and `potluck --help` must not wait for torch.
_HOMES = {
    "Client": "core.roles",
    "Cohort": "core.roles",
    "Server": "core.roles",
    "Examples": "core.examples",
    "Federation": "core.federation",
    "Site": "core.federation",
    "Fit": "core.fit",
    "LocalTraining": "core.fit",
    "Message": "core.message",
    "Method": "core.method",
    "Need": "core.needs",
    "on_client": "core.method",
    "Sharing": "parts.sharing",
    "PotluckError": "core.errors",
    "Run": "experiment.run",
    "RunConfig": "experiment.config",
    "get_method": "methods",
    "list_methods": "methods",
}

if TYPE_CHECKING:
    from potluck.core.errors import PotluckError as PotluckError
    from potluck.core.examples import Examples as Examples
    from potluck.core.federation import Federation as Federation
    from potluck.core.federation import Site as Site
    from potluck.core.fit import Fit as Fit
    from potluck.core.fit import LocalTraining as LocalTraining
    from potluck.core.message import Message as Message
    from potluck.core.method import Method as Method
    from potluck.core.method import on_client as on_client
    from potluck.core.needs import Need as Need
    from potluck.core.roles import Client as Client
    from potluck.core.roles import Cohort as Cohort
    from potluck.core.roles import Server as Server
    from potluck.experiment.config import RunConfig as RunConfig
    from potluck.experiment.run import Run as Run
    from potluck.methods import get_method as get_method
    from potluck.methods import list_methods as list_methods
    from potluck.parts.sharing import Sharing as Sharing


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    return getattr(importlib.import_module(f"potluck.{_HOMES[name]}"), name)
