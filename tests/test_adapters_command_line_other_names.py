"""Option names of other libraries: aliases, one line for the others, and the tables of the guide."""

import re
from pathlib import Path

import pytest

from areax.adapters import cli
from areax.adapters.command_line import config_file, help, other_names, parse
from areax.adapters.command_line.options import flat
from areax.core import losses
from areax.recipes import distill, eval, grpo, preference, sft
from areax.rollout import object_path

GUIDE = Path(__file__).parents[1] / "docs" / "migrating.md"
COMMANDS = {recipe.__name__: help.names(recipe.Config) for recipe in (grpo, sft, preference, distill, eval)}
NEEDED = ["--model", "m", "--data", "d"]


def test_the_guide_shows_the_tables():
    text = GUIDE.read_text()
    shown = "\n".join(f"| `--{name}` | `--{option}` |" for name, option in other_names.ALIASES.items())
    assert f"|---|---|\n{shown}\n\n" in text
    for names in other_names.LIBRARIES:
        shown = "\n".join(f"| {theirs} | {here} |" for theirs, here in names.rows)
        assert re.search(rf"{re.escape(names.source)}.*:\n\n\| {names.library} \| areax \|\n\|---\|---\|\n", text)
        assert f"|---|---|\n{shown}\n" in text


def test_the_tables_name_options_and_algorithms_that_exist():
    known = set().union(*COMMANDS.values())
    assert set(other_names.ALIASES.values()) <= known
    algorithms = {*cli.RECIPES, *map(str.lower, losses.POLICIES | losses.PREFERENCES)}
    for names in other_names.LIBRARIES:
        for _, here in names.rows:
            assert set(re.findall(r"--([a-z][\w.-]*\w)", here)) <= known, here
            for quoted in other_names.QUOTED.findall(here):
                if found := re.match(r"areax train (\w+)", quoted):
                    assert found[1] in algorithms, here
                if found := re.match(r"--workflow (.+)", quoted):
                    assert callable(object_path.load_object(found[1])), here
            assert not re.search(r"(?<![:.])(multi_turn|tool_loop)\b", here), here  # `--workflow` takes no bare name


def test_every_name_of_the_tables_is_answered():
    for names in other_names.LIBRARIES:
        for theirs, here in names.rows:
            for name in other_names.QUOTED.findall(theirs):
                answers = [other_names.hint(name.replace("*", "x"), known) for known in COMMANDS.values()]
                text = here.replace("`", "").lstrip("=").removeprefix("none")
                assert not any(answer and "is here: none" in answer for answer in answers)
                assert any(answer and answer.endswith(text) for answer in answers), name


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("recipe", "words", "wanted"),
    [
        (grpo, "--learning-rate 3e-6 --num-generations 4", {"group_size": 4}),
        (grpo, "--learning_rate=3e-6 --num_generations=4", {"group_size": 4}),
        (grpo, "--lr 3e-6 --max-steps 7 --output-dir o --model-name-or-path p", {"steps": 7, "out": "o", "model": "p"}),
        (sft, "--lr 3e-6 --max_steps 7 --output_dir o --model_name_or_path p", {"steps": 7, "out": "o", "model": "p"}),
    ],
)
def test_aliases_are_the_options_themselves(tmp_path, recipe, words, wanted):
    required = [*NEEDED, *(["--reward", "r"] if recipe is grpo else [])]
    got = flat(parse.parse(recipe.Config, [*required, *words.split()], "x"))
    assert got.optim.lr == 3e-6 and {name: getattr(got, name) for name in wanted} == wanted
    file = tmp_path / "run.yaml"
    pairs = re.findall(r"--([\w-]+)[ =](\S+)", words)
    file.write_text("\n".join(f"{name.replace('-', '_')}: {value}" for name, value in pairs))
    assert flat(parse.parse(recipe.Config, [*required, "--config", str(file), "--model", got.model], "x")) == got
    with pytest.raises(ValueError, match="needs --model"):  # nothing else became optional
        parse.parse(recipe.Config, ["--lr", "1"], "x")


def test_an_alias_and_its_option_in_one_file_are_one_option_twice(tmp_path):
    (tmp_path / "run.yaml").write_text("lr: 1\noptim: {lr: 2}")
    with pytest.raises(ValueError, match="optim.lr is given twice"):
        config_file.read(tmp_path / "run.yaml", grpo.Config)


