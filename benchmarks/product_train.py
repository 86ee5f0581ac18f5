"""A product of R in training on 704 tokens, [704, 576] by [576, 1536], in XLA, against torch; fp32."""

import product

UNIT, PEERS = product.UNIT, {"R": ("torch",)}
work, ours, _, torch = product.case(704, 576, 1536)
