"""`sft` of adapters of rank 16, on 4 problems."""

from sft import PEERS as PEERS, UNIT as UNIT, case

work, ours, trl = case(4, rank=16)
