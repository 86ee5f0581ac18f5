"""Entry of the command line, which needs no package but areax to say which ones are missing."""

import sys


def main() -> int:
    """Runs `areax ARGUMENTS`; returns the exit code."""
    if sys.argv[1:] == ["doctor"]:
        from .adapters.commands.doctor import doctor

        return doctor()
    try:
        from .adapters import cli
    except ModuleNotFoundError as error:
        if (error.name or "areax").startswith("areax"):
            raise
        print(f"areax: needs the package of {error.name}, got none; `areax doctor` says how to get it", file=sys.stderr)
        return 2
    return cli.main()


if __name__ == "__main__":
    raise SystemExit(main())
