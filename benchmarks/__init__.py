"""Speed, memory and accuracy, always beside a named alternative in the same run."""
