"""How local steps are executed: the same method and numbers, at different speeds."""
