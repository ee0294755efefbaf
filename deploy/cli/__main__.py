"""Entry point of `python -m kiln.deploy.cli`, which is the command `kiln`."""

from kiln.deploy.cli.app import main

if __name__ == "__main__":
    main()
