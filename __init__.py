"""areax: asynchronous reinforcement learning of language models in JAX.

core/      pure functions on arrays: parameters, batches, packing, losses, optimisers, the training step
parallel/  meshes, sharding rules, communication between devices
models/    one file per family: Config, table, block; shared layers
rollout/   asyncio: clients, workflows, rewards, executor, loop, weight pushes; engine/ is the inference engine
adapters/  input and output: checkpoints, torch, flax, datasets, tokenizers, reports, command line
recipes/   training scripts composed of the above
"""

__version__ = "0.1.0"
