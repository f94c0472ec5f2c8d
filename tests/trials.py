"""Trials of whole commands in bad surroundings, too slow for the suite: `python -m tests.faults` runs them.

What needs a mounted file system is skipped where nobody may mount one.
"""
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TINY, environment, write_documents
from hub_server import HubServer
from synthetic import commit_sources, write_run
from test_data import TRAIN1, VAL, gpt2_shard

from data.shards import publish

ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONUNBUFFERED": ""}
SHORT = [*TINY, "--micro_batches", "2", "--batch_tokens", "256,512,512", "--preset", "cpu"]
WIDE = "--width 128 --head_dim 64 --qk_dim 64".split()      # what FlashAttention-4 can do
OUR_FRAME = 'train_gpt.py", line'
COMMANDS = {
    "records --help": "-m records --help", "check": "-m records --records {records} check",
    "stats": "-m records stats {runs}", "watch": "-m records --records {records} watch {run} --once",
    "report": "-m records --records {records} report", "plot": "-m records plot {runs} --out {out}/plots",
    "peek": "-m data.peek {shards}", "peek --help": "-m data.peek --help",
    "text --help": "-m data.text --help",
    "text": "-m data.text {text} --bytes --split line --out {out}/text",
    "overlap": "-m data.overlap {shards} --document_start 256 --tokens 500",
    "embedded": "-m data.embedded --out {out}/embedded", "explain": "train_gpt.py --preset cpu --explain",
    "timetable": "train_gpt.py --preset cpu --timetable 2", "help": "train_gpt.py --help",
    "train": "train_gpt.py {short} --data_path {shards}",
}


@pytest.fixture
def place(tmp_path) -> dict[str, Path | str]:
    """What the commands name: shards with their manifest, finished runs, a text, a folder to write into."""
    commit = commit_sources(tmp_path)
    for seed in range(2):
        log = write_run(tmp_path / "records/runs", "é…", seed, steps=12, header={"commit": commit})
    write_documents(tmp_path / "new", {"train_000000": [90] * 200, "val_000000": [300] * 10})
    (tmp_path / "shards").mkdir()
    publish(tmp_path / "new", tmp_path / "shards")
    (tmp_path / "README.md").write_text("<!-- records -->\n<!-- /records -->\né…\n", "utf-8")
    (tmp_path / "text.txt").write_text("".join(f"é… {i}\n" for i in range(9000)), "utf-8")
    return {"records": tmp_path / "records", "runs": tmp_path / "records/runs", "run": log.parent,
            "shards": tmp_path / "shards", "text": tmp_path / "text.txt", "out": tmp_path / "out",
            "short": " ".join(SHORT)}


def attempt(name: str, place: dict, out: int | None = None, inside: tuple[str, ...] = (),
            **variables: str) -> subprocess.CompletedProcess:
    """Run one of COMMANDS, or a command line; none may end in a traceback or in an ignored error.

    `inside` is a command that runs it.
    """
    words = COMMANDS.get(name, name).format(**place).split()
    variables = {"RUNS_PATH": str(place["out"])} | variables
    done = subprocess.run([*inside, sys.executable, *words], cwd=ROOT, env=environment(**variables),
                          timeout=300, stdout=out or subprocess.PIPE, stderr=subprocess.PIPE)
    done.stderr = done.stderr.decode("utf-8", "replace")
    bad = "Traceback", "Exception ignored", "Warning:"
    assert not any(said in done.stderr for said in bad), done.stderr
    return done


def one_line(done: subprocess.CompletedProcess, *words: str) -> None:
    said = [line for line in done.stderr.splitlines() if "step/s" not in line and line]
    assert done.returncode == 2 and len(said) == 1 and all(word in said[0] for word in words), done


@pytest.mark.parametrize("name", COMMANDS)
def test_a_locale_without_these_letters(place, name):
    assert attempt(name, place, **ASCII).returncode in (0, name == "check")


@pytest.mark.parametrize("name", COMMANDS)
def test_warnings_are_errors(place, name):
    """Of our own making: torch warns of its own affairs, which are not ours."""
    warnings = "error,ignore::DeprecationWarning,ignore::FutureWarning,ignore::UserWarning"
    assert attempt(name, place, PYTHONWARNINGS=warnings).returncode in (0, name == "check")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("text", "embedded")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_onto_a_full_disk(place, name, unbuffered):
    with open("/dev/full", "w") as full:
        done = attempt(name, place, full, PYTHONUNBUFFERED=unbuffered)
    if done.returncode or "--help" not in COMMANDS[name]:       # argparse keeps quiet about it
        one_line(done, "No space left on device")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("text", "embedded")])
def test_output_into_a_reader_that_has_gone(place, name):
    read, write = os.pipe()
    os.close(read)
    done = attempt(name, place, write, PYTHONUNBUFFERED="")
    os.close(write)
    assert done.returncode == 0
    assert name != "train" or last_line(place) == "summary"


