"""Metrics of asynchrony per step: waiting times, staleness of groups, lost and retried work.

    figures = Figures(fleet, lambda: {"failed": rollout.counts["failed"]})
    with events.watching(figures.see):
        ...                                            # the loop; at the end of each step:
        run.log("grpo", v, **figures.step(seconds))    # what happened since the step before

`Figures.step` documents each metric; all but the server levels are computed from the run's events.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from .fleet import Fleet

WORK = ("update_s", "save_s", "publish_s")  # parts of a step in which the trainer is busy
PUSHED = ("total_s", "pause_s", "load_s", "prove_s", "stage_s", "bytes", "stage_bytes")  # fields of a push report
SENT_AGAIN = ("busy", "refused", "broken", "rerouted", "strange")  # fleet counts of requests that are sent again
KINDS = ("call", "group", "batch", "push", "left_out", "canary")  # events that are read


class Figures:
    """Collects what a fleet and an executor did since the last step, and reports it as metrics."""

    def __init__(self, fleet: Fleet, counts: Callable[[], Mapping[str, int]]):
        """
        Args:
          counts: counts so far, by the name under which their growth in a step is reported.
        """
        self._fleet, self._counts = fleet, counts
        self._events: collections.deque[dict] = collections.deque()
        self._ended: dict[int, tuple[float, int]] = {}  # prompt: when its group ended, the version at its admission
        self._counted = self._count()
        self._held = {server: server.held.read() for server in fleet.servers}

    def see(self, event: dict[str, Any]) -> None:
        """Records an event; may be called from any thread."""
        if event["kind"] in KINDS:
            self._events.append(event)

    def step(self, seconds: Mapping[str, float]) -> dict[str, Any]:
        """Returns the metrics of the time since the last call; those without data are left out.

        trainer_idle: share of the step's `seconds` (from `loop.run`) without an update, a save or a host copy.
        server_busy: share of server time with at least one of our requests on the server, paused or not.
        requests_in_flight: requests on all servers together, averaged over time.
        slot_load: requests_in_flight divided by the servers' slots, if all report them: below 1 slots were empty, above
          1 requests waited on the servers.
        request_wait_s: seconds that a request waited here for a server with room, per attempt.
        generated_tokens, rollout_tokens_per_second: of completions that ended in the step, including evaluations.
        group_wait_s: seconds that the groups of the step's batch had waited for it since they ended.
        group_staleness: versions between their admission and the batch.
        push_...: of the pushes that ended in the step, added up, as in `push.PushReport`; of push_probe_diff
          the largest.
        canary_...: of the comparisons of canaries in the step: the largest differences, and how many of
          them were beyond their limits.
        too_long: rows that ended in the step and do not fit into a packed row.
        out_of_time: completions that ended in the step because their episode's time was over.
        The growth of `counts`, and request_retries: requests sent again.
        """
        events = [self._events.popleft() for _ in range(len(self._events))]
        of = lambda kind: [event for event in events if event["kind"] == kind]
        now, before = self._count(), self._counted
        self._counted = now
        metrics: dict[str, Any] = {name: now[name] - before[name] for name in now}
        metrics["too_long"] = len(of("left_out"))
        metrics["out_of_time"] = sum(call["out_of_time"] for call in of("call"))
        metrics["generated_tokens"] = sum(call["tokens"] for call in of("call"))
        if seconds["step_s"] > 0:
            metrics["trainer_idle"] = 1 - sum(seconds[part] for part in WORK) / seconds["step_s"]
            metrics["rollout_tokens_per_second"] = metrics["generated_tokens"] / seconds["step_s"]
        waits = self._fleet.waits.take()
        if waits.times:
            metrics |= {"request_wait_s": waits.sum / waits.times, "request_wait_s_max": waits.max}
        metrics |= self._servers() | self._groups(of("group"), of("batch"))
        return {**metrics, **_pushes(of("push")), **_canaries(of("canary"))}

    def live(self) -> dict[str, int]:
        """The fleet's current state, and its counts so far as `..._total`; may be called from any thread."""
        servers = list(self._fleet.servers)
        return {
            "fleet_servers": len(servers),
            "fleet_healthy": sum(server.state == "healthy" for server in servers),
            "fleet_in_flight": sum(server.load for server in servers),
            **{f"fleet_{name}_total": count for name, count in dict(self._fleet.counts).items()},
        }

    def _count(self) -> dict[str, int]:
        return {**self._counts(), "request_retries": sum(self._fleet.counts[name] for name in SENT_AGAIN)}

    def _servers(self) -> dict[str, float]:
        """Load metrics of the servers, each since the last call or since it joined."""
        before, servers = self._held, self._fleet.servers
        self._held = {server: server.held.read() for server in servers}
        since = [before.get(server, server.held.made) for server in servers]
        spent = [self._held[server].at - then.at for server, then in zip(servers, since, strict=True)]
        if not sum(spent) > 0:
            return {}
        total = sum(self._held[server].total - then.total for server, then in zip(servers, since, strict=True))
        busy = sum(self._held[server].busy - then.busy for server, then in zip(servers, since, strict=True))
        metrics = {"server_busy": busy / sum(spent), "requests_in_flight": total / max(spent)}
        if all(server.slots for server in servers):
            metrics["slot_load"] = total / sum(server.slots * s for server, s in zip(servers, spent, strict=True))
        return metrics

    def _groups(self, ended: Iterable[dict], batches: Iterable[dict]) -> dict[str, Any]:
        self._ended |= {one["prompt"]: (one["at"], one["admitted"]) for one in ended if one["outcome"] == "accepted"}
        waits, ages = [], []
        for batch in batches:
            for prompt in self._ended.keys() & batch["prompts"]:
                at, admitted = self._ended.pop(prompt)
                waits.append(batch["at"] - at)
                ages.append(batch["version"] - admitted)
        if not waits:
            return {}
        return {
            "group_wait_s": float(np.mean(waits)),
            "group_wait_s_max": max(waits),
            "group_staleness": float(np.mean(ages)),
            "group_staleness_max": max(ages),
            "group_staleness_hist": {"edges": list(range(max(ages) + 2)), "counts": np.bincount(ages).tolist()},
        }


def _pushes(ended: list[dict]) -> dict[str, float]:
    if not ended:
        return {}
    metrics = {name: sum(push[name] for push in ended) for name in PUSHED}
    if probed := [push["probe_diff"] for push in ended if push["probe_diff"] is not None]:
        metrics["probe_diff"] = max(probed)
    return {f"push_{name}": value for name, value in metrics.items()}


def _canaries(made: list[dict]) -> dict[str, float]:
    if not made:
        return {}
    return {
        "canary_diff": max(one["trainer"] for one in made),
        "canary_cache_diff": max(one["cache"] for one in made),
        "canary_drifts": sum(one["drifts"] for one in made),
    }
