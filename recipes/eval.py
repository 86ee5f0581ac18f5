"""Evaluation of a checkpoint: held-out rows, a workflow and a reward, on generation servers."""

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from areax.adapters import hf, tokenizer
from areax.adapters.command_line import typed
from areax.adapters.command_line.options import JSON, json_object
from areax.adapters.data import images
from areax.adapters.launch import devices
from areax.adapters.report import evaluation as page
from areax.adapters.runtime import compile_cache, hub
from areax.adapters.tracking import progress, run_dir
from areax.recipes.shared import common, environments, evaluation, many_rows, notebook, ranges, rows
from areax.recipes.shared.rl_options import serving_conflicts
from areax.rollout import rewards
from areax.rollout.processes import memory
from areax.rollout.scheduling import executor
from areax.rollout.servers import local
from areax.rollout.types import Sampling
from areax.rollout.workflows import agents, regroup, resolve

PROMPT = 2048  # tokens of a prompt for which servers started here have room


@dataclass(frozen=True)
class Config:
    """Evaluates a checkpoint on rows, with a reward.

    Attributes:
      model: Hugging Face directory, GGUF file or hub name, `owner/name`; with `servers` only the tokenizer is read.
      data: rows with "prompt" or "messages", any "images", and what the reward needs: a file, a folder, or a data set
        on the hub.
      row: function from records to rows: `module:function` or `file.py:function`, which returns None to leave a record
        out; "" = records are rows, or of a usual format that their fields tell (docs/add-a-data-set.md).
      chat_template_kwargs: variables of the chat template, a JSON object such as {"enable_thinking": false}.
      reward: `module:function` or `file.py:function`, called as f(text, row) in worker processes.
      workflow: an episode: `module:function` of `generate` and a row, or an agent (`rollout.workflows.resolve.bind`).
      workflow_options: further arguments of the workflow, a JSON object.
      agent: serving agents that use the OpenAI or Anthropic API.
      servers: addresses of generation servers; none = starts one with `model` on this machine. Their key, if any,
        is in AREAX_SERVER_KEY, or in the file that AREAX_SERVER_KEY_FILE names.
      serve: options of servers that are started here.
      out: folder for results.json, answers.jsonl (a line per row: row, prompt, answers, rewards, finish, lengths) and
        report.html; "" = none.
      json: print the results as JSON.
      samples: completions per row, for avg@n and pass@k; give a temperature, too.
      limit: records to read; 0 = all.
      bad_rows: "stop" ends the command at the first row that cannot be used, "skip" leaves such rows out and prints how
        many.
      max_prompt: longest prompt in tokens; rows with longer ones are left out and counted; 0 = no limit.
      max_concurrent: maximum number of rows in flight.
      sampling: sampling parameters; greedy by default.
      reward_workers: number of processes that compute rewards.
      reward_timeout_s: time limit of one reward, in seconds; after a second attempt the completion is unscorable.
      reward_environment: names of environment variables that rewards may read, in addition to PATH, HOME, LANG and the
        like (docs/add-a-reward.md).
      seed: random seed of sampling.
      env: environment in place of data and reward, of which it plays `limit` tasks: `reasoning_gym:NAME`,
        `textarena:NAME`, `aviary:NAME`, `gymnasium:NAME`, `verifiers:NAME`, `openenv:ADDRESS`, `nemo_gym:ADDRESS`,
        or a class of yours, `file.py:CLASS` (docs/train-on-an-environment.md).
      env_options: options of the environment, and `turns`, `step_timeout_s` and `style` of its episodes, a JSON object.
    """

    INSTEAD_OF: ClassVar = environments.INSTEAD_OF
    model: str
    data: str
    reward: str
    row: str = ""
    chat_template_kwargs: Annotated[str, JSON] = ""
    workflow: str = "areax.rollout.workflows:single_turn"
    workflow_options: Annotated[str, JSON] = ""
    agent: agents.Options = agents.Options()
    servers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    out: str = ""
    json: bool = False
    samples: int = 1
    limit: int = 0
    bad_rows: rows.Bad = "stop"
    max_prompt: int = 0
    max_concurrent: int = 64
    sampling: Sampling = Sampling(temperature=0.0)
    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    reward_environment: tuple[str, ...] = ()
    seed: int = 0
    env: str = ""
    env_options: Annotated[str, JSON] = ""

    def __post_init__(self):
        typed.check(self)
        json_object("--env-options", self.env_options)
        json_object("--workflow-options", self.workflow_options)
        json_object("--chat-template-kwargs", self.chat_template_kwargs)
        for reason in (
            *environments.conflicts(self),
            *ranges.integers(self, samples=1, limit=0, max_prompt=0, max_concurrent=1, reward_workers=1, seed=0),
            *ranges.samples(f"--samples {self.samples}", self.samples),
            *memory.lacking(f"--reward-workers {self.reward_workers}", self.reward_workers * memory.WORKER),
            *serving_conflicts(self.servers, self.serve),
        ):
            raise ValueError(reason)
        if self.env and not (self.data or self.limit):
            raise ValueError(f"--env {self.env} needs --limit, how many of its tasks to evaluate on, got 0")
        if self.serve.inside:
            raise ValueError("--serve.inside is for a trainer's process, which an evaluation has not; leave it out")