def last_line(place: dict) -> str:
    """What kind of line the log of the one run ends in."""
    [log] = place["out"].glob("*/log.jsonl")
    return last_kind(log)


def last_kind(log: Path) -> str | None:
    """Of its lines that are whole; None without any."""
    *whole, _ = log.read_text().split("\n")
    return json.loads(whole[-1])["kind"] if whole else None


@pytest.mark.parametrize("name", ["train", "peek", "stats"])
@pytest.mark.parametrize("streams", [">&-", "2>&-", ">&- 2>&-", "2>/dev/full", "2>&1 | :"])
def test_streams_that_take_nothing(place, name, streams):
    """Nor may the program end because of them: the status is that of what was done."""
    inside = "bash", "-o", "pipefail", "-c", f'"$0" "$@" {streams}'
    assert attempt(name, place, inside=inside, PYTHONUNBUFFERED="").returncode == 0
    assert name != "train" or last_line(place) == "summary"


@pytest.fixture(params=["full", "read-only"])
def bad_disk(request, tmp_path):
    """A file system of 64 kB, or one that cannot be written."""
    folder = tmp_path / "out"
    folder.mkdir()
    options = {"full": "size=64k,nr_inodes=40", "read-only": "ro"}[request.param]
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a file system here")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("name", ["plot", "text", "embedded", "train"])
def test_a_disk_that_takes_nothing_more(place, bad_disk, name):
    """What each tool writes: nothing half-written stays, and a run's log holds whole lines."""
    longer = " --steps 600 --epochs 500 --val_every 0" if name == "train" else ""
    one_line(attempt(COMMANDS[name] + longer, place), str(bad_disk))
    left = [p for p in bad_disk.rglob("*") if p.is_file() and p.name != ".lock"]
    assert {p.suffix for p in left} <= {".jsonl", ".patch", ".png", ".svg"}, left
    for log in (p for p in left if p.name == "log.jsonl"):
        *whole, last = log.read_text().splitlines(keepends=True)
        assert all(json.loads(line) for line in whole)


def test_weights_that_a_disk_does_not_take_leave_no_part(place, bad_disk):
    done = attempt("train_gpt.py {short} --data_path {shards} --save {out}/model", place,
                   RUNS_PATH=str(place["shards"]))
    one_line(done, str(bad_disk))
    assert not [p for p in bad_disk.rglob("*") if p.is_file()]


@pytest.fixture(scope="module")
def kernels(shards, tmp_path_factory) -> Path:
    """Caches that a run has filled."""
    folder = tmp_path_factory.mktemp("kernels")
    done = compiled(folder, shards)
    assert done.returncode == 0, done.stderr
    return folder


def compiled(caches: Path, shards: Path) -> subprocess.CompletedProcess:
    """A run on a GPU, by run.sh, whose compiled kernels are in this folder.

    Torch may show tracebacks of its own compilers. One of the program has OUR_FRAME.
    """
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = "./run.sh", *SHORT, *WIDE, "--data_path", str(shards), "--write_log", "false"
    return subprocess.run(words, cwd=ROOT, env=environment(CUDA_VISIBLE_DEVICES=gpu, **caches_in(caches)),
                          capture_output=True, text=True, timeout=200)


def caches_in(folder: Path) -> dict[str, str]:
    """The variables that move all caches of compiled kernels there."""
    return {"TORCHINDUCTOR_COMPILE_THREADS": "4", "TRITON_CACHE_DIR": f"{folder}/triton",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{folder}/flash"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("keep", [0.5, 0], ids=["cut", "empty"])
def test_caches_of_kernels_that_are_damaged(kernels, shards, tmp_path, keep):
    """What they lack is compiled anew, or a line says which folders to remove."""
    copy = shutil.copytree(kernels, tmp_path / "copy", symlinks=True)
    files = [path for path in copy.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        os.truncate(path, int(keep * path.stat().st_size))
    done = compiled(copy, shards)
    assert len(files) > 20 and OUR_FRAME not in done.stderr, (len(files), done.stderr)
    # A library that was cut short ends the process as soon as it is read.
    said = "train_gpt.py: a compiled kernel is damaged", "run.sh: rank 0 was ended by SIGBUS; a file that"
    assert not done.returncode or done.stderr.splitlines()[-1].startswith(said), done.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_caches_of_kernels_that_two_processes_fill(shards, tmp_path):
    """At once; neither reads half of what the other writes."""
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda _: compiled(tmp_path, shards), range(2)))
    assert [done.returncode for done in both] == [0, 0], [done.stderr for done in both]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_caches_of_kernels_on_a_disk_that_takes_nothing_more(bad_disk, shards):
    done = compiled(bad_disk, shards)
    assert OUR_FRAME not in done.stderr, done.stderr
    assert not done.returncode or done.stderr.splitlines()[-1].startswith("train_gpt.py: "), done.stderr


