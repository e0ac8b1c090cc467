"""Potluck: federated learning where every client brings its own model.

These names are for those who run, compare and deploy. The words of a method's file are in `potluck.fl`.
"""

import importlib
import logging
from typing import TYPE_CHECKING, Any

from potluck._version import __version__ as __version__

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless the application configures logging

if TYPE_CHECKING:
    from potluck.api.compare import Comparison as Comparison
    from potluck.api.compare import compare as compare
    from potluck.api.compare import report as report
    from potluck.api.export import Exported as Exported
    from potluck.api.result import RunResult as RunResult
    from potluck.api.result import open_run as open_run
    from potluck.api.run import resume as resume
    from potluck.api.run import run as run
    from potluck.core.federation import Federation as Federation
    from potluck.core.federation import Site as Site
    from potluck.core.federation import SitesOnDemand as SitesOnDemand
    from potluck.core.ground.errors import ConfigError as ConfigError
    from potluck.core.ground.errors import PotluckError as PotluckError
    from potluck.core.ground.errors import PotluckWarning as PotluckWarning
    from potluck.core.requests.examples import Examples as Examples
    from potluck.experiment.running.run import Run as Run
    from potluck.experiment.settings.schema import RunConfig as RunConfig
    from potluck.experiment.watching.observers import Observer as Observer
    from potluck.methods import get_method as get_method
    from potluck.methods import list_methods as list_methods

# Names are imported when they are first used: `import potluck` and `potluck --help` must not wait for torch.
_HOMES = {
    "Comparison": "api.compare",
    "compare": "api.compare",
    "report": "api.compare",
    "Exported": "api.export",
    "RunResult": "api.result",
    "open_run": "api.result",
    "resume": "api.run",
    "run": "api.run",
    "ConfigError": "core.ground.errors",
    "PotluckError": "core.ground.errors",
    "PotluckWarning": "core.ground.errors",
    "Examples": "core.requests.examples",
    "Federation": "core.federation",
    "Site": "core.federation",
    "SitesOnDemand": "core.federation",
    "RunConfig": "experiment.settings.schema",
    "Observer": "experiment.watching.observers",
    "Run": "experiment.running.run",
    "get_method": "methods",
    "list_methods": "methods",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    return getattr(importlib.import_module(f"potluck.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
