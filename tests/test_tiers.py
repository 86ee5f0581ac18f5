"""Which target runs a case of a test that is marked `sweep`."""

from types import SimpleNamespace

import conftest
import pytest


def item(name, *marks):
    """What the rule reads of a test that pytest has collected."""
    held = [getattr(pytest.mark, mark) for mark in marks]
    return SimpleNamespace(
        path="test_x.py", originalname=name, iter_markers=lambda: iter(held),
        get_closest_marker=lambda mark: next((one for one in held if one.name == mark), None),
        add_marker=lambda mark: held.append(getattr(pytest.mark, mark)),
    )  # fmt: skip


def test_all_cases_but_the_first_of_each_tier_move_down():
    items = [
        item("a", "sweep"), item("b"), item("a", "sweep", "mesh"), item("a", "sweep"), item("a", "sweep"), item("b"),
        item("a", "sweep", "mesh"), item("c", "sweep", "slow"), item("c", "slow", "sweep"),
    ]  # fmt: skip
    conftest.pytest_collection_modifyitems(items)
    assert [[mark.name for mark in one.iter_markers() if mark.name != "sweep"] for one in items] == [
        [], [], ["mesh"], ["cases"], ["cases"], [], ["mesh", "wide"], ["slow"], ["slow", "wide"],
    ]  # fmt: skip
