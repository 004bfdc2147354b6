"""The vocabulary and the equations that everything else is written in."""
