"""The run directory: configuration, metrics and samples of a run, as plain JSON.

    config.json     the run's options; config.1.json and so on: those of before a resume changed some
    chat_template.jinja  that of the run's tokenizer; chat_template.1.jinja and so on, likewise
    metrics.jsonl   one line per measurement: {"step", "kind", "seconds", name: number or {"edges", "counts"}, ...}
    replay.jsonl    one line per step that `areax replay` recomputed
    samples.jsonl   one line per sample: {"step", "kind", "version", "prompt", "text", "tokens", "logp", ...}
    events.jsonl    RL only, one line per event (rollout/events.py)
    journal.db      RL only, finished episodes and batches (rollout/journal/store.py)
    summary.json    results

Every line is standard JSON: a number that is not finite is written as null and listed in the line's "nonfinite". A line
truncated by a crash is skipped when read, and removed when the run is opened again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

CONFIG, METRICS, SAMPLES, SUMMARY = (
    "config.json",
    "metrics.jsonl",
    "samples.jsonl",
    "summary.json",
)
REPLAY = "replay.jsonl"  # of `areax replay --out`
TEMPLATE = "chat_template.jinja"
STATE = "state"  # the folder of saved states (adapters/orbax.py)
OURS = ("step", "kind", "seconds", "nonfinite")  # keys of a metrics line that are not metrics


def folder(path) -> pathlib.Path | None:
    """A run's folder with saved states, given that or the folder of states in it; None if the path is neither."""
    path = pathlib.Path(path)
    run = path.absolute().parent if path.name == STATE else path
    return run if (run / STATE).is_dir() and (run / CONFIG).is_file() else None


def recipe(cursor) -> str | None:
    """The recipe whose run saved a state with this cursor (`adapters.orbax`); None if it does not say."""
    if not isinstance(cursor, Mapping):
        return None
    return "grpo" if "rollout" in cursor else cursor.get("recipe")


def option(options: Mapping[str, Any], name: str) -> Any:
    """An option of a run's config.json, where it may be in a group; None if it has none of this name."""
    groups = (options, *(group for group in options.values() if isinstance(group, Mapping)))
    return next((group[name] for group in groups if name in group), None)


def plain(value):
    """Converts `value` to JSON types: dataclasses and mappings to objects, numpy and jax arrays to lists or numbers,
    paths to strings, functions to `module:name`, numbers that are not finite to null, or in a dataclass to strings
    ("inf")."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _option(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if callable(value):
        function = getattr(value, "func", value)  # of a functools.partial
        return f"{function.__module__}:{function.__qualname__}"
    raise ValueError(f"run_dir: values must be text, numbers, lists, mappings or dataclasses, got {value!r}")


def _option(value):
    """A dataclass's value: as `--config` reads it, which needs infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else plain(value)


