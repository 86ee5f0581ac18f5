"""The latest responses of `/v1/responses`, which later requests continue by the ids of responses and of their items."""

from __future__ import annotations

import collections
import functools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fields import Refused, objects, rule

RESPONSES, CHARACTERS = 1024, 2**26  # most that are kept
ADVICE = "send the whole conversation as input, with store: false"


@dataclass(frozen=True)
class Kept:
    """The items of a response: those it continued, and its own; with the characters of their JSON."""

    read: Sequence[Mapping[str, Any]]
    written: Sequence[Mapping[str, Any]]
    size: int


class Stored:
    """Responses for the requests of one key, those kept last; for any thread."""

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[str, Kept] = collections.OrderedDict()
        self._items: dict[str, Mapping[str, Any]] = {}
        self._size = 0
        self._lock = threading.Lock()

    def items(self, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The items of a request's input, behind those of the response that it continues, without references.

        Raises:
          Refused: the input is neither a text nor a list of objects, names what is not kept, or an item twice.
        """
        given, before = body.get("input"), body.get("previous_response_id")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
        rule(bool(items), "input", "must not be empty", given)
        with self._lock:
            referred: set[str] = set()
            found = [self._found(item, referred) if _refers(item) else item for item in items]
            if before is None:
                return found
            kept = self._kept.get(before) if isinstance(before, str) else None
        if kept is None:
            raise Refused("previous_response_id", f"no such response is kept, got {before!r:.80}; {ADVICE}")
        return [*kept.read, *kept.written, *found]

    def _found(self, reference: Mapping[str, Any], others: set[str]) -> Mapping[str, Any]:
        """The item of a reference, whose id is added to `others`."""
        id = reference.get("id")
        item = self._items.get(id) if isinstance(id, str) else None
        if item is None:
            raise Refused("input", f"no item with the id {id!r:.80} is kept; {ADVICE}")
        if id in others:  # else a short input could name more text than fits into memory
            raise Refused("input", f"may refer to each item once, got {id!r:.80} twice; leave one out")
        others.add(str(id))
        return item

    def keeper(self, read: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], None]:
        """`keep` for the response to these items, which are measured now: their JSON may take long to write."""
        return functools.partial(self.keep, read, len(json.dumps(read)))

    def keep(self, read: Sequence[Mapping[str, Any]], size: int, response: Mapping[str, Any]) -> None:
        """Keeps a response, which read these items of `size` characters; drops the oldest ones where there are too
        many."""
        written = response["output"]
        made = Kept(read, written, size + len(json.dumps(written)))
        with self._lock:
            self._kept[response["id"]] = made
            self._items |= {item["id"]: item for item in written}
            self._size += made.size
            while len(self._kept) > RESPONSES or self._size > CHARACTERS:
                _, oldest = self._kept.popitem(last=False)
                self._size -= oldest.size
                for item in oldest.written:
                    del self._items[item["id"]]


def _refers(item: Mapping[str, Any]) -> bool:
    """Whether an item is a reference, whose type may be left out."""
    given = {name for name, value in item.items() if value is not None}
    return item.get("type") == "item_reference" or given == {"id"}
