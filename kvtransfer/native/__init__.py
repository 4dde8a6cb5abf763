"""Copying, summing and moving KV in C++; compiled at first use like the CPU kernels. Without it Python does the same, slower."""
