"""The embedded generation engine: continuous batching in JAX, and a server with SGLang's HTTP API.

engine.py      takes requests and commands of any thread, and schedules them on its own
slots.py       gives requests memory; prompts.py and device_state.py have their tokens computed on the devices
programs/      what runs on the devices
routes/        the HTTP server
server.py      `areax serve`, over several processes by hosts.py, over replicas by replicas.py
in_process.py  the same inside a trainer
"""
