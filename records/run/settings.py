"""Settings on a command line: every field of a configuration's dataclass is a flag.

This module knows nothing of the program whose settings these are. It knows four things about a configuration:
the field `preset` names where it began, `layers` is a table that has no flag, `stages` is a table with one
row a stage of training whose columns are flags (`--batch_tokens 1024,2048,3072` gives each of three stages
its value, `--batch_tokens 1024` all of them), and every other field is a flag that takes one value. What a
value may be is the type of its field (kinds.py).
"""
import argparse
import ast
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, replace
from functools import lru_cache
from typing import Annotated, NoReturn, TypeVar, get_type_hints

from records.run.kinds import Between, Misfit, fit, is_names, parts, words

Config = TypeVar("Config")      # a frozen dataclass as described above

NO_FLAG = ("preset", "layers", "stages")
Ranks = Annotated[int, Between(1, 4096)]


class UserError(Exception):
    """Something the person who started the run can mend. One line: what was found, what to do."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """What argparse finds wrong, in one line and without its list of all flags."""
        raise UserError(f"{message} (--help lists all settings; --name=-1 gives a value that begins with -)")


def columns(config: Config) -> dict[str, tuple]:
    """The stage table by column: {"batch_tokens": (1024, 2048, 3072), ...}; {} where there are no stages."""
    stages = getattr(config, "stages", ())
    return {f.name: tuple(getattr(stage, f.name) for stage in stages)
            for f in (fields(stages[0]) if stages else ())}


def defaults(config: Config) -> dict[str, object]:
    """Every setting that has a flag, with its value in `config`; the columns of the stage table come last."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name not in NO_FLAG} | columns(config)


@lru_cache
def hints(table: type) -> dict[str, type]:
    """The kind of each field of a dataclass."""
    return get_type_hints(table, include_extras=True)


def kinds(config: Config) -> dict[str, type]:
    """The kind of every setting that has a flag; for a column, a list of the kind of its field."""
    stages, known = getattr(config, "stages", ()), hints(type(config))
    by_stage = hints(type(stages[0])) if stages else {}
    return {name: kind for name, kind in known.items() if name not in NO_FLAG} | {
        name: tuple[kind, ...] for name, kind in by_stage.items()}


def meanings(table: type) -> dict[str, str]:
    """What the comments above and beside each field of a dataclass say, if its source can be read."""
    found, above, of_section = {}, [], False
    try:
        source = inspect.getsource(table)
    except (OSError, TypeError):
        return {}
    for line in source.splitlines():
        field = re.match(r"    (\w+): [^#]*(?:# (.*))?$", line)
        comment = re.match(r"    # (.*)", line)
        of_section = comment is not None and (of_section or comment[1].startswith("----"))
        if field:
            found[field[1]] = " ".join([*above, *filter(None, [field[2]])])
        above = [*above, comment[1]] if comment and not of_section else []
    return found


def check(config: Config) -> None:
    """UserError if a field of the configuration, of a stage or of a layer is not of its kind."""
    for row in (config, *getattr(config, "stages", ()), *getattr(config, "layers", ())):
        for name, kind in hints(type(row)).items():
            fitted(name, getattr(row, name), kind)


def fitted(name: str, value: object, kind: type, text: str | None = None) -> object:
    """The `value` of the setting `name`, read from `text` if not None; UserError if it is not of its kind."""
    try:
        return fit(value, kind)
    except Misfit as misfit:
        wanted, part = misfit.args
        inside = "" if part is value or (part,) == value else f", not {shown(part)}"
        found = shown(value if text is None else text)
        raise UserError(f"--{name} {found}: expected {wanted}{inside}") from None


def shown(value: object) -> str:
    """A value as on a command line, in one line that is not too long."""
    text = str(value)
    text = text if text.isprintable() and text.strip() else repr(text)
    return text if len(text) <= 100 else f"{text[:50]}...{text[-20:]}"


def flat(config: Config) -> dict[str, object]:
    """The configuration as a dictionary for a log's header, in which the stage table stands as columns."""
    values = asdict(config)
    values.pop("stages", None)
    return values | columns(config)


def change(config: Config, **values: object) -> Config:
    """`dataclasses.replace` that also takes columns of the stage table by name.

    A column has one value for each stage, or one for all.
    """
    stages = values.pop("stages", getattr(config, "stages", ()))
    for name in columns(config):
        if name in values:
            column = values.pop(name)
            column = column * len(stages) if len(column) == 1 else column
            if len(column) != len(stages):
                plural = "s" * (len(column) != 1)
                known = f"there {'is 1 stage' if len(stages) == 1 else f'are {len(stages)} stages'}"
                raise UserError(f"--{name} has {len(column)} value{plural}, but {known}; give one a stage")
            stages = tuple(replace(stage, **{name: value}) for stage, value in zip(stages, column))
    return replace(config, **values, **({"stages": stages} if stages else {}))


