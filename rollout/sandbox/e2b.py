"""Machines that are sandboxes of E2B, by its SDK (`pip install 'areax[e2b]'`), which reads E2B_API_KEY.

E2B starts templates, not images: one is built of each image, or folder with a Dockerfile, and size, when it is first
needed, and found again by its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import uuid
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from .containers import digest
from .hosted import Hosted, Kind, internet, not_started, owned, started
from .machine import LIFETIME_S

KEYS = "E2B_API_KEY"
PACKAGES = ("e2b", "e2b_dockerfile_utils", "httpx", "httpcore", "connectrpc", "pyqwest")  # their errors are E2B's
_building: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()


async def start(
    image: str, context: Path, *, memory_mb: int = 0, workdir: str = "", network: str = "none", cpus: int = 0,
    template: str = "", lifetime_s: float = LIFETIME_S,
) -> Hosted:  # fmt: skip
    """Starts a sandbox, which E2B ends after `lifetime_s`.

    Args:
      network: none or internet.
      cpus: cores; 0 = as many as E2B gives.
      template: is started as it is, whatever the image; its size is that which it was built with.

    Raises:
      ServerError: E2B cannot be reached, is busy or fails, or cannot build the template.
      ValueError: E2B refuses the key, the template or an option.
    """
    try:
        import e2b
    except ModuleNotFoundError:
        raise ImportError("e2b is not installed: pip install 'areax[e2b]'") from None
    if template and (memory_mb or cpus):
        told = f"got memory_mb {memory_mb} and cpus {cpus} with template {template}"
        raise ValueError(f"provider e2b: a template has the size it was built with, {told}")
    how = dict(allow_internet_access=internet("e2b", network), timeout=math.ceil(lifetime_s), metadata={"areax": "1"})

    async def create(name: str) -> Any:
        making = e2b.AsyncSandbox.create(name, idempotency_key=str(uuid.uuid4()), **how)  # the SDK asks again at 503
        return await owned(making, lambda made: made.kill())

    try:
        if template:
            own = await create(template)
        else:
            own = await _created(create, image, context, memory_mb, cpus)
    except Exception as error:
        raise not_started("e2b", KEYS, _kind(error), error) from error

    async def execute(text: str, seconds: float) -> tuple[str, int]:
        try:
            done = await own.commands.run(text, user="root", timeout=seconds)
        except e2b.CommandExitException as error:
            return error.stdout, error.exit_code
        return done.stdout, done.exit_code

    async def write(path: str, content: bytes) -> None:
        await own.files.write(path, content, user="root")

    async def gone() -> str:
        return "" if await own.is_running() else "its sandbox was killed, or its time is over"

    machine = Hosted("e2b", execute=execute, write=write, gone=gone, end=own.kill, kind=_kind, lifetime_s=lifetime_s)
    return await started(machine, workdir)


async def _created(
    create: Callable[[str], Awaitable[Any]], image: str, context: Path, memory_mb: int, cpus: int
) -> Any:
    """A sandbox of the template of an image and a size, which is built if there is none."""
    import e2b

    source = image or await asyncio.to_thread(digest, context)
    name = "areax-" + hashlib.sha256(f"{source}\0{memory_mb}\0{cpus}".encode()).hexdigest()[:32]
    try:
        return await create(name)
    except e2b.SandboxException as error:
        if not _lacks_template(error):
            raise
    async with _building.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        try:
            return await create(name)  # another episode has built it meanwhile
        except e2b.SandboxException as error:
            if not _lacks_template(error):
                raise
        builder = e2b.Template(file_context_path=str(context))
        made = builder.from_image(image) if image else builder.from_dockerfile(str(context / "Dockerfile"))
        await e2b.AsyncTemplate.build(made, name, memory_mb=memory_mb or None, cpu_count=cpus or None)
    return await create(name)


def _lacks_template(error: Any) -> bool:
    return error.status_code in (400, 404) and "template" in str(error).lower()


def _kind(error: Exception) -> Kind:
    from e2b import exceptions

    package = type(error).__module__.partition(".")[0]
    if package not in PACKAGES:
        return ""
    if isinstance(error, exceptions.AuthenticationException):
        return "key"
    status = re.match(r"4(?!08|29)\d\d: ", str(error))  # of E2B's API, at the beginning of each message
    refused = isinstance(error, (exceptions.InvalidArgumentException, exceptions.TemplateException))
    return "refused" if status or refused or package == "e2b_dockerfile_utils" else "failed"
