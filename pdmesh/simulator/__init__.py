"""The mesh without machines: discrete events around the router's and the autoscaler's own policies, against modelled workers."""
