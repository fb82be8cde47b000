"""`python -m atoll`: the same as the command `atoll`."""

from atoll.cli.main import main

if __name__ == "__main__":
    main()
