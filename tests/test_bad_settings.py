"""No setting ends in a traceback: it is refused in one line that names it, or what it asks for is trained."""
import math
import os
import random
from dataclasses import replace

import pytest
import torch
from conftest import TINY, command

import train_gpt
from data.shards import ShardError
from kernels.ranks.collectives import Collectives
from records.run import checks, explain, settings
from records.run.kinds import Between, OneOf, is_names, parts
from records.run.settings import UserError

DRAWS = int(os.environ.get("DRAWS", 2000))      # settings drawn at random; one of 50 is trained
SMALL = [*TINY, "--micro_batches", "2", "--batch_tokens", "64,64,128", "--sequence_length", "64,64,64"]
SMALL = ["--preset", "cpu", *SMALL, "--val_tokens", "256", "--val_chunk", "256", "--write_log", "false"]
TRASH = ["", " ", "many", "None", "nan", "-inf", "1e999", "true", "0", "-1", "-0.0", "0.5", "1e-320", "1j",
         "()", "(1,2)", "1,2,3", "((1,3),(3,7),5)", "((1,2),(3,4),(5,6))", "((((", "'a'", "{}", "[1]", "a\nb",
         "9" * 23, "9" * 5000, "-" * 5000 + "1", "\udcff", "head,head", "/", "smear"]


@pytest.mark.parametrize("arguments, parts", [
    (["--name", "a/b"], ["--name a/b: it becomes part of a folder's name; leave out the /"]),
    (["--stepz", "3"], ["unknown setting '--stepz'", "--steps"]),
    (["--mount_lr=3"], ["unknown setting", "--muon_lr"]),
    (["--steps"], ["--steps: expected one argument"]),
    (["--steps", "many"], ["--steps many: expected a whole number from 0 to 1,000,000"]),
    (["--steps", "2"], ["--steps 2: at least one step for each of 3 stages"]),
    (["--steps", "3\n4"], [r"--steps '3\n4'"]),
    (["--steps", "9" * 5000], ["--steps 999", "...999"]),
    (["--runs", "0"], ["--runs 0: expected a whole number from 1"]),
    (["--seed", "1" * 23], ["--seed 111", "from 0 to 4,611,686,018,427,387,904"]),
    (["--micro_batches", "-2"], ["--micro_batches -2"]),
    (["--batch_tokens", "0,0,0"], ["--batch_tokens 0,0,0", "from 1 to", "not 0"]),
    (["--batch_tokens", "1000,2048,3072"], ["--batch_tokens 1000,2048,3072 --micro_batches 2",
                                            "multiples of 32"]),
    (["--batch_tokens", "1024,2048,4194304"], ["at most 1048576 tokens"]),
    (["--windows", "(1, 3), (3, 7)"], ["--windows has 2 values", "there are 3 stages", "give one a stage"]),
    (["--windows", "((1,3),(3,7),5)"], ["expected 2 values in brackets, each a whole", "not 5"]),
    (["--multi_token", "((1,1),),((1,1),),()"], ["--multi_token", "use 1 to 3 pairs"]),
    (["--lr_scale", "1,1e999,1"], ["--lr_scale 1,1e999,1", "from 0 to 1e+30, not inf"]),
    (["--lr_scale", "-1,1,1"], ["--lr_scale: expected one argument", "--name=-1"]),
    (["--muon_lr", "nan"], ["--muon_lr nan: expected a number"]),
    (["--muon_momentum", "0.9"], ["--muon_momentum 0.9: expected 2 values in brackets"]),
    (["--momentum_warmup", "0"], ["--momentum_warmup 0"]),
    (["--slow_from", "0.5,0.4"], ["--slow_from 0.5,0.4:", "cannot be whole before it begins"]),
    (["--adam_every", "0"], ["--adam_every 0: expected a whole number from 1 to 64"]),
    (["--polar_steps", "0"], ["--polar_steps 0"]),
    (["--width", "0"], ["--width 0: expected a whole number from 1 to 65,536"]),
    (["--qk_dim", "24"], ["--qk_dim 24", "use a multiple of 16"]),
    (["--rotary_share", "3"], ["--rotary_share 3: expected a number from 0 to 1"]),
    (["--rotary_base", "0"], ["--rotary_base 0"]),
    (["--gate_channels", "500"], ["--gate_channels 500", "an even number of at most 64"]),
    (["--gate_channels", "7"], ["--gate_channels 7", "an even number"]),
    (["--head_dim", "2", "--qk_dim", "2"], ["--gate_channels 12 --heads 2 --head_dim 2", "use fewer"]),
    (["--attention_gates", "true", "--rotary_share", "1"],
     ["--attention_gates True --rotary_share 1.0: the gates see"]),
    (["--ngrams", "2,9"], ["--ngrams 2,9: expected a whole number from 1 to 6, not 9"]),
    (["--ngrams", "2,3,4"], ["--ngrams 2,3,4: each takes a head", "there are 2"]),
    (["--drop_repeats", "15"], ["--drop_repeats 15: ", "fewer than 16 tokens"]),
    (["--ngrams", "2,3", "--near_match", "4"], ["--ngrams 2,3 --near_match 4: ", "each takes a head"]),
    (["--ngram_rows", "2000000000"], ["--ngram_rows 2000000000", "from 0 to 1,073,741,824"]),
    (["--ngram_classes", "true"], ["--ngram_classes True --vocab_size 257", "GPT-2's"]),
    (["--softmax_samples", "-1"], ["--softmax_samples -1"]),
    (["--vocab_size", "1"], ["--vocab_size 1"]),
    (["--val_tokens", "-5"], ["--val_tokens -5"]),
    (["--val_chunk", "100"], ["--val_chunk 100 --val_sequence_length 256", "holds whole sequences"]),
    (["--smear", "1"], ["--smear 1: expected true or false"]),
    (["--attention", "flash9"],
     ["--attention flash9: expected a name out of auto, bounded, flash4, varlen, plain"]),
    (["--fp8", "1"], ["--fp8 1: expected a name out of head, attention, mlp"]),
    (["--fp8", "head,tail"], ["--fp8 head,tail: expected a name out of head", "not tail"]),
    (["--reference", "fish"], ["--reference fish: use names out of lookup, smear", "all, or none"]),
    (["--preset", "huge"], ["--preset huge", "speedrun, corpus, single, cpu"]),
    (["--timetable", "9" * 5000], ["--timetable 999", "from 1 to 4,096"]),
])
def test_bad_settings(arguments, parts):
    with pytest.raises(UserError) as error:
        train_gpt.parse([*SMALL, *arguments])
    assert all(part in str(error.value) for part in parts) and str(error.value).isprintable(), error.value


