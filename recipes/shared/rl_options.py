"""Options of reinforcement learning, by group, and the combinations that are refused."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from areax import models
from areax.adapters.command_line.options import JSON, by_option
from areax.adapters.tracking import sinks
from areax.core import losses
from areax.core.balance import Balance
from areax.core.critic import Critic
from areax.core.mtp import MTP
from areax.core.optim import Optimizer
from areax.models.lora import Lora
from areax.parallel.mesh import Layout
from areax.recipes.shared import evaluation, ranges, stop_on
from areax.recipes.shared.microbatch import Rows
from areax.recipes.shared.packer import Trie
from areax.recipes.shared.rows import Bad
from areax.recipes.shared.vision import Vision
from areax.rollout.fleet import members
from areax.rollout.fleet.push import Push
from areax.rollout.processes import keys, memory
from areax.rollout.scheduling.curriculum import Curriculum
from areax.rollout.servers import local
from areax.rollout.types import SEATS, Sampling
from areax.rollout.weights import object_store
from areax.rollout.workflows import agents, resolve

DTYPES = ("auto", "float32", "bfloat16", "float16")  # of the servers that are started here


@dataclass(frozen=True)
class Prompts:
    """Which prompts are sampled, and in what order.

    Attributes:
      row: function from records to rows: `module:function` or `file.py:function`, which returns None to leave a record
        out; "" = records are rows, or of a usual format that their fields tell (docs/add-a-data-set.md).
      chat_template_kwargs: variables of the chat template, a JSON object such as {"enable_thinking": false}.
      limit: records of `data` to read, and to fetch from the hub; 0 = all.
      bad_rows: "stop" ends the run at the first row that cannot be used, before anything starts; "skip" leaves such
        rows out and prints how many.
      max_prompt: longest prompt in tokens; rows with longer ones are left out and counted; 0 = no limit.
      curriculum: the order of the rows.
    """

    row: str = ""
    chat_template_kwargs: Annotated[str, JSON] = ""
    limit: int = 0
    bad_rows: Bad = "stop"
    max_prompt: int = 0
    curriculum: Curriculum = Curriculum()


@dataclass(frozen=True)
class Rollout:
    """How completions are sampled.

    Attributes:
      workflow: an episode: `module:function` of `generate` and a row, or an agent (`rollout.workflows.resolve.bind`).
      workflow_options: further arguments of the workflow, a JSON object.
      agent: serving agents that use the OpenAI or Anthropic API.
      groups: prompts per batch.
      group_size: completions per prompt (num_generations in TRL).
      eta: maximum staleness in versions (0 = synchronous): from admitting a group to training on it.
      max_concurrent: maximum number of groups in flight.
      oversample: extra groups per batch: it takes the first groups to finish; the others are stopped and run again in a
        later batch. For eta 0, so that a batch does not wait for its slowest groups.
      episode_seats: of episodes of several seats, those that are compared with each other within their episode, such as
        solvers of a problem that another seat proposed (hierarchical GRPO); other seats are compared with the same seat
        of the group's other episodes.
      episode_timeout_s: seconds after which an episode ends with the answers it has, waits for a server included; the
        answer in progress counts as truncated at the length limit, as `objective.shaping.truncated` says. 0 = no limit.
    """

    workflow: str = "areax.rollout.workflows:single_turn"
    workflow_options: Annotated[str, JSON] = ""
    agent: agents.Options = agents.Options()
    groups: int = 32
    group_size: int = 8
    eta: int = 1
    max_concurrent: int = 128
    oversample: int = 0
    episode_seats: tuple[int, ...] = ()
    episode_timeout_s: float = 0.0
    sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Rewards:
    """How rewards are computed.

    Attributes:
      reward_workers: number of processes that compute rewards.
      reward_timeout_s: time limit of one reward, in seconds.
      reward_failed: the score of a completion whose reward raised, hung or crashed twice.
      reward_environment: names of environment variables that rewards may read, in addition to PATH, HOME, LANG and the
        like (docs/add-a-reward.md).
      shuffle_rewards: permutes the rewards within a batch, so that they carry no signal: a control experiment.
    """

    reward_workers: int = 1
    reward_timeout_s: float = 10.0
    reward_failed: Literal["unscorable", "zero"] = "unscorable"
    reward_environment: tuple[str, ...] = ()
    shuffle_rewards: bool = False


@dataclass(frozen=True)
class CriticOptions:
    """The critic, for objectives with credit "gae".

    Attributes:
      model: directory of the initial weights, for example a reward model; "" = the policy's, with a new head.
      warmup: number of first batches in which only the critic trains.
    """

    model: str = ""
    warmup: int = 0
    objective: Critic = Critic()
    optim: Optimizer = Optimizer(lr=1e-5, warmup=10)


@dataclass(frozen=True)
class Training:
    """Optimisation.

    Attributes:
      length: longest prompt and completion together; also tokens per packed row.
      rows: most packed rows per microbatch; "auto" = as many as fit the devices by the plan and make a step faster, 8
        on a CPU. A batch that fewer or shorter rows hold takes those.
      trie: "auto" = tokens that samples share, such as a prompt, are computed once, where that saves at least a fifth
        of all (docs/memory.md); "off" = once per sample.
      minibatches: optimiser steps per batch, each on an equal share of its groups.
      epochs: passes over the minibatches of a batch (ppo_epochs, num_iterations elsewhere).
      vision: the vision tower of a model that reads images, "trained" or "frozen"; "auto" = frozen, and loaded only if
        rows have images. Say "frozen" if a workflow makes them.
      lora: trains adapters instead of all weights, with the base model as the reference; rank 0 = all weights.
      critic: for objectives that have one, such as PPO.
      balance: load balancing of mixture-of-experts models.
      mtp: trains the layer for multi-token prediction, with which engines draft.
      teacher: directory of a teacher, for `objective.advantage.teacher` or `distill_coef`.
      teachers: instead of `teacher`, addresses of servers with teachers: `http://...`, or `name=http://...` if rows
        name theirs in "teacher". Their key is in AREAX_TEACHER_KEY.
      teacher_tokenizer: directory or hub name of the tokenizer of `teachers`, if it is not the trained model's.
      self_distillation: instead, the policy at its current weights is the teacher, which reads the row's
        "teacher_prompt", or the `teacher_prompt` of the workflow's samples.
      average_teacher: with `self_distillation` the teacher has the average of the policy's weights that `optim.ema`
        keeps, one more copy of them, instead of the current ones.
      distill: the divergence from the teacher that is added to the objective.
      distill_coef: weight of the divergence from the teacher (`distill`) in the loss; 0 = none.
      reference_every: batches between updates of the KL term's reference (ref_model); 0 = it is fixed.
      reference_mix: how far an update moves the reference towards the policy; 1 = all the way.
      offload_reference: keeps the reference's weights in the host's memory while they are not used.
      mesh: devices along each axis; fewer than there are = the first ones.
    """

    length: int = 1024
    rows: Rows = "auto"
    trie: Trie = "auto"
    minibatches: int = 1
    epochs: int = 1
    objective: losses.Policy = losses.GRPO()
    optim: Optimizer = Optimizer(lr=1e-6, warmup=10)
    vision: Vision = "auto"
    lora: Lora = Lora()
    critic: CriticOptions = CriticOptions()
    balance: Balance = Balance()
    mtp: MTP = MTP()
    teacher: str = ""
    teachers: tuple[str, ...] = ()
    teacher_tokenizer: str = ""
    self_distillation: bool = False
    average_teacher: bool = False
    distill: losses.Distill = losses.Distill()
    distill_coef: float = 0.0
    reference_every: int = 0
    reference_mix: float = 1.0
    offload_reference: bool = False
    run: models.Run = models.Run()
    mesh: Layout = Layout()

    @property
    def taught(self) -> bool:
        """Whether a teacher reads the samples."""
        return bool(self.teacher or self.teachers or self.self_distillation)

    def __post_init__(self):
        for url in self.teachers:
            members.check(url.rpartition("=")[2], "--teachers", lists=False)


@dataclass(frozen=True)
class Serving:
    """Generation servers, and how weights reach them.

    Attributes:
      servers: addresses of generation servers; none = starts its own on this machine. Lists that may change meanwhile:
        @FILE, dns+http://NAME:PORT, join+http://HOST:PORT (docs/servers.md). The servers' key, if any, is in
        AREAX_SERVER_KEY, or in the file that AREAX_SERVER_KEY_FILE names.
      serve: options of servers that the run starts.
      completion_timeout_s: seconds that a completion may go without progress before it is given up; must exceed the
        longest generation. A resumption after a pause in mode "abort" is progress.
      server_timeout_s: seconds that one of `servers` may be out of reach before it counts as dead; the run ends when
        all are. A restart should take less. Servers that the run starts are restarted.
      push: how new weights reach the servers (weight sync).
      published: folder for published weights; "" = a temporary one, in memory if there is room.
      stagers: address of a stager next to each server, in their order, if the servers cannot read `published`
        (docs/servers.md). Their key is in AREAX_STAGER_KEY.
      colocated: servers and trainer share devices: servers release their memory during updates and resume with the next
        version. Needs eta 0 (docs/colocated.md).
    """

    servers: tuple[str, ...] = ()
    serve: local.Serve = local.Serve()
    completion_timeout_s: float = 3600.0
    server_timeout_s: float = 30.0
    push: Push = Push()
    published: str = ""
    stagers: tuple[str, ...] = ()
    colocated: bool = False

    def __post_init__(self):
        for url in self.stagers:
            keys.check_address(url, "--stagers")


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on held-out rows.

    Attributes:
      heldout: rows evaluated and never trained on; several sets as NAME=ROWS ..., measured as NAME/accuracy etc.
      heldout_samples: completions per held-out row: 1 = greedy; more are sampled as in training, for avg@n and pass@k.
      evaluate_every: batches between evaluations; 0 = before the first and after the last batch.
    """

    heldout: tuple[str, ...] = ()
    heldout_samples: int = 1
    evaluate_every: int = 0


