"""Registers a server at a run that takes servers as they come (`rollout/fleet/registry.py`), while it serves."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import threading
import urllib.request
from collections.abc import Iterator
from typing import Any

from . import addresses, keys
from .printable import one_line

log = logging.getLogger(__name__)

STAYS_S, AGAIN_S = 60.0, 20.0  # how long the run keeps a server that says nothing more; between its requests
ANSWER_S = 5.0
LARGEST = 1 << 22  # bytes of an answer


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the key would go along."""

    def redirect_request(self, *_: Any) -> None:
        return None


@contextlib.contextmanager
def joined(run: str, url: str) -> Iterator[threading.Event]:
    """Has the server at `url` join the run at the address `run` during the block; "" = none. A run that does not answer
    is asked again, and may start later. Setting the event, and leaving the block, has it leave.

    Raises ValueError if the key in AREAX_FLEET_KEY is not valid.
    """
    leaving = threading.Event()
    if not run:
        yield leaving
        return
    addresses.check(run, "join")
    url = addresses.plain(url)  # as the run lists it
    key = keys.read(keys.FLEET)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays)

    def ask(method: str) -> str:
        """What went wrong, "" = nothing."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        body = {"url": url} | ({"for_s": STAYS_S} if method == "POST" else {})
        asked = urllib.request.Request(f"{run.rstrip('/')}/servers", json.dumps(body).encode(), headers, method=method)
        try:
            with opener.open(asked, timeout=ANSWER_S) as reply:
                said = json.loads(reply.read(LARGEST))
            listed = [one["url"] for one in said["servers"]]
        except (OSError, http.client.HTTPException) as error:  # HTTP statuses are some
            return one_line(error) or type(error).__name__
        except (ValueError, KeyError, TypeError, RecursionError):
            return "its answer is not that of a run"
        return "" if method == "DELETE" or url in listed else "it does not list this server"

    def stay() -> None:
        said = None
        while not leaving.is_set():
            if (why := ask("POST")) != said:
                log.warning("%s: %s", run, f"does not take this server in: {why}" if why else f"has taken in {url}")
                said = why
            leaving.wait(AGAIN_S)
        if not said:
            ask("DELETE")

    thread = threading.Thread(target=stay, name="areax-join", daemon=True)
    thread.start()
    try:
        yield leaving
    finally:
        leaving.set()
        thread.join(2 * ANSWER_S)
