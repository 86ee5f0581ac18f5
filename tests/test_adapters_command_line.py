"""Options of recipes: config files, the two help screens, and one-line errors."""

import dataclasses
import importlib
import json
import os
import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import yaml

from areax import models
from areax.adapters import cli
from areax.adapters.command_line import config_file, help, parse
from areax.adapters.command_line.options import flat, replaced
from areax.adapters.tracking import run_dir
from areax.core import losses
from areax.core.optim import Optimizer
from areax.core.shaping import Shaping
from areax.recipes import eval, grpo, preference, sft
from areax.recipes.shared.rl_options import Evaluation, Prompts, Rollout, Serving, Training
from areax.rollout.types import Sampling

RECIPES = {name: importlib.import_module(f"areax.recipes.{name}") for name in cli.RECIPES}
REQUIRED = {"model": "m", "data": "d", "reward": "r"}


def read(config, *arguments, given=None):
    return parse.parse(config, arguments, "areax train x", given)


def required(config):
    return {name: value for name, value in REQUIRED.items() if name in {f.name for f in dataclasses.fields(config)}}


def written(config, path):
    with run_dir.open_run(path, config=config):
        return str(path / run_dir.CONFIG)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*losses.POLICIES, *losses.PREFERENCES])
def test_the_saved_config_of_a_run_gives_the_same_options(tmp_path, name):
    recipe = grpo if name in losses.POLICIES else preference
    objective = (losses.POLICIES | losses.PREFERENCES)[name]()
    own = replaced(recipe.Config(**required(recipe.Config)), objective=objective, steps=7, out="runs/-x y")
    # Also under the name of the recipe itself: the file says which objective it was.
    assert read(recipe.Config, "--config", written(own, tmp_path)) == own


def test_every_type_of_value_round_trips(tmp_path):
    own = replaced(
        grpo.Config("m", "d", "r"), servers=("http://a", "http://b"), colocated=True, eta=0, seed=3,
        sampling=Sampling(temperature=0.7, stop=("\n", "end"), stop_token_ids=(1, 2)),
        run=models.Run(remat=(("qkv", "save"), ("mlp_gate_up", "offload")), dtype="bfloat16", head_chunk=5),
        objective=losses.VESPO(shaping=Shaping(low=-1.5), vespo_pos=(1.0, 1e-9)), workflow_options='{"a": [1, "b"]}',
        optim=Optimizer(lr=3e-7, decay=("norm",)),
    )  # fmt: skip
    path = written(own, tmp_path)
    assert read(grpo.Config, f"--config={path}") == own
    more = read(grpo.Config, "--steps", "9", "--config", path, "--servers", "http://c", "--no-colocated")
    assert more == replaced(own, steps=9, servers=("http://c",), colocated=False)


def test_a_handwritten_file_may_use_sections_or_command_line_names(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\ndata: d\nreward: r\ngroup-size: 4\nsampling.max_new_tokens: 5\noptim:\n  lr: 1e-5\n"
        "trie: off\n"
        "training:\n  length: 64\n  run: {dtype: null}\nservers: [http://a, http://b]\ncolocated: true\neta: 0\n"
    )
    got = flat(read(grpo.Config, "--config", str(path), "--length", "32"))
    assert (got.group_size, got.sampling.max_new_tokens, got.optim.lr, got.length) == (4, 5, 1e-5, 32)
    assert (got.run.dtype, got.servers, got.colocated) == (None, ("http://a", "http://b"), True)
    assert got.trie == "off"  # false to YAML
    path.write_text(yaml.safe_dump({"model": "m", "data": "d", "objective": {"desirable_weight": 2.0}}))
    assert read(preference.Config, "--config", str(path)).objective == losses.KTO(desirable_weight=2.0)


def test_a_time_in_yaml_is_a_text_and_no_number_of_seconds(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("steps: 1:30\nout: 1:30.5\nseed: 1_000\nsampling: {temperature: .5}\n")
    words, _ = config_file.read(file, grpo.Config)
    assert words == ["--steps=1:30", "--out=1:30.5", "--seed=1000", "--sampling.temperature=0.5"]


MERGES = "a0: &a0 {b: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(  # 10^9 values in 400 bytes
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
)


