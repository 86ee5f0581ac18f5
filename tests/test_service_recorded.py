"""What the client `tinker` really sends is served: bodies of its releases, as the server of tests/tinker got them
(AREAX_RECORD=FILE records them)."""

import base64
import json
import re
from pathlib import Path

import pytest
import tinker_calls as calls
import tiny

RECORDED = sorted((Path(__file__).parent / "data" / "tinker").glob("*.jsonl"))


@pytest.mark.sweep
@pytest.mark.parametrize("file", RECORDED, ids=lambda file: file.stem)
def test_a_recorded_session_runs(file, tmp_path):
    """Each request as it was but for the session's id; trained and loaded models give the same losses as then."""
    folder, losses, done = tiny.model(tmp_path / "model"), {}, 0
    with calls.serving(folder, tmp_path / "out", served="tiny") as caller:
        session = caller.session()
        for line in file.read_text().splitlines():
            made = json.loads(line)
            body = base64.b64decode(made["base64"]) if "base64" in made else json.dumps(made["json"]).encode()
            body = re.sub(rb"[0-9a-f]{32}", session.encode(), body)
            answer = caller.post(made["path"], body)
            assert answer.status_code == 200, (made["path"], answer.text)
            if "request_id" in (found := answer.json()):
                result, done = caller.wait(found["request_id"]), done + 1
                assert not (isinstance(result, dict) and "error" in result), result
                if made["path"] == "forward_backward":
                    metrics, rows = calls.read_pass(result)
                    assert all({"logprobs", "elementwise_loss"} <= set(row) for row in rows)
                    losses.setdefault(found["request_id"].split(":")[2], []).append(metrics["loss:sum"])
    assert done > 40
    saved, with_moments, without, loaded = (losses[key] for key in "2345")
    assert (
        saved[3:] == with_moments[:3]
    )  # the loss where it was saved, that of the next pass, and of the one after a step
    assert with_moments[0] == without[0] == loaded[0] and with_moments[2] != without[2]
