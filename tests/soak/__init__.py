"""`make bench-soak`: an hour of mixed traffic over every protocol, with clients that leave, lapse, err and flood.

`cases.py` draws requests, `sides/` sends them over one protocol each, `traffic.py` decides what becomes of them, `ledger.py`
checks every answer, `samples.py` looks at the processes and says whether memory stands still, `report.py` makes
figures.
"""