@pytest.mark.parametrize(
    "text, message",
    [
        ("grups: 4", "there is no option grups; did you mean groups?"),
        ("sampling: {temprature: 1}", "there is no option sampling.temprature; did you mean sampling.temperature?"),
        ("rollout: 4", "rollout must hold options by name, got 4"),
        ("colocated: 1", "colocated must be true or false, got 1"),
        ("steps: {a: 1}", "steps must be one value, got {'a': 1}"),
        ("[1, 2]", "must hold options by name, got list"),
        ("a: [", "must be YAML or JSON, got: "),
        ("", "must hold options by name, got NoneType"),
        ("servers: &x [*x]", "must have at most 100,000 values, also where YAML's anchors repeat them"),
        (MERGES, "must have at most 100,000 values, also where << merges them"),
        ("steps: !!int ''", "must be YAML or JSON, got: "),
        (f"a: &a [{', '.join(['*a'] * 3000)}]", "must have at most 100,000 values"),
        (LAUGHS, "must have at most 100,000 values, also where YAML's anchors repeat them"),
        (f"colocated: '{'long' * 10**6}'", "colocated must be true or false, got 'longlong"),
        ("[" * 100_000, "must be YAML or JSON, got: "),
        ("a: \x00", "must be YAML or JSON, got: "),
        ("#" * (2**24 + 1), "must have at most 16,777,216 characters"),
        ("model:", "model must be text, got None; write it in quotes"),
        ("out: no", "out must be text, got False; write it in quotes"),
        ("out: 010", "out must be text, got 8; write it in quotes"),
        ("servers: [a, null]", "servers must be text, got None; write it in quotes"),
        ("out: [a, b]", "out must be one value, got ['a', 'b']"),
        ("steps: 1\nsteps: 2", "steps is given twice; leave out one of them"),
        ("optim: {lr: 1, lr: 2}", "lr is given twice"),
        ("group-size: 2\ngroup_size: 3", "group-size is given twice"),
        ("groups: 2\nrollout: {groups: 3}", "groups is given twice"),
        ("colocated: true\nserving: {colocated: false}", "colocated is given twice"),
        ("run.dtype: float32\ntraining: {run: {dtype: float32}}", "run.dtype is given twice"),
        ("optim: {lr: 1}\noptim.lr: 2", "optim.lr is given twice"),
        ("sampling: {stop: [a, --, b]}", "sampling.stop: no value but the first may begin with -, got '--'"),
    ],
)
def test_errors_in_a_config_file_name_the_file_in_one_line(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"--config {path}: {message}")):
        config_file.read(path, grpo.Config)


def test_a_json_file_names_each_option_once(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"steps": 1, "optim": {"lr": 1e-5, "lr": 1e-6}}')
    with pytest.raises(ValueError, match=re.escape(f"--config {path}: lr is given twice; leave out one of them")):
        config_file.read(path, grpo.Config)


