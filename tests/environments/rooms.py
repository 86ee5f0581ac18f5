"""Doubles of E2B, Daytona and Modal on loopback: the SDKs talk to them, and commands run here, in bash."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import signal
import struct
from pathlib import Path

from aiohttp import web


class Rooms:
    """What the doubles share: sandboxes by id, whose temporary files are in a folder.

    Attributes:
      asked: what each sandbox was asked for, by its id.
      refusal: (HTTP status, message) of starts.
      start_s: seconds that a start takes.
      ended: ids of sandboxes that were deleted.
      end_refused: whether they cannot be.
      broken: whether no command runs.
      builds: how often an image was built.
      sent: files of images, as they arrived.
    """

    def __init__(self, folder):
        self.folder = str(folder)
        self.asked, self.refusal, self.start_s, self.ended = {}, None, 0.0, set()
        self.built, self.sessions, self.numbers = {}, {}, itertools.count(1)
        self.end_refused, self.broken, self.builds, self.requested = False, False, 0, {}
        self.sent = []
        self.starting = asyncio.Event()

    async def made(self, asked):
        self.starting.set()
        id = f"sb-{next(self.numbers)}"
        self.asked[id], self.sessions[id] = asked, set()
        await asyncio.sleep(self.start_s)
        return id

    def alive(self, id):
        return id in self.asked and id not in self.ended

    def end(self, id):
        self.ended.add(id)
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(stat.read_text().rpartition(")")[2].split()[3]) in self.sessions[id]:
                    os.kill(int(stat.parent.name), signal.SIGKILL)

    async def run(self, id, words, given=None):
        """What a command prints, and its exit code, negative for a signal; `given` is read to its end, if it reads."""
        env = {"PATH": os.environ["PATH"], "HOME": "/none", "TMPDIR": self.folder}
        process = await asyncio.create_subprocess_exec(
            *words, cwd="/", env=env, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.sessions[id].add(process.pid)
        reads = given and "cat >" in words[-1]
        said, _ = await process.communicate(await given.read() if reads else None)
        return said, process.returncode


@contextlib.asynccontextmanager
async def served(routes):
    app = web.Application(client_max_size=2**26)
    app.add_routes(routes)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def e2b(rooms, setenv):
    """E2B's API, and envd of each sandbox: Connect's streams of JSON."""

    def refusal(status, message):
        return web.json_response({"code": status, "message": message}, status=status)

    async def create(request):
        if request.headers.get("X-API-KEY") != "e2b_key":
            return refusal(401, "Invalid API key")
        if rooms.refusal:
            return refusal(*rooms.refusal)
        asked = await request.json()
        if asked["templateID"] not in {"known", *rooms.built}:
            return refusal(404, f"template '{asked['templateID']}' not found")
        id = await rooms.made(asked)
        given = dict(sandboxID=id, templateID="t", clientID="c", envdVersion="0.6.7", envdAccessToken="token")
        return web.json_response(given, status=201)

    async def delete(request):
        id = request.match_info["id"]
        if not rooms.alive(id):
            return refusal(404, "no such sandbox")
        if rooms.end_refused:
            return refusal(500, "not now")
        rooms.end(id)
        return web.Response(status=204)

    def gone(request):
        id = request.headers["E2b-Sandbox-Id"]
        return None if rooms.alive(id) else refusal(502, f"The sandbox {id} was not found")

    async def process(request):
        if gone(request) or rooms.broken:
            return gone(request) or refusal(500, "out of order")
        id, asked = request.headers["E2b-Sandbox-Id"], json.loads((await request.read())[5:])["process"]
        answer = web.StreamResponse(headers={"Content-Type": "application/connect+json"})
        await answer.prepare(request)

        async def send(message, flags=0):
            text = json.dumps(message).encode()
            await answer.write(struct.pack(">BI", flags, len(text)) + text)

        await send({"event": {"start": {"pid": 7}}})
        user = base64.b64decode(request.headers["Authorization"].split()[1]).decode()
        assert (user, asked["cmd"]) == ("root:", "/bin/bash")
        said, code = await rooms.run(id, ["/bin/bash", *asked["args"]])
        if not rooms.alive(id):
            await send({"error": {"code": "unavailable", "message": "the connection ended"}}, 2)
            return answer
        for begin in range(0, len(said), 1000):  # characters may be cut
            await send({"event": {"data": {"stdout": base64.b64encode(said[begin : begin + 1000]).decode()}}})
        await send({"event": {"end": {"exitCode": code, "exited": code >= 0, "status": "ended"}}})
        await send({}, 2)
        return answer

    async def files(request):
        if gone(request):
            return gone(request)
        path = Path(request.query["path"])
        form = await request.post()
        path.write_bytes(form["file"].file.read())
        return web.json_response([{"name": path.name, "type": "file", "path": str(path)}])

    async def health(request):
        return gone(request) or web.Response(status=204)

    async def template(request):
        asked = await request.json()
        given = dict(templateID=asked["name"], buildID="b", public=False, names=[asked["name"]], tags=[], aliases=[])
        rooms.requested[asked["name"]] = asked
        return web.json_response(given, status=202)

    async def copied(request):
        url = f"http://{request.host}/copied"
        return web.json_response({"present": False, "url": url}, status=201)

    async def store(request):
        rooms.sent.append(await request.read())
        return web.Response()

    async def build(request):
        rooms.builds += 1
        rooms.built[request.match_info["name"]] = rooms.requested[request.match_info["name"]] | await request.json()
        return web.Response(status=202)

    async def status(request):
        named = dict(templateID=request.match_info["name"], buildID="b", logs=[], logEntries=[])
        return web.json_response({**named, "status": "ready"})

    routes = [
        web.post("/v2/sandboxes", create), web.delete("/sandboxes/{id}", delete), web.post("/files", files),
        web.post("/process.Process/Start", process), web.get("/health", health), web.post("/v3/templates", template),
        web.get("/templates/{name}/files/{hash}", copied), web.put("/copied", store),
        web.post("/v2/templates/{name}/builds/b", build), web.get("/templates/{name}/builds/b/status", status),
    ]  # fmt: skip
    async with served(routes) as address:
        setenv("E2B_API_URL", address)
        setenv("E2B_SANDBOX_URL", address)
        setenv("E2B_API_KEY", "e2b_key")
        setenv("E2B_HTTP_VERSION", "1.1")
        yield rooms


@contextlib.asynccontextmanager
async def daytona(rooms, setenv):
    """Daytona's API, and the toolbox of each sandbox."""

    def refusal(status, message):
        return web.json_response({"statusCode": status, "message": message, "source": "DAYTONA_API"}, status=status)

    def told(request, id):
        asked = rooms.asked[id]
        return web.json_response(dict(
            id=id, organizationId="o", name=asked["name"], user=asked["user"], env={}, labels=asked["labels"],
            public=False, networkBlockAll=asked["networkBlockAll"], kvm=False, target="us", cpu=1, gpu=0, memory=1,
            disk=1, state="started", toolboxProxyUrl=f"http://{request.host}/toolbox",
        ))  # fmt: skip

    async def create(request):
        if request.headers.get("Authorization") != "Bearer dtn_key":
            return refusal(401, "Unauthorized")
        if rooms.refusal:
            return refusal(*rooms.refusal)
        asked = await request.json()
        if asked.get("snapshot") not in (None, "known"):
            return refusal(404, f"Snapshot {asked['snapshot']} not found")
        return told(request, await rooms.made(asked))

    def found(request):
        return next((id for id in rooms.asked if request.match_info["id"] in (id, rooms.asked[id]["name"])), "")

    async def show(request):
        id = found(request)
        return told(request, id) if rooms.alive(id) else refusal(404, "Sandbox not found")

    async def delete(request):
        id = found(request)
        if not rooms.alive(id):
            return refusal(404, "Sandbox not found")
        if rooms.end_refused:
            return refusal(500, "not now")
        rooms.end(id)
        return told(request, id)

    async def execute(request):
        id, asked = request.match_info["id"], await request.json()
        if rooms.broken:
            return refusal(500, "out of order")
        if rooms.alive(id):
            said, code = await rooms.run(id, ["sh", "-c", asked["command"]])
        if not rooms.alive(id):
            return refusal(400, "no IP address found. Is the Sandbox started?")
        return web.json_response({"result": said.decode(errors="replace"), "exitCode": code})

    async def upload(request):
        if not rooms.alive(request.match_info["id"]):
            return refusal(400, "no IP address found. Is the Sandbox started?")
        form = await request.post()
        Path(form["files[0].path"]).write_bytes(form["files[0].file"].file.read())
        return web.json_response({})

    routes = [
        web.post("/sandbox", create), web.get("/sandbox/{id}", show), web.delete("/sandbox/{id}", delete),
        web.post("/toolbox/{id}/process/execute", execute), web.post("/toolbox/{id}/files/bulk-upload", upload),
    ]  # fmt: skip
    async with served(routes) as address:
        setenv("DAYTONA_API_URL", address)
        setenv("DAYTONA_API_KEY", "dtn_key")
        yield rooms


