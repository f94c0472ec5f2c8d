"""The table of how several ranks compare with fewer."""
import json
from pathlib import Path

import numpy as np

from records.tools import scaling
from records.tools.schema import RecordError, Run


def test_rows_compare_with_the_fewest_ranks(monkeypatch, tmp_path, capsys):
    """By the last steps of each batch; two ranks by NCCL here take 0.6 of one's time, and by copies half."""
    commands = []

    def launch(command: str, runs: Path) -> Run:
        commands.append(command)
        share = 1.0 if "node=1 " in command else 0.5 if "--peer_copies true" in command else 0.6
        tokens = np.repeat([64, 128, 192], 50).cumsum()
        ms = np.repeat([1.0, 2.0, 3.0], 50) * share
        ms[:10] = ms[50:60] = 99    # Clocks settle: these are not timed.
        header = {"devices": ["A"], "versions": {}, "commit": "abc", "dirty": False}
        summary = {"peak_memory_bytes": 5, "startup_s": 7.0}
        return Run(runs, header, {"ms": ms, "tokens": tokens}, {}, summary=summary)

    monkeypatch.setattr(scaling, "launch", launch)
    out = tmp_path / "rows.json"
    given = ["--ranks", "2,1", "--batch_tokens", "64,128,192", "--out", str(out), "--preset", "corpus"]
    assert scaling.main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "times as fast as 1 rank " in lines[0] and len(lines) == 2 + 9
    assert [line.split("|")[-3].strip() for line in lines[2:]] == ["1.00", "2.00", "1.67"] * 3
    assert [line.split("|")[-2].strip() for line in lines[2:5]] == ["100%", "100%", "83%"]
    rows = json.loads(out.read_text())
    assert rows[0]["ms"] == [1.0, 1.0, 1.0] and rows[0]["startup_s"] == 7.0 and rows[0]["commit"] == "abc"
    assert len(commands) == 3 and all("--preset corpus" in command for command in commands)


def test_several_ranks_compare_with_the_faster_way_of_the_fewest():
    rows = [{"batch": "64 tokens", "ranks": ranks, "collectives": way, "ms": (ms, ms, ms)}
            for ranks, way, ms in ((2, "copies", 4.0), (2, "nccl", 5.0), (4, "copies", 2.0))]
    efficiency = [line.split("|")[-2].strip() for line in scaling.scaling_text(rows).splitlines()[2:]]
    assert efficiency == ["100%", "80%", "100%"]


def test_settings_of_its_own_are_named_and_left_out(monkeypatch, capsys):
    def launch(command: str, _) -> Run:
        raise RecordError(command)
    monkeypatch.setattr(scaling, "launch", launch)
    assert scaling.main(["--preset", "cpu", "--steps", "400", "--name=mine"]) == 2
    left_out, command = capsys.readouterr().err.splitlines()        # A run that fails ends in one line.
    assert command.startswith("python -m records.tools.scaling: ")
    assert left_out.endswith("--preset cpu --steps 400 --name=mine became --preset cpu")
    assert "400" not in command and "mine" not in command and "--steps 150" in command
