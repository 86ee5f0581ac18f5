"""Machines that are containers of Docker, by its SDK (`pip install 'areax[docker]'`), which reads DOCKER_HOST."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import io
import tarfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ServerError
from . import Result
from .containers import HALF, archive, digest, late, left_out, why
from .machine import FILE, LATE_S, LIFETIME_S, Ended

NO_FILE = 0x8F280000  # bits of Go's os.FileMode of anything but a file
LABEL = "areax"
AT_ONCE = 64  # commands, each in a thread
STARTS = 4  # starts and ends at once
_building = threading.Lock()
_commands = concurrent.futures.ThreadPoolExecutor(AT_ONCE, "docker")
_starts = concurrent.futures.ThreadPoolExecutor(STARTS, "docker-start")
_ends = concurrent.futures.ThreadPoolExecutor(STARTS, "docker-end")


async def start(
    image: str, context: Path, *, memory_mb: int = 0, workdir: str = "", network: str = "none", cpus: float = 0,
    processes: int = 512, lifetime_s: float = LIFETIME_S,
) -> Container:  # fmt: skip
    """Starts a container, which ends by itself after `lifetime_s`.

    Args:
      network: Docker's network mode; none = no network.
      cpus: most cores that it uses; 0 = all.
      processes: most processes in it.

    Raises:
      ServerError: there is no Docker, no such image, or none could be built.
    """
    how: dict[str, Any] = dict(network_mode=network, pids_limit=processes, working_dir=workdir or None)
    how |= dict(mem_limit=f"{memory_mb}m", memswap_limit=f"{memory_mb}m") if memory_mb else {}
    how |= dict(nano_cpus=int(cpus * 1e9)) if cpus else {}
    starting = _starts.submit(_started, image, context, lifetime_s, how)
    try:
        return await asyncio.wrap_future(starting)
    except asyncio.CancelledError:
        starting.add_done_callback(_remove_unowned)
        raise
    except Exception as error:
        if isinstance(error, ImportError) or not _is_from_docker(error):
            raise
        raise ServerError(f"docker: {' '.join(str(error).split())[:500]}") from error


def _remove_unowned(starting: concurrent.futures.Future[Container]) -> None:
    """Removes a container that nobody waits for any more."""
    if not starting.cancelled() and not starting.exception():
        starting.result().remove()


def _is_from_docker(error: Exception) -> bool:
    """Whether an error is the SDK's, or of its connection: those of requests are OSErrors without a number."""
    from docker import errors

    return isinstance(error, errors.DockerException) or isinstance(error, OSError) and error.errno is None


@functools.cache
def _client() -> Any:
    try:
        import docker
    except ModuleNotFoundError:
        raise ImportError("docker is not installed: pip install 'areax[docker]'") from None
    return docker.from_env(max_pool_size=AT_ONCE)


def _started(image: str, context: Path, lifetime_s: float, how: Mapping[str, Any]) -> Container:
    client = _client()
    made = client.containers.run(
        image or _built(context), [f"{lifetime_s:.0f}"], entrypoint=["sleep"], detach=True, init=True, auto_remove=True,
        labels=[LABEL], **how,
    )  # fmt: skip
    made.reload()
    return Container(made, made.attrs["Config"]["WorkingDir"] or "/")


def _built(context: Path) -> str:
    """The image of a folder with a Dockerfile, built once of each content."""
    from docker import errors

    name = f"areax-task:{digest(context)}"
    with _building:
        try:
            _client().images.get(name)
        except errors.ImageNotFound:
            _client().images.build(path=str(context), tag=name, rm=True, forcerm=True)
    return name


class Container:
    """A running container; made by `start`."""

    def __init__(self, container: Any, workdir: str):
        self._own, self.workdir, self._why = container, workdir, ""

    async def run(self, command: str, *, timeout_s: float = 60.0, cwd: str = "/") -> Result:
        return await self._called(functools.partial(self._run, command, timeout_s, cwd), timeout_s + LATE_S)

    async def put(self, files: Mapping[str, bytes]) -> None:
        if files:
            await self._called(functools.partial(self._own.put_archive, "/", archive(files)), LATE_S)

    async def get(self, path: str) -> bytes:
        return await self._called(functools.partial(self._get, path), LATE_S)

    async def aclose(self) -> None:
        self._why = self._why or "it was closed"
        await asyncio.wrap_future(_ends.submit(self.remove))

    def remove(self) -> None:
        from docker import errors

        try:
            self._own.remove(force=True)
        except errors.APIError as error:
            if error.status_code not in (404, 409):  # it is gone, or going
                raise

    async def _called(self, function: Any, seconds: float) -> Any:
        """What a call of the SDK returns; its time begins with it. Raises Ended if the container has ended, ServerError
        if Docker does not answer."""
        if self._why:
            raise Ended(self._why)
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def work() -> Any:
            loop.call_soon_threadsafe(begun.set)
            return function()

        running = asyncio.wrap_future(_commands.submit(work))
        try:
            await asyncio.wait(
                {running, waiting := asyncio.create_task(begun.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
            waiting.cancel()
            async with asyncio.timeout(seconds):
                return await running
        except TimeoutError as error:
            self._why = "Docker does not answer"
            raise ServerError(f"docker: no answer within {seconds:g} s") from error
        except Ended as error:
            self._why = error.why
        except Exception as error:
            if not _is_from_docker(error):
                raise
            self._why = " ".join(str(error).split())[:300]
        raise Ended(self._why)

    def _run(self, command: str, timeout_s: float, cwd: str) -> Result:
        api, began = self._own.client.api, time.monotonic()
        id = api.exec_create(self._own.id, late(command, timeout_s), workdir=cwd)["Id"]
        first, last, lost = b"", b"", 0
        for chunk in api.exec_start(id, stream=True):
            room = max(0, HALF - len(first))
            first, last = first + chunk[:room], last + chunk[room:]
            lost += max(0, len(last) - HALF)
            last = last[-HALF:]
        seconds = time.monotonic() - began
        code = api.exec_inspect(id)["ExitCode"]
        if code is None:
            raise Ended("its container has ended")
        text = first + (left_out(str(lost)).encode() if lost else b"") + last
        return Result(text.decode(errors="replace"), "", code, why(code, seconds, timeout_s), seconds)

    def _get(self, path: str) -> bytes:
        from docker import errors

        try:
            stream, about = self._own.get_archive(path)
        except errors.NotFound as error:
            if "no such container" in str(error).lower():
                raise
            raise FileNotFoundError(2, "No such file", path) from error
        content = b""
        try:
            if about["mode"] & NO_FILE:
                raise OSError(21, "is no file", path)
            for piece in stream:
                content += piece
                if len(content) > FILE + 2**16:
                    raise OSError(27, f"must have at most {FILE} bytes", path)
        finally:
            stream.close()  # else Docker waits for the rest to be read
        try:
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                found = archive.extractfile(archive.next() or "")
                return found.read() if found else b""
        except (KeyError, tarfile.TarError) as error:
            raise OSError(5, f"cannot be read: {error}", path) from error