@dataclass(frozen=True)
class Saving:
    """Checkpoints, samples, metric trackers and traces.

    Attributes:
      save_every: batches between checkpoints; 0 = only by time and at the end.
      save_minutes: minutes after the last checkpoint when another is saved in any case; 0 = off.
      samples_every: batches between groups written to samples.jsonl, besides the first and ten held-out answers at each
        evaluation; 0 = none of these.
      journal: finished episodes and batches in journal.db, from which a killed run goes on: `keep` all, so that the run
        can be replayed; `prune` those before the oldest checkpoint; or `off`.
      track: where else metrics go: TensorBoard, wandb, trackio, MLflow, SwanLab, Prometheus.
      profile: steps to trace with jax.profiler, one as 5 or a range as 5:8, both ends included; the trace is in
        `profile/` in the run's directory (docs/metrics.md); "" = none.
    """

    save_every: int = 0
    save_minutes: float = 30.0
    samples_every: int = 10
    journal: Literal["keep", "prune", "off"] = "keep"
    track: sinks.Sinks = sinks.Sinks()
    profile: str = ""


def conflicts(config: Any) -> Iterator[str]:
    """Why the options of a `grpo.Config` cannot be used together, one sentence for each reason."""
    yield from _out_of_range(config)
    yield from _rollout_conflicts(config)
    yield from _server_conflicts(config)
    yield from _training_conflicts(config)
    yield from _teacher_conflicts(config.training, config.rollout.sampling)
    yield from stop_on.rl_conflicts(config)