@pytest.mark.parametrize("changes, part", [
    ({"head_dim": 48, "width": 96, "qk_dim": 24}, "--qk_dim 24 --head_dim 48: use powers of two"),
    ({"rotary_share": 0.0}, "--rotary_share 0.0 --qk_dim 32: at least one pair"),
    ({"gate_channels": 130, "width": 256}, "--gate_channels 130: use at most 128"),
    ({"ngram_beta2": 0.0}, "--ngram_beta2 0.0: use more than 0"),
    ({"copy_channels": 512}, "--copy_channels 512 --attention_scale 0.1: their product is at most 40"),
    ({"width": 16_384}, "--width 16384: use at most 8192"),
    ({"val_chunk": 100}, "--width 64 --val_chunk 100: use multiples of 16"),
    ({"heads": 3, "head_dim": 4, "qk_dim": 2, "rotary_share": 1.0, "ngram_rows": 0},
     "--heads 3 --qk_dim 2 --head_dim 4: queries, keys and values have"),
])
def test_what_kernels_do_not_take(changes, part):
    """On a GPU; all but the width is a matter of kernels that have a reference."""
    config = replace(train_gpt.parse(SMALL)[0], **changes)
    with pytest.raises(UserError, match=part):
        checks.refuse(config, checks.kernel_faults(config))
    if config.width <= 8192:
        config = replace(config, reference=("all",), fp8=())
        checks.refuse(config, checks.kernel_faults(config))


@pytest.mark.parametrize("preset", train_gpt.PRESETS.values(), ids=lambda preset: preset.preset)
def test_presets_keep_the_rules(preset):
    train_gpt.check_config(preset, train_gpt.Ops._fields)
    checks.refuse(preset, checks.kernel_faults(preset))
    assert preset.heads * preset.head_dim == preset.width or preset.preset in ("corpus", "sprint")


@pytest.mark.parametrize("changes, part", [
    ({"width": "64"}, "--width 64: expected a whole number"),
    ({"muon_lr": math.inf}, "--muon_lr inf"),
    ({"smear": None}, "--smear None: expected true or false"),
    ({"fp8": ["head"]}, "--fp8 .'head'.: expected names"),
    ({"lr_scale": (1, 2, -3)}, "--lr_scale -3"),
    ({"layers": ()}, "table of layers is empty"),
    ({"layers": (train_gpt.Layer(kept=1),)}, "--kept 1: expected true or false"),
    ({"stages": ()}, "table of stages is empty"),
])
def test_a_configuration_made_in_python(changes, part):
    config = settings.change(train_gpt.parse(SMALL)[0], **changes)
    config = replace(config, **changes) if changes.get("stages") == () else config
    with pytest.raises(UserError, match=part):
        train_gpt.check_config(config, train_gpt.Ops._fields)


# ---- Settings at random

