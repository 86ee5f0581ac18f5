"""Where the package `areax` is: this folder, whatever its name. All else is in pyproject.toml.

Type checkers do not run the import hook by which setuptools renames a folder in editable installs. So these have a
folder on the path, `.dev`, with a link `areax` to this one.
"""

import sys
from pathlib import Path

from setuptools import setup

editable = "editable_wheel" in sys.argv
link = Path(".dev/areax")
if editable and not link.is_symlink():
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("..", target_is_directory=True)
# Named as the script, this file is not taken for a module of the package.
setup(script_name="setup.py", package_dir={"": ".dev"} if editable else {"areax": "."})
