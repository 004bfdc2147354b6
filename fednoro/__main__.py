"""`python -m fednoro` is the `fednoro` command."""

from fednoro.cli import main

main()
