"""Which request of which model runs next."""

import random

from areax.service.order import Order


def taken(order):
    return list(iter(order.take, None))


def test_chunks_of_a_pass_run_by_seq_though_the_first_comes_last():
    order = Order()
    order.begin("m", [0])
    order.put("m", 3, True)
    order.put("m", 2, True)
    assert taken(order) == []
    order.put("m", 1, True)
    assert taken(order) == [("m", 1), ("m", 2), ("m", 3)]


def test_a_step_tells_that_nothing_below_it_is_missing():
    order = Order()
    order.begin("m", [0])
    order.put("m", 3, True)
    order.put("m", 5, False)  # 1, 2 and 4 were never sent
    assert taken(order) == [("m", 3), ("m", 5)]
    assert order.passed("m", 4) and not order.passed("m", 6)


def test_a_refused_request_is_not_waited_for():
    order = Order()
    order.begin("m", [0])
    order.put("m", 2, True)
    order.skip("m", 1)
    order.skip("m", 3)
    order.put("m", 4, True)
    assert taken(order) == [("m", 2), ("m", 4)]


def test_models_take_turns():
    order = Order()
    for owner in "ab":
        order.begin(owner, [])
        for seq in range(3):
            order.put(owner, seq, False)
    assert taken(order) == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_any_order_of_arrival_gives_the_same_order_and_leaves_nothing():
    rng = random.Random(0)
    for _ in range(200):
        order, calls, seq = Order(), [], 1
        order.begin("m", [0])
        for _ in range(rng.randrange(1, 6)):
            chunks = range(seq, seq := seq + rng.randrange(1, 5))
            calls.append([*rng.sample(chunks[1:], len(chunks) - 1), chunks[0]])
        found = []
        for call in calls:
            for each in call:
                order.put("m", each, len(call) > 1)
                if rng.random() < 0.5:
                    found += taken(order)
        assert found + taken(order) == [("m", each) for each in range(1, seq)]
