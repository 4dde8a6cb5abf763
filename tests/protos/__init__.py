"""Tests of what is made from the `.proto` files."""