def _out_of_range(config: Any) -> Iterator[str]:
    rollout, training, rewards = config.rollout, config.training, config.rewards
    yield from ranges.integers(config, steps=0, seed=0)
    yield from ranges.integers(config.prompts, limit=0, max_prompt=0)
    yield from ranges.integers(rollout, groups=1, group_size=1, eta=0, max_concurrent=1)
    yield from ranges.integers(rewards, reward_workers=1)
    yield from ranges.integers(training, length=2, rows=1, minibatches=1, epochs=1, reference_every=0)
    yield from ranges.integers(config.evaluation, heldout_samples=1, evaluate_every=0)
    yield from ranges.integers(config.saving, save_every=0, samples_every=0)
    group = f"--groups {rollout.groups} of --group-size {rollout.group_size}"
    yield from ranges.samples(group, rollout.groups * rollout.group_size)
    every = config.evaluation.heldout_samples
    yield from ranges.samples(f"--heldout-samples {every}", every)
    workers = rewards.reward_workers
    yield from memory.lacking(f"--reward-workers {workers}", workers * memory.WORKER)
    yield from ranges.finite(config.saving, "save_minutes")
    yield from ranges.finite(rollout, "episode_timeout_s")
    yield from ranges.finite(training, "distill_coef")
    yield from serving_conflicts(config.serving.servers, config.serving.serve)
    for part, option, holds, rule in (
        (config.serving, "completion_timeout_s", config.serving.completion_timeout_s > 0, "above 0"),
        (config.serving, "server_timeout_s", 0 < config.serving.server_timeout_s < math.inf, "above 0 and finite"),
        (rewards, "reward_timeout_s", 0 < rewards.reward_timeout_s < math.inf, "above 0 and finite"),
        (rollout, "oversample", 0 <= rollout.oversample <= rollout.groups, f"from 0 to --groups {rollout.groups}"),
        (rollout, "episode_seats", {*rollout.episode_seats} <= {*range(SEATS)}, f"numbers from 0 to {SEATS - 1}"),
        (rollout, "episode_seats", len({*rollout.episode_seats}) != 1, "at least two seats, to compare, or none"),
        (training, "reference_every", not training.reference_every or training.objective.needs_reference,
         "0 without a reference, which --objective.kl.coef above 0 has"),
        (training, "reference_mix", 0 < training.reference_mix <= 1, "above 0 and at most 1"),
    ):  # fmt: skip
        if not holds:
            yield f"--{option.replace('_', '-')} must be {rule}, got {getattr(part, option)}"


