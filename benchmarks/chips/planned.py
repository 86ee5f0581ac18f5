"""`areax plan` of a measured run, by its own options."""

import contextlib
import io
import json


def figures(recipe: str, words: list[str], chip: str | None) -> dict:
    """{"planned_peak_bytes", "planned_step_s"}; nothing without a chip.

    An engine in the process shares the device: the peak has both, and a step takes the time of both.
    """
    if chip is None:
        return {}
    from areax.adapters import cli

    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = cli.main(["plan", recipe, *words, "--chip", chip, "--json"])
    if code not in (0, 1):  # 1 = it does not fit
        raise RuntimeError(f"areax plan {recipe} ended with exit code {code}")
    found = {name: figure["value"] for name, figure in json.loads(said.getvalue())["figures"].items()}
    step_s = found.get("train_batch_s", found["step_s"]) + found.get("generate_batch_s", 0)
    return {"planned_peak_bytes": found.get("shared_bytes", found["peak_bytes"]), "planned_step_s": step_s}
