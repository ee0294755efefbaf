"""`python -m kiln.deploy.cli`: the command `kiln`."""

from kiln.deploy.cli.app import main

if __name__ == "__main__":
    main()
