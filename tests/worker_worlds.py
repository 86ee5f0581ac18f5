"""Worlds for worker processes: honest ones, and such as die, hang, print, fork or return what is not JSON."""

import os
import time

import numpy as np

from areax.rollout.errors import ServerError


class Count:
    """Rewards the text of the policy's answer as a number; says what its process is."""

    seats = 1

    def __init__(self, start=0):
        self.count = start

    def reset(self, row):
        self.tools = [{"type": "function", "function": {"name": "add"}}] if row.get("tools") else []
        return f"{os.getpid()} {os.environ.get('SECRET')} {os.environ.get('SHARED')} {self.count}"

    def step(self, message):
        self.count += int(message["content"])
        return (
            str(self.count),
            {"reward": np.float32(self.count), "size": np.int64(len(message["content"]))},
            (np.bool_(self.count > 3)),
        )


class Two(Count):
    seats = 2
    seat = 0

    def step(self, message):
        self.seat += 1
        return "you", None if self.seat == 1 else [1.0, 2.0], self.seat == 2


class Breaks(Count):
    """Does what the answer says."""

    def step(self, message):
        said = message["content"]
        if said == "die":
            os._exit(3)
        if said == "hang":
            time.sleep(60)
        if said == "raise":
            raise ValueError("broken\nhere")
        if said == "busy":
            raise ServerError("http://other: 503")
        if said == "set":
            return {1, 2}, 1.0, True
        if said == "print":
            print("x" * 100_000)
            os.write(1, b"\x00" * 5000)
        if said == "fork" and os.fork() == 0:
            return "child", 9.0, True
        return "seen", 1.0, True


class Rows(Count):
    @staticmethod
    def rows(split, start=0):
        print("noise")
        return [{"split": split, "n": n, "pid": os.getpid()} for n in range(start, 3)]


class Endless(Count):
    @staticmethod
    def rows(split, start=0):
        while True:
            yield {"n": start}
            start += 1


class Tools:
    def reset(self, **row):
        self.count = 0

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def get_reward(self):
        return self.count