def serving_conflicts(servers: Sequence[str], serve: local.Serve) -> Iterator[str]:
    """Why these addresses of servers, and options of servers started here, cannot be used, one sentence each.

    Raises ValueError for one that is no address.
    """
    for entry in servers:
        members.check(entry, "--servers")
    if servers and serve != local.Serve():
        given = changed(serve, "serve")
        yield f"--serve.* are for servers that are started here, got {given} beside --servers; leave out one of them"
    if len(set(servers)) < len(servers):
        yield f"--servers must differ, got {' '.join(servers)}"
    if serve.context < 2 and serve.context:
        yield f"--serve.context must be at least 2, or 0 = as long as needed, got {serve.context}"
    if serve.dtype not in DTYPES:
        yield f"--serve.dtype must be one of {', '.join(DTYPES)}, got {serve.dtype!r}"


def changed(options: Any, name: str) -> str:
    """The options of a group that are not the default, as on the command line; "" if there are none."""
    now, default = (by_option(dataclasses.asdict(x)) for x in (options, type(options)()))
    return ", ".join(f"--{name}.{option} {value}" for option, value in now.items() if value != default[option])


def _rollout_conflicts(config: Any) -> Iterator[str]:
    rollout, objective, heldout = config.rollout, config.training.objective, evaluation.named(config.evaluation.heldout)
    sampling = rollout.sampling
    if not sampling.temperature > 0:
        yield (
            f"--sampling.temperature must be above 0, got {sampling.temperature:g}; greedy decoding does not explore"
        )
    filters = () if sampling.sampling_mask else ("top_p", "top_k", "min_p")
    for name in (*filters, "min_new_tokens"):
        if (value := getattr(sampling, name)) != getattr(Sampling, name):
            yield (
                f"--sampling.{name.replace('_', '-')} must be {getattr(Sampling, name)}: training needs samples from "
                f"the full distribution, got {value}{'; or add --sampling.sampling-mask' if name in filters else ''}"
            )
    if bool(sampling.top_logprobs) != objective.score_centering:
        yield (
            "--sampling.top-logprobs, such as 128, and --objective.score-centering, which reads them, are needed "
            f"together, got {sampling.top_logprobs} and {str(objective.score_centering).lower()}"
        )
    if config.evaluation.heldout_samples > 1 and not heldout:
        yield f"--heldout-samples {config.evaluation.heldout_samples} needs --heldout, rows to evaluate on, got none"
    if config.evaluation.evaluate_every and not heldout:
        yield f"--evaluate-every {config.evaluation.evaluate_every} needs --heldout, rows to evaluate on, got none"
    if rollout.workflow == resolve.ONLINE and (heldout or objective.advantage.mean not in ("batch", "none")):
        yield (
            "--workflow online: users' sessions form no groups to compare, and cannot be evaluated; use "
            f"--objective.advantage.mean batch without --heldout, got {objective.advantage.mean} and "
            f"{' '.join(heldout.values()) or 'none'}"
        )
    if rollout.groups % config.training.minibatches:
        yield f"--minibatches must divide --groups {rollout.groups}, got {config.training.minibatches}"
    if rollout.eta and not objective.corrects:
        yield (
            f"--eta {rollout.eta} lets samples be older than the weights, which {objective.name} with proximal "
            '"behaviour" does not correct for; use --objective.correction.proximal recompute, or --eta 0'
        )


