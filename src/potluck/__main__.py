"""`python -m potluck`: the command line."""

from potluck.cli import main

if __name__ == "__main__":
    main()