def parse(argv: list[str], presets: dict[str, Config], default: str, description: str,
          environment: Mapping[str, str]) -> tuple[Config, dict[str, object]]:
    """The configuration of a command line, and the options that are not settings.

    These options are `timetable`, `explain` and `given`, the names of the settings that were given.

    The configuration begins as a preset (`default` where none is named); `--name value` changes a setting.
    DATA_PATH in the `environment` stands in for `--data_path`, and DISABLE_FP8=1 means `--fp8 none`.
    UserError says what is wrong with a flag or a value.
    """
    first = next(iter(presets))
    # --help shows the values of the preset that would run.
    asked = [after for before, after in zip(argv, argv[1:]) if before == "--preset"] + [
        word.partition("=")[2] for word in argv if word.startswith("--preset=")]
    preset_shown = next((name for name in asked if name in presets), default)
    known, preset_values = kinds(presets[first]), defaults(presets[preset_shown])
    parser = Parser(description=description, allow_abbrev=False, usage="%(prog)s [--SETTING VALUE] ...",
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help=f"one of {', '.join(presets)}; here {default} if none is given",
                        default=default)
    parser.add_argument("--timetable", metavar="RANKS", nargs="?", const="0",
                        help="print when a step communicates on so many ranks (default: as micro-batches), "
                             "then end")
    parser.add_argument("--explain", action="store_true", help="print what the settings amount to, then end")
    said = {}
    if {"-h", "--help"} & {*argv}:
        for table in {type(row) for row in (presets[first], *getattr(presets[first], "stages", ()))}:
            said |= meanings(table)
    group = parser.add_argument_group("settings", f"In brackets: the default of {preset_shown}, and what "
                                      "is allowed. A, B, @names and #numbers: the docstring of `Config`.")
    for name, kind in known.items():
        rule = "" if kind is str else f"; {words(kind)}"
        text = f"{said.get(name, '')} [{preset_values[name]!r}{rule}]"
        group.add_argument(f"--{name}", metavar="VALUE", action="append", help=text.replace("%", "%%"))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name, flags = unknown[0].split("=")[0].lstrip("-"), [*known, "preset", "timetable", "explain"]
        nearest = difflib.get_close_matches(name, flags, n=1, cutoff=0)[0]
        raise UserError(f"unknown setting {shown(repr(unknown[0]))}; the nearest is --{nearest} "
                        "(--help lists all)")
    if given.preset not in presets:
        raise UserError(f"--preset {shown(given.preset)}: choose {', '.join(presets)}")
    config, ranks = presets[given.preset], given.timetable
    texts = {name: getattr(given, name) for name in known if getattr(given, name) is not None}
    # If a flag is given twice, the last value counts, but lists of names add up.
    values = {name: read(name, ",".join(several) if is_names(known[name]) else several[-1], known[name])
              for name, several in texts.items()}
    if "data_path" not in values and environment.get("DATA_PATH"):
        values["data_path"] = environment["DATA_PATH"]
    if environment.get("DISABLE_FP8", "0") not in ("", "0"):
        values["fp8"] = ()
    if ranks not in (None, "0"):
        ranks = read("timetable", ranks, Ranks)
    return change(config, **values), {"timetable": None if ranks is None else int(ranks),
                                      "explain": given.explain, "given": set(values)}


def without(argv: list[str], names: Iterable[str]) -> list[str]:
    """A command line without the flags of these settings and their values."""
    flags = {f"--{name}" for name in names}
    return [word for before, word in zip(["", *argv], argv)
            if before not in flags and word.partition("=")[0] not in flags]


def read(name: str, text: str, kind: type) -> object:
    """The value of the setting `name` that a flag's `text` stands for; UserError if it is not of its kind.

    A list is written `head,mlp` or `1,2`, and `none` or an empty text is the empty list.
    """
    base, _, inside = parts(kind)
    if is_names(kind):
        listed = text.strip().strip("()[]")
        value = () if listed in ("", "none") else tuple(x.strip() for x in listed.split(","))
    elif base is str:
        value = text
    else:
        try:
            words = {"none": (), "": ()} if inside else {"true": True, "false": False}
            value = words.get(text.strip().lower())
            value = ast.literal_eval(text.strip()) if value is None else value
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = text
        value = (value,) if inside and type(value) in (int, float) else value
    return fitted(name, value, kind, text)


def split_values(text: str) -> list[str]:
    """"a,(1,2)" -> ["a", "(1,2)"]: commas inside brackets belong to a value."""
    values, depth = [""], 0
    for letter in text:
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and not depth:
            values.append("")
        else:
            values[-1] += letter
    return values
