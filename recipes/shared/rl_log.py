"""Logging of a reinforcement learning run: metrics of each step and evaluation, samples, progress."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from areax.adapters.report import chrome_trace
from areax.adapters.runtime import compile_time
from areax.adapters.tracking import progress, run_dir, sinks
from areax.recipes.shared import describe, evaluation, terminal
from areax.recipes.shared.rl_options import Saving
from areax.recipes.shared.stop_on import StopOn
from areax.rollout import events, loop, rewards
from areax.rollout.client import Fleet
from areax.rollout.fleet import step_metrics
from areax.rollout.scheduling.executor import Executor
from areax.rollout.types import Sample

LARGEST = ("max_logp_diff", "mismatch_k3_now")  # whose largest value over the run is in the summary
SHOWN = 10  # held-out rows with an answer in samples.jsonl
COUNTED = ("rejected", "refused", "failed", "stopped", "lost", "retries")  # of an executor's counts


class Log:
    """Writes metrics.jsonl, samples.jsonl and the events of a run, and shows its progress.

    Attributes:
      evaluations: version -> metrics on the held-out rows, such as "accuracy" or "math/accuracy".
      largest: the largest value of each of LARGEST.
      offload_s: seconds that offloading the servers took before the last update; None = no offloading.
      terminal: what the run says on stderr.
    """

    def __init__(self, run: run_dir.Run, tick, tokens, saving: Saving, stop_on: StopOn):
        self.evaluations: dict[int, dict[str, float | None]] = {}
        self.largest: dict[str, float] = {}
        for line in run_dir.read_lines(run.path / run_dir.METRICS):  # of before a resume
            if line["kind"] == "eval":
                beside = ("step", "kind", "seconds", "server_version")
                self.evaluations[line["step"]] = {name: value for name, value in line.items() if name not in beside}
            self._enlarge(line)
        self.offload_s: float | None = None
        self.terminal = terminal.Terminal("grpo", stop_on, run.path)
        self._run, self._tick, self._tokens, self._saving = run, tick, tokens, saving

    @contextlib.contextmanager
    def watching(self, fleet: Fleet, rollout: Executor, pool: rewards.Pool) -> Iterator[None]:
        """Adds metrics of servers, executor and reward workers to every step."""
        counts = lambda: {
            **{name: rollout.counts[name] for name in COUNTED}, "reward_retries": pool.counts["retried"]
        }  # fmt: skip
        self._fleet, self._rollout, self._figures = fleet, rollout, step_metrics.Figures(fleet, counts)
        before = rollout.counts["accepted"]
        finished = lambda: f", {rollout.counts['accepted'] - before} groups finished"
        with (
            self.terminal.waiting("waiting for the first batch of completions", finished),
            sinks.following(self._run.path, self._saving.track) as track,
            events.watching(self._figures.see),
        ):
            track.live = self._figures.live
            yield

    def step(self, v: int, report: dict, seconds: dict[str, float]) -> None:
        """Logs the update that made version v; the `on_step` of `loop.run`."""
        groups = report.pop("groups")
        report |= self._figures.step(seconds) | {"tokens_per_second": report["tokens"] / seconds["step_s"]}
        room = [self._fleet.room(server) for server in self._fleet.servers]
        report |= self._rollout.lengths() | ({"limit": min(room)} if room else {})
        if self.offload_s is not None:
            report["rest_s"] = self.offload_s
        beside = {name: seconds.pop(name) for name in loop.BACKGROUND}
        self._enlarge(report)
        self.terminal.look(v, report)
        self._run.log("grpo", v, **report, **{f"time_{k[:-2]}": x for k, x in seconds.items()}, **beside)
        self._tick(v, tokens=report["tokens"], reward=report["reward"])
        if self._saving.samples_every and (v == 1 or v % self._saving.samples_every == 0):
            describe.show(self._run, self._tokens, v, groups[0])

    def _enlarge(self, line: dict) -> None:
        seen = {name: line[name] for name in LARGEST if line.get(name) is not None}
        self.largest |= {name: max(value, self.largest.get(name, value)) for name, value in seen.items()}

    def evaluation(self, v: int, sets: dict[str, dict], groups: list[list[Sample]]) -> None:
        """Logs the metrics of version v on the held-out sets, {name: `evaluation.summary`}, and an answer to each of
        the first rows.

        Args:
          groups: the samples of each row.
        """
        self.evaluations[v] = evaluation.combined(sets)
        self._run.log("eval", v, **self.evaluations[v], server_version=self._fleet.version)
        held = {
            name: x for name, x in self.evaluations[v].items() if "/" in name or name.startswith(("accuracy", "pass@"))
        }
        self.terminal.stop_on.see(v, run_dir.numbers(held))
        if (accuracy := self.evaluations[v]["accuracy"]) is not None:
            progress.say(f"grpo version {v}: accuracy {accuracy:.4g} on {evaluation.counted(self.evaluations[v])}")
        if self._saving.samples_every:
            first = [(group[0], None) for group in groups[:SHOWN] if group]
            describe.show(self._run, self._tokens, v, first, kind="eval")


@contextlib.contextmanager
def opened(config, saving: Saving, tokens, start: int, stop_on: StopOn) -> Iterator[Log]:
    """Opens the log of a run in `config.out` at version `start`; drops what was logged beyond it."""
    out = Path(config.out)
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        evaluated = start - bool(config.evaluation.heldout)  # version `start` is evaluated again
        run = enter(run_dir.open_run(out, keep={"grpo": start, "eval": evaluated}))
        enter(events.writing(out / chrome_trace.EVENTS))
        tick = enter(progress.steps("grpo", max(config.steps, start), start=start, now=compile_time.clock))
        yield Log(run, tick, tokens, saving, stop_on)
