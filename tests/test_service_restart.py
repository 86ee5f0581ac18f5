"""A server that starts again in the folder of one that ended goes on as if nothing had happened."""

import sqlite3
import time

import numpy as np
import pytest
import tinker_calls as calls
import tiny

from areax.service import saves, server, sessions

RNG = np.random.default_rng(0)
DATA = [calls.datum(RNG.integers(0, 10, n), weights=np.ones(n - 1)) for n in (6, 11, 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.model(tmp_path_factory.mktemp("model"))


def script(caller, model):
    """The requests of a model: (route, body), as long as one does not depend on another's result."""
    seq = 0
    for step in range(4):
        for chunk in range(2):
            yield "forward_backward", calls.pass_body(model, seq := seq + 1, [DATA[(step + chunk) % 3]])
        adam = {"learning_rate": 0.02, "weight_decay": 0.1}
        yield "optim_step", {"model_id": model, "seq_id": (seq := seq + 1), "adam_params": adam}
    yield "save_weights", {"model_id": model, "seq_id": seq + 1, "path": "end"}


@pytest.mark.slow
def test_a_server_that_starts_again_goes_on_at_every_point(folder, tmp_path, monkeypatch):
    """Undisturbed, with a restart before every other request, and with a model that leaves the memory between requests:
    the same weights, to the bit. The last request is sent again after each restart, as a client does that got no
    answer."""
    found = []
    for name in ("whole", "stopped", "parked"):
        out, model, sent, requests = tmp_path / name, None, 0, []
        if name == "parked":
            monkeypatch.setattr(server, "EVERY_S", 0.01)
            monkeypatch.setattr(sessions, "SILENT_S", 0.0)
        while model is None or sent < len(requests):
            with calls.serving(folder, out, save_every=2) as caller:
                if model is None:
                    model = caller.model(folder)
                    requests = [*script(caller, model)]
                for at in range(max(0, sent - 1), len(requests)):
                    made = caller.answer(*requests[at])
                    if at == sent:
                        sent += 1
                        if name == "stopped" and sent % 2:
                            break  # without waiting for the result
                    caller.wait(made["request_id"])
                    if name == "parked":
                        time.sleep(0.05)
        with calls.serving(folder, out, save_every=2) as caller:
            result = caller.wait(f"{model}:13")
            assert caller.wait(f"{model}:3")["metrics"]["skipped"] == 0  # results of before
        found.append(calls.weights(saves.folder(out, result["path"])))
        states = [path.name for path in saves.state_folder(out, model, 0).parent.iterdir()]
        assert states == ["12"]
    whole, *others = found
    for other in others:
        assert whole.keys() == other.keys()
        for name, x in whole.items():
            np.testing.assert_array_equal(x, other[name], err_msg=name)


@pytest.mark.slow
def test_samples_that_had_not_ended_are_made_after_a_restart(folder, tmp_path):
    body = {
        "seq_id": 0, "num_samples": 2, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 3, "stop": []},
    }  # fmt: skip
    with calls.serving(folder, tmp_path) as caller:
        session = {"session_id": caller.session(), "sampling_session_seq_id": 0, "base_model": str(folder)}
        body["sampling_session_id"] = caller.answer("create_sampling_session", session)["sampling_session_id"]
        id = caller.answer("asample", body)["request_id"]
        first, _ = calls.read_sample(caller.wait(id))
    with sqlite3.connect(tmp_path / "service.db") as db:  # as if it had been killed before the result was noted
        db.execute("UPDATE requests SET state = 'pending', result = NULL WHERE kind = 'asample'")
    db.close()
    with calls.serving(folder, tmp_path) as caller:
        again, _ = calls.read_sample(caller.wait(id))
    assert [tokens for tokens, *_ in again] == [tokens for tokens, *_ in first]


def test_what_was_half_written_is_removed(folder, tmp_path):
    half, whole = (tmp_path / "models" / "m" / "weights" / name for name in (".x.0123abcd.tmp", "x"))
    for path in (half, whole):
        (path / "adapter").mkdir(parents=True)
    with calls.serving(folder, tmp_path):
        assert whole.exists() and not half.exists()


def test_a_folder_has_one_server(folder, tmp_path):
    with calls.serving(folder, tmp_path):
        with pytest.raises(ValueError, match="does another server use this folder"):
            with calls.serving(folder, tmp_path):
                pass