def test_fineweb_onto_a_disk_that_takes_nothing_more(place, bad_disk):
    with HubServer({VAL: gpt2_shard(0, 60_000), TRAIN1: gpt2_shard(1, 60_000)}) as hub:
        done = attempt("-m data.fineweb --shards 1 --out {out}/f", place, HF_ENDPOINT=hub.url,
                       HF_HOME=str(place["shards"] / "hf"))
    one_line(done, str(bad_disk))
    assert not list(bad_disk.rglob("*.bin"))


def test_a_run_folder_that_vanishes(place):
    """The log goes on in the deleted file, as everywhere on Unix; the run itself is not disturbed."""
    words = COMMANDS["train"].format(**place).split()
    process = subprocess.Popen([sys.executable, *words, "--steps", "40", "--epochs", "50"], cwd=ROOT,
                               env=environment(RUNS_PATH=str(place["out"])), stderr=subprocess.PIPE,
                               text=True)
    while process.poll() is None and not list(place["out"].glob("*/log.jsonl")):
        pass
    subprocess.run(["rm", "-r", place["out"]], check=True)
    assert process.wait(120) == 0 and "Traceback" not in process.stderr.read()


def test_a_shard_that_is_cut_while_it_is_read(place):
    """The system ends the ranks that read on, and run.sh says why. The log holds whole lines."""
    words = COMMANDS["train"].format(**place).split()[1:]
    process = subprocess.Popen(["./run.sh", *words, "--steps", "4000", "--epochs", "9999"], cwd=ROOT,
                               env=environment(RUNS_PATH=str(place["out"])), stderr=subprocess.PIPE,
                               stdout=subprocess.DEVNULL, text=True)
    while process.poll() is None and "step" not in map(last_kind, place["out"].glob("*/log.jsonl")):
        time.sleep(0.2)
    os.truncate(place["shards"] / "train_000000.bin", 0)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == 1, said
    assert said.splitlines()[-1].startswith("run.sh: rank ") and "SIGBUS; a file that it had mapped" in said
    [log] = place["out"].glob("*/log.jsonl")
    assert all(map(json.loads, log.read_text().splitlines()))


@pytest.mark.parametrize("name, runs, status", [
    ("train", "{out}", 0), ("train", f"{ROOT}/records/runs", 2),
    (f"-m data.text {{text}} --bytes --split line --out {ROOT}/new", "", 2),
    ("-m records report", "", 2), ("-m records.tools.profile {short} --data_path {shards}", "", 2),
], ids=["train", "train into it", "text", "report", "profile"])
def test_a_checkout_that_cannot_be_written(place, name, runs, status):
    """In a view of the file system of its own. A run needs only a place for its log."""
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && cd "$0" && exec "$@"'
    inside = "unshare", "--mount", "sh", "-c", mount, str(ROOT)
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("may not mount a file system here")
    done = attempt(name, place, inside=inside, RUNS_PATH=runs.format(**place))
    assert done.returncode == status, done
    if status:
        one_line(done, "Read-only file system")


@pytest.mark.parametrize("tool", ["profile --out /dev/null/traces", "ablate --data_path /dev/null/shards"])
def test_tools_that_train_end_as_the_program_does(place, tool):
    one_line(attempt(f"-m records.tools.{tool} {{short}}", place), "/dev/null", f"records.tools.{tool[:6]}")


@pytest.mark.parametrize("variables, words", [
    ({"RANK": "x"}, "RANK"), ({"WORLD_SIZE": "x"}, "WORLD_SIZE"), ({"WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK"), ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE"),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "no.host.invalid", "MASTER_PORT": "29500"}, "find each other"),
], ids=str)
def test_variables_of_a_launcher_that_are_wrong(place, variables, words):
    one_line(attempt("train", place, **variables), words)


def test_the_page_in_a_browser(tmp_path):
    """Markup that nobody escaped is stopped by the page's policy; needs chromium."""
    from records.tools.report import html_page
    chromium = subprocess.run(["which", "chromium"], capture_output=True, text=True).stdout.strip()
    if not chromium:
        pytest.skip("no chromium here")
    evil = "<body><script>document.title='RAN'</script><img src=x onerror=\"document.title='RAN'\">"
    page = html_page([]).replace("<body>", evil)
    for name, text, title in (("page", page, "Records"),
                              ("control", page.replace("Content-Security-Policy", "x"), "RAN")):
        (tmp_path / f"{name}.html").write_text(text)
        shown = subprocess.run([chromium, "--headless", "--no-sandbox", "--dump-dom",
                                f"file://{tmp_path}/{name}.html"], capture_output=True, text=True, timeout=60)
        assert f"<title>{title}</title>" in shown.stdout
