"""``python -m paceline`` is the command line."""

from paceline.cli.app import main

if __name__ == "__main__":
    main()
