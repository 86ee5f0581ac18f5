"""One number of a plan, and the assumptions behind every estimate."""

from dataclasses import dataclass
from typing import Literal

MATMUL = 0.5  # fraction of peak FLOP/s reached by a step's matmuls
# The same for attention: on GPUs that of our own kernel, whose 2.95 ms for 16 heads of 128 and four sequences of 4,096
# tokens are 28 % of an H100's; on TPUs not measured.
ATTENTION = {"gpu": 0.28, "tpu": MATMUL}
PASSES = 4 / 3  # passes over inputs and outputs of matmuls for each time that they are computed: norms, activations
LINK = 0.7  # fraction of a link's bytes/s reached by collectives
LATENCY = 1e-5  # seconds that a collective takes however few bytes it sends; assumed, not measured
STREAM = 0.7  # fraction of HBM's bytes/s reached by the optimiser, and by decoding as it reads weights
# Our engine on GPUs, fitted to Qwen3-0.6B on an H100: 2.26 ms a step for 16 sequences of 384 tokens, 6.83 ms for 128.
PAGED = 0.32  # fraction of HBM's bytes/s reached as it reads keys and values
LAUNCH = 3.5e-5  # seconds for the kernels of a layer in a step, however few sequences there are
FILLED = 0.7  # largest fraction of a server's usable memory for weights: the rest is for the KV cache
USABLE = 0.92  # usable fraction of HBM: the rest is for the runtime and fragmentation
AHEAD = 0.1  # of the head's part of a step: room that XLA makes ahead for layers' gradients, in the steps measured
HOLES = 0.01  # of a step's temporaries, added for holes between buffers in XLA's heap: up to that in the steps measured
HOST = 20e9  # bytes/s from a device to its host
DISK = 2e9  # bytes/s to and from the folder of published weights
UPDATE = 4  # passes over the fp32 weights in an optimiser step: gradient twice, weight read and write; over state 2


@dataclass(frozen=True)
class Figure:
    """One number of a plan; its name ends in the unit."""

    section: str
    name: str
    value: float
    kind: Literal["exact", "estimate"]
    text: str
