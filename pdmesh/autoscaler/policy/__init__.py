"""The scaling decision, pure: demand, sizes of pools, role switching, and the reasons."""
