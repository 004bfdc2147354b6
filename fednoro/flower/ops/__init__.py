"""Setting up and running a federation: certificates, checks, processes."""
