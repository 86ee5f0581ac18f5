"""Machines that are sandboxes of Modal, by its SDK (`pip install 'areax[modal]'`), which reads MODAL_TOKEN_ID and
MODAL_TOKEN_SECRET, or the file that `modal token new` writes."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from .hosted import Hosted, Kind, internet, not_started, owned, started
from .machine import LIFETIME_S

KEYS = "MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
APP = "areax"  # the app of Modal that its sandboxes belong to
PIECE = 2**20  # bytes of a file that are sent at once


async def start(
    image: str, context: Path, *, memory_mb: int = 0, workdir: str = "", network: str = "none", cpus: float = 0,
    lifetime_s: float = LIFETIME_S,
) -> Hosted:  # fmt: skip
    """Starts a sandbox, which Modal ends after `lifetime_s`. It builds images as it needs them.

    Args:
      network: none or internet.
      cpus: most cores that it uses; 0 = as many as Modal gives.

    Raises:
      ServerError: Modal cannot be reached, is busy or fails, or cannot build the image.
      ValueError: Modal refuses the token or an option.
    """
    try:
        import modal
    except ModuleNotFoundError:
        raise ImportError("modal is not installed: pip install 'areax[modal]'") from None
    how: dict[str, Any] = dict(timeout=math.ceil(lifetime_s), block_network=not internet("modal", network))
    how |= dict(memory=(memory_mb, memory_mb)) if memory_mb else {}
    how |= dict(cpu=(cpus, cpus)) if cpus else {}
    try:
        app = await modal.App.lookup.aio(APP, create_if_missing=True)
        registry, folder = modal.Image.from_registry, modal.Image.from_dockerfile
        made = registry(image) if image else folder(context / "Dockerfile", context_dir=context)
        made = await made.entrypoint([]).build.aio(app)
        making = modal.Sandbox.create.aio("sleep", "infinity", app=app, image=made, **how)
        own = await owned(making, lambda sandbox: sandbox.terminate.aio())
    except Exception as error:
        raise not_started("modal", KEYS, _kind(error), error) from error

    async def execute(text: str, seconds: float) -> tuple[str, int]:
        process = await own.exec.aio("bash", "-c", text, timeout=math.ceil(seconds), text=False)
        said = await process.stdout.read.aio()
        return said.decode(errors="replace"), await process.wait.aio()

    async def write(path: str, content: bytes) -> None:
        process = await own.exec.aio("bash", "-c", f"cat > {shlex.quote(path)}")
        for begin in range(0, len(content), PIECE):
            process.stdin.write(content[begin : begin + PIECE])
            await process.stdin.drain.aio()
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        if code := await process.wait.aio():
            raise OSError(5, f"cannot be written: exit code {code}", path)

    async def gone() -> str:
        code = await own.poll.aio()
        return "" if code is None else f"its sandbox has ended with code {code}"

    async def end() -> None:
        await own.terminate.aio()
        await own.detach.aio()

    machine = Hosted("modal", execute=execute, write=write, gone=gone, end=end, kind=_kind, lifetime_s=lifetime_s)
    return await started(machine, workdir)


def _kind(error: Exception) -> Kind:
    from modal import exception

    if not isinstance(error, exception.Error):
        return "failed" if type(error).__module__.startswith("grpclib.") else ""
    if isinstance(error, exception.AuthError):
        return "key"
    refused = isinstance(error, (exception.PermissionDeniedError, exception.NotFoundError, exception.InvalidError))
    return "refused" if refused and not isinstance(error, exception.ConflictError) else "failed"
