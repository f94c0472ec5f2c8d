"""Generated parts of Markdown files: tables, and the text between `<!-- name -->` and `<!-- /name -->`."""
import re

from data.errors import printable
from records.tools.schema import RecordError

WRITTEN_SECTIONS = ("What changed", "Why it works")  # of a record's README


def table(head: list[str], rows: list[list[str]], words: set[int] = {0}) -> str:
    """A Markdown table that a terminal shows well. The columns `words` are aligned left, numbers right."""
    cells = [head, *([plain(str(cell)) for cell in row] for row in rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(head))]
    rule = ["-" * width if i in words else "-" * (width - 1) + ":" for i, width in enumerate(widths)]

    def line(row: list[str]) -> str:
        aligned = [cell.ljust(width) if i in words else cell.rjust(width)
                   for i, (cell, width) in enumerate(zip(row, widths))]
        return "| " + " | ".join(aligned) + " |"

    return "\n".join(line(row) for row in [head, rule, *cells[1:]])


def plain(cell: str) -> str:
    """A cell of a table that can neither end it nor begin a comment or HTML."""
    return printable(cell).replace("\n", " ").replace("|", "\\|").replace("<", "&lt;")


def section(name: str) -> re.Pattern:
    return re.compile(rf"<!-- {name} -->\n(.*?)\n?<!-- /{name} -->", re.S)


def between(text: str, name: str) -> str | None:
    """What stands between the markers; None where there are none."""
    match = section(name).search(text)
    return match[1] if match else None


def marked(name: str, content: str) -> str:
    return f"<!-- {name} -->\n{content}\n<!-- /{name} -->"


def titled(text: str, title: str) -> str | None:
    """The text under the heading `## title`, up to the next heading; None where there is no such heading."""
    match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return match[1].strip() if match else None


def replace_between(text: str, name: str, content: str) -> str:
    if between(text, name) is None:
        raise RecordError(f"no lines <!-- {name} --> and <!-- /{name} -->; put them where the table is to "
                          "stand")
    return section(name).sub(lambda _: marked(name, content), text, count=1)
