"""Sessions of clients: whose key they have, and when they were last heard of."""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request as Http

from .log import Log, Model, Session

HEADER = "x-api-key"
SILENT_S = 600.0  # after which a session's models leave memory, until they are asked for


class Sessions:
    """Who may use what.

    Args:
      keys: that are allowed; none = any, for servers that only this machine reaches. A key sees only its own sessions.
    """

    def __init__(self, store: Log, keys: Sequence[str]):
        self._log, self._keys = store, [key.encode() for key in keys]
        self._heard: dict[str, float] = {}

    def key(self, http: Http) -> str:
        """The hash of the request's key, which stands for it. Raises HTTPException 401."""
        given = http.headers.get(HEADER, "").encode("latin-1")
        known = [hmac.compare_digest(given, key) for key in self._keys]  # all, whichever fits
        if not given or (known and not any(known)):
            raise HTTPException(401, f"the header {HEADER} must be a key of this server")
        return hashlib.sha256(given).hexdigest()

    def create(self, key: str, about: Mapping[str, Any]) -> str:
        id = uuid.uuid4().hex
        self._log.add_session(id, key, dict(about))
        self._heard[id] = time.monotonic()
        return id

    def of(self, key: str, id: str) -> Session:
        """The key's session. Raises HTTPException: 404 it has no such session, 410 it has ended."""
        session = self._log.session(id)
        if session is None or session.key != key:
            raise HTTPException(404, f"session_id: there is no session {id!r:.80}")
        if session.ended:
            raise HTTPException(410, f"session_id: session {id} has ended")
        return session

    def heartbeat(self, key: str, id: str) -> None:
        self._heard[self.of(key, id).id] = time.monotonic()

    def model(self, key: str, id: str) -> Model:
        """The key's model. Raises HTTPException 404, 410."""
        model = self._log.model(id)
        if model is None:
            raise HTTPException(404, f"model_id: there is no model {id!r:.80}")
        self._heard[self.of(key, model.session).id] = time.monotonic()
        return model

    def end(self, key: str, id: str) -> list[str]:
        """Ends a session; returns its models."""
        self.of(key, id)
        models = self._log.models_of(id)
        self._log.end_session(id)
        self._heard.pop(id, None)
        return models

    def silent(self) -> list[str]:
        """The models of sessions that were not heard of for SILENT_S, each session once until it is heard again."""
        now = time.monotonic()
        gone = [id for id, heard in list(self._heard.items()) if now - heard > SILENT_S]
        for id in gone:
            del self._heard[id]
        return [model for id in gone for model in self._log.models_of(id)]
