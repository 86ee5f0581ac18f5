"""The responses that are kept: what refers to them, and which are dropped."""

import pytest

from areax.rollout.chat.api import stored
from areax.rollout.chat.api.stored import Stored
from areax.rollout.chat.fields import Refused


def kept(store, name, read=(), text="x"):
    item = {"type": "message", "id": f"msg_{name}", "content": text}
    store.keeper(read)({"id": name, "output": [item]})
    return item


def test_references_and_responses_become_items():
    store = Stored()
    said = {"role": "user", "content": "?"}
    item = kept(store, "a", [said])
    for reference in ({"type": "item_reference", "id": "msg_a"}, {"id": "msg_a"}, {"type": None, "id": "msg_a"}):
        assert store.items({"input": [said, reference]}) == [said, item]
    assert store.items({"input": "more", "previous_response_id": "a"}) == [
        said,
        item,
        {"role": "user", "content": "more"},
    ]
    assert store.items({"input": "more", "previous_response_id": None}) == [{"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    "body, name",
    [
        ({"input": "x", "previous_response_id": "b"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": ["a"]}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "b"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": {}}]}, "input"),
        ({"input": [{"type": "item_reference"}]}, "input"),
        ({"input": [{"id": "msg_a"}, {"role": "user", "content": "x"}, {"id": "msg_a"}]}, "input"),
        ({"input": []}, "input"),
        ({}, "input"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(body, name):
    store = Stored()
    kept(store, "a")
    with pytest.raises(Refused) as refused:
        store.items(body)
    assert refused.value.name == name


def test_the_oldest_are_dropped(monkeypatch):
    monkeypatch.setattr(stored, "RESPONSES", 2)
    monkeypatch.setattr(stored, "CHARACTERS", 1000)
    store = Stored()
    known = lambda name: store.items({"input": [{"type": "item_reference", "id": f"msg_{name}"}]})
    for name in "abc":
        kept(store, name)
    with pytest.raises(Refused, match="is kept; send the whole conversation as input, with store: false"):
        known("a")
    assert known("b") and known("c")
    kept(store, "d", text="x" * 900)
    with pytest.raises(Refused):
        known("b")
    with pytest.raises(Refused):
        known("c")
    assert known("d")
    kept(store, "e", text="x" * 2000)  # larger than all that may be kept
    with pytest.raises(Refused):
        known("e")
    kept(store, "f")
    assert known("f")
