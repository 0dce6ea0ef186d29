"""Our engine against what a user would pick instead. Imports nothing: parts of it run in environments of others."""
