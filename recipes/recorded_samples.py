"""The samples of a run for its page, while it goes on: all of a `grpo` run's from its journal; those of other runs, and
of evaluations, from samples.jsonl."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from areax.adapters import tokenizer
from areax.adapters.report import build, rows, samples
from areax.adapters.tracking import run_dir
from areax.rollout.journal import reading, store
from areax.rollout.types import Sample

SHARE = 100  # a journal is copied again after so many times what a copy takes
KIND = "grpo"  # of the journal's samples; a batch of version v makes step v + 1
Found = tuple[Sequence[Sequence[Sample]], Sequence[np.ndarray | None], str]


class Samples:
    """The samples of a run's directory, which need not exist yet: a `samples.Source`, used in one thread."""

    def __init__(self, path: Path):
        self.path = path
        self._open = contextlib.ExitStack()
        self._reader: reading.Reader | None = None
        self._seen: Any = None
        self._again = 0.0  # when the journal may be copied again
        self._batch: tuple[int, Found] | None = None  # the last that was read, and its step
        self._decode: Callable[[int], str] | None = None
        self._lines: dict[tuple[str, int], list[tuple[int, float | None]]] = {}  # place and reward, in samples.jsonl
        self._end = self._count = self._inode = 0  # bytes and lines of that file that were read, and which it was

    def steps(self) -> dict[str, list[int]]:
        self._look()
        self._index()
        found = {KIND: [v + 1 for v in self._reader.versions]} if self._reader else {}
        for kind, step in sorted(self._lines):
            if not (self._reader and kind == KIND):
                found.setdefault(kind, []).append(step)
        return found

    def rewards(self, kind: str, step: int) -> list[list[float | None]]:
        if self._reader and kind == KIND:
            groups, _, _ = self._of(step)
            return [[sample.reward for sample in group] for group in groups]
        return [[reward for _, reward in self._lines[kind, step]]]

    def line(self, kind: str, step: int, group: int, index: int) -> dict:
        if not (self._reader and kind == KIND):
            with open(self.path / run_dir.SAMPLES, "rb") as file:
                file.seek(self._lines[kind, step][index][0])
                return run_dir.parse(file.readline(), file.name, 0)
        groups, advantages, note = self._of(step)
        sample = groups[group][index]
        first = int(sample.mask.argmax())
        ids, mask, text = sample.tokens.tolist(), sample.mask, self._token
        line = {
            "version": step - 1, "prompt": sample.info.get("prompt") or "".join(map(text, ids[:first])),
            "text": sample.info.get("text", ""), "reward": sample.reward, "components": sample.components,
            "finish": sample.finish, "tokens": [*map(text, ids[first:])],
            "logp": np.where(mask, sample.logp, np.nan)[first:], "version_of_token": sample.version[first:],
            "note": note,
        }  # fmt: skip
        adv = advantages[sum(map(len, groups[:group])) + index]
        if adv is not None and mask.any():
            line |= {"adv": adv[mask].mean(), "adv_of_token": np.where(mask, adv, np.nan)[first:]}
        return run_dir.plain(line)

    def close(self) -> None:
        """Closes the journal, and removes its copy."""
        self._open.close()
        self._reader = None

    def _look(self) -> None:
        """Opens the journal, or finds what was added to it, if that is not too soon."""
        files = self.path / store.FILE, self.path / f"{store.FILE}-wal"
        seen = [(x.st_ino, x.st_size, x.st_mtime_ns) for x in (file.stat() for file in files if file.is_file())]
        began = time.monotonic()
        if not files[0].is_file() or seen == self._seen or began < self._again:
            return
        if self._reader:
            self._reader.refresh()
        else:
            self._reader = self._open.enter_context(reading.opened(self.path))
        now = time.monotonic()
        self._seen, self._again, self._batch = seen, now + SHARE * (now - began), None

    def _of(self, step: int) -> Found:
        """(groups, the advantages of each sample's tokens, why there are none) of a step."""
        assert self._reader
        if not self._batch or self._batch[0] != step:
            groups = self._reader.read(step - 1).groups
            from areax.recipes import recorded_advantages  # loads JAX, which only this needs

            self._batch = step, (groups, *recorded_advantages.of(self.path, groups, step - 1))
        return self._batch[1]

    def _token(self, token: int) -> str:
        self._decode = self._decode or self._decoder()
        return self._decode(token)

    def _decoder(self) -> Callable[[int], str]:
        """The run's tokenizer; without it a function that writes ids."""
        for place in (build.json_object(self.path / run_dir.CONFIG).get("model"), self.path / "model"):
            with contextlib.suppress(ValueError, OSError):
                tokens = tokenizer.load(place or "")
                return lambda token: tokens.decode([token])
        return lambda token: f"⟨{token}⟩"

    def _index(self) -> None:
        """Reads on in samples.jsonl, from the start if it was cut or replaced."""
        path = self.path / run_dir.SAMPLES
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_size < self._end or found.st_ino != self._inode:
                self._lines, self._end, self._count, self._inode = {}, 0, 0, found.st_ino
            file.seek(self._end)
            while (text := file.readline()).endswith(b"\n"):
                where = f"{path}:{self._count + 1}"
                one = rows.checked(run_dir.parse(text, path, self._count + 1), where, samples.FIELDS)
                key = str(one.get("kind", "")), int(one.get("step", 0))
                self._lines.setdefault(key, []).append((self._end, one.get("reward")))
                self._end, self._count = self._end + len(text), self._count + 1
