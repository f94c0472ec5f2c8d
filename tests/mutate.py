"""Can the tests fail? Each mutation breaks one line of the program, and the tests beside it must notice.

    python -m tests.mutate                  every mutation of tests/mutations.txt, one after the other
    python -m tests.mutate normuon clock    those of files whose path holds one of these words

The tests run in a copy of the checkout, first as it is and then with each mutation. A mutation is caught if a
test fails or takes longer than TIMEOUT_S. The exit status is 1 if fewer than 95% are caught, if a survivor
has no reason beside it, or if a mutated line is not in its file any more.
"""
import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("mutations.txt")
TIMEOUT_S, CAUGHT = 600, 0.95


class Mutation(NamedTuple):
    file: str       # that is mutated
    tests: str      # words for pytest: what must notice
    old: str        # text that the file holds once
    new: str
    excuse: str     # why it may survive; empty: it may not


def read_table(text: str) -> list[Mutation]:
    """The mutations of a table in the form that tests/mutations.txt explains."""
    mutations, file, tests = [], "", ""
    for line in filter(None, text.splitlines()):
        if line.startswith("== "):
            file, tests = line.removeprefix("== ").split(" | ")
        elif line.startswith("  survives: "):
            mutations[-1] = mutations[-1]._replace(excuse=line.removeprefix("  survives: "))
        elif not line.startswith("# "):
            old, new = (text.replace("\\n", "\n") for text in line.removesuffix(" =>").split(" => "))
            mutations.append(Mutation(file, tests, old, new, ""))
    return mutations


def copy_checkout(to: Path) -> None:
    """Everything that git tracks or would track."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    for name in names:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def passes(tests: str, checkout: Path) -> bool:
    """Whether these tests pass in a checkout."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *split_words(tests)]
    # A cached program of the line before might be taken for one of the mutated line.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, cwd=checkout, env=environment, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            return process.wait(TIMEOUT_S) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:            # Ranks that wait for one another may be left of a test that failed, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def split_words(tests: str) -> list[str]:
    """"test_a.py test_b.py -k one or two" as words: all behind -k is one expression."""
    files, _, expression = tests.partition(" -k ")
    return [f"tests/{name}" for name in files.split()] + (["-k", expression] if expression else [])


def survivors(mutations: list[Mutation], checkout: Path) -> list[Mutation]:
    """The mutations that no test notices. SystemExit if tests fail without any mutation."""
    found, sound = [], set()
    for mutation in (bar := tqdm(mutations, unit="mutation", disable=None)):
        if mutation.tests not in sound and not passes(mutation.tests, checkout):
            raise SystemExit(f"without any mutation these tests fail, or there are none: {mutation.tests}")
        sound.add(mutation.tests)
        path = checkout / mutation.file
        original = path.read_text()
        path.write_text(original.replace(mutation.old, mutation.new))
        if passes(mutation.tests, checkout):
            found.append(mutation)
            bar.write(f"survives  {mutation.file}: {mutation.old!r} => {mutation.new!r}  {mutation.excuse}")
        path.write_text(original)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutate", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="parts of the paths of files (default: all files)")
    words = parser.parse_args().words
    chosen = [m for m in read_table(TABLE.read_text()) if not words or any(word in m.file for word in words)]
    if not chosen:
        parser.error(f"no file of {TABLE.name} has {' or '.join(words)} in its path")
    stale = [m for m in chosen if (ROOT / m.file).read_text().count(m.old) != 1]
    for mutation in stale:
        print(f"{mutation.file} does not hold this once: {mutation.old}; mend tests/mutations.txt")
    with tempfile.TemporaryDirectory() as folder:
        copy_checkout(Path(folder))
        whole = [m for m in chosen if m not in stale]
        found = survivors(whole, Path(folder))
    unexplained = [mutation for mutation in found if not mutation.excuse]
    print(f"caught / tried: {len(whole) - len(found)} / {len(whole)}; without a reason: {len(unexplained)}")
    return int(bool(stale or unexplained) or len(found) > (1 - CAUGHT) * len(whole))


if __name__ == "__main__":
    sys.exit(main())
