"""The page and the tables of the records: `index.html`, and the tables in all READMEs."""
import base64
import difflib
import json
from collections import defaultdict
from datetime import date
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from data.shards import read_regular
from records.tools import markdown
from records.tools.classes import table_class
from records.tools.compare import compare, difference_text
from records.tools.plots import figures, page_svg, progress_figure
from records.tools.pool import common_texts, devices_text, list_clashes, number_text, scores_text
from records.tools.record import Record, is_proven, load_all, result_table, significance_line, write_text
from records.tools.schema import RecordError, flatten
from records.tools.stats import SIGNIFICANCE

MARKER = "records"
HEAD = ["record", "date", "time (s)", "loss (nats/token)", "target", "n", "p", "other texts", "n-gram table",
        "machine", "preset", "by"]
LEGEND = ("Mean ± standard deviation over n runs; p of the one-sided t-test of \"the mean loss is above the "
          "target\", for n > 1.\nThe class of the n-gram table goes by its parameters: at most 0.3 G, at "
          "most 65 G, or open.\nRuns with --retrieval are classes of their own.\n"
          "Other texts, -: scored on the validation text alone.")
# The browser runs and fetches nothing that others wrote into a record, even where an escape was forgotten.
POLICY = ("default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
          "form-action 'none'")
STYLE_SHEET = Path(__file__).with_name("page.css")


def machine(record: Record) -> str:
    return devices_text(record.data["hardware"]) or "unknown machine"


def row(record: Record) -> list[str]:
    """The cells of HEAD for one record."""
    data = record.data

    def spread(mean: str, deviation: str, digits: int) -> str:
        known = data[deviation] is not None
        return f"{data[mean]:.{digits}f}" + (f" ± {data[deviation]:.{digits}f}" if known else "")

    return [data["date"], spread("mean_time_s", "standard_deviation_time_s", 2),
            spread("mean_loss", "standard_deviation_loss", 4), number_text(data["target"], "g"),
            str(len(data["runs"])), number_text(data["p_value"], ".2g"),
            scores_text(data["scores"]) if data.get("scores") else "-", table_class(record.runs[0].header),
            machine(record), data["preset"],
            ", ".join(data["contributors"]) or "-"]


def readme_table(records: list[Record]) -> str:
    """The table of records in records/README.md, newest first; it links to the folders."""
    if not records:
        return "No records yet: `python -m records new` makes the first one of finished runs."
    rows = [[f"[{record.data['title']}]({record.name})", *row(record)]
            for record in reversed(records)]
    words = {0, *range(HEAD.index("other texts"), len(HEAD))}
    return markdown.table(HEAD, rows, words) + "\n\n" + LEGEND


def write(root: Path) -> tuple[Path, list[str]]:
    """Write `root/index.html` and refresh the tables; returns the page and what could not be refreshed."""
    records, notes = load_all(root), []
    for record in records:
        table = result_table(record.data, record.runs, record.second)
        refresh(record.folder / "README.md", "result", table, notes)
    refresh(root / "README.md", MARKER, readme_table(records), notes)
    page = root / "index.html"
    write_text(page, html_page(records))
    return page, notes


def refresh(path: Path, name: str, content: str, notes: list[str]) -> None:
    try:
        old = read_regular(path, mode="r", encoding="utf-8")
        new = markdown.replace_between(old, name, content)
    except (OSError, ValueError) as error:
        notes.append(f"{path}: not refreshed: {error}")
    else:
        write_text(path, new)


def html_page(records: list[Record]) -> str:
    """The whole page: no script, no network, pictures as inline SVG that follows the colour scheme."""
    rows = [[f'<a href="#{record.name}">{escape(record.data["title"])}</a>', *map(escape, row(record))]
            for record in reversed(records)]
    if records:
        body = [html_table(HEAD, rows, "records"), f"<p>{LEGEND}</p>", "<h2>The best time over dates</h2>",
                figure_html(page_svg(progress_figure(progress(records)), "progress"),
                            "The best mean time of the records whose mean loss is below the target (p < "
                            f"{SIGNIFICANCE:g})")]
    else:
        body = ["<p>No records yet: <code>python -m records new</code> makes the first one of finished "
                "runs.</p>"]
    by_name = {record.name: record for record in records}
    body += [record_html(record, by_name.get(record.data["parent"])) for record in reversed(records)]
    # Without an icon the browser would ask a server for one.
    icon = base64.b64encode(b'<svg xmlns="http://www.w3.org/2000/svg"/>').decode()
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<title>Records</title>\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n'
            f'<style>\n{STYLE_SHEET.read_text("utf-8")}</style>\n'
            "</head>\n<body>\n<main>\n<h1>Records</h1>\n" + "\n".join(body) + "\n</main>\n</body>\n</html>\n")