def write_json(path, value) -> None:
    """Writes `value` (see `plain`) to a file as JSON, atomically."""
    write_text(pathlib.Path(path), json.dumps(plain(value), indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file atomically; what is no file, such as /dev/stdout, is written to and stays."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def read_lines(path) -> Iterator[dict]:
    """The objects of a JSON Lines file, in order; skips a truncated last line.

    Raises ValueError with the line number if any other line is not a JSON object.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n"):
                yield parse(line, path, number)


def logged(path, kind: str, step: int) -> dict:
    """The metrics of one kind and step in a run directory, by name."""
    lines = read_lines(pathlib.Path(path) / METRICS)
    found = [line for line in lines if (line.get("kind"), line.get("step")) == (kind, step)]
    return {name: value for line in found for name, value in line.items() if name not in OURS}


def parse(line: bytes, path, number: int) -> dict:
    """Parses a line as a JSON object; raises ValueError with its number if it is not one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        shown = line[:60].decode("utf-8", "replace").strip()
        raise ValueError(f"{path}:{number}: every line must be one JSON object, got {shown!r}; remove it")
    return value


def numbers(line: Mapping) -> dict[str, float]:
    """The numbers of a metrics line by name, including those that are not finite."""
    odd = {name: float(what) for name, what in line.get("nonfinite", {}).items()}
    return {k: float(v) for k, v in line.items() if k not in OURS and isinstance(v, int | float)} | odd


def histograms(line: Mapping) -> dict[str, Mapping]:
    """The histograms {"edges", "counts"} of a metrics line by name."""
    return {name: value for name, value in line.items() if name not in OURS and isinstance(value, Mapping)}


class Run:
    """An open run directory, created by `open_run`; thread-safe."""

    def __init__(self, path: pathlib.Path, metrics, samples, began: float):
        self.path = path
        self._metrics, self._samples, self._began = metrics, samples, began
        self._lock = threading.Lock()

    def log(self, kind: str, step: int, **values) -> None:
        """Appends a line to metrics.jsonl.

        Args:
          kind: kind of step: `sft`, `grpo`, `eval`, ...
          values: numbers (Python's, or 0-d arrays), histograms {"edges": n + 1 increasing numbers, "counts": n}, or
            None for a missing number.
        """
        line: dict[str, Any] = {"step": int(step), "kind": kind, "seconds": round(time.monotonic() - self._began, 3)}
        unfit = {}
        for name, value in values.items():
            if name in OURS:
                raise ValueError(f"log: a metric must not be named {', '.join(OURS)}, got {name!r}; rename it")
            if isinstance(value, Mapping):
                line[name] = _histogram(name, value)
                continue
            number = value.tolist() if hasattr(value, "tolist") else value
            if number is not None and not isinstance(number, int | float):
                raise ValueError(f"log: {name} must be a number or a histogram {{edges, counts}}, got {value!r}")
            line[name] = plain(number)
            if isinstance(number, float) and not math.isfinite(number):
                unfit[name] = str(number)
        if unfit:
            line["nonfinite"] = unfit
        self._append(self._metrics, line)

    def sample(
        self,
        step: int,
        *,
        version: int | None,
        prompt: str,
        text: str,
        reward: float,
        finish: str,
        tokens: list[str],
        logp: list[float],
        version_of_token: list[int],
        adv: float | None = None,
        images: Sequence[str] = (),
        trainer_logp: list[float] | None = None,
        kind: str = "grpo",
    ) -> None:
        """Appends a line to samples.jsonl.

        Args:
          version: policy version trained on the sample; None for an answer to a held-out row.
          text: everything after the prompt.
          tokens: its n tokens, decoded individually.
          logp: n log-probabilities (nats) from the sampler.
          version_of_token: n policy versions; -1 for a token that the policy did not sample.
          images: hashes of the prompt's images.
          trainer_logp: n log-probabilities (nats) from the trainer.
        """
        line: dict[str, Any] = {"step": int(step), "kind": kind, "version": version, "prompt": prompt, "text": text}
        line |= {"reward": reward, "finish": finish, "tokens": tokens, "logp": logp}
        line |= {"version_of_token": version_of_token, "adv": adv}
        if images:
            line["images"] = list(images)
        if trainer_logp is not None:
            line["trainer_logp"] = trainer_logp
        for name in ("logp", "version_of_token", "trainer_logp"):
            if name in line and len(line[name]) != len(tokens):
                raise ValueError(f"sample: {name} needs one entry per token, got {len(line[name])} for {len(tokens)}")
        self._append(self._samples, plain(line))

    def _append(self, file, line: dict) -> None:
        left = memoryview((json.dumps(line, allow_nan=False) + "\n").encode())
        with self._lock:
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:  # of a full disk; an open file's has no name
                raise OSError(error.errno, error.strerror, file.name) from error


def _histogram(name: str, value: Mapping) -> dict:
    shape = plain({"edges": value.get("edges", ()), "counts": value.get("counts", ())})
    edges, counts = shape["edges"], shape["counts"]
    rises = None not in edges and all(a < b for a, b in zip(edges, edges[1:], strict=False))
    if not counts or None in counts or len(edges) != len(counts) + 1 or not rises:
        raise ValueError(
            f"log: histogram {name} needs n counts and n + 1 finite increasing edges, "
            f"got {len(counts)} counts and edges {edges}"
        )
    return shape


def write_config(path, config) -> None:
    """Writes config.json in a run directory, and removes the summary of a former process: only a run that ended has
    results.

    Args:
      config: a dataclass or mapping.
    """
    write_json(pathlib.Path(path) / CONFIG, config)
    (pathlib.Path(path) / SUMMARY).unlink(missing_ok=True)


@contextlib.contextmanager
def open_run(path, *, config=None, keep: Mapping[str, int] | None = None, quiet: bool = False) -> Iterator[Run]:
    """Opens a run directory for appending, creating it if needed.

    Args:
      config: as `write_config`; None = it is written later, or the run has nothing left to train.
      keep: {kind: last step to keep}: later lines of that kind are removed from both files. A run that resumes after
        step 40 passes {"grpo": 40, "eval": 40}, a run that starts over {"grpo": -1, ...}.
      quiet: reads and writes nothing: for the other processes of a job.
    """
    if quiet:
        with open(os.devnull, "wb", buffering=0) as nowhere:
            yield Run(pathlib.Path(path), nowhere, nowhere, time.monotonic())
        return
    path = pathlib.Path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"open_run: a run needs a directory, got the file {path}; use another path")
    path.mkdir(parents=True, exist_ok=True)
    if config is not None:
        write_config(path, config)
    for name in (METRICS, SAMPLES):
        if (path / name).exists():
            _cut(path / name, keep or {})
    before = 0.0  # seconds continue from the last line; the time between two processes does not count
    if (path / METRICS).exists():
        before = max((line.get("seconds", 0.0) for line in read_lines(path / METRICS)), default=0.0)
    with (
        open(path / METRICS, "ab", buffering=0) as metrics,  # closing one with a buffer would fail again
        open(path / SAMPLES, "ab", buffering=0) as samples,
    ):
        yield Run(path, metrics, samples, time.monotonic() - before)


def _cut(path: pathlib.Path, keep: Mapping[str, int]) -> None:
    """Removes a truncated last line and the lines after the last step to keep."""
    partial = path.with_name(path.name + ".partial")
    with open(path, "rb") as old, open(partial, "wb") as new:
        for number, line in enumerate(old, 1):
            if line.endswith(b"\n"):
                entry = parse(line, path, number)
                if entry.get("step", 0) <= keep.get(entry.get("kind", ""), math.inf):
                    new.write(line)
        new.flush()
        os.fsync(new.fileno())
    if partial.stat().st_size == path.stat().st_size:
        partial.unlink()
    else:
        os.replace(partial, path)
