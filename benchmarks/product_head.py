"""The product of R's head for 16 tokens, [16, 576] by [49152, 576] transposed, as decoding computes it, against XLA and
torch; fp32."""

import product

UNIT, PEERS = product.UNIT, {"R": ("xla", "torch")}
work, ours, xla, torch = product.case(16, 576, 49152)
