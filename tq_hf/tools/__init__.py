"""The command line `tq-hf`: estimate, chat, serve."""
