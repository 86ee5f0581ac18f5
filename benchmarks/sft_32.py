"""`sft` on 32 problems."""

from sft import PEERS as PEERS, UNIT as UNIT, case

work, ours, trl = case(32)
