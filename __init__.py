"""areax: asynchronous reinforcement learning of language models in JAX.

core/      pure mathematics on arrays: parameters, batches, packing, losses, optimisers, the step
parallel/  meshes, sharding rules, what moves between devices
models/    one file a family: Config, table, block; shared layers
rollout/   asyncio: clients, workflows, rewards, executor, loop, publishing; engine/ generates
adapters/  the borders: checkpoints, torch, flax, datasets, tokenizers, reports, command line
recipes/   training scripts composed of the above
"""

__version__ = "0.1.0"
