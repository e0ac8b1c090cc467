"""Flower's app of the server: it plays an experiment with Potluck's own engine.

`flwr run` looks for the app in this file's text, so it is a plain assignment.
"""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from potluck.core.errors import PotluckError
from potluck.engine.numerics.allocator import keep_freed_memory
from potluck.flower.server.hosting import Said
from potluck.flower.server.serve import serve

server_app = ServerApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    config = context.run_config
    folder = Path(str(config["folder"]))
    said = Said(folder)
    keep_freed_memory()
    try:
        serve(
            grid,
            json.loads(str(config["experiment"])),
            folder,
            timeout=float(config["timeout"]),
            patience=float(config["patience"]),
            say=said.say,
        )
    except BaseException as error:
        said.end(str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}")
        raise
    said.end()