def _server_conflicts(config: Any) -> Iterator[str]:
    serving, lora = config.serving, config.training.lora
    if serving.colocated and (lists := [entry for entry in serving.servers if members.is_list(entry)]):
        yield f"--colocated needs servers that stay, with which devices are shared, got --servers {lists[0]}"
    if serving.colocated and config.rollout.eta:
        yield (
            "--colocated offloads servers while the trainer updates, so that nothing is generated ahead: it needs "
            f"--eta 0, got {config.rollout.eta}"
        )
    if serving.serve.inside and serving.published:
        yield (
            "--serve.inside starts a server in this process and hands it versions in memory; leave out --published, "
            f"got {serving.published}"
        )
    if serving.stagers and len(serving.stagers) != len(serving.servers):
        yield (
            f"--stagers must name one stager per server, in the order of --servers, got {len(serving.stagers)} for "
            f"{len(serving.servers)}"
        )
    if serving.push.bucket:
        object_store.check_url(serving.push.bucket, object_store.OPTION)
        if not (serving.stagers or any(map(members.is_list, serving.servers))):
            yield (
                f"--push.bucket is where stagers fetch versions, got {serving.push.bucket} without --stagers; start a "
                "stager with this --bucket next to each server (docs/servers.md), or leave it out"
            )
    if serving.push.way == "tensors" and (serving.stagers or not serving.servers):
        yield (
            "--push.way tensors is for SGLang servers at --servers, without --stagers, got "
            f"{serving.servers or 'none'} and {serving.stagers or 'none'}; servers started here read the files"
        )
    if serving.push.lora == "adapter" and not lora.rank:
        yield "--push.lora adapter needs adapters to push, got --lora.rank 0; give a rank, or leave it out"


