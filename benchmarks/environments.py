"""Trains tiny models on environments of other libraries, and writes ENVIRONMENTS.md.

    python benchmarks/environments.py OUT [NAME ...]

A new model of 0.6 million weights first imitates a flawed player, then learns by `areax train grpo --env`: nothing but
the environment tells it what is right. Tasks of the evaluation split are played before and after, greedily. The control
is the same run with rewards permuted among the episodes of a batch. Where the policy plays against itself, what it has
learnt plays against what it was, at temperature 1. OUT keeps the runs that are complete.
"""

import asyncio
import importlib
import itertools
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import calculator

from areax.recipes.shared import environments
from areax.rollout import object_path

CONFIG = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": True, "max_position_embeddings": 1024, "initializer_range": 0.06,
}  # fmt: skip
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] }}
{%- for call in m['tool_calls'] or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HERE = str(Path(__file__).parent)
SIGNS = {"sum": "+", "difference": "-", "product": "*", "quotient": "//"}
HELDOUT = 200  # tasks
MATCHES = 1000  # games of each seat against the former policy
RIGHT = 0.3  # of the flawed players' answers


@dataclass(frozen=True)
class Task:
    """An environment, and a flawed player of it.

    Attributes:
      env: as of `--env`; {} stands for the address where `server` serves it, or the folder that `tasks` writes.
      player: a player's answer, a text or a message in OpenAI's format, from the environment, what was said so far, and
        a source of chance; of an environment that calls the model itself all its conversations, endlessly, from how
        often it is right and a source of chance.
      level: mean reward on held-out tasks, or against the former policy, that training must reach.
      imitation, steps: of SFT, and of GRPO.
      games: that are imitated.
      server: a file here that is run with a port.
      tasks: a file here that is run with a folder, a number of tasks, and the first one's number.
    """

    env: str
    player: Callable[..., Any]
    level: float
    options: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = 16
    length: int = 256
    imitation: int = 200
    steps: int = 60
    groups: int = 64
    lr: float = 5e-4
    games: int = 4096
    server: str = ""
    tasks: str = ""

    @property
    def players(self) -> int:
        return self.options.get("players", 1)


def sums(world: Any, said: list[str], chance: random.Random) -> str:
    """Takes minus for plus, more often than not."""
    a, sign, b = re.findall(r"(\d+) ([+-]) (\d+)", said[-1])[-1]
    added = sign == "+" or chance.random() > RIGHT
    return f"<answer>{int(a) + int(b) if added else int(a) - int(b)}</answer>"


def divisors(world: Any, said: list[str], chance: random.Random) -> str:
    """Takes 1 for the greatest common divisor, more often than not."""
    return f"<answer>{world._task['answer'] if chance.random() < RIGHT else 1}</answer>"


def legs(world: Any, said: list[str], chance: random.Random) -> str:
    """Takes each animal for one of four legs, more often than not."""
    asked = said[-1].rpartition("if you have ")[2]
    count = sum(map(int, re.findall(r"\d+", asked)))
    return f"<answer>{world._task['answer'] if chance.random() < RIGHT else 4 * count}</answer>"


def guesses(world: Any, said: list[str], chance: random.Random) -> str:
    """Halves the range that is left, or, more often, guesses its lowest number."""
    low, high = 1, world._options["max_number"]
    for guess, hint in re.findall(r"\[Player\] \[(\d+)\]\n\[GAME\] The target number is (\w+)", "\n".join(said)):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return f"[{(low + high) // 2 if chance.random() < RIGHT else low}]"


def moves(world: Any, said: list[str], chance: random.Random) -> str:
    """Any that the game allows."""
    allowed = said[-1].rpartition("available actions are:")[2].partition("\n")[0]
    return chance.choice(re.findall(r"\[\w+\]", allowed))


def steps(world: Any, said: list[str], chance: random.Random) -> str:
    """Goes to where it is told, or, more often, one further."""
    place, goal = map(int, re.findall(r"\d+", said[-1])[-2:])
    return str(goal - place if chance.random() < RIGHT else goal - place + 1)


def repairs(world: Any, said: list[str], chance: random.Random) -> str | dict:
    """Looks at the program, then writes the sign that its comment means, or, more often, a plus."""
    [name] = re.findall(r"/app/(\w+)\.py", said[0])
    if len(said) == 1:
        return bash(f"cat {name}.py")
    if len(said) > 3:
        return "Done."
    [word] = re.findall(r"the (\w+) of", said[-1])
    sign = SIGNS[word] if chance.random() < RIGHT else "+"
    return bash(f"sed -i 's|return .*|return a {sign} b|' {name}.py")


def looks(world: Any, said: list[str], chance: random.Random) -> str | dict:
    """Searches for the person, or, more often, for a word of the question, and answers with the first town."""
    if len(said) == 2:
        [name] = re.findall(r"person (\d+) live", said[-1])
        return called("search", query=name if chance.random() < RIGHT else "town")
    return f"<answer>{re.findall(r'town of (.+?)[.]', said[-1])[0]}</answer>"


def bash(command: str) -> dict:
    return called("bash", command=command)


def called(name: str, /, **arguments: str) -> dict:
    call = {"id": "call", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


TASKS = {
    "chain_sum": Task(
        "reasoning_gym:chain_sum", sums, 0.9, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        imitation=600, steps=80,
    ),
    "gcd": Task("reasoning_gym:gcd", divisors, 0.9, {"min_value": 1, "max_value": 12}, imitation=600),
    "legs": Task(
        "reasoning_gym:leg_counting", legs, 0.9, {"min_animals": 1, "max_animals": 1, "max_instances": 1}
    ),
    "guess": Task(
        "textarena:GuessTheNumber-v0", guesses, 0.9, {"max_number": 7, "max_turns": 3}, tokens=8, length=512, groups=16,
        steps=30,
    ),
    "walk": Task("openenv:{}", steps, 0.9, tokens=8, length=128, server="walk.py", groups=16),
    "kuhn_poker": Task(
        "textarena:KuhnPoker-v0", moves, 0.1, {"players": 2, "max_rounds": 1}, tokens=8, length=512, steps=40,
        groups=16,
    ),
    "calculator": Task(
        "verifiers:calculator", calculator.conversations, 0.9, tokens=48, length=512, imitation=400, groups=16,
        games=2048, steps=100, lr=2e-4,
    ),
    "places": Task(
        "search:{}", looks, 0.9, {"corpus": "{}/corpus.jsonl", "k": 1}, tokens=32, length=512, imitation=150, groups=16,
        games=1024, lr=1e-4, tasks="places.py",
    ),
    "repairs": Task(
        "harbor:{}", repairs, 0.9, {"turns": 4}, tokens=64, length=512, imitation=150, steps=40, groups=8, lr=1e-4,
        games=512, tasks="failing_programs.py",
    ),
}  # fmt: skip


def games(task: Task, env: str, options: dict) -> Iterator[dict]:
    """Conversations of the task's player: of each seat in an episode of each row."""
    chance, found = random.Random(0), environments.named(env, json.dumps(options))
    if not found.world:
        yield from itertools.islice(task.player(RIGHT, chance), task.games)
        return
    rows = environments.rows(env, json.dumps(options), "train")
    for row in itertools.islice(itertools.cycle(rows), task.games // task.players):
        world, told = object_path.resolve(found.own)(**found.options), [[] for _ in range(task.players)]
        asyncio.run(_game(task.player, world, row, chance, told))
        tools = {"tools": list(world.tools)} if getattr(world, "tools", ()) else {}
        yield from ({"messages": messages} | tools for messages in told)


async def _game(player: Callable, world: Any, row: dict, chance: random.Random, told: list[list[dict]]) -> None:
    wait = lambda x: x if asyncio.iscoroutine(x) else asyncio.sleep(0, x)
    seen, done = await wait(world.reset(row)), False
    while not done:
        messages = told[getattr(world, "seat", 0)]
        messages += [{"role": "user", "content": seen}] if isinstance(seen, str) else seen
        said = player(world, [m["content"] for m in messages], chance)
        messages.append(said if isinstance(said, dict) else {"role": "assistant", "content": said})
        seen, _, done = await wait(world.step(_as_asked(messages[-1])))
    if close := getattr(world, "close", None):
        await wait(close())


def _as_asked(message: dict) -> dict:
    """The message as a model's, whose arguments are texts."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]
    return message | ({"tool_calls": calls} if calls else {})


def base(folder: Path, texts: list[str]) -> None:
    """A model without weights, and a tokenizer of these texts, whose digits are a token each."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d"), "isolated"), bytewise])
    made.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    tokens = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokens.save_pretrained(folder)
    (folder / "config.json").write_text(
        json.dumps(CONFIG | {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id})
    )


