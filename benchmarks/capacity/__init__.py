"""`make bench-capacity`: how much load four systems bear on this machine before answers come too late.

`plan` says what is asked, `systems` who takes part and how each is started; `processes` (with `keeper`) ends all that was
started; `probes` measures one window, once; `outcome` turns all of it into figures and a page.
"""
