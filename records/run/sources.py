"""The sources that a run ran: as files by relative path, and their hash as the header of a log states it."""
import hashlib
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def source_files(folder: Path) -> dict[str, bytes]:
    """Relative POSIX path -> contents, sorted by path; without Python's own caches."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*")
             if p.is_file() and "__pycache__" not in p.parts}
    return dict(sorted(files.items()))


def hash_sources(files: dict[str, bytes]) -> str:
    """sha256 (hex) over path, NUL, contents, NUL of each file, in order of path."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode() + b"\0" + files[path] + b"\0")
    return digest.hexdigest()


def project_sources() -> dict[str, bytes]:
    """The files that make a run what it is: the program, its kernels and its data code."""
    paths = [ROOT / "train_gpt.py", *ROOT.glob("kernels/**/*.py"), *ROOT.glob("data/*.py")]
    return {name: (ROOT / name).read_bytes() for name in sorted(p.relative_to(ROOT).as_posix() for p in paths)}


def keep_sources(files: dict[str, bytes], runs: Path, scratch: Path) -> str:
    """Store the files as `runs/sources/<hash>/` unless they are there: written in `scratch`, then renamed. Their hash."""
    digest = hash_sources(files)
    kept = runs / "sources" / digest
    if not kept.exists():
        for name, text in files.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(text)
        kept.parent.mkdir(exist_ok=True)
        try:
            scratch.rename(kept)
        except OSError:
            if not kept.exists():                           # else another run of the same sources was faster
                raise
            shutil.rmtree(scratch)
    return digest