@contextlib.asynccontextmanager
async def modal(rooms, setenv):
    """Modal's API and its router of commands, in gRPC."""
    import grpclib.const
    import grpclib.server
    from modal.client import Client
    from modal_proto import api_grpc, api_pb2, task_command_router_grpc, task_command_router_pb2

    processes, inputs = {}, {}

    def answering(base, answers):
        """A service of which only some methods answer."""

        async def unknown(self, stream):
            raise grpclib.GRPCError(grpclib.const.Status.UNIMPLEMENTED, "not in this double")

        return type(base.__name__, (base,), {**dict.fromkeys(base.__abstractmethods__, unknown), **answers})()

    def answer(function):
        async def method(self, stream):
            if stream.metadata.get("x-modal-token-secret", "as-secret") != "as-secret":
                raise grpclib.GRPCError(grpclib.const.Status.UNAUTHENTICATED, "Token validation failed")
            made = await function(await stream.recv_message(), stream)
            if made is not None:
                await stream.send_message(made)

        return method

    async def hello(asked, stream):
        return api_pb2.ClientHelloResponse(image_builder_version="2025.06")

    async def token(asked, stream):
        return api_pb2.AuthTokenGetResponse(token="h.eyJleHAiOjk5OTk5OTk5OTl9.s")

    async def app(asked, stream):
        return api_pb2.AppGetOrCreateResponse(app_id="ap-1")

    async def environment(asked, stream):
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        return api_pb2.EnvironmentGetOrCreateResponse(
            environment_id="en-1", metadata=api_pb2.EnvironmentMetadata(name="main", settings=settings)
        )

    async def missing(asked, stream):
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=asked.sha256_hex_hashes)

    async def put(asked, stream):
        rooms.sent.append(asked.data)
        return api_pb2.MountPutFileResponse(exists=True)

    async def mount(asked, stream):
        return api_pb2.MountGetOrCreateResponse(mount_id="mo-1")

    async def image(asked, stream):
        rooms.built[f"im-{len(rooms.built)}"] = [*asked.image.dockerfile_commands]
        done = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
        return api_pb2.ImageGetOrCreateResponse(image_id=f"im-{len(rooms.built) - 1}", result=done)

    async def create(asked, stream):
        if rooms.refusal:
            statuses = grpclib.const.Status
            kinds = {429: statuses.RESOURCE_EXHAUSTED, 503: statuses.UNAVAILABLE, 400: statuses.INVALID_ARGUMENT}
            raise grpclib.GRPCError(kinds[rooms.refusal[0]], rooms.refusal[1])
        id = await rooms.made(asked.definition)
        access = api_pb2.CommandRouterAccess(url=address, jwt="j")
        return api_pb2.SandboxCreateV2Response(sandbox_id=id, task_id=id, command_router_access=access)

    async def terminate(asked, stream):
        if rooms.end_refused:
            raise grpclib.GRPCError(grpclib.const.Status.DATA_LOSS, "not now")
        if rooms.alive(asked.sandbox_id):
            rooms.end(asked.sandbox_id)
        return api_pb2.SandboxTerminateResponse()

    async def wait(asked, stream):
        kinds = api_pb2.GenericResult
        ended = kinds.GENERIC_STATUS_UNSPECIFIED if rooms.alive(asked.sandbox_id) else kinds.GENERIC_STATUS_TERMINATED
        return api_pb2.SandboxWaitResponse(result=kinds(status=ended))

    def gone(id):
        if not rooms.alive(id):
            raise grpclib.GRPCError(grpclib.const.Status.NOT_FOUND, f"task {id} not found")

    async def start(asked, stream):
        gone(asked.task_id)
        if rooms.broken:
            raise grpclib.GRPCError(grpclib.const.Status.DATA_LOSS, "out of order")
        inputs[asked.exec_id] = asyncio.StreamReader()
        running = rooms.run(asked.task_id, asked.command_args, given=inputs[asked.exec_id])
        processes[asked.exec_id] = asyncio.create_task(running)
        return task_command_router_pb2.TaskExecStartResponse()

    async def output(asked, stream):
        said = b"" if "STDERR" in str(asked) else (await processes[asked.exec_id])[0]
        gone(asked.task_id)
        for begin in range(asked.offset, len(said), 1000):
            data = said[begin : begin + 1000]
            await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=data))

    async def into(asked, stream):
        gone(asked.task_id)
        inputs[asked.exec_id].feed_data(asked.data)
        if asked.eof:
            inputs[asked.exec_id].feed_eof()
        return task_command_router_pb2.TaskExecStdinWriteResponse()

    async def code(asked, stream):
        _, code = await processes[asked.exec_id]
        gone(asked.task_id)
        how = dict(code=code) if code >= 0 else dict(signal=-code)
        return task_command_router_pb2.TaskExecWaitResponse(**how)

    api = dict(
        ClientHello=hello, AuthTokenGet=token, AppGetOrCreate=app, EnvironmentGetOrCreate=environment,
        ImageGetOrCreate=image, SandboxCreateV2=create, SandboxTerminateV2=terminate, SandboxWaitV2=wait,
        MountBatchedCheckExistence=missing, MountPutFile=put, MountGetOrCreate=mount,
    )  # fmt: skip
    router = dict(TaskExecStart=start, TaskExecStdioRead=output, TaskExecStdinWrite=into, TaskExecWait=code)
    server = grpclib.server.Server([
        answering(base, {name: answer(function) for name, function in answers.items()})
        for base, answers in (
            (api_grpc.ModalClientBase, api), (task_command_router_grpc.TaskCommandRouterBase, router),
        )
    ])  # fmt: skip
    await server.start("127.0.0.1", 0)
    address = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}"
    setenv("MODAL_SERVER_URL", address)
    setenv("MODAL_TOKEN_ID", "ak-id")
    setenv("MODAL_TOKEN_SECRET", "as-secret")
    Client._set_env_client(None)
    try:
        yield rooms
    finally:
        Client._set_env_client(None)
        server.close()
        await server.wait_closed()
