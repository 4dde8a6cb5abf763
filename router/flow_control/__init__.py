"""Flow control: which requests start, wait or are refused; fair between tenants, by forecast. Pure but for one class."""
