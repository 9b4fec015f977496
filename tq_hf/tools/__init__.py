"""Command line `tq-hf`: estimate, sweep, chat, serve."""
