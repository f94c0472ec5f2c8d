"""Which files make a run what it is, their hash for the log's header, and how they differ from the commit."""
import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The program, its kernels, its data code, and what a run needs of the records. Commits from before
# `records/run/` existed have no files in it, so by this list their runs have the hash of their logs.
SOURCE = re.compile(r"train_gpt\.py|kernels/(.+/)?[^/]+\.py|data/[^/]+\.py|records/run/[^/]+\.py")


def is_source(path: str) -> bool:
    """Whether the file of this relative POSIX path is one of a run's sources."""
    return SOURCE.fullmatch(path) is not None


def project_sources(root: Path = ROOT) -> dict[str, bytes]:
    """Relative POSIX path -> contents of a run's sources as they are on disk, sorted by path."""
    paths = [root / "train_gpt.py", *root.glob("kernels/**/*.py"), *root.glob("data/*.py"),
             *root.glob("records/run/*.py")]
    names = sorted(path.relative_to(root).as_posix() for path in paths)
    return {name: (root / name).read_bytes() for name in names}


def hash_sources(files: dict[str, bytes]) -> str:
    """sha256 (hex) over path, NUL, contents, NUL of each file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + files[path] + b"\0")
    return digest.hexdigest()


def source_changes(root: Path = ROOT) -> bytes:
    """How the sources on disk differ from the commit that is checked out, as one patch; b"" if they do not.

    The patch has files that git does not track, or ignores, too. It is also b"" where there is no git or no
    commit; then the log names no commit either.
    """
    with tempfile.TemporaryDirectory() as folder:
        # An index of its own leaves what the person has staged alone.
        environment = os.environ | {"GIT_INDEX_FILE": str(Path(folder) / "index"),
                                    "GIT_LITERAL_PATHSPECS": "1"}

        def git(*words: str, paths: str | None = None) -> bytes:
            return subprocess.run(["git", *words], cwd=root, env=environment, capture_output=True, check=True,
                                  timeout=60, input=None if paths is None else paths.encode()).stdout

        try:
            git("read-tree", "HEAD")
            known = git("ls-files", "-z").decode().split("\0")
            names = {name for name in known if is_source(name)} | project_sources(root).keys()
            git("add", "--all", "--force", "--pathspec-from-file=-", "--pathspec-file-nul",
                paths="\0".join(names))
            return git("diff", "--cached", "--binary", "--no-renames", "--no-color", "--no-ext-diff", "HEAD")
        except (OSError, subprocess.SubprocessError):
            return b""
