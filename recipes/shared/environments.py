"""`--env`: an environment in place of rows, a reward and a workflow, into which it is expanded here."""

import inspect
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

from areax.adapters.command_line.options import flat, json_object, replaced
from areax.rollout import object_path
from areax.rollout.workflows import environments

WORLDS = "aviary", "gymnasium", "nemo_gym", "openenv", "reasoning_gym", "textarena"  # files of adapters/environments
AGENTS = ("verifiers",)  # likewise, whose environments call the model
KINDS = *WORLDS, *AGENTS
AGENT = "areax.adapters.environments.{}:Agent"
PLAY, TOOL_CLASS = "areax.rollout.workflows.environments:play", "areax.rollout.workflows.tool_class:World"
REWARD, SINGLE_TURN = "areax.rollout.rewards:none", "areax.rollout.workflows:single_turn"
OF_PLAY = "turns", "step_timeout_s", "style"  # entries of --env-options that are not the environment's
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


def named(env: str, options: str) -> Environment:
    """What `--env` and `--env-options` name. Raises ValueError if there is no such class or function."""
    given = json_object("--env-options", options)
    kind, _, name = env.partition(":")
    if kind in AGENTS and name:
        return Environment(env, "", AGENT.format(kind), {"name": name, **given}, {})
    play = {name: given.pop(name) for name in OF_PLAY if name in given}
    if kind in WORLDS and name:
        world = f"areax.adapters.environments.{kind}:World"
        return Environment(env, world, world, {"name": name, **given}, play)
    try:
        found = object_path.resolve(env)
    except ValueError as error:
        kinds = ", ".join(f"{kind}:NAME" for kind in KINDS)
        raise ValueError(f"--env {env}: must be {kinds} or a class, FILE.py:CLASS ({error})") from error
    if inspect.isclass(found) and not hasattr(found, "step"):
        return Environment(env, TOOL_CLASS, env, {"make": env, **given}, play)
    return Environment(env, env, env, given, play)


def conflicts(config: Any) -> Iterator[str]:
    """Why options of a Config cannot be used with its `--env`, or without, one sentence for each reason."""
    given = flat(config)
    if not given.env:
        if given.env_options:
            yield f"--env-options is for an environment, --env, got {given.env_options} alone; leave it out"
        return
    own = PLAY, *map(AGENT.format, AGENTS)
    for option, taken in (
        ("data", given.env.partition(":")[0] in KINDS and given.data),
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
    found = named(given.env, given.env_options)
    options = {"world": found.world, "name": found.name, "options": found.options, **found.play}
    workflow, options = (PLAY, options) if found.world else (found.own, found.options)
    return replaced(given, reward=REWARD, workflow=workflow, workflow_options=json.dumps(options))


class Rows:
    """The rows that `make()` iterates over; their iteration can start anew."""

    def __init__(self, make: Callable[[], Iterable[dict]]):
        self._make = make

    def __iter__(self) -> Iterator[dict]:
        return iter(self._make())


def rows(env: str, options: str, split: Literal["train", "eval"]) -> Any:
    """The rows of an environment: what the static method `rows(split, **options)` of its class returns, or {"seed": n}
    for n from 0 on, for evaluation from HELDOUT on. Raises ValueError if they do not take the options."""
    found = named(env, options)
    own = object_path.load_object(found.own)
    if not isinstance(inspect.getattr_static(own, "rows", None), staticmethod):
        begin = HELDOUT if split == "eval" else 0
        return Rows(lambda: ({"seed": n} for n in itertools.count(begin)))
    given = {name: value for name, value in found.options.items() if found.world != TOOL_CLASS or name not in OF_CLASS}
    try:
        inspect.signature(own.rows).bind(split, **given)
    except TypeError as error:
        raise ValueError(f"--env {env}: --env-options must be those of its rows: {error}") from None
    made = own.rows(split, **given)
    return made if hasattr(made, "__getitem__") else Rows(lambda: own.rows(split, **given))


def heldout(env: str, options: str, source: str) -> list[dict] | None:
    """The rows of `--heldout env:N`, the first N of the environment's for evaluation; None for another source.

    Raises:
      ValueError: there is no environment, or no N.
    """
    word, _, count = source.partition(":")
    if word != "env":
        return None
    if not (env and count.isdecimal() and int(count)):
        raise ValueError(f"--heldout env:N needs --env, and N, how many of its tasks to evaluate on, got {source}")
    return first(env, options, int(count))


def first(env: str, options: str, count: int) -> list[dict]:
    """The first `count` rows of an environment for evaluation."""
    found = list(itertools.islice(rows(env, options, "eval"), count))
    if not found:
        raise ValueError(f"--env {env}: must have tasks for evaluation, got none of rows('eval')")
    return found


async def check(env: str, options: str, row: dict, tokens: Any) -> None:
    """Begins and ends an episode. Raises ValueError, in one line, if the environment cannot. An agent's `rows` has."""
    found = named(env, options)
    if not found.world:
        return
    await environments.check(found.world, row, tokenizer=tokens, options=found.options, name=found.name, **found.play)
