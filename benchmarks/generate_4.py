"""`generate` for 4 prompts, in an engine with 16 slots."""

import generate

UNIT, PEERS = generate.UNIT, generate.OF_R | {"R": ("transformers", "llama_cpp")}
work, ours, transformers, _, llama_cpp = generate.case(4)
