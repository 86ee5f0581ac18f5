"""Whether the Hugging Face hub answers: its clients retry for most of a minute before they say that it does not."""

from __future__ import annotations

import urllib.error
import urllib.request

SECONDS = 5.0


def check(name: str) -> None:
    """Raises ValueError if the hub does not answer within seconds; with HF_HUB_OFFLINE it is not asked.

    Args:
      name: what is to be loaded from it, for the message.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=SECONDS).close()
    except urllib.error.HTTPError:  # it answers, if only that it does not like the question
        return
    except OSError as error:
        raise ValueError(
            f"{name}: no such file or folder here, and the hub, {constants.ENDPOINT}, does not answer "
            f"({getattr(error, 'reason', error)}); give a path, or set HF_HUB_OFFLINE=1 if it has been downloaded"
        ) from None
