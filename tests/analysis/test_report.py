import re
import struct

import pytest

from potluck.analysis.read import find_runs, read_run
from potluck.analysis.report import Target, report_text, write_report
from potluck.core.ground.errors import CheckpointError, ConfigError

FACTS = {
    "git_commit": "0123456789abcdef",
    "git_dirty": True,
    "python": "3.12.1",
    "packages": {"potluck": "0.1.0", "torch": "2.9.0", "numpy": "2.3.0"},
    "machine": "Linux x86_64, 2 cores for torch",
    "data_checksum": "aa" * 16,
    "partition_fingerprint": "bb" * 16,
}


def report(*paths, **options):
    """The text of the report on folders, without its picture."""
    return report_text([read_run(folder) for folder in find_runs(paths)], **options)


def rows(text, heading):
    """The rows of the tables in one section, each as the list of its cells."""
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_report_is_a_page_and_for_plain_text_a_short_one_with_a_picture(store_run, seal, tmp_path):
    page = write_report([seal(store_run())], tmp_path / "deep" / "report")
    assert page == tmp_path / "deep" / "report" / "report.html"
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    picture = (page.parent / "curves.png").read_bytes()
    assert struct.unpack(">II", picture[16:24]) == (1500, 630)
    text = (page.parent / "report.md").read_text(encoding="utf-8")
    assert "](curves.png)" in text
    assert "](report.html)" in text


def test_the_summary_of_a_run_has_its_numbers(store_run):
    text = report(store_run())
    assert text.startswith(
        "# fedin on digits\n\n**fedin** trained 4 clients with 2 architectures on digits for 6 rounds"
    )
    summary = text.split("\n\n")[1]
    assert "After round 6, the clients' models were right on 55.0% of their own test parts" in summary
    assert "(worst client 30.0%), and on 50.0% of the common test set" in summary
    assert "the global model was right on 57.5% of the common test set." in summary
    assert (
        "At the round chosen on validation accuracy (round 2) it is 40.0%, and 35.0% on the common test set." in summary
    )
    assert "A round sent 1.75 MB to the clients and 0.500 MB back." in summary
    assert sorted(re.findall(r"\d+\.\d+", summary)) == ["0.500", "1.75", "30.0", "35.0", "40.0", "50.0", "55.0", "57.5"]
    assert "MB are megabytes of 10^6 bytes." in text


def test_the_table_of_runs_has_both_headlines_and_never_the_best_test_round(store_run):
    text = report(store_run())
    _, *found = rows(text, "Runs")
    common = ["fedin", "0", "6"]
    assert found == [
        [*common, "last: round 6", "55.0 ± 18.0", "30.0", "50.0", "57.5", "1.75", "0.500"],
        [*common, "chosen: round 2", "40.0 ± 14.1", "20.0", "35.0", "–", "1.75", "0.500"],
    ]
    assert "62.5" not in text
    assert "## Experiments" not in text


def test_one_row_is_enough_if_the_chosen_round_is_the_last(store_run, make_round):
    rounds = [make_round(1, personal=[0.5, 0.5, 0.5, 0.5], validation=0.5)]
    text = report(store_run(rounds=rounds, planned=1))
    (_, found) = rows(text, "Runs")
    assert found[3:8] == ["last and chosen: round 1", "50.0 ± 0.0", "50.0", "–", "–"]
    assert "for 1 round (seed 0). After round 1," in text
    assert "The round chosen on validation accuracy is the same one." in text


def test_architectures_and_traffic(store_run):
    text = report(store_run())
    assert rows(text, "By architecture")[1:] == [
        ["small", "2", "40.0", "40.0", "30.0", "25.0"],
        ["large(width=8)", "2", "70.0", "60.0", "50.0", "45.0"],
    ]
    assert rows(text, "Traffic")[1:] == [
        ["examples", "0", "0.0000800"],
        ["weights", "1.75", "0.500"],
        ["**all**", "1.75", "0.500"],
    ]
    assert "A whole run: 13.5 MB for training, and 0.750 MB sent down for evaluation" in text


