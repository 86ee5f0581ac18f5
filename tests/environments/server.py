"""A server of OpenEnv: python server.py KIND PORT CAPACITY, where KIND is text, tools or form."""

import random
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str = Field(..., description="what to say")


class Heard(Observation):
    heard: str = ""
    length: int = 0


class Move(Action):
    """Moves by some steps."""

    steps: int = Field(..., ge=0, le=9)
    left: bool = False


class Seen(Observation):
    place: int = 0


class Stated(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    @property
    def state(self):
        return State(episode_id="x", step_count=0)


class Echo(Stated):
    """Two messages end it; the first that is "break" breaks it."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(heard=f"secret {random.Random(seed).randint(0, 10**6)}")

    def step(self, action):
        if action.message == "break":
            raise RuntimeError("the echo\nis gone")
        self.count += 1
        reward = len(action.message) / 10
        return Heard(heard=action.message, length=len(action.message), reward=reward, done=self.count == 2)


class Walk(Stated):
    def reset(self, seed=None, episode_id=None, **kwargs):
        self.place = 0
        return Seen(place=0)

    def step(self, action):
        self.place += -action.steps if action.left else action.steps
        return Seen(place=self.place, reward=float(self.place == 5), done=self.place == 5)


class Tools(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("tools")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(tools)

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"status": "ready"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(metadata={"error": "unknown action"})

    @property
    def state(self):
        return State(episode_id="x", step_count=0)


KINDS = {
    "text": (Echo, Say, Heard), "form": (Walk, Move, Seen), "tools": (Tools, CallToolAction, CallToolObservation),
}  # fmt: skip


if __name__ == "__main__":
    kind, port, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    app = create_app(*KINDS[kind], env_name=kind, max_concurrent_envs=capacity)
    uvicorn.run(app, port=port, log_level="warning")