def test_a_merged_mapping_may_be_overridden(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("sampling: &a {temperature: 0.5, max_new_tokens: 3}\nrollout: {sampling: {<<: *a}}")
    with pytest.raises(ValueError, match="sampling.temperature is given twice"):
        config_file.read(path, grpo.Config)
    path.write_text("sampling: {<<: {temperature: 0.5, max_new_tokens: 3}, max_new_tokens: 4}")
    words, _ = config_file.read(path, grpo.Config)
    assert sorted(words) == ["--sampling.max-new-tokens=4", "--sampling.temperature=0.5"]


def test_a_file_that_names_some_options_of_an_objective_keeps_the_algorithm(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: m\ndata: d\nobjective: {beta: 0.2}")
    for objective in (losses.KTO(), losses.BCO(), losses.SimPO(), losses.IPO()):
        given = parse.instance(preference.Config, {"objective": objective})
        got = read(preference.Config, "--config", str(path), given=given)
        assert got.objective == replace(objective, beta=0.2)
    assert read(preference.Config, "--config", str(path)).objective == losses.DPO(beta=0.2)
    for objective in (losses.KTO(), losses.BCO(), losses.CPO()):  # as a run writes it
        path.write_text(yaml.safe_dump({"model": "m", "data": "d", "objective": vars(objective)}))
        assert read(preference.Config, "--config", str(path)).objective == objective
    path.write_text("model: m\ndata: d\nobjective.desirable_weight: 2.0\nobjective.beta: 0.2")
    assert read(preference.Config, "--config", str(path)).objective == losses.KTO(desirable_weight=2.0, beta=0.2)


def test_values_of_lists_that_begin_with_dashes(tmp_path):
    path = tmp_path / "run.json"
    values = {"model": "m", "data": "d", "reward": "r", "sampling": {"stop": ["--x", "b"], "stop_token_ids": [1, 0]}}
    path.write_text(json.dumps(values), encoding="utf-8-sig")  # as some editors write UTF-8
    sampling = read(grpo.Config, "--config", str(path)).rollout.sampling
    assert (sampling.stop, sampling.stop_token_ids) == (("--x", "b"), (1, 0))


@pytest.mark.parametrize("columns", ["20", "80"])
def test_errors_are_the_same_in_a_terminal_of_any_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for arguments, message in (
        (["--model", "m"], "needs --data"),
        (["--stpes", "3"], "unrecognized options: --stpes; did you mean --steps?"),
        (["--model", "m", "--data", "d", "--steps", "x" * 100], f"--steps must be a whole number, got '{'x' * 100}'"),
    ):
        assert cli.main(["train", "sft", *arguments]) == 2
        assert capsys.readouterr().err == f"areax train sft: {message}; see areax train sft --help-all\n"
    assert os.environ["COLUMNS"] == columns


@pytest.mark.slow
def test_errors_are_one_line(capsys, tmp_path):
    for arguments, message in (
        (["--config"], "--config needs a YAML or JSON file, got nothing"),
        (["--config", "--steps"], "--config needs a YAML or JSON file, got --steps"),
        (["--config", str(tmp_path / "no.yaml")], f"{tmp_path / 'no.yaml'}: No such file or directory"),
        (["--steps", "3"], "needs --model, --data; see areax train sft --help-all"),
        (["--stpes", "3"], "unrecognized options: --stpes; did you mean --steps?"),
        (["--model", "m", "--data", "d", "--steps", "x"], "--steps must be a whole number, got 'x'"),
        (["--model", "m", "--data", "d", "--optim.lr", "x"], "--optim.lr must be a number, got 'x'"),
        (["--model", "m", "--data", "d", "--init", "x"], "invalid choice 'x'"),
        (["--model", "m", "--data", "d", "--run.dtype", "float8"], "invalid choice 'float8'"),
        (["--model", "m", "--data"], ": --data needs a value; see"),
        (["--model", "m", "--data", "d", "--out", "-x"], ": --out needs a value; see"),
        (["--model", "m", "--data", "d", "more"], ": unexpected values: more; see"),
        (["--model", "m", "--data", "d", "--run.remat", "x"], "from ['x']; see areax train sft --help-all"),
    ):
        assert cli.main(["train", "sft", *arguments]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", [*RECIPES, *map(str.lower, losses.POLICIES | losses.PREFERENCES)])
def test_the_short_help_fits_on_one_screen(capsys, command):
    for kind in ("train", "plan"):
        with pytest.raises(SystemExit):
            cli.main([kind, command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24 and max(map(len, lines)) <= help.WIDTH, "\n".join(
            line for line in lines if len(line) > help.WIDTH
        )
        assert sum(line.startswith(" --") for line in lines) in (15, 16, 17)
        assert "--help-all" in lines[-1] and not any(line.endswith(" ...") for line in lines[2:])


@pytest.mark.parametrize("name", RECIPES)
def test_all_options_are_shown_with_their_defaults(name):
    config = RECIPES[name].Config
    text = help.all_options(config, "x")
    shown = set(re.findall(r"^  --([\w.-]+)", text, re.M))
    known = {n for n in re.findall(r"^[ │]+--([a-z][\w.-]*)", parse._help(config, "x"), re.M) if ".no-" not in n}
    assert shown == known
    assert max(map(len, text.splitlines())) <= help.WIDTH
    groups = list(help._groups(config, None))
    for group in groups:
        alike = [
            other.name for other in groups if group.name and other.text == group.text and "optim" not in other.name
        ]
        assert len(alike) < 2 and group.text.count("(") == group.text.count(")"), (group.text, alike)
        texts = [option.text for option in group.options]
        for option in group.options:
            assert option.text, f"--{option.name} has no help text"
            assert texts.count(option.text) == 1, f"--{option.name} shares its help text with another option"


@pytest.mark.parametrize("option", ["groups", "group_size", "max_concurrent", "rows"])
def test_counts_must_be_at_least_one(option):
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} must be at least 1, got 0"):
        replaced(grpo.Config("m", "d", "r"), **{option: 0})


def test_help_shows_the_defaults_of_the_algorithm(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "dapo", "--help-all"])
    assert re.search(
        r"--objective.shaping.dynamic-sampling, --no-...\n.*\(default:\s+true\)", capsys.readouterr().out, re.S
    )


def test_a_recipe_may_have_its_own_option_named_config():
    @dataclasses.dataclass(frozen=True)
    class Config:
        config: str = ""

    assert read(Config, "--config", "a").config == "a"


def test_options_are_replaced_by_name():
    own = grpo.Config("m", "d", "r")
    assert replaced(own, eta=0).rollout == replace(own.rollout, eta=0)
    with pytest.raises(TypeError, match="there is no option etta"):
        replaced(own, etta=0)
    assert replaced(sft.Config("m", "d"), steps=3).steps == 3


def test_config_json_is_standard_json(tmp_path):
    path = written(grpo.Config("m", "d", "r"), tmp_path)
    with open(path) as file:
        values = json.load(file, parse_constant=pytest.fail)
    assert values["training"]["objective"]["shaping"]["high"] == "inf"


def own_reward(text, row):
    return 1.0


@pytest.mark.parametrize(
    "config, values, message",
    [
        (grpo, {"reward": own_reward}, "--reward must be a text, got the function own_reward; a function is"),
        (eval, {"reward": own_reward}, "--reward must be a text, got the function own_reward"),
        (grpo, {"rollout": {"groups": 2}}, "--rollout must be of type Rollout, got {'groups': 2}"),
        (grpo, {"rollout": Rollout(workflow=own_reward)}, "--workflow must be a text, got the function"),
        (grpo, {"training": Training(objective="dapo")}, "--objective must be of type Policy, got 'dapo'"),
        (grpo, {"serving": Serving(servers="http://a:1")}, "tuple of texts, got 'http://a:1'; write ('http://a:1',)"),
        (grpo, {"evaluation": Evaluation(heldout={"a": "b"})}, "got {'a': 'b'}; write ('a=b',)"),
        (grpo, {"prompts": Prompts(chat_template_kwargs={"a": False})}, "write '{\"a\": false}'"),
        (grpo, {"steps": "3"}, "--steps must be an integer, got '3'"),
        (sft, {"too_long": "Drop"}, "--too-long must be one of refuse, drop, got 'Drop'"),
        (preference, {"objective": "dpo"}, "--objective must be of type "),
    ],
)  # fmt: skip
def test_values_of_another_type_given_in_python_are_one_line(config, values, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        config.Config(**required(config.Config) | values)
    assert "\n" not in str(caught.value)


def test_a_path_a_list_and_a_number_of_numpy_pass_in_python(tmp_path):
    grpo.Config(tmp_path, tmp_path, "r", steps=np.int64(3), evaluation=Evaluation(heldout=["a"]))
