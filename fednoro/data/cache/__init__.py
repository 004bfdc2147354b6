"""Images decoded once and kept on disk: archives, files and what is known of each."""
