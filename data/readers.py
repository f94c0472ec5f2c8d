"""From files, folders and standard input to documents, one at a time, in the same order on every machine."""
import codecs
import gzip
import json
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from data.errors import DataError

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".parquet": "parquet"}
# What separates documents in plain text, and the bytes then stripped from both ends of each.
SEPARATORS = {"file": (None, b""), "line": (re.compile(rb"\n"), b"\r\n"),
              "blank": (re.compile(rb"\n(?:[ \t\r]*\n)+"), b"\r\n"), "nul": (re.compile(rb"\0"), b"")}
BLOCK = 1 << 20
MAX_DOCUMENT = 1 << 26  # bytes; bounds the memory that one document takes


class Documents:
    """The documents of `inputs` (files, folders, "-" for standard input): iterating gives each one's bytes.

    `kind` ("text", "jsonl", "parquet") overrides the endings of names; `split` (a key of SEPARATORS) says
    what separates documents in plain text; `field` is the field or column that holds the text; `utf8`: "any"
    takes bytes as they are, "strict" refuses what is not UTF-8, "replace" puts U+FFFD there. DataError
    names the file and the place.
    """

    def __init__(self, inputs: list[str], kind: str | None = None, split: str = "file", field: str = "text",
                 utf8: str = "strict") -> None:
        self.kind, self.split, self.field, self.utf8 = kind, split, field, utf8
        self.files = [file for name in inputs for file in self.find(name)]
        # Bytes on disk, of which a progress bar shows how many were read.
        self.total = None if "-" in self.files else sum(os.path.getsize(f) for f in self.files)
        self.position = 0  # bytes read so far, for a progress bar

    def find(self, name: str) -> list[str]:
        """The files of an input, sorted: in a folder all of known format (or `kind`) but hidden ones."""
        path = Path(name)
        if name == "-" or path.is_file():
            if self.kind or name == "-" or file_format(name):
                return [name]
            raise DataError(f"{name}: cannot tell the format from the name; say --format text, jsonl or "
                            "parquet")
        if not path.is_dir():
            raise DataError(f"{name}: no such file or folder")
        files = (p for p in path.rglob("*")
                 if not any(part.startswith(".") for part in p.relative_to(path).parts))
        found = [str(p) for p in sorted(files) if p.is_file() and (self.kind or file_format(p.name))]
        if not found:
            raise DataError(f"{name}: holds no {', '.join(FORMATS)} (nor .gz or .zst of these); for other "
                            "names say --format")
        return found

    def __iter__(self) -> Iterator[bytes]:
        for name in self.files:
            before = self.position
            try:
                with open(sys.stdin.fileno() if name == "-" else name, "rb", closefd=name != "-") as file:
                    for number, document in enumerate(self.read(name, file), 1):
                        self.position = self.position + len(document) if name == "-" else before + file.tell()
                        if document:
                            yield self.check(document, f"{name}, document {number}")
                if name != "-":  # a parquet file is not read from start to end
                    self.position = before + os.path.getsize(name)
            except (EOFError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno:
                    raise
                raise DataError(f"{name}: cannot be read ({error}); it is damaged or incomplete")

    def read(self, name: str, file: BinaryIO) -> Iterator[bytes]:
        """The documents of one open file."""
        kind = self.kind or file_format(name) or "text"
        stream = decompressed(file, Path(name).suffix.lower())
        if kind == "parquet":
            yield from read_parquet(name, seekable(stream), self.field)
        elif kind == "jsonl":
            lines = split_stream(name, stream, "line")
            yield from (json_field(line, self.field, f"{name}:{number}")
                        for number, line in enumerate(lines, 1))
        else:
            yield from split_stream(name, stream, self.split)

    def check(self, document: bytes, where: str) -> bytes:
        """The document, if it is text as `utf8` asks for."""
        if self.utf8 == "any":
            return document
        try:
            codecs.utf_8_decode(document, "strict", True)
            return document
        except UnicodeDecodeError as error:
            if self.utf8 == "replace":
                return document.decode(errors="replace").encode()
            raise DataError(f"{where}: byte {error.start:,} is not UTF-8 ({document[error.start]:#04x}); "
                            "convert the file, or use --replace-invalid to put U+FFFD there, or --bytes to "
                            "take bytes as they are")


def file_format(name: str) -> str | None:
    """The value of FORMATS for the ending of the name before .gz or .zst, in any case; None for others."""
    return FORMATS.get(Path(re.sub(r"\.(gz|zst)$", "", name.lower())).suffix)


def arrow():
    """pyarrow, needed only for parquet and zstandard."""
    try:
        import pyarrow.parquet
        return pyarrow
    except ImportError:
        raise DataError("pyarrow is not installed, which .parquet and .zst need: pip install -r "
                        "requirements.txt")


def decompressed(file: BinaryIO, suffix: str) -> BinaryIO:
    """`file`, read through the decompressor that the suffix of its name asks for."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    return arrow().CompressedInputStream(file, "zstd") if suffix == ".zst" else file


def seekable(stream: BinaryIO) -> BinaryIO:
    """`stream`, copied to an unnamed file if it cannot go back, since Parquet is read from its end."""
    # Gzip can go back, but only by reading again from the start.
    if stream.seekable() and not isinstance(stream, gzip.GzipFile):
        return stream
    copy = tempfile.TemporaryFile()
    shutil.copyfileobj(stream, copy, BLOCK)
    copy.seek(0)
    return copy


def split_stream(name: str, stream: BinaryIO, split: str) -> Iterator[bytes]:
    """The documents between the stream's separators, or all of it as one. Memory holds one at a time."""
    separator, strip = SEPARATORS[split]
    rest = b""
    while block := stream.read(BLOCK):
        rest += block
        if separator:
            body = rest.rstrip(b" \t\r\n")  # a separator at the end of the block may go on in the next
            *documents, last = separator.split(body)
            yield from (document.strip(strip) for document in documents)
            rest = last + rest[len(body):]
        if len(rest) > MAX_DOCUMENT:
            raise DataError(f"{name}: a document of more than {MAX_DOCUMENT >> 20} MiB; say with --split "
                            "what separates documents (line, blank, nul), or split the file")
    yield from (document.strip(strip) for document in (separator.split(rest) if separator else [rest]))


def json_field(line: bytes, field: str, where: str) -> bytes:
    """The text in a field of one line of JSON; empty for an empty line or a null."""
    if not line.strip():
        return b""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error})")
    if not isinstance(record, dict) or field not in record:
        found = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}"
        raise DataError(f"{where}: no field {field!r} (found: {found}); name the one that holds the text "
                        "with --field")
    text = record[field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is a {type(text).__name__}, not text; choose another with "
                        "--field")
    # Half a surrogate pair has no UTF-8: its three bytes go on to the check of the document, which reports or
    # replaces it.
    return (text or "").encode(errors="surrogatepass")


def read_parquet(name: str, file: BinaryIO, field: str) -> Iterator[bytes]:
    """The texts of a column of strings, a few rows at a time."""
    pyarrow = arrow()
    try:
        table = pyarrow.parquet.ParquetFile(file)
        columns = {column.name: column.type for column in table.schema_arrow}
        if field not in columns:
            raise DataError(f"{name}: no column {field!r} (found: {', '.join(columns)}); "
                            "name the one that holds the text with --field")
        kind = columns[field]
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise DataError(f"{name}: column {field!r} is {kind}, not text; choose another with --field")
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for text in batch.column(0).cast(pyarrow.large_binary()):
                yield text.as_py() or b""
    except pyarrow.ArrowException as error:
        raise DataError(f"{name}: not a whole parquet file ({str(error).splitlines()[0]})")
