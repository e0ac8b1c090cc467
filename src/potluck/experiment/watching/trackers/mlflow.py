"""MLflow: a run of the experiment `potluck`, or of `MLFLOW_EXPERIMENT_NAME`, at MLflow's own tracking URI.

That is `MLFLOW_TRACKING_URI`, or else a database in the working directory.
"""

import os
import re
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from potluck.experiment.watching.trackers.tracker import Tracker

_AT_ONCE = 100  # parameters that MLflow takes in one request
_LONGEST = 6000  # characters of a parameter's value
_TAG = "potluck.identity"
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}


class MLflow(Tracker):
    """Logs to MLflow. The numbers of one round go there together, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self._client = MlflowClient()
        self._run: str | None = None

    def open(self, folder: Path, name: str, identity: str, settings: Mapping[str, Any]) -> Collection[int]:
        """The run with this identity as a tag."""
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME", "potluck")
        found = self._client.get_experiment_by_name(title)
        experiment = found.experiment_id if found else self._client.create_experiment(title)
        runs = self._client.search_runs([experiment], f"tags.`{_TAG}` = '{identity}'")
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return {metric.step for metric in self._client.get_metric_history(self._run, "bytes/up")}
        tags = {_TAG: identity, "potluck.folder": str(folder.resolve())}
        self._run = self._client.create_run(experiment, run_name=name, tags=tags).info.run_id
        params = [Param(_key(key), str(value)[:_LONGEST]) for key, value in settings.items()]
        for start in range(0, len(params), _AT_ONCE):
            self._client.log_batch(self._run, params=params[start : start + _AT_ONCE])
        return ()

    def send(self, round: int, numbers: Mapping[str, float]) -> None:
        """One batch, whose last number is the one by which `open` knows the round."""
        now = int(1000 * time.time())
        metrics = [Metric(_key(name), value, now, round) for name, value in numbers.items() if name != "bytes/up"]
        assert self._run is not None
        self._client.log_batch(self._run, metrics=metrics)
        self._client.log_metric(self._run, "bytes/up", numbers["bytes/up"], now, round)

    def close(self, status: str) -> None:
        """Set the run's status."""
        if self._run:
            self._client.set_terminated(self._run, _STATUS[status])


def _key(name: str) -> str:
    """A name without the characters that MLflow refuses: `cnn2(width=4)` becomes `cnn2_width_4`."""
    return re.sub(r"[^\w\-. :/]+", "_", name).strip("_")


TRACKER = MLflow