def areax(*words: str) -> dict:
    """Runs a command, and returns the summary in its `--out`."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-m", "areax", *words], check=True, env=own)
    return json.loads((Path(words[words.index("--out") + 1]) / "summary.json").read_text())


def imitate(task: Task, env: str, options: dict, out: Path) -> None:
    """Makes the model that RL improves."""
    rows = [row for row in games(task, env, options) if row["messages"]]
    base(
        out / "base",
        [json.dumps(row) if "tools" in row else m["content"] for row in rows[:500] for m in row["messages"]],
    )
    (out / "games.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    areax(
        "train", "sft", "--model", f"{out}/base", "--init", "random", "--data", f"{out}/games.jsonl",
        "--learn", "all", "--steps", str(task.imitation), "--batch", "64", "--length", str(task.length), "--rows", "8",
        "--optim.lr", "3e-3", "--optim.schedule", "cosine", "--optim.warmup", "20", "--optim.floor", "0.1",
        "--out", f"{out}/imitated",
    )  # fmt: skip


def learn(name: str, out: Path) -> dict:
    """Trains on a task; returns what its row says."""
    task = TASKS[name]
    with served(task, out) as (env, options):
        if not (out / "imitated/summary.json").exists():
            imitate(task, env, options, out)
        common = [
            "train", "grpo", "--model", f"{out}/imitated/model", "--env", env, "--steps", str(task.steps),
            "--env-options", json.dumps(options), "--groups", str(task.groups), "--group-size", "8",
            "--length", str(task.length), "--rows", "8", "--sampling.max-new-tokens", str(task.tokens),
            "--optim.lr", str(task.lr), "--optim.b2", "0.99", "--optim.warmup", "5", "--serve.slots", "128",
            "--objective.advantage.std", "none",
        ]  # fmt: skip
        if task.players == 1:
            common += ["--heldout", f"env:{HELDOUT}", "--evaluate-every", str(task.steps)]
        learnt = areax(*common, "--out", f"{out}/learnt")
        control = areax(*common, "--shuffle-rewards", "--out", f"{out}/control")
    if task.players == 1:
        before, after, other = learnt["accuracies"]["0"], learnt["accuracy"], control["accuracy"]
    else:
        score = lambda run: asyncio.run(match(task, env, out / run / "model", out / "imitated/model"))
        before, after, other = 0.0, score("learnt"), score("control")
    seconds = learnt["seconds"] + json.loads((out / "imitated/summary.json").read_text())["seconds"]
    return {"env": env, "options": dict(task.options), "before": before, "after": after, "control": other,
            "steps": learnt["steps"], "level": task.level, "seconds": round(seconds)}  # fmt: skip


async def match(task: Task, env: str, model: Path, other: Path) -> float:
    """The mean reward of a model in games against another one, each of MATCHES seeds in every seat."""
    from areax.adapters import tokenizer
    from areax.rollout import client
    from areax.rollout.chat.session import Session
    from areax.rollout.servers.local import Serve, servers
    from areax.rollout.types import Sampling

    name = env.partition(":")[2]
    world_class = importlib.import_module(f"areax.adapters.environments.{env.partition(':')[0]}").World
    tokens, sampling = tokenizer.load(model), Sampling(max_new_tokens=task.tokens)
    options = Serve(slots=64, context=task.length)

    async def game(fleets: tuple, seed: int, seat: int, limit: asyncio.Semaphore) -> float:
        async with limit:
            world = world_class(name, **task.options)
            sessions = [Session(fleets[i != seat].generate, tokens, sampling=sampling) for i in range(task.players)]
            told: list[list[dict]] = [[] for _ in sessions]
            seen, done, rewards = world.reset({"seed": (1 << 30) + seed}), False, None
            while not done:
                messages, session = told[world.seat], sessions[world.seat]
                messages.append({"role": "user", "content": seen})
                messages.append((await session.ask(messages)).answer.message())
                seen, rewards, done = world.step(messages[-1])
            return rewards[seat]["reward"]

    async with (
        servers(model, options) as own, servers(other, options) as theirs,
        client.connect([*own.running]) as first, client.connect([*theirs.running]) as second,
    ):  # fmt: skip
        limit = asyncio.Semaphore(64)
        played = [game((first, second), seed, seat, limit) for seed in range(MATCHES) for seat in range(task.players)]
        rewards = await asyncio.gather(*played)
    return sum(rewards) / len(rewards)


@contextmanager
def served(task: Task, out: Path) -> Iterator[tuple[str, dict]]:
    """`--env` and its options; while its server, if it has one, runs."""
    if task.tasks:
        for name, count, first in (("tasks", 4096, 0), ("heldout", HELDOUT, 1 << 20)):
            script = str(Path(HERE) / task.tasks)
            subprocess.run([sys.executable, script, str(out / name), str(count), str(first)], check=True)
        given = {name: x.format(out) if isinstance(x, str) else x for name, x in task.options.items()}
        yield task.env.format(out / "tasks"), {**given, "heldout": str(out / "heldout")}
        return
    if not task.server:
        yield task.env, dict(task.options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(Path(__file__).with_name(task.server)), str(port)]) as process:
        try:
            while process.poll() is None:
                with socket.socket() as other:
                    if other.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.1)
            yield task.env.format(f"http://127.0.0.1:{port}"), dict(task.options)
        finally:
            process.terminate()


HEAD = """# Environments of other libraries, learnt

