"""`sft` on 32 problems."""

import sft

UNIT, PEERS = sft.UNIT, sft.PEERS
work, ours, trl = sft.case(32)
