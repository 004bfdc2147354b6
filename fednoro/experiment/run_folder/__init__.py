"""The files of a run: who writes the logs, and who reads it all. Nothing here loads torch."""