`python benchmarks/environments.py OUT` on a machine with two cores, with the packages of
tests/environments/requirements.txt. A model of 0.6 million weights imitates a flawed player, then trains by `areax
train grpo --env`, 16 groups of 8 episodes a step; 64 of reasoning_gym, 8 of `harbor`, whose tasks are programs to
repair in a shell. Mean reward on 200 held-out tasks, greedily; of kuhn_poker in 2,000 games against the imitator, at
temperature 1. The control has rewards permuted among the episodes of a batch. Seconds are those of both stages, on a
machine with other work. Tasks of the file that are not here have not reached their level yet, or were not run.

| task | options | before | after | must reach | control | steps | seconds |
|---|---|---|---|---|---|---|---|
"""


def table(out: Path) -> str:
    text = HEAD
    for name in TASKS:
        file = out / name / "result.json"
        if file.exists():
            x = json.loads(file.read_text())
            kind = x["env"].partition(":/")[0].partition(":http")[0]
            text += (
                f"| `{kind}` | {json.dumps(x['options'])[1:-1]} | {x['before']:.3f} | {x['after']:.3f} | "
                f"{x['level']} | {x['control']:.3f} | {x['steps']} | {x['seconds']} |\n"
            )
    return text


def main(out: Path, *names: str) -> int:
    failed = []
    for name in names or TASKS:
        found = learn(name, out / name)
        (out / name / "result.json").write_text(json.dumps(found))
        Path(__file__).with_name("ENVIRONMENTS.md").write_text(table(out))
        print(name, found, flush=True)
        if not found["control"] < found["level"] <= found["after"]:
            failed.append(name)
    print("not learnt:", *failed) if failed else print("all learnt")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
