"""`--env`: an environment in place of rows, a reward and a workflow, into which it is expanded here."""

import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from areax.adapters.command_line.options import flat, json_object, replaced
from areax.recipes.shared import evaluation
from areax.rollout import object_path
from areax.rollout.scheduling.mixture import FIELD, Mixture
from areax.rollout.workflows import environment_rows, environment_workers, environments
from areax.rollout.workflows.environment_rows import Rows
from areax.rollout.workflows.environments import WORLD

# Files of adapters/environments:
WORLDS = (
    "aviary", "gymnasium", "harbor", "nemo_gym", "openenv", "openreward", "reasoning_gym", "search", "textarena",
    "tinker_cookbook",
)  # fmt: skip
AGENTS = "agentlightning", "inspect_ai", "verifiers"  # whose environments call the model
KINDS = *WORLDS, *AGENTS
OF_DATA = ("agentlightning",)  # whose tasks are the rows of --data
AGENT = "areax.adapters.environments.{}:Agent"
PLAY, TOOL_CLASS = "areax.rollout.workflows.environments:play", "areax.rollout.workflows.tool_class:World"
ONE_OF = "areax.rollout.workflows.environments:play_one_of"
WEIGHT = re.compile(r"(.+?):(\d+\.?\d*|\.\d+)", re.ASCII)
ADDRESS = re.compile(r".*//[^/:]*", re.ASCII)  # without a port, which is no weight
REWARD, SINGLE_TURN = "areax.rollout.rewards:none", "areax.rollout.workflows:single_turn"
# Entries of --env-options that are not the environment's:
OF_PLAY = "turns", "step_timeout_s", "style", "workers", "environment"
TESTS_S = 900.0  # seconds of a step that may run a task's tests, or of a start that builds its image
HELDOUT = 1 << 30  # seeds from here on are for evaluation
INSTEAD_OF = {"env": ("data", "reward")}  # required options that another stands for
OF_CLASS = "make", "reward"  # options of TOOL_CLASS that are not the class's
Config = TypeVar("Config")


class Environment(NamedTuple):
    """What `--env` names.

    Attributes:
      world: object path of the class of a `World`; "" = an agent.
      own: object path of the class that it runs, which is the world, one whose methods are tools, or the agent.
      options: arguments of the world, or the agent.
      play: arguments of `environments.play`.
    """

    name: str
    world: str
    own: str
    options: dict[str, Any]
    play: dict[str, Any]


class Share(NamedTuple):
    """One environment of a mixture.

    Attributes:
      options: as of `--env-options` for it alone.
    """

    name: str
    env: str
    options: str
    weight: Fraction


def shares(env: str, options: str) -> list[Share]:
    """The environments of `--env NAME=KIND:NAME:WEIGHT,...`, whose `--env-options` are by name; [] of one alone.

    Raises:
      ValueError: one has no name, that of another, or a weight of 0; options of none; what cannot be mixed.
    """
    texts = env.split(",")
    found = [evaluation.NAMED.fullmatch(text) for text in texts]
    if not any(found):
        return []
    given, made = json_object("--env-options", options), list[Share]()
    for text, match in zip(texts, found, strict=True):
        if not match or match[1] in [share.name for share in made]:
            raise ValueError(f"--env: each of several environments needs a name of its own, as in a={text}, got {env}")
        name, place = match.groups()
        weighted = WEIGHT.fullmatch(place)
        if weighted and ADDRESS.fullmatch(weighted[1]):
            weighted = None
        if not weighted and place.count(":") > 1 and _misweighted(place):
            raise ValueError(f"--env: a weight must be a number above 0, such as 2 or 0.5, got {text}")
        place, weight = (weighted[1], Fraction(weighted[2])) if weighted else (place, Fraction(1))
        if not weight or place.partition(":")[0] in AGENTS:
            what = "have a weight above 0" if not weight else "be stepped by the trainer, which those of agents are not"
            raise ValueError(f"--env: an environment of a mixture must {what}, got {text}")
        made.append(Share(name, place, json.dumps(given.pop(name, {})), weight))
    if given:
        raise ValueError(f"--env-options of a mixture must be by the names in --env, got {', '.join(given)} besides")
    return made


