"""The formats in which models write calls, one a file."""