def progress(records: list[Record]) -> dict[str, list[tuple[date, float, bool]]]:
    """A series for each machine, preset, class, target and set of texts: times compare only within it."""
    series = defaultdict(list)
    for record in records:
        name = (f"{machine(record)}, {record.data['preset']}, {table_class(record.runs[0].header)}, "
                f"target {number_text(record.data['target'], 'g')}"
                + ", on one text" * (not record.data.get("scores")))
        day = date.fromisoformat(record.data["date"])
        series[name].append((day, record.data["mean_time_s"], is_proven(record.data)))
    return dict(series)


def record_html(record: Record, parent: Record | None) -> str:
    """One record's section: its result, curves, settings, environment and differences from its parent."""
    data, header = record.data, record.runs[0].header
    pictures = [figure_html(page_svg(figure, f"{record.name}-{name}"), CAPTIONS[name])
                for name, figure in figures({data["title"]: record.runs}).items()]
    texts = common_texts(record.runs)
    runs = [[str(run.seed), f"{run.loss:.4f}", *(f"{run.scores[text]:.4f}" for text in texts),
             f"{run.time_s:.3f}"] for run in record.runs]
    environment = {"machine": machine(record), "driver": data["driver"], **data["versions"],
                   "commit": data["commit"], "attention": header["attention"], "fp8": header["fp8"],
                   "parameters": f"{header['parameters']:,}",
                   "command": " ".join(map(str, header["command"])), "sources": data["sources"]}
    return "\n".join([
        f'<section id="{record.name}">', f"<h2>{escape(data['title'])}</h2>",
        f"<p>{escape(', '.join([data['date'], *data['contributors']]))}. "
        f"{escape(significance_line(data))}</p>",
        *words_html(record.readme),
        html_table(["seed", "loss (nats/token)", *map(escape, texts), "time (s)"], runs),
        '<div class="figures">', *pictures,
        "</div>", "<h3>Differences from its parent</h3>", parent_html(record, parent),
        fold("Environment", pairs_html(environment)), fold("Settings", pairs_html(flatten(header["config"]))),
        "</section>"])


def words_html(readme: str) -> list[str]:
    """What changed and why it works, by the record's README. HTML among its Markdown is shown as text."""
    reader = MarkdownIt("commonmark", {"html": False}).enable("table")
    return [f"<h3>{title}</h3>\n{reader.render(markdown.titled(readme, title) or '')}"
            for title in markdown.WRITTEN_SECTIONS]


CAPTIONS = {"loss-time": "Loss against time", "loss-tokens": "Loss against tokens",
            "final-loss": "The last loss of each run", "step-time": "Time of each step",
            "schedule": "Schedule"}


def parent_html(record: Record, parent: Record | None) -> str:
    """Loss, time, settings, environment and source files against the parent record's."""
    if parent is None:
        alone = record.data["parent"] is None
        return "<p>No parent.</p>" if alone else "<p>Its parent is not among these records.</p>"
    result = compare(parent.runs, record.runs)
    settings = {key: pair for key, pair in result["configuration"].items() if key != "sources"}
    found = {"loss": difference_text(result["loss"], 4, "nats/token"),
             "time": difference_text(result["time_s"], 3, "s"),
             "settings": list_clashes(settings, 20) or "the same",
             "sources": changed_sources(parent, record)}
    notes = "".join(f"<p><strong>{escape(note)}</strong></p>" for note in result["notes"])
    title = escape(parent.data["title"])
    return f'<p>Against <a href="#{parent.name}">{title}</a>:</p>{pairs_html(found)}{notes}'


def changed_sources(before: Record, after: Record) -> str:
    """"train_gpt.py +12 -3" for each file that differs."""
    try:
        old, new = before.sources(), after.sources()
    except RecordError as error:
        return f"unknown: {error}"
    changed = []
    for path in sorted(old.keys() | new.keys()):
        if old.get(path) != new.get(path):
            lines = [files.get(path, b"").decode(errors="replace").splitlines() for files in (old, new)]
            diff = list(difflib.unified_diff(*lines, n=0))[2:]
            changed.append(f"{path} +{sum(line[0] == '+' for line in diff)} "
                           f"-{sum(line[0] == '-' for line in diff)}")
    return ", ".join(changed) or "the same"


def html_table(head: list[str], rows: list[list[str]], kind: str = "") -> str:
    """A table of ready HTML cells; each cell names its column, which a phone shows instead of the head."""
    cells = ["".join(f'<td data-name="{name}">{cell}</td>' for name, cell in zip(head, row)) for row in rows]
    return (f'<table class="{kind}"><thead><tr>' + "".join(f"<th>{name}</th>" for name in head)
            + "</tr></thead><tbody>"
            + "".join(f"<tr>{row}</tr>" for row in cells) + "</tbody></table>")


def pairs_html(values: dict) -> str:
    def text(value: object) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    pairs = (f"<dt>{escape(key)}</dt><dd>{escape(text(value))}</dd>" for key, value in values.items())
    return f"<dl>{''.join(pairs)}</dl>"


def fold(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"


def figure_html(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"
