"""A command line becomes a configuration: of made-up settings, since this part does not know the program."""
from dataclasses import dataclass
from typing import Annotated

import pytest

from records.run.kinds import Between, Misfit, OneOf, Positive, Share, fit, words
from records.run.settings import UserError, change, check, flat, meanings, parse, read, split_values

Part = Annotated[str, OneOf(("head", "attention", "mlp"))]


@dataclass(frozen=True)
class Layer:
    wide: bool = False


@dataclass(frozen=True)
class Stage:
    batch_tokens: Positive      # tokens a step
    windows: tuple[int, int]
    lr_scale: float
    multi_token: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Config:
    preset: str = "small"
    data_path: str = "here"
    steps: Positive = 30        # of all stages
    # ---- A section, which says nothing
    # of the field below it.

    # What a learning rate is,
    # in 100% plain words.
    lr: float = 0.5             # 0: none
    smear: bool = True
    lengths: tuple[int, ...] = (2, 3)
    fp8: tuple[Part, ...] = ("head", "mlp")
    reference: tuple[str, ...] = ()
    limit: int | None = None
    layers: tuple[Layer, ...] = (Layer(), Layer(wide=True))
    stages: tuple[Stage, ...] = (Stage(64, (1, 3), 1.0, ((1, 1), (0.5, 0.0))),
                                 Stage(128, (3, 7), 1.5, ((1, 1),)))


PRESETS = {"small": Config(), "large": Config(preset="large", steps=90)}


def parsed(*argv: str, **environment: str) -> Config:
    return parse(list(argv), PRESETS, "small", "Made up.", environment)[0]


def test_every_field_is_a_flag():
    assert parsed() == PRESETS["small"] and parsed("--preset", "large") == PRESETS["large"]
    config = parsed("--steps", "7", "--lr=1", "--smear", "false", "--lengths", "4", "--data_path", "there")
    assert (config.steps, config.lr, config.smear, config.lengths, config.data_path) == (7, 1.0, False, (4,),
                                                                                         "there")
    assert type(config.lr) is float and parsed("--lengths", "4,5").lengths == (4, 5)


def test_names_in_a_list():
    assert parsed("--fp8", "head").fp8 == ("head",) and parsed("--reference",
                                                               "mlp, smear").reference == ("mlp", "smear")
    assert parsed("--fp8", "none").fp8 == parsed("--fp8", "").fp8 == parsed("--fp8", "()").fp8 == ()
    # As inside `--try fp8=(head,attention)`.
    assert parsed("--fp8", "(head,attention)").fp8 == ("head", "attention")


def test_an_empty_list_of_numbers():
    assert {parsed("--lengths", text).lengths for text in ("none", "None", "", "()")} == {()}
    for column in ("none", ""):
        with pytest.raises(UserError, match="--windows"):
            parsed("--windows", column)


def test_a_column_of_the_stages_takes_a_value_a_stage():
    config = parsed("--batch_tokens", "256,512", "--windows", "(1,3),(5,11)", "--lr_scale", "1,2")
    assert [stage.batch_tokens for stage in config.stages] == [256, 512]
    assert [stage.windows for stage in config.stages] == [(1, 3), (5, 11)]
    assert [stage.lr_scale for stage in config.stages] == [1.0,
                                                           2.0] and type(config.stages[0].lr_scale) is float
    assert config.stages[0].multi_token == ((1, 1), (0.5, 0.0))
    assert [stage.lr_scale for stage in parsed("--lr_scale", "3").stages] == [3.0, 3.0]      # or one for all
    assert change(config, lr_scale=(3.0, 4.0), steps=5).stages[1] == Stage(512, (5, 11), 4.0, ((1, 1),))


@pytest.mark.parametrize("argv, message", [
    (["--windows", "(1,3),(3,7),(5,11)"], "--windows has 3 values, but there are 2 stages; give one a stage"),
    (["--batch_tokens", "64,64,64"], "--batch_tokens has 3 values, but there are 2 stages; give one a stage"),
    (["--windows", "1,3"], "--windows 1,3: expected 2 values in brackets, each a whole number, not 1"),
    (["--batch_tokens", "64,many"], "--batch_tokens 64,many: expected a list, each a whole number from 1"),
    (["--batch_tokens", "64,0"], "--batch_tokens 64,0: expected a whole number from 1 to .*not 0"),
    (["--stages", "3"], "unknown setting '--stages'"),
    (["--layers", "3"], "unknown setting '--layers'"),
    (["--stepz", "3"], "unknown setting '--stepz'; the nearest is --steps"),
    (["--step=3"], "unknown setting '--step=3'; the nearest is --steps"),
    (["--steps", "many"], "--steps many: expected a whole number from 1"),
    (["--steps", "1.5"], "--steps 1.5: expected a whole number from 1"),
    (["--smear", "1"], "--smear 1: expected true or false"),
    (["--fp8", "false"], "--fp8 false: expected a name out of head, attention, mlp"),
    (["--preset", "huge"], "--preset huge: choose small, large"),
    (["--timetable", "many"], "--timetable many: expected a whole number"),
])
def test_what_is_refused(argv, message):
    with pytest.raises(UserError, match=message) as error:
        parsed(*argv)
    assert "\n" not in str(error.value)


def test_the_environment_stands_in_for_flags():
    assert parsed(DATA_PATH="elsewhere").data_path == "elsewhere"
    assert parsed("--data_path", "there", DATA_PATH="elsewhere").data_path == "there"
    assert parsed(DISABLE_FP8="1").fp8 == () and parsed(DISABLE_FP8="0").fp8 == ("head", "mlp")


