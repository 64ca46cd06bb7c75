"""`python -m dflash_core` is the `dflash` command."""

from dflash_core.cli import main

if __name__ == "__main__":
    main()