def main(config: Config) -> dict:
    """Writes `out`, if any, and returns {"accuracy": mean reward, ...}, as `evaluation.summary`."""
    notebook.refuse_running_loop(config)
    return asyncio.run(run(config))


async def run(config: Config) -> dict:
    """`main` where an event loop is running, as in a notebook."""
    if config.out:
        common.check_directory("--out", config.out)
    compile_cache.keep()
    results, answers = await evaluate(config)
    if config.out:
        write(config, results, answers)
    return results


def write(config: Config, results: dict, answers: list[dict]) -> None:
    """Writes results.json, answers.jsonl and report.html into `config.out`."""
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(answer, ensure_ascii=False, default=str) + "\n" for answer in answers)
    run_dir.write_text(out / "answers.jsonl", lines)
    page.write(out / "report.html", f"{config.data or config.env} by {config.model}", results, answers)
    run_dir.write_json(out / "results.json", results)


async def evaluate(config: Config) -> tuple[dict, list[dict]]:
    """(results, answers); as `evaluation.summary` and `evaluation.answers`."""
    config = environments.expanded(config)
    tokens = common.open_tokenizer(config.model, config.chat_template_kwargs)
    processor = images.of_model(config.model)
    rewards.check(config.reward)
    resolve.check(config.workflow, json_object("--workflow-options", config.workflow_options), config.agent)
    if config.samples > 1 and not config.sampling.temperature and rows.asks(config.workflow):
        raise ValueError(
            f"--samples {config.samples} needs --sampling.temperature above 0, got 0: greedy completions are equal"
        )
    settings = None if config.servers else hf.read_config(hub.folder(config.model))  # servers may be all that has it
    if settings:
        common.say_added_ends(config.model, settings, tokens)
    serve = config.serve.sized(PROMPT + config.sampling.max_new_tokens)
    context, vocabulary = (min(serve.context, settings.context), settings.vocab) if settings else (0, 0)
    check = rows.prompts(
        tokens, config.workflow, processor and processor.as_given(), most=config.max_prompt, room=context,
        vocabulary=vocabulary, context=context, new=config.sampling.max_new_tokens,
    )  # fmt: skip
    asked: Sequence[dict]
    if config.env and not config.data:
        asked = environments.first(config.env, config.env_options, config.limit)
    else:
        asked = many_rows.every(
            config.data, config.row, config.limit, check=check, bad=config.bad_rows,
            recognise=rows.asks(config.workflow),
        )  # fmt: skip
    if config.env:
        await environments.check(config.env, config.env_options, dict(asked[0]), tokens)
    gpus, each = len(devices.visible_gpus()), serve.mesh.devices  # JAX here would take memory of the servers' GPUs
    places = devices.of_own_servers(gpus, 0, serve.count, each) if each <= gpus else []
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        fleet = await enter(
            common.fleet(
                config.servers, config.model, serve, concurrency=config.max_concurrent * config.samples,
                image_token=processor.token if processor else None, ends=tokenizer.stop_ids(tokens),
                vocabulary=vocabulary,
                environs=[devices.showing(ids) for ids in places],
            )
        )  # fmt: skip
        for server in fleet.servers:
            fleet.warn_of_another_model(server)
        reward = await enter(
            rewards.pool(
                config.reward, workers=config.reward_workers, timeout_s=config.reward_timeout_s,
                environment=config.reward_environment,
            )
        )  # fmt: skip
        episode = await enter(
            resolve.bind(
                config.workflow, tokenizer=tokens, processor=processor, reward=reward, sampling=config.sampling,
                agent=config.agent, options=json_object("--workflow-options", config.workflow_options),
            )
        )  # fmt: skip
        with progress.counting(f"evaluating {len(asked)} rows") as count:
            groups = await executor.rollouts(
                episode, fleet.generate, asked, group_size=config.samples, max_concurrent=config.max_concurrent,
                seed=config.seed if fleet.seeded else None, on_group=count, regroup=regroup.of(episode),
            )  # fmt: skip
    evaluation.say_endless(groups, tokens)
    results = evaluation.summary(groups, config.samples)
    if not results["scored_rows"]:
        progress.say(f"eval: none of the {results['rows']} rows has a score; the lines above say why")
    return results, evaluation.answers(asked, groups, tokens)
