"""Runs of tables of configuration, in this process."""

from potluck.experiment.federation.assemble import assemble
from potluck.experiment.running.execute import execute, prepare
from potluck.experiment.settings.resolve import resolve


def carried_out(folder, tables):
    """The result of a run in a folder, which goes on with it if there is one."""
    experiment = resolve(tables)
    folder.mkdir(exist_ok=True)
    run = prepare(experiment, assemble(experiment), folder)
    result, _ = execute(run, experiment, folder)
    return result


def digest_of(folder, tables):
    """The digest of its last checkpoint."""
    return carried_out(folder, tables).checkpoint.digest
