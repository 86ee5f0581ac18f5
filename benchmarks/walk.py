"""A server of OpenEnv for environments.py: python walk.py PORT. One step must lead to the goal."""

import random
import re
import sys

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Say(Action):
    message: str = Field(..., description="how far to go")


class Seen(Observation):
    text: str = ""


class Walk(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        chance = random.Random(seed)
        self.place, self.goal = chance.randint(1, 9), chance.randint(10, 19)
        return Seen(text=f"You are at {self.place}. Go to {self.goal}.")

    def step(self, action):
        far = re.fullmatch(r"\s*(\d+)\s*", action.message)
        return Seen(reward=float(bool(far) and self.place + int(far[1]) == self.goal), done=True)

    @property
    def state(self):
        return State(episode_id="walk", step_count=0)


if __name__ == "__main__":
    app = create_app(Walk, Say, Seen, env_name="walk", max_concurrent_envs=256)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
