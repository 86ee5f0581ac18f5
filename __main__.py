"""Entry of the command line; where packages are missing it still runs `areax doctor`, which names them."""

import faulthandler
import signal
import sys


def main() -> int:
    """Runs `areax ARGUMENTS`; returns the exit code. At SIGUSR1 the process prints the stacks of its threads."""
    faulthandler.register(signal.SIGUSR1, file=2)
    try:
        from .adapters import cli
    except ImportError as error:
        if (error.name or "").split(".")[0] == __package__:  # ours: a bug
            raise
        if sys.argv[1:] == ["doctor"]:
            from .adapters.commands.doctor import doctor

            return doctor()
        print(f"areax: a package is missing or broken, {error}; `areax doctor` says which to install", file=sys.stderr)
        return 2
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
