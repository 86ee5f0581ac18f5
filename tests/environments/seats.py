"""A game of two agents of a taskset, as verifiers from 0.4 on has them."""

import verifiers.v1 as vf


class GameConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()
    trained: tuple[str, ...] = ("first", "second")
    again: bool = False


class Game(vf.Env[GameConfig]):
    async def setup(self, agents):
        for name in ("first", "second"):
            getattr(agents, name).trainable = name in self.config.trained

    async def run(self, task, agents):
        await agents.first.run(task)
        if self.config.again:
            await agents.first.run(task)


__all__ = ["Game"]
