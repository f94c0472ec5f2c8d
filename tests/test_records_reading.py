"""Records, the reading half: statistics, what may be pooled, our logs and foreign ones, all made up."""
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats as scipy_stats

from records.tools import pool, stats
from records.tools.classes import table_class
from records.tools.logs import find_logs, read_log, read_logs
from records.tools.schema import RecordError
from tests.synthetic import SOURCES, command, foreign_log, write_run

PUBLISHED = [3.2779, 3.2782, 3.2782, 3.2788, 3.2814, 3.2807, 3.2780, 3.2780, 3.2795, 3.2802]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of records with five finished runs of one configuration."""
    for seed in range(5):
        write_run(tmp_path / "records" / "runs", seed=seed)
    return tmp_path / "records"


# Statistics

def test_published_sample():
    """Ten published losses. p = 0.0018 is quoted with them, but t = -2.245 with 9 degrees of freedom is p =
    0.0257.
    """
    sample = stats.describe(PUBLISHED)
    assert f"{sample.mean:.4f}" == "3.2791" and f"{sample.standard_deviation:.4f}" == "0.0013"
    t = (sample.mean - 3.28) / sample.standard_error
    assert f"{t:.3f}" == "-2.245"
    assert f"{stats.p_below(PUBLISHED, 3.28):.4f}" == f"{scipy_stats.t.cdf(t, 9):.4f}" == "0.0257"
    assert "4 more runs would show that it is below 3.28" in stats.verdict(PUBLISHED, 3.28)
    assert "is below 3.281" in stats.verdict(PUBLISHED,
                                             3.281) and "is above 3.277" in stats.verdict(PUBLISHED, 3.277)


def test_statistics_against_scipy():
    random = np.random.default_rng(0)
    for n_a, n_b in [(2, 2), (3, 7), (10, 10), (30, 4)]:
        a, b = random.normal(3.28, 0.002, n_a), random.normal(3.279, 0.004, n_b)
        assert stats.describe(a).standard_error == pytest.approx(scipy_stats.sem(a))
        assert stats.p_below(a, 3.28) == pytest.approx(scipy_stats.ttest_1samp(a, 3.28,
                                                                               alternative="less").pvalue)
        found, expected = stats.welch(a, b), scipy_stats.ttest_ind(b, a, equal_var=False)
        interval = expected.confidence_interval(0.95)
        assert (found.p, found.low, found.high) == pytest.approx((expected.pvalue, *interval))
        assert found.difference == pytest.approx(b.mean() - a.mean())


def test_more_runs_decide():
    """With the promised number of runs, mean and spread the same, the test decides, and with one less not."""
    losses = [3.2780, 3.2800, 3.2795]
    more = stats.more_runs(losses, 3.28)
    sample = stats.describe(losses)

    def p(n: int) -> float:
        return scipy_stats.t.cdf((sample.mean - 3.28) / sample.standard_deviation * math.sqrt(n), n - 1)

    assert p(3 + more) < 0.01 <= p(3 + more - 1)
    assert f"{more} more runs would show" in stats.verdict(losses, 3.28)


def test_smallest_difference_is_found_in_four_of_five_tries():
    random = np.random.default_rng(1)
    smallest = stats.welch([0.0, 1.0, 2.0] * 4, [0.0, 1.0, 2.0] * 4).smallest
    spread = np.std([0.0, 1.0, 2.0] * 4, ddof=1)
    p = scipy_stats.ttest_ind(random.normal(smallest, spread, (4000, 12)),
                              random.normal(0, spread, (4000, 12)), axis=1, equal_var=False).pvalue
    assert 0.75 < np.mean(p < 0.05) < 0.85


def test_edge_cases_of_statistics():
    assert stats.describe([3.27]).standard_deviation is None and stats.p_below([3.27], 3.28) is None
    assert "one run has no spread" in stats.verdict([3.27], 3.28)
    assert stats.p_below([3.1, 3.1, 3.1], 3.28) is None and "equal" in stats.verdict([3.1, 3.1, 3.1], 3.28)
    assert stats.welch([1.0], [2.0, 3.0]) == stats.Difference(1.5)
    assert stats.welch([1.0, 1.0], [2.0, 2.0]) == stats.Difference(1.0)
    assert "no target" in stats.verdict([3.27, 3.28], None)
    for values in ([], [3.27, math.nan], [math.inf]):
        with pytest.raises(RecordError):
            stats.describe(values)


# What may be pooled

@pytest.mark.parametrize("particulars, message", [
    ({"seed": 3}, r"seed 3: 20261121-100003-first, 20261121-100005-first"),
    ({"seed": 9, "settings": {"adam": {"lr": 0.01}}}, r"adam\.lr \(0\.008 / 0\.01\)"),
    ({"seed": 9, "sources": {**SOURCES, "kernels/xxt.py": b"# changed\n"}}, "differ in sources"),
    ({"seed": 9, "level": math.nan}, "its loss is nan: the run diverged"),
], ids=["repeated seeds", "mixed configurations", "mixed sources", "diverged"])
def test_runs_that_do_not_belong_together_are_refused(root, particulars, message):
    write_run(root / "runs", **particulars)
    with pytest.raises(RecordError, match=message):
        pool.summarize(read_logs([root / "runs"]))


def test_runs_on_different_data_are_refused(root):
    """An unfinished run does not say yet what its data was."""
    log = write_run(root / "runs", seed=9)
    log.write_text(log.read_text().replace('"val": "x"', '"val": "y"'))
    with pytest.raises(RecordError, match=r"differ in data\.val \(x / y\)"):
        pool.summarize(read_logs([root / "runs"]))
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-1]))
    pool.require_one_configuration(read_logs([root / "runs"]), "the runs")


def test_runs_that_went_on_from_a_checkpoint_are_refused(root):
    write_run(root / "runs", seed=9, header={"resumed": {"step": 30}})
    with pytest.raises(RecordError, match="went on from a checkpoint, so its clock has counted only the r"):
        pool.summarize(read_logs([root / "runs"]))


def test_runs_on_other_texts_of_one_name_are_refused(root):
    """A run that was not scored on a text has none of that name."""
    for seed, text in ((9, "aa"), (10, "bb")):
        log = write_run(root / "runs", seed=seed)
        line = {"kind": "score", "text": "clean", "loss": 3.5, "tokens": 9, "sha256": text}
        last = '{"kind": "summary"'
        log.write_text(log.read_text().replace(last, f"{json.dumps(line)}\n{last}"))
    runs = read_logs([root / "runs"])
    pool.summarize(runs[:-1])
    with pytest.raises(RecordError, match=r"differ in texts\.clean\.sha256 \(aa / bb\)"):
        pool.summarize(runs[-2:])


def test_runs_of_several_machines_are_pointed_out(root):
    write_run(root / "runs", seed=9, header={"driver": "590.1"})
    assert "driver (580.95 / 590.1)" in " ".join(pool.summarize(read_logs([root / "runs"]))["notes"])


# Classes by the n-gram table

@pytest.mark.parametrize("most, above, below", [(300_000_000, "at most 65 G", "at most 0.3 G"),
                                                (65_000_000_000, "open", "at most 65 G")])
def test_the_classes_and_their_limits(most, above, below):
    """A table of as many parameters as the limit is within it, and one row more is not."""
    width = 128
    for rows, expected in ((most // width, below), (most // width + 1, above), (most // width - 1, below)):
        header = {"config": {"ngram_rows": rows, "head_dim": width}, "parameters": 1}
        assert table_class(header) == expected
    assert most % width == 0
    assert table_class({"config": {}, "parameters": most}) == below
    assert table_class({"config": {"retrieval": 4}, "parameters": most + 1}) == above + " + retrieval"
    assert table_class({"config": {}}) == "unknown"


def test_stats_and_compare_print_the_class(root, tmp_path, capsys):
    write_run(tmp_path / "other", settings={"ngram_rows": 2 ** 28, "head_dim": 128})
    assert command("stats", root / "runs") == command("compare", root / "runs", tmp_path / "other") == 0
    printed = capsys.readouterr().out
    assert "\nclass    at most 0.3 G\n" in printed
    assert f"A = {root / 'runs'} (class: at most 0.3 G)\n" in printed
    assert f"B = {tmp_path / 'other'} (class: at most 65 G)\n" in printed
    assert command("stats", foreign_log(tmp_path, "foreign")) == 0
    assert "\nclass    unknown\n" in capsys.readouterr().out


# Logs

def test_whole_log(root):
    run = read_log(find_logs(root / "runs")[0])
    assert run.finished and not run.warnings and run.seed == 0 and run.planned_steps == 60
    assert [name for name, _ in run.stages()] == ["131,072 tokens", "262,144 tokens", "393,216 tokens"]
    assert run.step_time_s[-1] == pytest.approx(run.time_s)


@pytest.mark.parametrize("keep", [1, 2, 30])
def test_growing_and_truncated_logs_are_partial(root, keep, capsys):
    log = find_logs(root / "runs")[0]
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:keep]) + lines[keep][:20])
    run = read_log(log)
    assert not run.finished and "line is incomplete" in run.warnings[0].replace(f"line {keep + 1}", "line")
    assert "not finished" in run.warnings[1]
    with pytest.raises(RecordError, match="not finished"):
        pool.summarize([run])
    assert command("--records", root, "watch", log, "--once") == 0
    assert f"step {len(run.steps['step'])} of 60" in capsys.readouterr().out


def test_stopped_log(root):
    log = find_logs(root / "runs")[0]
    lines = log.read_text().splitlines()[:20]
    log.write_text("\n".join([*lines, json.dumps({"kind": "stopped", "step": 17, "reason": "loss is NaN"})])
                   + "\n")
    assert read_log(log).warnings == ["stopped at step 17: loss is NaN"]


@pytest.mark.parametrize("change, message", [
    (lambda lines: [], "empty"),
    (lambda lines: lines[1:], "its beginning is missing"),
    (lambda lines: [*lines[:5], "{half", *lines[5:]], ":6: not JSON"),
    (lambda lines: [*lines[:5], lines[0], *lines[5:]], "two runs wrote into one log"),
    (lambda lines: [*lines, lines[5]], "a line after the run's last one"),
    (lambda lines: [lines[0].replace('"schema": 1', '"schema": 2')], "log schema 2; these tools read schema "
                                                                     "1"),
    (lambda lines: [lines[0], lines[1].replace('"ms"', '"milliseconds"')], "step line needs 'ms'"),
    (lambda lines: [lines[0], lines[1].replace('"windows": [1, 3]', '"windows": [1]')],
     r"needs 'windows' as \[short, long\]"),
    (lambda lines: [lines[0].replace('"preset": "made-up"', '"preset": null')],
     "needs 'preset' as str, found None"),
    (lambda lines: [lines[0], '{"kind": "other"}'], "kind 'other'"),
    (lambda lines: [*lines[:-1], lines[-1].replace('"train": "x"', '"a": {' * 9 + '"b": 1' + "}" * 9)],
     "nested more than 8 deep"),
])
def test_malformed_logs(root, change, message):
    log = find_logs(root / "runs")[0]
    log.write_text("".join(line + "\n" for line in change(log.read_text().splitlines())))
    with pytest.raises(RecordError, match=message):
        read_log(log)


def test_places_that_hold_no_log(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        find_logs(tmp_path / "gone")
    with pytest.raises(RecordError, match="holds no log.jsonl"):
        find_logs(tmp_path)


# Foreign logs

def test_foreign_log(tmp_path):
    run = read_log(foreign_log(tmp_path, "a"))
    assert run.finished and run.loss == 3.2796 and run.time_s == 0.819
    assert run.steps["ms"].tolist() == [376, 220, 223] and run.validations["step"].tolist() == [0, 3]
    assert run.header["versions"] == {"python": "3.11.10", "torch": "2.10.0+cu128", "cuda": "12.8",
                                      "triton": "3.6.0"}
    assert run.header["driver"] == "580.126.09" and run.header["devices"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert run.summary["peak_memory_bytes"] == 37352 * 2**20


def test_foreign_logs_go_to_stats_compare_and_plot(tmp_path, root, capsys):
    logs = [foreign_log(tmp_path, name, loss) for name, loss in [("a", 3.2781), ("b", 3.2779), ("c", 3.2783)]]
    assert command("stats", *logs) == 0
    assert "p = 0.0018" in (printed := capsys.readouterr().out) and "distinct cannot be checked" in printed
    (tmp_path / "theirs").mkdir()
    for log in logs:
        log.rename(tmp_path / "theirs" / log.name)
    assert command("compare", tmp_path / "theirs", root / "runs") == 0
    assert "WARNING: machine, driver or versions differ" in (printed := capsys.readouterr().out)
    assert "all steps" in printed
    assert command("plot", tmp_path / "theirs", f"ours={root / 'runs'}", "--out", tmp_path / "plots") == 0
    assert (tmp_path / "plots" / "loss-time.png").exists()


def test_the_same_foreign_run_twice_is_refused(tmp_path):
    (tmp_path / "copy").mkdir()
    runs = [read_log(foreign_log(folder, "a")) for folder in (tmp_path, tmp_path / "copy")]
    with pytest.raises(RecordError, match="repeat seeds.* 3.2796 at 0.819 s: a.txt, a.txt"):
        pool.summarize(runs)


def test_foreign_sources_that_hold_a_separator(tmp_path):
    path = foreign_log(tmp_path, "a")
    whole = read_log(path)
    path.write_text(f"# {'=' * 3}\n{'=' * 40}\n" + path.read_text())
    run = read_log(path)
    assert run.header["driver"] == whole.header["driver"] and run.header["sources"] != whole.header["sources"]


def test_cut_foreign_log(tmp_path):
    path = foreign_log(tmp_path, "a")
    path.write_text(path.read_text().split("step:3/3")[0])
    run = read_log(path)
    assert not run.finished and run.warnings == ["not finished: ends at step 2 of 3, without the last "
                                                 "validation"]


def test_text_that_is_no_log(tmp_path):
    (tmp_path / "a.txt").write_text("nothing here\n")
    with pytest.raises(RecordError, match="neither a log.jsonl nor a plain-text log"):
        read_log(tmp_path / "a.txt")
