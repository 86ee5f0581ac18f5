"""Machines that are sandboxes of Daytona, by its SDK (`pip install 'areax[daytona]'`), which reads DAYTONA_API_KEY."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shlex
import uuid
from pathlib import Path
from typing import Any

from .hosted import Hosted, Kind, internet, not_started, owned, started
from .machine import LIFETIME_S

KEYS = "DAYTONA_API_KEY"


async def start(
    image: str, context: Path, *, memory_mb: int = 0, workdir: str = "", network: str = "none", cpus: int = 0,
    snapshot: str = "", lifetime_s: float = LIFETIME_S,
) -> Hosted:  # fmt: skip
    """Starts a sandbox, which Daytona ends after `lifetime_s`, in whole minutes. It builds images as it needs them.

    Args:
      memory_mb: rounded up to whole GiB, which Daytona counts in.
      network: none or internet.
      cpus: cores; 0 = as many as Daytona gives.
      snapshot: is started as it is, whatever the image; its size is that which it was made with.

    Raises:
      ServerError: Daytona cannot be reached, is busy or fails, or cannot build the image.
      ValueError: Daytona refuses the key, the snapshot or an option.
    """
    try:
        import daytona
    except ModuleNotFoundError:
        raise ImportError("daytona is not installed: pip install 'areax[daytona]'") from None
    if snapshot and (memory_mb or cpus):
        told = f"got memory_mb {memory_mb} and cpus {cpus} with snapshot {snapshot}"
        raise ValueError(f"provider daytona: a snapshot has the size it was made with, {told}")
    how: dict[str, Any] = dict(
        name=f"areax-{uuid.uuid4().hex}", labels={"areax": "1"}, os_user="root", ephemeral=True, auto_stop_interval=0,
        ttl_minutes=math.ceil(lifetime_s / 60), network_block_all=not internet("daytona", network),
    )  # fmt: skip
    async with contextlib.AsyncExitStack() as opened:
        try:
            client = await opened.enter_async_context(daytona.AsyncDaytona())
            params: Any
            if snapshot:
                params = daytona.CreateSandboxFromSnapshotParams(snapshot=snapshot, **how)
            else:
                size = daytona.Resources(cpu=cpus or None, memory=math.ceil(memory_mb / 1024) or None)
                made = image or await asyncio.to_thread(daytona.Image.from_dockerfile, context / "Dockerfile")
                params = daytona.CreateSandboxFromImageParams(image=made, resources=size, **how)
            own = await owned(_created(client, params), lambda made: made.delete())
        except Exception as error:
            raise not_started("daytona", KEYS, _kind(error), error) from error
        opened.push_async_callback(_delete, own)
        keep = opened.pop_all()

    async def execute(text: str, seconds: float) -> tuple[str, int]:
        done = await own.process.exec(f"bash -c {shlex.quote(text)}", timeout=math.ceil(seconds))
        return done.result, done.exit_code

    async def write(path: str, content: bytes) -> None:
        await own.fs.upload_file(content, path)

    async def gone() -> str:
        try:
            await own.refresh_data()
        except daytona.DaytonaNotFoundError:
            return "its sandbox was deleted, or its time is over"
        return "" if own.state == "started" else f"its sandbox is {own.state and own.state.value}"

    machine = Hosted(
        "daytona", execute=execute, write=write, gone=gone, end=keep.aclose, kind=_kind, lifetime_s=lifetime_s
    )
    return await started(machine, workdir)


async def _created(client: Any, params: Any) -> Any:
    """A sandbox that runs. One that does not, or not in time, is deleted by its name."""
    from daytona import DaytonaError

    try:
        return await client.create(params, timeout=0)
    except BaseException:
        with contextlib.suppress(DaytonaError):
            await _delete(await client.get(params.name))
        raise


async def _delete(sandbox: Any) -> None:
    from daytona import DaytonaNotFoundError

    with contextlib.suppress(DaytonaNotFoundError):
        await sandbox.delete()


def _kind(error: Exception) -> Kind:
    import daytona

    if not isinstance(error, daytona.DaytonaError):
        return ""
    if isinstance(error, daytona.DaytonaAuthenticationError):
        return "key"
    status = error.status_code or 0
    refused = 400 <= status < 500 and status not in (408, 409, 429) or isinstance(error, daytona.DaytonaValidationError)
    return "refused" if refused else "failed"
