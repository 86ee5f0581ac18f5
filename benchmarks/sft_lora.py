"""`sft` of adapters of rank 16, on 4 problems."""

import sft

UNIT, PEERS = sft.UNIT, sft.PEERS
work, ours, trl = sft.case(4, rank=16)
