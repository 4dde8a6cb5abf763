"""Matrix products with weights in fp8, int8 and int4 packed into words."""
