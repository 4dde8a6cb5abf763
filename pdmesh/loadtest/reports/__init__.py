"""Results of a load test as text and as HTML pages with charts."""