def test_a_recipes_own_option_of_that_name_is_no_alias():
    assert other_names.renamed("lr", {"lr", "optim.lr"}) == "lr"
    assert other_names.renamed("lr", {"sft-lr"}) == "lr"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ("train grpo", "--beta 0.1", "unrecognized options: --beta; TRL's beta is here: --objective.kl.coef; see"),
        ("train dpo", "--beta 0.1", "unrecognized options: --beta; TRL's beta is here: --objective.beta; see"),
        ("train grpo", "--max_completion_length 9", "is here: --sampling.max-new-tokens; see"),
        ("train grpo", "--max-prompt-length 9", "is here: --max-prompt, which leaves longer prompts out; see"),
        ("train grpo", "--per-device-train-batch-size 9", "is here: --rows packed rows of --length tokens per"),
        ("train sft", "--per-device-train-batch-size 9", "is here: --batch rows per optimiser step, over all devices"),
        ("train sft", "--gradient-accumulation-steps 9", "is here: --batch rows per optimiser step, over all devices"),
        ("train grpo", "--gradient-accumulation-steps 9", "gradient_accumulation_steps needs no option here (as many"),
        ("train grpo", "--num-train-epochs 2", "is here: --steps = epochs x prompts / --groups; see"),
        ("train sft", "--num-train-epochs 2", "is here: --steps = epochs x rows / --batch; see"),
        (
            "train sft",
            "--lora-r 2 --lora_alpha 3",
            "lora_r is here: --lora.rank; TRL's lora_alpha is here: --lora.alpha",
        ),
        ("train sft", "--warmup-ratio 0.1", "is here: --optim.warmup, in steps: ratio x --steps; see"),
        ("train grpo", "--temperature 1", "is here: --sampling.temperature; see"),
        ("train grpo", "--dataset-name a/b", "is here: --data owner/name; see"),
        ("train grpo", "--loss-type dapo", "loss_type is here: dapo, grpo: --objective.denominator token, sequence"),
        ("train grpo", "--epsilon 0.2", "is here: --objective.clip-low; --objective.clip-high is a bound of its own"),
        ("train grpo", "--epsilon-high 0.2", "is here: --objective.clip-high; see"),
        (
            "train grpo",
            "--vllm-gpu-memory-utilization 1",
            "is here: --servers, addresses of vLLM or SGLang; none",
        ),
        ("train grpo", "actor_rollout_ref.rollout.n=8", "verl's rollout.n is here: --group-size; see"),
        ("train grpo", "--actor_rollout_ref.rollout.n 8", "verl's rollout.n is here: --group-size; see"),
        ("train grpo", "--data.train_batch_size 8", "verl's data.train_batch_size is here: --groups; see"),
        (
            "train grpo",
            "--algorithm.kl_ctrl.kl_coef 1",
            "is here: --objective.kl.coef with --objective.kl.place reward",
        ),
        ("train grpo", "--ppo-mini-batch-size 8", "is here: --minibatches = train_batch_size / ppo_mini_batch_size"),
        (
            "train grpo",
            "groups_per_batch=8",
            "there is no groups_per_batch=8; Tinker's groups_per_batch is here: --groups",
        ),
        ("train grpo", "group_size=8", "areax train grpo: write --group-size 8, got group_size=8; see"),
        ("train grpo", "--model m --data d --reward r --stop-on reward=>0.5", "\"reward>=0.95@5\", got 'reward=>0.5'"),
        ("train grpo", "learning_rate=8", "areax train grpo: write --optim.lr 8, got learning_rate=8; see"),
        (
            "train grpo",
            "Qwen/Qwen3-0.6B --data d",
            "the name of their option, as in --model Qwen/Qwen3-0.6B, got Qwen/",
        ),
        ("eval", "Qwen/Qwen3-0.6B", "areax eval: values need the name of their option, as in --model Qwen/Qwen3-0.6B"),
        ("train sft", "trainer.epochs=3", "values need the name of their option, got trainer.epochs=3; see"),
        ("train grpo", "--grups 3", "unrecognized options: --grups; did you mean --groups?; see"),
        ("train grpo", "--tp 2", "unrecognized options: --tp; did you mean --mesh.tp?; see"),
    ],
)
def test_other_names_end_in_one_line_that_says_what_to_use(capsys, command, words, message):
    assert cli.main([*command.split(), *words.split()]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beta: 0.1", "there is no option beta; TRL's beta is here: --objective.kl.coef"),
        ("actor_rollout_ref: {rollout: {n: 8}}", "verl's rollout.n is here: --group-size"),
        ("algorithm: {adv_estimator: grpo}", "verl's algorithm.adv_estimator is here: areax train ppo, grpo"),
        ("gconfig: {n_samples: 8}", "AReaL's gconfig.n_samples is here: --group-size"),
    ],
)
def test_files_of_other_libraries_are_answered_alike(tmp_path, text, message):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        config_file.read(tmp_path / "run.yaml", grpo.Config)
