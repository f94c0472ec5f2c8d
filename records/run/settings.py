"""Settings on a command line: every field of a configuration's dataclass is a flag.

This module knows nothing of the program whose settings these are. It knows four things about a configuration:
the field `preset` names where it began, `layers` is a table that has no flag, `stages` is a table with one
row a stage of training whose columns are flags (`--batch_tokens 1024,2048,3072` gives each of three stages
its value), and every other field is a flag that takes one value.
"""
import argparse
import ast
import difflib
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import TypeVar

Config = TypeVar("Config")      # a frozen dataclass as described above

NO_FLAG = ("preset", "layers", "stages")


class UserError(Exception):
    """Something the person who started the run can mend. One line: what was found, what to do."""


def columns(config: Config) -> dict[str, tuple]:
    """The stage table by column: {"batch_tokens": (1024, 2048, 3072), ...}; {} where there are no stages."""
    stages = getattr(config, "stages", ())
    return {f.name: tuple(getattr(stage, f.name) for stage in stages)
            for f in (fields(stages[0]) if stages else ())}


def defaults(config: Config) -> dict[str, object]:
    """Every setting that has a flag, with its value in `config`; the columns of the stage table come last."""
    return {f.name: getattr(config, f.name) for f in fields(config)
            if f.name not in NO_FLAG} | columns(config)


def flat(config: Config) -> dict[str, object]:
    """The configuration as a dictionary for a log's header, in which the stage table stands as columns."""
    values = asdict(config)
    values.pop("stages", None)
    return values | columns(config)


def change(config: Config, **values: object) -> Config:
    """`dataclasses.replace` that also takes columns of the stage table by name: one value for each stage."""
    stages = values.pop("stages", getattr(config, "stages", ()))
    for name in columns(config):
        if name in values:
            column = values.pop(name)
            if len(column) != len(stages):
                plural = "s" * (len(column) != 1)
                known = f"there {'is 1 stage' if len(stages) == 1 else f'are {len(stages)} stages'}"
                raise UserError(f"--{name} has {len(column)} value{plural}, but {known}; give one a stage")
            stages = tuple(replace(stage, **{name: value}) for stage, value in zip(stages, column))
    return replace(config, **values, **({"stages": stages} if stages else {}))


def parse(argv: list[str], presets: dict[str, Config], default: str, description: str,
          environment: Mapping[str, str]) -> tuple[Config, dict[str, object]]:
    """The configuration of a command line, and the options that are not settings.

    They are `timetable`, `explain` and `given`, the names of the settings that were given.

    A preset (`default` where none is named), then `--name value` for any setting. Of the `environment`
    DATA_PATH stands in for `--data_path`, and DISABLE_FP8=1 means `--fp8 none`. UserError says what is wrong
    with a flag or a value.
    """
    shown = next(iter(presets))
    settings = defaults(presets[shown])
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", help=f"one of {', '.join(presets)}", default=default)
    parser.add_argument("--timetable", metavar="RANKS", nargs="?", const="0",
                        help="print when a step communicates on so many ranks (default: as micro-batches), "
                             "then end")
    parser.add_argument("--explain", action="store_true", help="print what the settings amount to, then end")
    for name, value in settings.items():
        parser.add_argument(f"--{name}", metavar="VALUE", action="append",
                            help=f"default of {shown}: {value!r}".replace("%", "%%"))
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name, known = unknown[0].split("=")[0].lstrip("-"), [*settings, "preset", "timetable", "explain"]
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)[0]
        raise UserError(f"unknown setting {unknown[0]!r}; the nearest is --{nearest} (--help lists all)")
    if given.preset not in presets:
        raise UserError(f"--preset {given.preset}: choose {', '.join(presets)}")
    config, ranks = presets[given.preset], given.timetable
    if ranks is not None and not ranks.isdecimal():
        raise UserError(f"--timetable {ranks}: expected a number of ranks")
    texts = {name: getattr(given, name) for name in settings if getattr(given, name) is not None}
    # Of a flag that is given twice the last one counts, but lists of names add up.
    values = parse_values({name: ",".join(several) if is_names(settings[name]) else several[-1]
                           for name, several in texts.items()}, config)
    if "data_path" not in values and environment.get("DATA_PATH"):
        values["data_path"] = environment["DATA_PATH"]
    if environment.get("DISABLE_FP8", "0") not in ("", "0"):
        values["fp8"] = ()
    return change(config, **values), {"timetable": None if ranks is None else int(ranks),
                                      "explain": given.explain, "given": set(values)}


def parse_values(texts: dict[str, str], config: Config) -> dict[str, object]:
    """Values for `change` from texts by setting. Each value of a stage column is of its type in `config`."""
    known, by_stage = defaults(config), columns(config)
    values = {name: parse_value(name, text, known[name]) for name, text in texts.items()}
    for name in values.keys() & by_stage.keys():
        values[name] = tuple(convert(name, texts[name], value, by_stage[name][0]) for value in values[name])
    return values


def parse_value(name: str, text: str, default: object) -> object:
    """The `text` of a flag as a value of the type that `default` has.

    A list of names is written `head,mlp`, and `none` or an empty text is the empty list.
    """
    if isinstance(default, str):
        return text
    try:
        value = {"true": True, "false": False}.get(text.lower(), None)
        value = ast.literal_eval(text) if value is None else value
    except (ValueError, SyntaxError):
        value = text
    if is_names(default) and isinstance(value, str):
        listed = value.strip().strip("()[]")
        return () if listed in ("", "none") else tuple(x.strip() for x in listed.split(","))
    if isinstance(default, tuple) and isinstance(value, (int, float)) and not isinstance(value, bool):
        value = (value,)
    return convert(name, text, value, default)


def is_names(default: object) -> bool:
    """Whether a setting with this default is a list of names."""
    return isinstance(default, tuple) and all(isinstance(x, str) for x in default)


def convert(name: str, text: str, value: object, default: object) -> object:
    """`value` as the type of `default`; UserError if it is of another. A whole number will do for a float."""
    if isinstance(default, float) and type(value) is int:
        return float(value)
    if type(value) is not type(default):
        wanted = f"a value like {default!r}"
        if is_names(default):
            wanted = "names with commas between them, or none"
        raise UserError(f"--{name} {text}: expected {wanted}")
    return value


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
