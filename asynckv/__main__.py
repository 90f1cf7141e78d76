"""`python -m asynckv` is `asynckv`."""

from asynckv.cli import main

if __name__ == "__main__":
    main()
