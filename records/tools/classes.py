"""The class of a run, by the size of its n-gram table: runs are compared with those of their class."""
from records.tools.schema import flatten

CLASSES = {"at most 0.3 G": 300_000_000, "at most 65 G": 65_000_000_000}    # parameters in n-gram tables


def table_parameters(header: dict) -> int | None:
    """Parameters of the n-gram table; of a log without its length all parameters, None if unknown."""
    config = flatten(header["config"])
    rows, width = config.get("ngram_rows"), config.get("head_dim")
    return rows * width if type(rows) is type(width) is int else header.get("parameters")


def table_class(header: dict) -> str:
    """The smallest class by table parameters that a run belongs to; it names retrieval, if that was on."""
    count = table_parameters(header)
    if count is None:       # a foreign log
        return "unknown"
    name = next((name for name, most in CLASSES.items() if count <= most), "open")
    return name + " + retrieval" * any(header["config"].get(name) for name in ("retrieval", "states"))
