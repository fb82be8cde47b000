"""Entry point of `atoll` and `python -m atoll`: Ctrl-C ends it without a traceback, even while it loads."""

import sys


def main() -> None:
    try:
        from atoll.cli.main import main as command

        command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
