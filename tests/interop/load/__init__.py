"""Load generators of others, unmodified: one module each says how it is called and where its report keeps TTFT and TPOT."""
