"""`python -m nolocod` is `nolocod`."""

from nolocod.cli import main

if __name__ == "__main__":
    main()
