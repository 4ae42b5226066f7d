"""`python -m ramify`: the command `ramify`, where its script is not on the path."""

from ramify.cli import main

if __name__ == "__main__":
    main()