def draw(kind: type, now: object, random: random.Random) -> str:
    """A text for a setting of this kind: a value near an end of its range or near `now`, or trash."""
    base, rules, inside = parts(kind)
    if random.random() < 0.2:
        return random.choice(TRASH)
    if inside:
        now = list(now)
        if inside[-1] is ... and random.random() < 0.2:
            now = now[1:] if random.random() < 0.5 else now + now[:1]
        each = [draw(inside[0], x, random) if random.random() < 0.5 else str(x) for x in now]
        return ",".join(each) if is_names(kind) else f"({','.join(each)},)"
    choices = {bool: ["true", "false"], str: [str(now)]}.get(base, [])
    for rule in rules:
        if isinstance(rule, OneOf):
            choices = [*rule.names]
        elif isinstance(rule, Between):
            ends = [rule.low, rule.high] if base is float or rule.high <= 100 else [rule.low]
            choices = [*ends, rule.low - 1, rule.high + 1, rule.high * 2]
            if rule.low <= now * 2 <= rule.high:
                choices += [now * 2, now * 3]
    if base is int:
        choices += [now // 2, now + 1, now - 1, 1, 2, 3, 16, 48, 64]
    elif base is float:
        choices += [now / 2, now * 1.1, 1e-9]
    return str(random.choice(choices))


def test_ngrams_that_are_off_take_no_head():
    config = train_gpt.parse(["--preset", "cpu", "--ngrams", "2,3,4", "--ngram_rows", "0"])[0]
    assert len(config.ngrams) > config.heads


def is_tiny(config: train_gpt.Config) -> bool:
    """Whether two steps take no time."""
    model = train_gpt.GPT(config, torch.device("meta"), Collectives(1))
    tokens = [config.val_chunk, config.val_tokens, *(stage.batch_tokens for stage in config.stages)]
    return explain.parameter_count(model) < 500_000 and sum(tokens) < 2000 and config.micro_batches <= 4


def trains(config: train_gpt.Config) -> bool:
    """Take the first and the last step and score; False if that is refused."""
    try:
        trainer = train_gpt.Trainer(config, train_gpt.World())
    except (UserError, ShardError) as error:
        assert str(error).isprintable(), error
        return False
    schedule = trainer.schedule
    for step in (schedule.at(0), schedule.at(len(schedule) - 1)):
        trainer.step(step, trainer.loader.batches(step.index))
    trainer.validate(schedule.validation(len(schedule)))
    return True


def test_settings_at_random(shards):
    """One or two at a time: each is refused in one line, or makes a model, its groups and its timetables."""
    base = train_gpt.parse([*SMALL, "--data_path", str(shards)])[0]
    kinds, now, chance = settings.kinds(base), settings.defaults(base), random.Random(0)
    drawn, refused, trained = set(), 0, 0
    for i in range(DRAWS):
        names = chance.sample([*kinds], 1 + i % 2)
        texts = [f"--{name}={draw(kinds[name], now[name], chance)}" for name in names]
        drawn |= {*names}
        try:
            config = train_gpt.parse([*SMALL, "--data_path", str(shards), *texts])[0]
        except UserError as error:
            assert str(error).isprintable() and len(str(error)) < 400, texts
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(texts) from error
        try:
            meta = torch.device("meta")
            groups = train_gpt.parameter_groups(train_gpt.GPT(config, meta, Collectives(2)), config)
            explain.tables_text(groups, train_gpt.Schedule(config), 2)
            if trained < i // 50 and is_tiny(config):
                trained += trains(config)
        except Exception as error:
            raise AssertionError(texts) from error
    assert drawn == {*kinds} and DRAWS / 4 < refused < DRAWS * 3 / 4 and trained >= DRAWS // 50 - 1


# ---- The environment and the files

def refusal(*arguments: str, **variables: str) -> str:
    """The one line that the program ends with."""
    result = command(*SMALL, *arguments, **variables)
    _, program, line = result.stderr.rpartition("train_gpt.py: ")       # below a progress bar
    assert result.returncode == 2 and program and line.count("\n") == 1
    return line


@pytest.mark.parametrize("variables, parts", [
    ({"RANK": "first"}, ["RANK=first", "start with torchrun"]),
    ({"RANK": "1"}, ["RANK=1 WORLD_SIZE=1"]),
    ({"WORLD_SIZE": "-2"}, ["WORLD_SIZE=-2"]),
    ({"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "without MASTER_ADDR and MASTER_PORT"]),
    ({"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "http"}, ["do not find each other"]),
])
def test_what_torchrun_sets(variables, parts):
    line = refusal(**variables)
    assert all(part in line for part in parts), line


def test_paths_that_are_something_else(tmp_path, shards):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "shards", "long" * 2000):
        assert "no val shards" in refusal(DATA_PATH=str(path))
    for flag in ("--save", "--resume", "--checkpoint_every=1 --checkpoint"):
        for path in (tmp_path / "file", tmp_path / "file" / "folder"):
            assert str(path) in refusal(*flag.split(), str(path), DATA_PATH=str(shards))
    for path in (tmp_path / "file", tmp_path / "file" / "runs"):
        assert "cannot write the run's log" in refusal("--write_log", "true", RUNS_PATH=str(path),
                                                       DATA_PATH=str(shards))


@pytest.mark.parametrize("backend", ["bounded", "flash4", "varlen"])
def test_attention_that_needs_a_gpu(shards, backend):
    line = refusal("--attention", backend, DATA_PATH=str(shards))
    assert f"--attention {backend}: it does not run here (no GPU); use auto or plain" in line
