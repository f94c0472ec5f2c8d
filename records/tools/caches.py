"""python -m records.tools.caches: the compiled kernels of a machine as one file, for the next one.

    python -m records.tools.caches pack kernels.tar.gz         after a run
    python -m records.tools.caches unpack kernels.tar.gz       on another machine, before its first run

A start takes 27 s on one H200 with empty caches and 12 s with full ones (one start each). The file has the
caches of Inductor, Triton and FlashAttention-4, whichever program filled them. It fits machines with the same
kind of GPU and the same versions. On others `unpack` refuses it, since they would compile anew all the same.

Compiled kernels are programs, and a run executes what its caches hold: unpack only files that you packed
yourself.
"""
import getpass
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import torch

from data.errors import DataError, one_line_errors, tool_parser
from data.shards import whole_file
from records.run.machine import device_name, version

ABOUT = "about.json"        # the file's first member: what the kernels were compiled for
LARGEST_ABOUT = 10_000      # bytes


def folders() -> dict[str, Path]:
    """Where the three caches are, by the names that they have in the file."""
    def place(variable: str, default: Path) -> Path:
        return Path(os.environ.get(variable) or default)

    temporary, user = Path(tempfile.gettempdir()), getpass.getuser()
    return {"inductor": place("TORCHINDUCTOR_CACHE_DIR", temporary / f"torchinductor_{user}"),
            "triton": place("TRITON_CACHE_DIR", Path.home() / ".triton/cache"),
            "flash": place("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
                           temporary / user / "flash_attention_cute_dsl_cache")}


def about() -> dict[str, str | None]:
    """What kernels are compiled for on this machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {"python": ".".join(map(str, sys.version_info[:2])), "torch": torch.__version__,
            "triton": version("triton"), "flash_attn": version("flash-attn-4"), "device": device_name(device)}


def pack(file: Path) -> tuple[int, int]:
    """Write the caches into `file`; the number of their files, and their bytes."""
    count = size = 0
    facts = json.dumps(about()).encode()
    with whole_file(file) as out, tarfile.open(fileobj=out, mode="w:gz", compresslevel=6) as tar:
        head = tarfile.TarInfo(ABOUT)
        head.size = len(facts)
        tar.addfile(head, io.BytesIO(facts))
        for name, folder in folders().items():
            for path in sorted(folder.rglob("*")):
                if path.is_symlink() or not path.is_file():
                    continue
                try:
                    content = path.read_bytes()
                except FileNotFoundError:       # Another process is at work there.
                    continue
                member = tarfile.TarInfo(f"{name}/{path.relative_to(folder).as_posix()}")
                member.size, member.mode = len(content), path.stat().st_mode & 0o700
                tar.addfile(member, io.BytesIO(content))
                count, size = count + 1, size + len(content)
        if not count:
            raise DataError("the caches are empty; train first, then pack")
    return count, size


def unpack(file: Path) -> tuple[int, int]:
    """Put the files of `file` into this machine's caches; returns how many are new, and how many were there.

    DataError if the kernels are for other versions or another GPU. A file that is there already stays.
    """
    new = old = 0
    with opened(file) as tar:
        require_same(file, tar)
        for member in iter(tar.next, None):
            path = target(member)
            if path.exists():
                old += 1
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(path) as out:
                shutil.copyfileobj(tar.extractfile(member), out)
            os.chmod(path, 0o600 | member.mode & 0o100)
            new += 1
    return new, old


@contextmanager
def opened(file: Path) -> Iterator[tarfile.TarFile]:
    """The file as an archive; DataError if it is none, or not whole."""
    try:
        with tarfile.open(file, "r|gz") as tar:
            yield tar
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: no whole file of `caches pack` ({error})") from None


def require_same(file: Path, tar: tarfile.TarFile) -> None:
    """DataError unless the archive begins with this machine's `about`."""
    first, here = tar.next(), about()
    try:
        if first is None or first.name != ABOUT or not first.isfile() or first.size > LARGEST_ABOUT:
            raise ValueError("it does not begin with about.json")
        made_for = dict(json.load(tar.extractfile(first)))
    except (ValueError, TypeError) as error:
        raise DataError(f"{file}: no file of `caches pack` ({error})") from None
    others = [f"{name} {made_for.get(name)}, here {value}" for name, value in here.items()
              if made_for.get(name) != value]
    if others:
        raise DataError(f"{file}: its kernels are for {'; '.join(others)}. Train here, then pack anew")


def target(member: tarfile.TarInfo) -> Path:
    """Where a file of the archive belongs; DataError for what is no file inside one of the caches."""
    name, *parts = PurePosixPath(member.name).parts
    folder = folders().get(name)
    if not member.isfile() or folder is None:
        raise DataError(f"{member.name!a} is no file of a cache; what came before it was unpacked")
    path = folder.joinpath(*parts)
    if not path.parent.resolve().is_relative_to(folder.resolve()):
        raise DataError(f"{member.name!a} leads out of the cache; what came before it was unpacked")
    return path


def main() -> None:
    parser = tool_parser("records.tools.caches", __doc__)
    parser.add_argument("action", choices=["pack", "unpack"])
    parser.add_argument("file", type=Path, metavar="FILE", help="as kernels.tar.gz")
    with one_line_errors(parser, "file") as options:
        if options.action == "pack":
            count, size = pack(options.file)
            megabytes = options.file.stat().st_size / 1e6
            print(f"{options.file}: {count:,} files of {size / 1e6:,.1f} MB, {megabytes:,.1f} MB packed")
        else:
            new, old = unpack(options.file)
            print(f"{options.file}: {new:,} files unpacked, {old:,} were there already")


if __name__ == "__main__":
    main()
