"""FineWeb, tokenised with GPT-2's vocabulary: fetches as many public shards as a run needs, and checks them.

    python -m data.fineweb                        validation and the speedrun's 5 training shards (1.2 GB)
    python -m data.fineweb --shards 103           everything: 10 billion tokens (21 GB)
    python -m data.fineweb --out /big/disk/fineweb && DATA_PATH=/big/disk/fineweb ./run.sh

Run again at any time: what is whole stays, what is missing or damaged is fetched. A cut connection is resumed
where it broke; a killed run begins again at the shards that were not finished. HF_ENDPOINT chooses a mirror;
shards that the cache in HF_HOME holds are copied from there. Without a network, run this on a machine that
has one, copy the folder over and set DATA_PATH.

A shard is fetched into a hidden folder and appears under its name only after these checks: magic, version,
number of tokens against size, ids inside the vocabulary, a document start, and the SHA-256 that the hub
publishes for it. The SHA-256 of what arrived goes into manifest.json, and each later run compares it. A shard
brought by other means, with no manifest, passes on its format alone: then nothing shows that an id was
changed to another one of the vocabulary.
"""
import os
import re
import shutil
import sys
from collections.abc import Callable
from multiprocessing.pool import ThreadPool
from pathlib import Path
from threading import Event
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from tqdm import tqdm

from data.errors import NO_SPACE, DataError, one_line_errors, printable, tool_parser, whole
from data.shards import Manifest, ShardError, document_starts, incoming, open_shard, sha256_of

DATASET = "kjj0/fineweb10B-gpt2"
FOLDER = Path(__file__).parent / "shards" / "fineweb"
VOCAB_SIZE, BOS = 50257, 50256
ALL_SHARDS = 103  # for training
TRIES = 4  # of each request
FIRST_WAIT_S, LONGEST_WAIT_S = 1, 60  # between them: 1, 2 and 4 seconds, or as long as the hub asks for

# The preset "speedrun" wants 338.8 M tokens of sequences: 55.5 M cut at 896 tokens, the rest at 2,048. The
# tails of longer documents are not used: on a corpus like FineWeb 61% of the tokens are left at the first cut
# and 79% at the second (measured on 13,373 documents with `python -m data.peek`). So the preset takes 448 M
# tokens of shards: 5 shards of 100 M.
SPEEDRUN_SHARDS = 5


