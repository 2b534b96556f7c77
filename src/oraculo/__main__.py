"""`python -m oraculo`: the command line, where its script is not on the PATH."""

from oraculo.cli import main

if __name__ == "__main__":
    main()
