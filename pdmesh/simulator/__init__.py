"""Simulates a mesh by discrete events: the router's and the autoscaler's real policies against modelled workers."""