def names_of(shards: int) -> list[str]:
    return ["fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, shards + 1))]


def check(path: Path) -> dict:
    """Facts about a shard for the manifest, after all checks that need nothing but the file.

    ShardError names the fault.
    """
    tokens = open_shard(path, VOCAB_SIZE)
    documents = len(document_starts(tokens, BOS))
    if not documents:
        raise ShardError(f"{path}: no document starts in it (no token {BOS}); it is not a GPT-2 shard or is "
                         "damaged")
    return {"tokens": len(tokens), "documents": documents, "sha256": sha256_of(path)}


def is_whole(path: Path, manifest: Manifest) -> dict | None:
    """Facts about a shard that is in the folder and as recorded; None if it is missing or bad.

    A bad shard is named and removed.
    """
    if not path.exists():
        return None
    try:
        facts = check(path)
        recorded = manifest.shards.get(path.name, facts)
        if facts["sha256"] != recorded["sha256"]:
            raise ShardError(f"{path}: its SHA-256 is not the one in manifest.json: it has changed since it "
                             "was checked")
        return recorded
    except ShardError as error:
        tqdm.write(f"{error}; removed, to be fetched again", sys.stderr)
        path.unlink()
        return None


class Published(NamedTuple):
    """What the hub says about a file."""
    size: int  # bytes
    sha256: str | None  # None if the hub does not keep the file in its store for large files
    commit: str


Result = TypeVar("Result")


class Hub:
    """The dataset on the hub.

    The methods are called from several threads; once `stop` is set they end at the next chunk.
    """

    def __init__(self, staging: Path, retry_command: str) -> None:
        try:
            import huggingface_hub
            huggingface_hub.logging.set_verbosity_error()  # it warns of each retry; so do we, in one line
            place = urlsplit(huggingface_hub.constants.ENDPOINT)
        except ImportError:
            raise DataError("huggingface_hub is not installed: pip install -r requirements.txt")
        except ValueError as error:     # It reads its variables as it is imported.
            raise DataError(f"huggingface_hub: {error}; mend or unset the variables HF_…") from None
        if place.scheme not in ("http", "https") or not place.hostname:
            raise DataError(f"HF_ENDPOINT={place.geturl()} is no address like https://huggingface.co")
        self.client, self.staging, self.retry_command = huggingface_hub, staging, retry_command
        self.stop = Event()

    def published(self, name: str, revision: str = "main") -> Published:
        """Size, SHA-256 and commit of a file, or DataError."""
        def ask(_: bool) -> Published:
            facts = self.client.get_hf_file_metadata(
                self.client.hf_hub_url(DATASET, name, repo_type="dataset", revision=revision))
            commit = facts.commit_hash or revision
            if commit != "main" and not re.fullmatch("[0-9a-f]{40}", commit):
                raise ValueError(f"{commit!r} is no commit")  # the client would make a path of it
            sha256 = facts.etag if re.fullmatch("[0-9a-f]{64}", facts.etag or "") else None
            return Published(facts.size or 0, sha256, commit)
        return self.persist(name, ask)

    def fetch(self, name: str, expected: Published, bar: tqdm) -> dict:
        """Bring a file into the staging folder and check it; its facts. DataError after TRIES."""
        def bring(discard_cache: bool) -> dict:
            counter = self.counter_class(bar)
            try:
                path = self.client.hf_hub_download(DATASET, name, repo_type="dataset",
                                                   revision=expected.commit, local_dir=self.staging,
                                                   force_download=discard_cache, tqdm_class=counter)
                facts = check(Path(path))
                if expected.sha256 not in (None, facts["sha256"]):
                    raise ShardError(f"{path}: its SHA-256 is not the one that the hub publishes: damaged on "
                                     "the way")
            except BaseException:
                bar.update(-counter.counted)
                raise
            bar.update(expected.size - counter.counted)  # what was in the cache is not counted by the client
            return {**facts, "commit": expected.commit}
        return self.persist(name, bring)

    def persist(self, name: str, request: Callable[[bool], Result]) -> Result:
        """`request(False)`, tried again if it fails in a way that may pass; with True once bad data came."""
        bad = False
        for tried in range(1, TRIES + 1):
            wait_s = FIRST_WAIT_S * 2 ** (tried - 1)
            try:
                return request(bad)
            except ShardError as error:
                bad, reason = True, str(error).replace(f"{self.staging / name}: ", "")
            # The client raises its HTTP library's own classes, other ones in each version.
            except Exception as error:
                if self.stop.is_set() or (isinstance(error, OSError) and error.errno in NO_SPACE):
                    raise
                cause = root_cause(error)
                reason = f"{type(cause).__name__}: {(str(cause).splitlines() or [''])[0]}"
                answer = getattr(cause, "response", None)
                status = getattr(answer, "status_code", 500)
                if 400 <= status < 500 and status not in (408, 429):  # refused: it would be so again
                    break
                wished = getattr(answer, "headers", {}).get("Retry-After", "")
                wait_s = max(wait_s, min(int(wished), LONGEST_WAIT_S) if wished.isdecimal() else 0)
            if tried < TRIES:
                tqdm.write(printable(f"{name}: {reason}; trying again ({tried + 1} of {TRIES})"), sys.stderr)
                if self.stop.wait(wait_s):
                    break
        raise DataError(f"{name} cannot be had from {self.client.constants.ENDPOINT} ({reason}). If there is "
                        f"no network here, run `{self.retry_command}` where there is one, copy its folder to "
                        "this machine and set DATA_PATH to that; HF_ENDPOINT chooses a mirror")

    def counter_class(self, bar: tqdm) -> type[tqdm]:
        """A progress bar for the client to make: its instances add their bytes to `bar` and show nothing."""
        stop = self.stop

        class Counter(tqdm):
            counted = 0  # bytes, of all instances together: the client may make one for each attempt

            def __init__(self, *_, **__) -> None:
                super().__init__(disable=True)

            def update(self, n: int = 1) -> None:
                if stop.is_set():
                    raise DataError("stopped")
                Counter.counted += n
                bar.update(n)

            def update_transfer(self, n: int = 1) -> None:  # bytes on the wire, which the client counts apart
                pass

            def set_transfer_postfix_str(self, *_, **__) -> None:
                pass
        return Counter


def root_cause(error: BaseException) -> BaseException:
    """What the client's general errors were raised from: the connection's or the server's own error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def fetch(folder: Path, shards: int, jobs: int) -> Manifest:
    """Fill `folder` with the validation shard and the first `shards` training shards, all checked."""
    names = names_of(shards)
    with incoming(folder) as staging, ThreadPool(jobs) as pool:  # its threads do not keep the process alive
        manifest = Manifest(folder)
        for name, facts in zip(names, pool.imap(lambda name: is_whole(folder / name, manifest), names)):
            if facts:
                manifest.record(**{name: facts})
        missing = [name for name in names if not (folder / name).exists()]
        if not missing:
            return manifest
        hub = Hub(staging, f"python -m data.fineweb --shards {shards}")
        commit = hub.published(missing[0]).commit
        published = dict(zip(missing, pool.imap(lambda name: hub.published(name, commit), missing)))
        size = sum(facts.size for facts in published.values())
        if size > (free := shutil.disk_usage(folder).free):
            raise DataError(f"{folder}: {len(missing)} shards need {size / 1e9:.1f} GB and {free / 1e9:.1f} "
                            "GB are free; free some or choose another folder with --out")
        with tqdm(total=size, unit="B", unit_scale=True, disable=None) as bar:
            def fetch_one(name: str) -> tuple[str, dict]:
                return name, hub.fetch(name, published[name], bar)

            try:
                for name, facts in pool.imap_unordered(fetch_one, missing):
                    manifest.record(**{name: facts})  # first: no shard stands there without its SHA-256
                    os.replace(staging / name, folder / name)
                    tqdm.write(f"{name}: {facts['tokens']:,} tokens, {facts['documents']:,} documents",
                               sys.stderr)
            finally:
                hub.stop.set()
    return manifest


def main() -> None:
    parser = tool_parser("data.fineweb", __doc__)
    parser.add_argument("--shards", type=whole(1, ALL_SHARDS), default=SPEEDRUN_SHARDS, metavar="N",
                        help=f"training shards of 100 M tokens (default: {SPEEDRUN_SHARDS}, what the "
                             "speedrun takes)")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR",
                        help="default: data/shards/fineweb")
    parser.add_argument("--jobs", type=whole(1, 64), default=4, metavar="N",
                        help="shards fetched at the same time (default: 4)")
    with one_line_errors(parser) as arguments:
        manifest = fetch(arguments.out, arguments.shards, arguments.jobs)
        tokens = sum(manifest.shards[name]["tokens"] for name in names_of(arguments.shards))
        print(f"{arguments.out}: the validation shard and {arguments.shards} training shards, all checked, "
              f"{tokens / 1e6:,.1f} M tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
