"""`generate` for 4 prompts, in an engine with 16 slots."""

from generate import OF_R as PEERS, UNIT as UNIT, case

work, ours, transformers, tunix, llama_cpp = case(4)
