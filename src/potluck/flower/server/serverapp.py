"""Flower's server app: runs an experiment with Potluck's engine.

`flwr run` searches this file's text for the app, so it is a plain assignment.
"""

import json
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from potluck.core.ground.errors import PotluckError
from potluck.engine.numerics.allocator import keep_freed_memory
from potluck.flower.deploy.processes import end_with_parent
from potluck.flower.server.hosting import EventLog
from potluck.flower.server.serve import serve

server_app = ServerApp()


@server_app.main()
def _main(grid: Grid, context: Context) -> None:
    end_with_parent()  # a run that goes on in another process wants its folder
    config = context.run_config
    folder = Path(str(config["folder"]))
    events = EventLog(folder)
    keep_freed_memory()
    try:
        serve(
            grid,
            json.loads(str(config["experiment"])),
            folder,
            largest=int(config["largest-reply"]),
            say=events.say,
            refuse=events.refuse,
            allow_versions=bool(config.get("allow-versions")),
        )
    except BaseException as error:
        events.end(str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}")
        raise
    events.end()