def _training_conflicts(config: Any) -> Iterator[str]:
    training = config.training
    if training.critic.warmup < 0:
        yield f"--critic.warmup must be at least 0, got {training.critic.warmup}"
    if not training.objective.needs_values and (given := changed(training.critic, "critic")):
        yield f"--critic.* is for objectives with a critic, {training.objective.name} has none, got {given}; use ppo"
    if training.critic.warmup >= config.steps and training.objective.needs_values:
        yield (
            f"--critic.warmup must be below --steps {config.steps}, for the policy to train at all, got "
            f"{training.critic.warmup}"
        )
    if training.reference_mix != 1 and not training.reference_every:
        yield f"--reference-mix needs --reference-every, batches between updates, got {training.reference_mix} alone"
    updates = (config.steps - training.critic.warmup * training.objective.needs_values) * training.minibatches
    yield from ranges.schedule(training.optim, updates * training.epochs)
    yield from ranges.moved_bias(training.balance, training.lora)
    yield from ranges.narrow_adapters(training.optim, training.lora)
    yield from ranges.towers(training.vision, training.optim, training.lora)
    yield from ranges.drafting(training.mtp, training.optim, training.lora)
    if training.critic.optim.mtp_lr:
        yield f"--critic.optim.mtp-lr: critics draft nothing, got {training.critic.optim.mtp_lr:g}; leave it out"
    if training.offload_reference and (not training.objective.needs_reference or training.lora.rank):
        yield (
            "--offload-reference needs a reference with weights of its own, which --objective.kl.coef above 0 has and "
            "--lora.rank above 0 has not; leave it out"
        )
    if compared := _without_comparison(config.rollout, training):
        yield compared
    if training.lora.rank and training.reference_every:
        yield (
            f"--reference-every {training.reference_every} would move the weights under the adapters, which stay fixed "
            f"with --lora.rank {training.lora.rank}; leave out one of them"
        )


def _without_comparison(rollout: Rollout, training: Training) -> str:
    """Why every advantage would be 0, because a completion is compared with itself alone; "" if it is not."""
    mean, taught = training.objective.advantage.mean, training.objective.advantage.teacher or training.distill_coef
    among = {"group": 1, "optimal_token": 1, "batch": rollout.groups // training.minibatches}.get(mean)
    if rollout.group_size > 1 or among != 1 or taught:
        return ""
    return (
        f"--group-size must be at least 2 with --objective.advantage.mean {mean}: a completion that is compared with "
        "none has advantage 0 and trains nothing, got 1; raise it, or compare several --groups with "
        "--objective.advantage.mean batch and std batch, or use areax train ppo"
    )


def _teacher_conflicts(training: Training, sampling: Sampling) -> Iterator[str]:
    used = training.objective.advantage.teacher or training.distill_coef
    if bool(training.teacher) + bool(training.teachers) + training.self_distillation != (used != 0):
        itself = ", and --self-distillation" if training.self_distillation else ""
        yield (
            "name one of --teacher, --teachers and --self-distillation where --objective.advantage.teacher or "
            f"--distill-coef is not 0, and none elsewhere, got {training.teacher!r} and {training.teachers}{itself}"
        )
    yield from ranges.average_teacher(training)
    if training.teacher_tokenizer and not training.teachers:
        yield (
            f"--teacher-tokenizer is for --teachers, servers, got {training.teacher_tokenizer} without; a --teacher "
            "directory has its own"
        )
    if not training.distill_coef and (given := changed(training.distill, "distill")):
        yield f"--distill.* needs --distill-coef above 0 and a --teacher to learn from, got {given} without; add them"
    if training.objective.score_centering and training.distill_coef:
        yield (
            f"--objective.score-centering reads other logits than --distill-coef, got {training.distill_coef:g}; leave "
            "out one of them"
        )
    if sampling.sampling_mask and (training.teachers or training.distill_coef or training.self_distillation):
        yield (
            "--sampling.sampling-mask trains on a part of the vocabulary, where --teachers, --self-distillation and "
            "--distill-coef compare all of it; leave it out, or use --teacher with --objective.advantage.teacher"
        )
    if training.teachers and training.objective.advantage.teacher and sampling.temperature != 1:
        yield (
            f"--teachers give log-probabilities at temperature 1, got --sampling.temperature {sampling.temperature:g}; "
            "use --teacher, a directory"
        )
    if (
        training.teachers
        and training.distill_coef
        and (not training.distill.top_k or training.distill.temperature != 1)
    ):
        yield (
            "--teachers give log-probabilities of --distill.top-k tokens at temperature 1, got "
            f"{training.distill.top_k} and --distill.temperature {training.distill.temperature:g}; or use --teacher"
        )
