"""``python -m lightning_effi`` is the command line ``lightning-effi``."""

from lightning_effi.cli import main

if __name__ == "__main__":
    main()
