"""The command line as `python -m raysim.cli`."""

from raysim.cli import main

if __name__ == "__main__":
    main()