def test_experiments_are_averaged_over_seeds(store_run, make_round):
    for seed, share in enumerate((0.4, 0.5, 0.9)):
        rounds = [make_round(1, personal=[share] * 4, validation=0.5, common=0.5)]
        store_run(f"seed{seed}", rounds, seed=seed, planned=1)
    folder = store_run("other", [make_round(1, personal=[0.7] * 4, validation=0.5)], method="fedavg", planned=1)
    text = report(folder.parent)
    assert text.startswith("# fedavg and fedin on digits\n")
    assert rows(text, "Experiments")[1:] == [
        ["fedavg", "0", "1", "70.0", "70.0", "70.0", "–", "–", "1.50", "0.500"],
        ["fedin", "0, 1, 2", "1", *["60.0 ± 26.5"] * 3, "50.0 ± 0.0", "–", "1.50", "0.500"],
    ]
    assert rows(text, "By architecture") == [
        ["Experiment", "small", "large(width=8)"],
        ["fedavg", "70.0", "70.0"],
        ["fedin", "60.0 ± 26.5", "60.0 ± 26.5"],
    ]
    assert rows(text, "All metrics")[1:] == [["fedavg", "70.0"], ["fedin", "60.0 ± 26.5"]]
    assert "## Runs" not in text


def test_the_report_of_many_runs_stays_short(store_run):
    for method in range(13):
        for seed in range(3):
            folder = store_run(f"m{method}-{seed}", method=f"method{method}", seed=seed, lr=0.01 * (1 + method % 2))
    text = report(folder.parent)
    assert text.count("\n") < 150  # of 39 runs
    assert [len(rows(text, title)) - 1 for title in ("Experiments", "By architecture", "All metrics")] == [13] * 3
    assert "<details>" not in text
    differing = {value: set(labels.split(", ")) for key, value, labels in rows(text, "Setting")[-2:]}
    assert differing["0.02"] == {f"method{n}" for n in range(1, 13, 2)}
    assert "`method.name`" not in text


def test_missing_replies_are_counted_in_a_report_of_several_experiments(store_run, make_round):
    broken = store_run("broken", [{**make_round(1), "failed": {"2": "out of memory"}}])
    text = report(broken, store_run("whole", method="fedavg"))
    assert "**Replies missing** because a client failed, fedin: 1." in text


def test_rounds_to_a_target(store_run, make_round):
    store_run("slow", [make_round(1), make_round(2), make_round(3, personal=[0.6] * 4)], seed=1)
    never = store_run("weak", [make_round(1, personal=[0.5] * 4)], seed=2)
    fast = store_run("fast", [make_round(1, personal=[0.6] * 4)], seed=3)
    text = report(fast, never, fast.parent / "slow", target=Target(0.6, against="slow"))
    assert rows(text, "Rounds to 60.0%")[1:] == [
        ["fedin, 1 round, seed 3", "3", "1", "3.0"],
        ["fedin, 1 round, seed 2", "2", ">1", "–"],
        ["fedin, 3 rounds, seed 1", "1", "3", "1.0"],
    ]
    without = report(fast, target=Target(0.6, measure="common"))
    assert rows(without, "Rounds to 60.0%")[1:] == [["fedin", "3", ">1"]]
    assert "unsmoothed: mean over clients, common test set." in without


def test_what_was_judged_is_said(store_run):
    text = report(store_run())
    evaluated = text.split("## What was evaluated")[1].split("## ")[0]
    for words in ("Whose model.", "On what.", "When.", "Test accuracy has no say in the choice."):
        assert words in evaluated


def test_the_setting_is_told_and_the_whole_configuration_can_be_unfolded(store_run):
    folder = store_run(**FACTS)
    text = report(folder)
    assert ["`federation.models`", "small, large(width=8)"] in rows(text, "Setting")
    assert ["`method.training.lr`", "0.005"] in rows(text, "Setting")
    unfolded = text.split("<details>")[1].split("</details>")[0]
    assert (folder / "config.toml").read_text() in unfolded.replace("\n```\n", "\n")


def test_how_to_reproduce_is_told_with_what_the_run_stood_on(store_run):
    text = report(store_run(**FACTS))
    assert "\n```sh\npotluck run config.toml\n```\n" in text
    machine = "Linux x86_64, 2 cores for torch"
    versions = ["0123456789ab with changes", "3.12.1", "0.1.0", "2.9.0", "2.3.0", machine, "a" * 12, "b" * 12]
    assert ["1", *versions] in rows(text, "How to reproduce")


def test_without_code_of_the_users_the_commit_is_potlucks(store_run):
    facts = {"git_commit": None, "git_dirty": None, "potluck_commit": "fedcba9876543210", "potluck_dirty": False}
    told = rows(report(store_run(**{**FACTS, **facts})), "How to reproduce")
    assert ["1", "fedcba987654"] in [row[:2] for row in told]


