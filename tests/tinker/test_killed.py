"""A server that is killed while clients train, and starts again: they notice nothing but time."""

import random
import threading
import time

from test_client import TEXT, datum
from tinker import types

KILLS, STEPS = 6, 10


def session(connect, seed, told):
    """Trains for some steps; returns the losses, and that of the saved weights. `told` gets each loss at once."""
    with connect() as service:
        model, losses = service.create_lora_training_client(base_model="tiny", rank=4, seed=seed), []
        for step in range(STEPS):
            passes = [model.forward_backward([datum(TEXT[: 4 + (step + i) % 4])], "cross_entropy") for i in range(2)]
            stepped = model.optim_step(types.AdamParams(learning_rate=1e-2))
            for each in passes:
                losses.append(each.result().metrics["loss:sum"])
                told.append(losses[-1])
            stepped.result()
        path = model.save_state("end").result().path
        loaded = service.create_training_client_from_state_with_optimizer(path)
        return [*losses, loaded.forward([datum(TEXT)], "cross_entropy").result().metrics["loss:sum"]]


def test_two_clients_end_with_the_same_weights_however_often_the_server_is_killed(server, connect):
    """At random points of their progress, and a little later."""
    want = [session(connect, seed, []) for seed in (1, 2)]
    rng, found, told = random.Random(0), {}, []

    def run(seed):
        found[seed] = session(connect, seed, told)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for point in sorted(rng.sample(range(4 * STEPS - 4), KILLS)):
        while len(told) < point and any(thread.is_alive() for thread in threads):
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.05))
        assert any(thread.is_alive() for thread in threads)
        server.kill()
        server.start()
    for thread in threads:
        thread.join()
    assert [found.get(seed) for seed in (1, 2)] == want
