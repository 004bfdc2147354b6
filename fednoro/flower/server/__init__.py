"""The coordinator's side: who is there, what is asked, what comes of it."""