def test_what_a_manifest_does_not_say_is_left_open(store_run):
    assert ["1", *(["–"] * 8)] in rows(report(store_run()), "How to reproduce")


def test_an_unfinished_run_is_called_so(store_run, make_round):
    text = report(store_run(rounds=[make_round(1)], status="interrupted"))
    assert "**Not finished:** fedin has 1 of 6 rounds (status: interrupted)." in text
    assert "No round was evaluated. A round sent 1.50 MB" in text
    assert [row[3:8] for row in rows(text, "Runs")[1:]] == [["last and chosen: none", "–", "–", "–", "–"]]


def test_missing_replies_are_counted(store_run, make_round):
    rounds = [{**make_round(number), "failed": {"2": "out of memory"}} for number in (1, 2)]
    assert "Replies missing because a client failed: 2." in report(store_run(rounds=rounds))
    assert "Replies missing" not in report(store_run("whole"))


def test_a_bar_in_a_name_does_not_end_a_cell(store_run):
    assert "| data\\|set |" in report(store_run(dataset="data|set"))


def test_the_same_runs_give_the_same_bytes(store_run, seal, tmp_path):
    folder = seal(store_run(**FACTS))
    first, second = (write_report([folder], tmp_path / name) for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert first.with_name("report.md").read_bytes() == second.with_name("report.md").read_bytes()
    assert first.with_name("curves.png").read_bytes() == second.with_name("curves.png").read_bytes()


def test_nothing_is_written_if_there_is_nothing_to_report(store_run, seal, tmp_path):
    with pytest.raises(CheckpointError, match="found no run with a finished round"):
        write_report([store_run(rounds=[], status="running")], tmp_path / "report")
    with pytest.raises(CheckpointError, match="no run 'other' to compare with"):
        write_report([seal(store_run("b"))], tmp_path / "report", Target(0.5, against="other"))
    assert not (tmp_path / "report").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (60.0, "target 60: accuracy is a share; expected 0 to 1, such as 0.6"),
        (-0.1, "target -0.1: accuracy is a share; expected 0 to 1, such as 0.6"),
        (float("nan"), "target nan: expected a number"),
    ],
)
def test_a_target_that_no_curve_can_reach_is_refused_before_anything_is_written(
    store_run, seal, tmp_path, target, message
):
    with pytest.raises(ConfigError) as refused:
        write_report([seal(store_run())], tmp_path / "report", Target(target))
    assert str(refused.value) == message
    assert not (tmp_path / "report").exists()


@pytest.mark.slow
def test_smoothing_changes_page_and_picture_and_no_table(store_run, seal, tmp_path):
    folder = seal(store_run(**FACTS))
    plain, smooth = (write_report([folder], tmp_path / f"by{window}", smooth=window) for window in (1, 2))
    for name, same in (("report.html", False), ("curves.png", False), ("report.md", True)):
        assert (plain.with_name(name).read_bytes() == smooth.with_name(name).read_bytes()) is same


def test_notes_have_a_table_where_there_are_any(store_run, make_round):
    lines = [{**make_round(1), "notes": {"norm": 123.456, "clients/conflict": 1e-7}}, make_round(2)]
    _, *found = rows(
        report(store_run("noted", lines), store_run("plain", [make_round(1), make_round(2)], seed=1)), "Notes"
    )
    assert found == [
        ["fedin, seed 0", "`clients/conflict`", "1", "1e-07", "1e-07", "1e-07", "1e-07"],
        ["fedin, seed 0", "`norm`", "1", "123.5", "123.5", "123.5", "123.5"],
    ]
    assert "## Notes" not in report(store_run("without"))


HOSTILE = "</script><img src=x onerror=alert(1)>|![a](http://b)`c`"


def test_names_of_users_are_text_in_markdown_too(store_run, make_round):
    folder = store_run(method="own", machine=HOSTILE, rounds=[make_round(1, personal=[0.5] * 4)], privacy=HOSTILE)
    for file in ("rounds.jsonl", "clients.jsonl"):
        text = (folder / file).read_text().replace('"small"', '"</script><img src=x onerror=alert(1)>"')
        (folder / file).write_text(text)
    other = store_run("other", method="</h1><img src=x>", seed=1)
    for found in (report(folder), report(folder, other)):
        outside = found.split("```toml")[0] + found.split("```")[-1]
        assert "<img" not in outside
        assert "</script" not in outside
        assert "![a](" not in outside
        assert "&lt;img src=x" in outside
