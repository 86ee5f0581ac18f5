"""`--env`: what it expands into, what it refuses, its rows, and a run that goes on."""

import asyncio
import itertools
import json
import re

import pytest
import servers
import tiny
from fidelity import SAMPLING, Policy
from gateways import TOKENS

from areax.adapters import cli
from areax.adapters.command_line import parse
from areax.adapters.command_line.options import flat, replaced
from areax.adapters.tracking import run_dir
from areax.core.losses import GRPO
from areax.core.optim import Optimizer
from areax.recipes import eval, grpo
from areax.recipes.shared import environments, rollouts
from areax.rollout import object_path
from areax.rollout.journal import store
from areax.rollout.scheduling.curriculum import Prompts
from areax.rollout.types import Sampling
from areax.rollout.workflows import environments as worlds

WORLDS = """
import asyncio

class Sum:
    made = []
    def __init__(self, digits=1):
        self.digits = digits
    def reset(self, row):
        Sum.made.append(row["seed"])
        self.left = 2
        return f"{row['seed'] % 10}+1"
    def step(self, message):
        self.left -= 1
        return "2+2", float(len(message["content"]) > self.digits), not self.left

class Own(Sum):
    @staticmethod
    def rows(split, digits=1):
        return [{"seed": n, "digits": digits, "split": split} for n in range(3)]

class Flow(Sum):
    @staticmethod
    def rows(split, **options):
        yield from Own.rows(split, **options)

class Sourced(Sum):
    def __init__(self, source):
        self.digits = 1
    @staticmethod
    def rows(split, source):
        return [{"seed": n, "data_source": source} for n in range(2)]
    def reset(self, row):
        self.left = 1
        return f"{row}"

class Full(Sum):
    def reset(self, row):
        raise RuntimeError("no\\nroom")

class Told(Sum):
    def step(self, message):
        self.left -= 1
        return f"{3 * self.seen % 10}", float(len(message["content"])), not self.left
    def reset(self, row):
        self.left, self.seen = 2, row["seed"] % 10
        return f"{self.seen}"

class Counter:
    def reset(self, **row):
        self.count = 0
    def add(self, number: int) -> int:
        self.count += number
        return self.count
    def get_reward(self):
        return self.count
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("env") / "my_env.py"
    path.write_text(WORLDS)
    return path


def options(config):
    given = flat(environments.expanded(config))
    assert given.reward == environments.REWARD and given.workflow == environments.PLAY
    return json.loads(given.workflow_options)


def test_env_stands_for_rows_a_reward_and_a_workflow(file):
    words = ["--model", "m", "--env", "textarena:Nim-v0", "--env-options", '{"max_turns": 3, "turns": 4}']
    want = {
        "world": "areax.adapters.environments.textarena:World", "name": "textarena:Nim-v0",
        "options": {"name": "Nim-v0", "max_turns": 3}, "turns": 4,
    }  # fmt: skip
    for recipe, more in ((grpo, []), (eval, ["--limit", "9"])):
        config = parse.parse(recipe.Config, [*words, *more], "x")
        assert options(config) == want
        assert environments.expanded(environments.expanded(config)) == environments.expanded(config)
    config = grpo.Config("m", "", "", env=f"{file}:Sum")
    assert options(config) == {"world": f"{file}:Sum", "name": f"{file}:Sum", "options": {}}
    config = grpo.Config("m", "rows.jsonl", "", env=f"{file}:Counter", env_options='{"start": 1}')
    assert options(config)["world"] == "areax.rollout.workflows.tool_class:World"
    assert options(config)["options"] == {"make": f"{file}:Counter", "start": 1}
    config = grpo.Config("m", "d", "r")
    assert environments.expanded(config) is config


def test_agents_whose_tasks_are_rows_of_a_file_take_data():
    config = grpo.Config("m", "rows.jsonl", "", env="agentlightning:my.py:own", env_options='{"n": 1}')
    given = flat(environments.expanded(config))
    assert given.workflow == "areax.adapters.environments.agentlightning:Agent" and given.data == "rows.jsonl"
    assert json.loads(given.workflow_options) == {"name": "my.py:own", "n": 1}
    with pytest.raises(ValueError, match="^--env inspect_ai:my.py:own stands for .*; leave out --data, got rows.jsonl"):
        grpo.Config("m", "rows.jsonl", "", env="inspect_ai:my.py:own")


@pytest.mark.parametrize(
    "words, line",
    [
        ("--env textarena:X --data d", "leave out --data, got d"),
        ("--env my.py:X --reward a:b", "leave out --reward, got a:b"),
        ("--env my.py:X --workflow a:b", "leave out --workflow, got a:b"),
        ("--env my.py:X --workflow-options {}", "leave out --workflow-options, got {}"),
        ("--env my.py:X --max-prompt 9", "leave out --max-prompt, got 9"),
        ("--env my.py:X --env-options 3", "--env-options must be a JSON object"),
        ('--data d --reward r --env-options {"a":1}', "--env-options is for an environment, --env, got"),
        ("--data d", "needs --reward"),
    ],
)
def test_options_that_do_not_go_with_env_are_refused(capsys, words, line):
    assert cli.main(["train", "grpo", "--model", "m", *words.split()]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert line in said, said


def test_an_evaluation_needs_a_limit(capsys):
    assert cli.main(["eval", "--model", "m", "--env", "textarena:X"]) == 2
    assert "--env textarena:X needs --limit, how many of its tasks to evaluate on, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing", "my_env.py", "textarena", "{file}:Sun"])
def test_an_env_that_is_none_is_named(file, name):
    name = name.format(file=file)
    with pytest.raises(ValueError, match=f"^--env {re.escape(name)}: must be aviary:NAME, .* or a class, FILE"):
        environments.named(name, "")


def test_rows_are_seeds_unless_the_class_has_its_own(file):
    few = lambda rows: list(itertools.islice(rows, 2))
    seeds = environments.rows(f"{file}:Sum", "", "train")
    assert few(seeds) == few(seeds) == [{"seed": 0}, {"seed": 1}]  # it starts anew
    assert environments.first("textarena:X", "", 2) == [{"seed": 2**30}, {"seed": 2**30 + 1}]
    own = environments.rows(f"{file}:Own", '{"digits": 4, "turns": 2}', "train")
    assert own[2] == {"seed": 2, "digits": 4, "split": "train"}
    flow = environments.rows(f"{file}:Flow", '{"digits": 4}', "train")
    assert list(flow) == list(flow) == own
    assert environments.heldout(f"{file}:Own", "", "", "", "env:2")[""][1] == {"seed": 1, "digits": 1, "split": "eval"}
    assert environments.heldout("", "", "", "", "rows.jsonl") is None
    for env, source in (("", "env:3"), ("textarena:X", "env"), ("textarena:X", "env:0")):
        with pytest.raises(ValueError, match=f"--heldout env:N needs --env, and N, .* got {source}"):
            environments.heldout(env, "", "", "", source)


@pytest.mark.parametrize(
    "env, options, line",
    [
        ("nemo_gym:http://a", "", "missing a required argument: 'data'"),
        ("nemo_gym:http://a", '{"data": "x", "size": 3}', "got an unexpected keyword argument 'size'"),
        ("{file}:Own", '{"size": 3}', "got an unexpected keyword argument 'size'"),
    ],
)
def test_options_that_rows_do_not_take_are_named(file, env, options, line):
    env = env.format(file=file)
    with pytest.raises(ValueError, match=f"^--env {re.escape(env)}: --env-options must be those of its rows: {line}$"):
        environments.rows(env, options, "train")


def test_several_environments_have_shares_and_options_of_their_own(file):
    env, given = f"a={file}:Sum:3,b=openenv:http://h:8000,c=nemo_gym:http://h:80:.5", '{"a": {"digits": 2, "turns": 1}}'
    found = environments.shares(env, given)
    assert [(x.name, x.env, float(x.weight)) for x in found] == [
        ("a", f"{file}:Sum", 3), ("b", "openenv:http://h:8000", 1), ("c", "nemo_gym:http://h:80", 0.5)
    ]  # fmt: skip
    expanded = flat(environments.expanded(grpo.Config("m", "", "", env=env, env_options=given)))
    own = json.loads(expanded.workflow_options)["worlds"]
    assert expanded.workflow == environments.ONE_OF and own.keys() == {"a", "b", "c"}
    assert own["a"] == {"world": f"{file}:Sum", "name": f"{file}:Sum", "options": {"digits": 2}, "turns": 1}
    rows = environments.first(f"a={file}:Own,b={file}:Sum", '{"a": {"digits": 4}}', 2)
    assert [row["data_source"] for row in rows] == ["a", "a", "b", "b"] and rows[0]["digits"] == 4
    assert [row[worlds.WORLD] for row in rows] == ["a", "a", "b", "b"]
    assert environments.shares("openenv:http://h/?a=b", "") == environments.shares("textarena:X", "") == []


def test_held_out_tasks_of_a_mixture_are_those_of_the_environment_that_is_named(file):
    env = f"a={file}:Own,b={file}:Sum"
    of = lambda name: {
        of: [row[worlds.WORLD] for row in rows] for of, rows in environments.heldout(env, "", "", name, "env:2").items()
    }
    assert of("") == {"a": ["a", "a"], "b": ["b", "b"]}
    assert of("b") == {"b": ["b", "b"]} and of("all") == {"all": ["a", "a", "b", "b"]}
    with pytest.raises(ValueError, match="--heldout env:2 is tasks of the environment, got --data rows.jsonl"):
        environments.heldout(f"{file}:Sum", "", "rows.jsonl", "", "env:2")
    for weight in ("nan", "-1", "1e9"):
        with pytest.raises(ValueError, match="a weight must be a number above 0, such as 2 or 0.5, got"):
            environments.shares(f"a={file}:Sum:{weight},b={file}:Own", "")


@pytest.mark.parametrize("source", ["b", "gsm8k"])
def test_rows_of_a_mixture_are_played_in_their_own_environment(file, source):
    """Whatever fields they have, also one with the name of another environment."""
    env, given = f"a={file}:Sourced,b={file}:Own", json.dumps({"a": {"source": source}})
    prompts = environments.opened(env, given, lambda rows, seed: Prompts(list(rows), seed), 0)
    flow = json.loads(
        flat(environments.expanded(grpo.Config("m", "", "", env=env, env_options=given))).workflow_options
    )
    rows = [*(prompts[n] for n in range(4)), *environments.first(env, given, 2)]
    assert [row[worlds.WORLD] for row in rows[:4]] == [prompts.source(n) for n in range(4)]
    for row in rows:
        policy = Policy("1")
        how = dict(tokenizer=TOKENS, sampling=SAMPLING, worlds=flow["worlds"])
        [*_, sample] = asyncio.run(worlds.play_one_of(policy, row, **how))
        if row[worlds.WORLD] == "a":
            assert f"'data_source': '{source}'" in policy.heard[0] and worlds.WORLD not in policy.heard[0]
        else:
            assert f"{row['seed'] % 10}+1" in policy.heard[0]
        assert worlds.WORLD not in sample.info["row"]


@pytest.mark.parametrize(
    "env, options, line",
    [
        ("a=textarena:X,textarena:Y", "", "each of several environments needs a name of its own, as in a=textarena:Y"),
        ("a=textarena:X,a=textarena:Y", "", "needs a name of its own"),
        ("a=textarena:X:0,b=textarena:Y", "", "must have a weight above 0, got a=textarena:X:0"),
        ("a=verifiers:X,b=textarena:Y", "", "must be stepped by the trainer, .* got a=verifiers:X"),
        (
            "a=textarena:X",
            '{"turns": 3}',
            "--env-options of a mixture must be by the names in --env, got turns besides",
        ),
        ("a=textarena:X", '{"a": 3}', "--env-options must be a JSON object"),
    ],
)
def test_what_cannot_be_mixed_is_named(env, options, line):
    with pytest.raises(ValueError, match=line):
        environments.expanded(grpo.Config("m", "", "", env=env, env_options=options))


@pytest.mark.slow
def test_a_mixture_trains_on_each_environment_in_its_share_and_goes_on(place, file):
    path = file.with_name("two.py")
    path.write_text(WORLDS)
    env, own = f"a={file}:Sum:3,b={path}:Flow:1", '{"a": {"digits": 2}}'
    config = replaced(run(place, file), env=env, env_options=own, out=str(place / "mixed"), groups=4)
    made = object_path.load_object(f"{file}:Sum").made, object_path.load_object(f"{path}:Sum").made
    [one.clear() for one in made]
    done = grpo.main(config)
    assert done["complete"] and done["heldout_rows"] == 6
    trained = [[seed for seed in one if seed < environments.HELDOUT] for one in made]
    assert {*range(6)} <= {*trained[0]} and {0, 1} <= {*trained[1]}
    tiny.cut_off(place / "mixed", place / "mixed-again", 1)
    grpo.main(replaced(config, out=str(place / "mixed-again")))
    weights = [(place / name / "model" / "model.safetensors").read_bytes() for name in ("mixed", "mixed-again")]
    assert weights[0] == weights[1]


def run(place, file, env="Sum"):
    base = grpo.Config(str(place / "model"), "", "", env=f"{file}:{env}", env_options='{"digits": 2}')
    return replaced(
        base, out=str(place / "run"), groups=2, group_size=2, max_concurrent=4, length=64, rows=2, eta=0, steps=2,
        servers=((place / "url").read_text(),), sampling=Sampling(max_new_tokens=4), heldout=("env:3",),
        objective=GRPO(advantage={"std": "none"}), optim=Optimizer(lr=1e-3), save_every=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("place")
    tiny.model(path / "model")
    with servers.embedded(path / "model", slots=8, context=64) as remote:
        (path / "url").write_text(remote.url)
        yield path


@pytest.mark.slow
def test_a_run_trains_on_an_environment_and_goes_on(place, file):
    """Stopped after a step and run again, it meets the same tasks and makes the same weights."""
    made = object_path.load_object(f"{file}:Sum").made
    done = grpo.main(run(place, file))
    assert done["complete"] and done["heldout_rows"] == 3 and 0 <= done["accuracy"] <= 2
    asked = {seed for seed in made if seed < environments.HELDOUT}
    assert {0, 1, 2, 3} <= asked and {2**30, 2**30 + 1, 2**30 + 2} == {*made} - asked
    tiny.cut_off(place / "run", place / "again", 1)
    (place / "again" / store.FILE).unlink()  # which has the episodes of the second step
    made.clear()
    done = grpo.main(replaced(run(place, file), out=str(place / "again")))
    assert done["complete"] and min(set(made) - {0}) == 2  # 0 was only tried before the run
    weights = [(place / name / "model" / "model.safetensors").read_bytes() for name in ("run", "again")]
    assert weights[0] == weights[1]


@pytest.mark.slow
def test_turns_are_compared_with_those_of_the_same_state(place, file):
    """GiGPO: in Told both first turns of a group are of one state, and so are the second ones, which are told the same.
    Without states, in episodes of one turn by another workflow, the option is refused."""
    objective = GRPO(advantage={"std": "none", "state_coef": 1.0})
    config = replaced(run(place, file, env="Told"), out=str(place / "states"), heldout=(), objective=objective)
    seen, marked = [], rollouts.states.marked

    async def watched(*given):
        made = await marked(*given)
        seen.extend(made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollouts.states, "marked", watched)
        assert grpo.main(replaced(config, env_options='{"turns": 2}'))["complete"]
    assert len(seen) >= 8
    for s in seen:
        kind, state = s.arrays["state"]
        turns = [{*state[s.mask & (s.turn == turn)].tolist()} for turn in range(int(s.turn[s.mask].max()) + 1)]
        assert kind == "target" and all(len(turn) == 1 for turn in turns) and 0 not in set().union(*turns)
        assert not state[~s.mask].any()
    by_first = {int(s.arrays["state"][1][s.mask][0]) for s in seen}
    assert 1 <= len(by_first) < len(seen)  # one for each task


@pytest.mark.long
def test_what_an_environment_answers_is_learnt(place, file):
    """ECHO: the policy expects what its environment answers, a digit that depends on the task; by rewards alone it
    does not, which a coefficient of nearly nothing measures."""
    fell = {}
    for coef in (1.0, 1e-9):
        config = replaced(
            run(place, file, env="Told"), out=str(place / f"told-{coef:g}"), env_options='{"turns": 2}', steps=30,
            groups=16, group_size=2, rows=8, max_concurrent=8, heldout=(), save_every=0, minibatches=2,
            objective=GRPO(advantage={"std": "none"}, observation={"coef": coef, "kinds": ("user",)}),
            optim=Optimizer(lr=1e-2),
        )  # fmt: skip
        assert grpo.main(config)["complete"]
        lines = run_dir.read_lines(place / f"told-{coef:g}" / run_dir.METRICS)
        nll = [line["observation_nll"] for line in lines if line["kind"] == "grpo"]
        print(coef, [round(x, 2) for x in nll])
        fell[coef] = sum(nll[-5:]) / sum(nll[:5])
    assert fell[1.0] < 0.2 and fell[1e-9] > 0.7, fell


@pytest.mark.slow
def test_an_evaluation_plays_an_environment(place, file):
    config = eval.Config(
        str(place / "model"), "", "", env=f"{file}:Sum", limit=3, servers=((place / "url").read_text(),),
        sampling=Sampling(max_new_tokens=4, temperature=0.0), out=str(place / "eval"),
    )  # fmt: skip
    done = eval.main(config)
    assert done["rows"] == 3 and done["unscorable"] == 0
    lines = [json.loads(line) for line in (place / "eval" / "answers.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [{"seed": 2**30 + n} for n in range(3)]


@pytest.mark.slow
def test_an_environment_that_cannot_begin_ends_a_run_before_it_starts(place, file):
    with pytest.raises(ValueError, match=r"Full cannot begin: reset: RuntimeError: no room; row {'seed': 0}$"):
        grpo.main(replaced(run(place, file, env="Full"), out=str(place / "full")))
    assert not (place / "full").exists()
