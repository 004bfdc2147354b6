"""A site's side: its data, its engine, what it remembers, its letter."""
