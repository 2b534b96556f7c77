"""The command line as `python -m oraculo`."""

from oraculo.cli import main

if __name__ == "__main__":
    main()