def _misweighted(place: str) -> bool:
    """Whether an environment ends with a number that is no weight, and no port."""
    before, _, last = place.rpartition(":")
    try:
        float(last)
    except ValueError:
        return False
    return not ADDRESS.fullmatch(before)


def named(env: str, options: str) -> Environment:
    """What `--env` and `--env-options` name. Raises ValueError if there is no such class or function."""
    given = json_object("--env-options", options)
    kind, _, name = env.partition(":")
    if kind in AGENTS and name:
        return Environment(env, "", AGENT.format(kind), {"name": name, **given}, {})
    play = {name: given.pop(name) for name in OF_PLAY if name in given}
    try:
        environments.check_options(**play)
    except ValueError as error:
        raise ValueError(f"--env-options: {error}") from None
    variables = play.get("environment", ())
    workers = environment_workers.counted(play.get("workers", 0), variables)
    if kind in WORLDS and name:
        world = f"areax.adapters.environments.{kind}:World"
        limits = {"step_timeout_s": TESTS_S} if kind == "harbor" else {}
        return Environment(env, world, world, {"name": name, **given}, limits | play)
    try:
        if workers:
            steps = _described(env, "", "{}", tuple(variables)).steps
        else:
            found = object_path.resolve(env)
            steps = not inspect.isclass(found) or hasattr(found, "step")
    except ValueError as error:
        kinds = ", ".join(f"{kind}:NAME" for kind in KINDS)
        raise ValueError(f"--env {env}: must be {kinds} or a class, FILE.py:CLASS ({error})") from error
    if not steps:
        return Environment(env, TOOL_CLASS, env, {"make": env, **given}, play)
    return Environment(env, env, env, given, play)


def conflicts(config: Any) -> Iterator[str]:
    """Why options of a Config cannot be used with its `--env`, or without, one sentence for each reason."""
    given = flat(config)
    if not given.env:
        if given.env_options:
            yield f"--env-options is for an environment, --env, got {given.env_options} alone; leave it out"
        return
    own = PLAY, ONE_OF, *map(AGENT.format, AGENTS)
    several = shares(given.env, given.env_options)
    for option, taken in (
        ("data", (several or given.env.partition(":")[0] in {*KINDS} - {*OF_DATA}) and given.data),
        ("reward", given.reward != REWARD and given.reward),
        ("workflow", given.workflow not in (*own, SINGLE_TURN) and given.workflow),
        ("workflow-options", given.workflow not in own and given.workflow_options),
        ("row", not given.data and given.row),
        ("max-prompt", given.max_prompt),
    ):
        if taken:
            yield f"--env {given.env} stands for rows, a reward and a workflow; leave out --{option}, got {taken}"


def expanded(config: Config) -> Config:
    """The Config with the reward and the workflow that its `--env`, if any, stands for."""
    given: Any = config
    if not given.env:
        return config
    of_play = lambda found: {"world": found.world, "name": found.name, "options": found.options, **found.play}
    options: dict[str, Any]
    if several := shares(given.env, given.env_options):
        worlds = {share.name: of_play(named(share.env, share.options)) for share in several}
        workflow, options = ONE_OF, {"worlds": worlds}
    else:
        found = named(given.env, given.env_options)
        workflow, options = (PLAY, of_play(found)) if found.world else (found.own, found.options)
    return replaced(given, reward=REWARD, workflow=workflow, workflow_options=json.dumps(options))


@functools.lru_cache(maxsize=8)
def _described(world: str, split: str, options: str, environment: tuple[str, ...]) -> environment_rows.Description:
    return environment_rows.describe(world, split, json.loads(options), environment)


