"""Programs over several devices take turns; those of one device do not wait."""

import threading

import pytest
import test_rollout_engine_mesh as meshes

from areax.parallel import mesh, turns
from areax.rollout.engine.request import Request, Sampling
from areax.rollout.servers.engine_mesh import EngineMesh

ONE, ALL = mesh.Layout(), mesh.Layout(fsdp=8)


def test_only_meshes_of_several_devices_wait():
    others, done = threading.Event(), threading.Event()

    def start(layout, event):
        turns.during(mesh.make(layout), event.set)()

    with turns.taken(mesh.make(ALL)), turns.taken(mesh.make(ALL)):  # once more in the same thread
        waiting = threading.Thread(target=start, args=(ALL, done))
        waiting.start()
        start(ONE, others)
        assert others.is_set() and not done.wait(0.05)
    waiting.join(10)
    assert done.is_set()


@pytest.mark.mesh
def test_an_engine_computes_nothing_while_a_trainer_has_its_turn():
    asked, done = Request("0", (9, 10, 11), Sampling(max_new_tokens=3, ignore_eos=True)), threading.Event()
    with meshes.engine_of("qwen3", EngineMesh(tp=2)) as engine:
        with turns.taken(mesh.make(ALL)):
            engine.submit(asked, lambda progress: progress.finish and done.set())
            assert not done.wait(0.3) and engine.stats()["dispatches"] == 0
        assert done.wait(60)
