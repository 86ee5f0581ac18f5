"""A resources server of nemo-gym: python nemo_server.py NAME PORT, where NAME is that of its folder."""

import importlib
import sys

import uvicorn
from nemo_gym.base_resources_server import BaseResourcesServerConfig, SimpleResourcesServer
from nemo_gym.server_utils import ServerClient


def own(module, base):
    """The class that a server's file defines."""
    [found] = [
        kind for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind.__module__ == module.__name__
    ]  # fmt: skip
    return found


if __name__ == "__main__":
    name, port = sys.argv[1], int(sys.argv[2])
    module = importlib.import_module(f"resources_servers.{name}.app")
    config = own(module, BaseResourcesServerConfig)(host="127.0.0.1", port=port, entrypoint="app.py", name=name)
    server = own(module, SimpleResourcesServer)(config=config, server_client=ServerClient.model_construct())
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
