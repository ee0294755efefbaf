"""`python -m deploy.cli`: the command `kiln`."""

from deploy.cli.app import main

if __name__ == "__main__":
    main()
