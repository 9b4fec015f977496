"""The command line: estimate, chat, bench."""
