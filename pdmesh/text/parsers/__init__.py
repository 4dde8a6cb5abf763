"""Reads what models write: calls of tools and thoughts, in the formats that they were trained on, whole or as it comes."""
