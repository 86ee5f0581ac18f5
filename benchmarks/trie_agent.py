"""GRPO's update on 4 episodes of an agent, whose 8 turns are a sample each with all turns before it, behind a system
prompt: 24,064 tokens, 5,376 of them different."""

import numpy as np
import trie

UNIT, PEERS = "tokens/s", {"S": ("rows",), "M": ("rows",)}
EPISODES, TURNS, SYSTEM, TURN, BRANCH = 4, 8, 256, 96, 64


def paths(vocabulary):
    """Each turn's history goes on with the next turn's; what was sampled in it is a branch."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(0, vocabulary, n).tolist()
    system, made = draw(SYSTEM), []
    for _ in range(EPISODES):
        history = list(system)
        for _ in range(TURNS):
            history = history + draw(TURN)
            made.append((history, draw(BRANCH)))
    return made


work, ours, rows, _ = trie.case(paths, SYSTEM + EPISODES * TURNS * (TURN + BRANCH))
