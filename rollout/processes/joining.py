"""Registers a server at a run that takes servers as they come (`rollout/fleet/registry.py`), while it serves."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import urllib.request
from collections.abc import Iterator

from . import keys
from .printable import one_line

log = logging.getLogger(__name__)

STAYS_S, AGAIN_S = 60.0, 20.0  # how long the run keeps a server that says nothing more; between its requests
ANSWER_S = 5.0


@contextlib.contextmanager
def joined(run: str, url: str) -> Iterator[threading.Event]:
    """Has the server at `url` join the run at the address `run` during the block; "" = none. A run that does not answer
    is asked again, and may start later. Setting the event, and leaving the block, has it leave.

    Raises ValueError if `run` is no address, or the key in AREAX_FLEET_KEY is not valid.
    """
    leaving = threading.Event()
    if not run:
        yield leaving
        return
    keys.check_address(run, "join")
    if not run.startswith(("http://", "https://")):
        raise ValueError(f"join: must be the address of a run, such as http://10.0.0.1:9000, got {run!r:.200}")
    key = keys.read(keys.FLEET)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def ask(method: str) -> str:
        """What went wrong, "" = nothing."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        body = {"url": url} | ({"for_s": STAYS_S} if method == "POST" else {})
        asked = urllib.request.Request(f"{run.rstrip('/')}/servers", json.dumps(body).encode(), headers, method=method)
        try:
            opener.open(asked, timeout=ANSWER_S).close()
        except OSError as error:  # HTTP errors are some
            return one_line(error)
        return ""

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