def rows(env: str, options: str, split: Literal["train", "eval"]) -> Any:
    """The rows of an environment: what the static method `rows(split, **options)` of its class returns, or {"seed": n}
    for n from 0 on, for evaluation from HELDOUT on. Raises ValueError if they do not take the options."""
    found, begin = named(env, options), HELDOUT if split == "eval" else 0
    seeds = Rows(lambda: ({"seed": n} for n in itertools.count(begin)))
    given = {name: value for name, value in found.options.items() if found.world != TOOL_CLASS or name not in OF_CLASS}
    if found.play.get("workers"):
        made = _described(found.own, split, json.dumps(given), tuple(found.play.get("environment", ()))).rows
        return seeds if made is None else made
    own = object_path.load_object(found.own)
    if not isinstance(inspect.getattr_static(own, "rows", None), staticmethod):
        return seeds
    try:
        inspect.signature(own.rows).bind(split, **given)
    except TypeError as error:
        raise ValueError(f"--env {env}: --env-options must be those of its rows: {error}") from None
    made = own.rows(split, **given)
    return made if hasattr(made, "__getitem__") else Rows(lambda: own.rows(split, **given))


def opened(env: str, options: str, open_one: Callable[[Any, int], Any], seed: int) -> Any:
    """What a run trains on: `open_one(rows, seed)` of the environment, or of each of a mixture in its share."""
    if not (several := shares(env, options)):
        return open_one(rows(env, options, "train"), seed)
    own = {share.name: open_one(rows(share.env, share.options, "train"), seed + i) for i, share in enumerate(several)}
    return Worlds(own, {share.name: share.weight for share in several}, seed)


class Worlds(Mixture):
    """A mixture whose rows name their environment, whatever fields they have of their own."""

    def __getitem__(self, ordinal: int) -> dict:
        return {**super().__getitem__(ordinal), WORLD: self.source(ordinal)}


def heldout(env: str, options: str, data: str, name: str, source: str) -> dict[str, list[dict]] | None:
    """{name: rows} of `--heldout [NAME=]env:N`, the first N for evaluation; None for another source.

    Of a mixture without a name there is a set for each environment, and with that of one, its own.

    Args:
      data: `--data`, which the environment's own tasks are not.

    Raises:
      ValueError: there is no environment, or no N; or there is `data`.
    """
    word, _, count = source.partition(":")
    if word != "env":
        return None
    if not (env and count.isdecimal() and int(count)):
        raise ValueError(f"--heldout env:N needs --env, and N, how many of its tasks to evaluate on, got {source}")
    if data:
        raise ValueError(f"--heldout {source} is tasks of the environment, got --data {data} in their place; name rows")
    each = {x.name: x for x in shares(env, options)}
    if not each or name and name not in each:
        return {name: first(env, options, int(count))}
    return {x.name: _first_of(x, int(count)) for x in each.values() if name in ("", x.name)}


def _first_of(share: Share, count: int) -> list[dict]:
    return [{FIELD: share.name, **row, WORLD: share.name} for row in first(share.env, share.options, count)]


def first(env: str, options: str, count: int) -> list[dict]:
    """The first `count` rows of an environment for evaluation, or of each of a mixture."""
    if several := shares(env, options):
        return [row for share in several for row in _first_of(share, count)]
    found = list(itertools.islice(rows(env, options, "eval"), count))
    if not found:
        raise ValueError(f"--env {env}: must have tasks for evaluation, got none of rows('eval')")
    return found


async def check(env: str, options: str, row: dict, tokens: Any, longest: int = 0) -> None:
    """Begins and ends an episode, of a mixture one of each. Raises ValueError, in one line, if the environment cannot;
    an agent's `rows` has. `longest` as of `environments.check`."""
    for share in (several := shares(env, options)):
        await check(share.env, share.options, next(iter(rows(share.env, share.options, "train"))), tokens, longest)
    if several:
        return
    found = named(env, options)
    if not found.world:
        return
    await environments.check(
        found.world, row, tokenizer=tokens, options=found.options, name=found.name, longest=longest, **found.play
    )