def test_options_that_are_no_settings():
    def options(*argv):
        return parse(list(argv), PRESETS, "small", "Made up.", {})[1]

    assert options() == {"timetable": None, "explain": False, "given": set()}
    assert options("--timetable", "--explain") == {"timetable": 0, "explain": True, "given": set()}
    assert options("--timetable", "4")["timetable"] == 4 and options("--steps", "3")["given"] == {"steps"}


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit, match="0"):
        parsed("--help")
    printed = capsys.readouterr().out
    assert all(f"--{name} " in printed for name in ("steps", "batch_tokens", "multi_token", "fp8", "preset"))
    printed = " ".join(printed.split())
    assert "In brackets: the default of small" in printed and "--stages" not in printed
    assert "VALUE tokens a step [(64, 128); a list, each a whole number from 1" in printed
    assert "VALUE of all stages [30; a whole number" in printed and "--smear VALUE [True; true or" in printed
    assert "VALUE What a learning rate is, in 100% plain words. 0: none [0.5; a number" in printed
    for words in (["--preset", "large"], ["--preset=large"]):       # its values, for it is what would run
        with pytest.raises(SystemExit, match="0"):
            parsed("--help", *words)
        printed = " ".join(capsys.readouterr().out.split())
        assert "here small if none is given" in printed and "the default of large" in printed
        assert "VALUE of all stages [90; a whole number" in printed


def test_what_comments_say_of_fields():
    assert meanings(Commented) == {"a": "", "b": "beside b", "c": "above c, in two lines beside c", "d": ""}


@dataclass(frozen=True)
class Commented:
    """c: is no field here.

    Nor is this # a comment.
    """
    # ---- A section that says more
    # in a second line
    a: int = 0
    b: int = 1          # beside b

    # above nothing

    # above c, in
    # two lines
    c: tuple[str, ...] = (  # beside c
        "a",)
    d: str = ""


def test_a_log_has_the_stages_as_columns():
    values = flat(PRESETS["small"])
    assert values["batch_tokens"] == (64, 128) and values["windows"] == ((1, 3),
                                                                         (3, 7)) and "stages" not in values
    assert values["layers"] == ({"wide": False}, {"wide": True}) and values["steps"] == 30


def test_one_stage():
    only = Config(stages=PRESETS["small"].stages[:1])
    assert change(only, batch_tokens=(7,)).stages[0].batch_tokens == 7
    with pytest.raises(UserError, match="--batch_tokens has 2 values, but there is 1 stage"):
        change(only, batch_tokens=(7, 8))
    assert read("batch_tokens", "7", tuple[int, ...]) == (7,)


def test_commas_inside_brackets_belong_to_a_value():
    assert split_values("a,(1,2),[3,(4,5)]") == ["a", "(1,2)", "[3,(4,5)]"]


def test_lists_of_names_add_up_and_of_other_flags_the_last_one_counts():
    config = parsed("--reference", "a=x:1", "--steps", "1", "--reference", "b:2,c:3", "--steps", "2")
    assert config.reference == ("a=x:1", "b:2", "c:3") and config.steps == 2


@pytest.mark.parametrize("kind, right, wrong, said", [
    (int, [0, -5, 2 ** 63 - 1], [True, 1.0, "1", 2 ** 63, None], "a whole number"),
    (float, [0, 0.5, 2 ** 900], [True, "1", float("nan"), float("inf"), 10 ** 400], "a number"),
    (bool, [True], [1, None], "true or false"),
    (Positive, [1], [0, -1, 1.0], "a whole number from 1 to 1,000,000,000"),
    (Share, [0, 1.0], [-1e-9, 2, float("nan")], "a number from 0 to 1"),
    (Part, ["mlp"], ["", "tail", 1], "a name out of head, attention, mlp"),
    (tuple[Part, ...], [(), ("mlp", "head")], ["mlp", ["mlp"]],
     "names out of head, attention, mlp with commas between them, or none"),
    (tuple[Share, Share], [(0, 1)], [(0,), (0, 1, 1), 0.5],
     "2 values in brackets, each a number from 0 to 1"),
    (tuple[Annotated[int, Between(1, 6)], ...], [(), (6,)], [3], "a list, each a whole number from 1 to 6"),
    (int | None, [None, 3, "anything"], [], "a value"),
])
def test_kinds(kind, right, wrong, said):
    assert words(kind) == said and all(fit(value, kind) == value for value in right)
    for value in wrong:
        with pytest.raises(Misfit) as error:
            fit(value, kind)
        assert error.value.args == (said, value) or value != value


def test_what_is_made_in_python_is_checked():
    check(PRESETS["small"])
    for changes, said in (({"lr": "fast"}, "--lr fast: expected a number"),
                          ({"lengths": (2, 0.5)}, r"--lengths \(2, 0.5\): .*not 0.5"),
                          ({"windows": ((1, 2), (3,))}, r"--windows \(3,\): expected 2 values"),
                          ({"layers": (Layer(wide=2),)}, "--wide 2: expected true or false")):
        with pytest.raises(UserError, match=said):
            check(change(PRESETS["small"], **changes))


def test_a_field_without_a_rule_takes_anything():
    assert parsed("--limit", "3").limit == 3 and parsed("--limit", "None").limit is None
    assert parsed("--limit", "high").limit == "high"
