"""Serves Tinker's API for a tiny model in the folder `tiny` here: program.py OUT PORT [RECORD]. RECORD is a file to
which each request is written that this server gets, a JSON object a line."""

import base64
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import tiny

from areax.rollout.processes import http_process
from areax.rollout.servers.engine_options import EngineOptions
from areax.service import server
from areax.service.options import Options


def recording(app, path):
    """The application, whose requests are written to a file."""

    async def recorded(scope, receive, send):
        body = b""

        async def read():
            nonlocal body
            message = await receive()
            body += message.get("body", b"")
            if message["type"] == "http.request" and not message.get("more_body"):
                line = {"method": scope["method"], "path": scope["path"], "body": base64.b64encode(body).decode()}
                with open(path, "a") as file:
                    file.write(json.dumps(line) + "\n")
            return message

        await app(scope, read if scope["type"] == "http" else receive, send)

    return recorded


def main(out, port, record=""):
    if not Path("tiny").exists():
        tiny.model(Path("tiny"))
    options, engine = Options(out, save_every=3), EngineOptions(slots=4, context=64)
    sock = http_process.bind("127.0.0.1", int(port))
    with server.serving("tiny", "tiny", options, engine) as app:
        ready = f"http://127.0.0.1:{sock.getsockname()[1]} is ready"
        http_process.serve(recording(app, record) if record else app, sock, ready, lifespan="on")


if __name__ == "__main__":
    main(*sys.argv[1:])
