"""`make bench-capacity`: how much load six systems (`peers/systems.py`) bear on this machine before answers come too late.

`probes` says what is asked and measures one window, once; `__main__` turns all windows into figures and a page.
"""
