"""What a run from Python shows while it goes on."""

from io import StringIO

import potluck
from potluck.api.progress import ProgressLine, _Line

SETTINGS = {"run.workers": 1, "federation.train_fraction": 0.1}


def test_display__shows_rounds_the_metric_and_megabytes_and_ends_with_how_the_run_ended():
    shown = []
    display = ProgressLine(lambda share, text: shown.append((share, text)))
    result = potluck.run("fedavg", clients=2, models="cnn2", rounds=2, settings=SETTINGS, observers=display)
    sent = sum(result.records["bytes_down"] + result.records["bytes_up"]) / 10**6
    shares = [share for share, _ in shown]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    metric = f"accuracy {100 * result.evaluation.value('personal'):.1f} %"
    assert shown[-1][1] == f"fedavg: round 2 of 2, {metric}, {sent:.1f} MB; finished"
    assert any(text.startswith("fedavg: round 1 of 2") for _, text in shown)


def test_line__is_written_over_and_the_last_one_stays():
    stream = StringIO()
    line = _Line(stream)
    line.show(0.5, "fedavg: round 1 of 2; client 1/2")
    line.show(1.0, "fedavg: round 2 of 2; finished")
    first, last = stream.getvalue().split("\r\x1b[K")[1:]
    assert first == f"[{'#' * 12}{'.' * 12}] fedavg: round 1 of 2; client 1/2"
    assert last == f"[{'#' * 24}] fedavg: round 2 of 2; finished\n"
