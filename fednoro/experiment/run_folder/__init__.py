"""The files of a run: their names, one writer and one reader. Nothing here loads torch."""
