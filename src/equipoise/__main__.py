"""`python -m equipoise`, as torchrun needs it."""

from equipoise.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main()
