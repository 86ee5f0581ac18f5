"""Keys of HTTP servers, from the environment or a file, and addresses that hold none."""

from __future__ import annotations

import os
import re
from pathlib import Path

# Environment variables: the keys that generation servers, stagers, the fleet of a run and its page require of callers.
SERVER, STAGER, FLEET, REPORT = "AREAX_SERVER_KEY", "AREAX_STAGER_KEY", "AREAX_FLEET_KEY", "AREAX_REPORT_KEY"


def read(variable: str) -> str | None:
    """Reads a key from an environment variable, or from the file that VARIABLE_FILE names; None if neither is set.

    Command lines are visible to every user of the machine, environments only to their owner.

    Raises:
      ValueError: both are set, the file cannot be read, or the key is empty or does not fit into an HTTP header.
    """
    where = f"{variable}_FILE"
    text, path = os.environ.get(variable), os.environ.get(where)
    if path is None:
        where = variable
    elif text is not None:
        raise ValueError(f"{variable}: the key must come from one place, got {where} as well; unset one of them")
    else:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:  # without the path, which may be the key itself by mistake
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ValueError(f"{where}: must name a readable file with the key ({reason})") from None
    if text is not None:
        check(text := text.strip(), where)
    return text


def check(key: str, where: str) -> None:
    """Raises ValueError, without the key, if it is empty or does not fit into an HTTP header."""
    if not (key and key.isascii() and key.isprintable() and key == key.strip()):
        what = "other text" if key else "an empty one"
        raise ValueError(f"{where}: a key must be one line of printable ASCII, without spaces at its ends, got {what}")


def check_address(url: str, what: str) -> None:
    """Checks that the address of a server holds no secret: addresses are written to config.json and events.

    Args:
      what: the option's name in errors.

    Raises:
      ValueError: it has a user, a password or a query, which the message leaves out.
    """
    if re.search("[@?#]", url):
        raise ValueError(
            f"{what}: an address must have no user, password or query, which would be written to the run's files, got "
            f"{redacted(url)}; give the server's key by its environment variable (docs/servers.md)"
        )


def redacted(url: str) -> str:
    """The URL with *** in place of user, password, query and fragment."""
    return re.sub("[?#].*", "?***", re.sub("^(.*?://)?.*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)
